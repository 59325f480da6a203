"""The daemon as it is installed somewhere: its files, the processes started from them, and what can be seen of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from provisioner.simulate.server import Site
from tests.usage import Usage, usage
from tests.waiting import PATIENCE_SECONDS

#: Wants no more of a server than that it leaves provisioning mode.
HELPER = """#!/bin/sh
cat >/dev/null
echo '{"configuration":{"plugin.choria.server.provision":"0"}}'
"""

#: What simulated servers that it provisions have in common.
SITE = Site(token="s3cret")

#: None of them is taken by a simulated broker, or given to an outgoing connection.
PORTS = range(12000, 20000)

_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    while True:
        ports = random.SystemRandom().sample(PORTS, count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


class Installation:
    """The files of one instance, and the processes started from them; leaving the context kills what still runs.

    :param directory: made when it is not there; several instances need one each
    :param brokers: for ``middleware_hosts``
    :ivar settings: of ``provisioner.yaml``, written with every start
    :ivar choria: the text of ``choria.cfg``, the same
    """

    def __init__(self, directory: Path, *brokers: str) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.pid_file = directory / "provisioner.pid"
        self.log_file = directory / "provisioner.log"
        self.helper(HELPER)
        self.settings: dict[str, Any] = {
            "workers": 4,
            "helper": str(directory / "helper"),
            "token": "s3cret",
            "site": "lab",
            "choria_insecure": True,
            "monitor_port": self.port,
            "monitor_address": "127.0.0.1",
            "logfile": str(self.log_file),
        }
        #: What Python is to run.
        self.program: tuple[str, ...] = ("-m", "provisioner")
        self.choria = f"identity = prov.example.net\nplugin.choria.middleware_hosts = {','.join(brokers)}\n"
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    # --- the process

    def helper(self, script: str) -> None:
        """Put another helper in the place of the present one; a process that runs takes it for the next host."""
        new = self.directory / "helper.new"
        new.write_text(script)
        new.chmod(0o755)
        new.replace(self.directory / "helper")

    def command(self, *arguments: str) -> list[str]:
        configuration = self.directory / "provisioner.yaml"
        configuration.touch(0o600)
        configuration.write_text(json.dumps(self.settings))
        (self.directory / "choria.cfg").write_text(self.choria)
        return [
            *(sys.executable, *self.program, *arguments),
            *("--config", str(self.directory / "provisioner.yaml")),
            *("--choria-config", str(self.directory / "choria.cfg")),
            *("--pid", str(self.pid_file)),
        ]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(self.command(*arguments), cwd=self.directory, **options)
        self.processes.append(process)
        return process

    @property
    def process(self) -> subprocess.Popen[str]:
        """The one that was started last."""
        return self.processes[-1]

    def stop(self, patience: float = PATIENCE_SECONDS) -> int:
        """Ask it to leave, and give its exit code.

        :param patience: seconds
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)

    def kill(self) -> None:
        """End it as a crash of the machine would."""
        self.process.kill()
        self.process.wait()

    def usage(self) -> Usage | None:
        """What it takes up; None while it is not there."""
        return usage(self.process.pid) if self.process.returncode is None else None

    # --- what it says

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The value of the one series that has these labels, whatever others it has.

        :param name: in full, or without ``choria_provisioner_``
        """
        name = name if name.startswith("choria_") else f"choria_provisioner_{name}"
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        samples = filter(None, map(_SAMPLE.fullmatch, self.get("/metrics")[1].splitlines()))
        (value,) = (
            sample["value"]
            for sample in samples
            if sample["name"] == name and wanted <= set((sample["labels"] or "").split(","))
        )
        return float(value)

    def ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def messages(self) -> list[str]:
        """The texts of the log."""
        return [line["msg"] for line in self.log()]

    def logged(self, text: str) -> bool:
        """Whether the log has this text anywhere."""
        return self.log_file.exists() and text in self.log_file.read_text()
