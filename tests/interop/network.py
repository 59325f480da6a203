"""A network of real Choria parts in a folder, and the daemon on it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.interop import enroll

#: For everything that is awaited; none of it takes that long unless it fails. It is time for one more discovery, should
#: a server be too slow for the first.
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.05
#: How much of every log is shown when a test fails.
SHOWN_LINES = 60
#: Below those that the kernel gives to outgoing connections: nobody takes the broker's port while it is down.
PORTS = range(15400, 15500)


class Part:
    """A process with a log; what it says about itself, one JSON document a line, is among the log's lines."""

    def __init__(self, log: Path, *command: str | Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=log.parent
            )

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the log that are whole and JSON."""
        return [json.loads(line) for line in self.log.read_text().split("\n")[:-1] if line.startswith("{")]

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs."""
        return self._process.poll()

    def stop(self) -> int:
        """Have it end in good order; gives its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """Have it end at once."""
        self._process.kill()
        self._process.communicate()


_T = TypeVar("_T", bound=Part)


class Server(Part):
    """A real server, which starts out waiting to be provisioned; its log is named after it."""

    @property
    def identity(self) -> str:
        return self.log.stem

    @property
    def connections(self) -> list[dict[str, Any]]:
        """What it was each time that it had come up and connected."""
        return [line for line in self.lines() if line.get("event") == "connected"]

    @property
    def is_waiting(self) -> bool:
        """Whether it is up and waits to be provisioned."""
        return self.exit_code is None and len(self.connections) == 1 and self.connections[0]["waiting"]

    @property
    def is_member(self) -> bool:
        """Whether it has restarted once, and has connected as itself to the collective of all that are enrolled."""
        wanted = {"identity": self.identity, "collectives": [enroll.COLLECTIVE], "waiting": False}
        connections = self.connections
        return self.exit_code is None and len(connections) == 2 and wanted.items() <= connections[-1].items()


class Daemon(Part):
    """The provisioner, its log in JSON."""

    def __init__(self, log: Path, *command: str | Path) -> None:
        super().__init__(log, *command)
        # the other parts end by themselves when we are gone
        guard = ("/bin/sh", "-c", 'read _; kill -9 "$1"', "guard", str(self._process.pid))
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def kill(self) -> None:
        self._guard.kill()  # first: once the daemon is reaped its number may belong to somebody else
        self._guard.communicate()
        super().kill()

    @property
    def problems(self) -> list[str]:
        """What it has logged as a warning or worse."""
        return [line["msg"] for line in self.lines() if line["level"] not in {"debug", "info"}]

    def logged(self, *parts: str) -> list[dict[str, Any]]:
        """The records whose message has all these parts."""
        return [line for line in self.lines() if all(part in line["msg"] for part in parts)]


class Network:
    """A network in a folder.

    :param program: the real parts, as built from the folder ``choria``
    :param directory: where it is made
    :param kind: ``insecure``, ``x509`` or ``org``
    :ivar settings: of the daemon, as they are written to ``provisioner.yaml`` at its next start
    """

    def __init__(self, program: Path, directory: Path, kind: str) -> None:
        self.directory = directory
        self._program = program
        self._kind = kind
        self._port = _free_port()
        self._parts: list[Part] = []
        self._broker: Part | None = None
        self._daemon: Daemon | None = None
        make = (program, "make", "--dir", directory, "--network", kind, "--port", str(self._port))
        subprocess.run(make, check=True)
        self.settings: dict[str, Any] = yaml.safe_load((directory / "provisioner.yaml").read_text())
        self.settings |= {"logfile": "stdout", "log_format": "json", "helper_timeout": f"{PATIENCE_SECONDS:.0f}s"}
        self.use_helper()

    def eventually(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds, as long as the broker and the daemon run that were started."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            for part in (self._broker, self._daemon):
                assert part is None or part.exit_code is None, f"{part.log.stem} has ended, this did not happen: {what}"
            assert time.monotonic() < give_up, f"it never happened: {what}"
            time.sleep(POLL_SECONDS)

    def wait_for_waiting(self, *servers: Server) -> None:
        """Wait until servers wait to be provisioned."""
        self.eventually(lambda: all(server.is_waiting for server in servers), "the servers wait to be provisioned")

    def wait_for_members(self, *servers: Server) -> None:
        """Wait until servers are back as what the helper made of them."""
        self.eventually(lambda: all(server.is_member for server in servers), "the servers are back in their network")

    def start_broker(self) -> None:
        """Start the broker and wait until it listens."""
        self._broker = self._start(Part(self.directory / "broker.log", *self._command("broker")))
        self.eventually(self._broker_listens, "the broker listens")

    def stop_broker(self) -> None:
        """Stop the broker."""
        assert self._broker is not None
        self._broker.stop()
        self._broker = None

    def start_servers(self, *identities: str) -> list[Server]:
        """Start servers, without waiting for anything."""
        return [
            self._start(Server(self.directory / f"{identity}.log", *self._command("server", "--identity", identity)))
            for identity in identities
        ]

    @contextlib.contextmanager
    def daemon(self) -> Iterator[Daemon]:
        """Run the daemon, and have it end in good order."""
        files = {"--config": "provisioner.yaml", "--choria-config": "choria.cfg"}
        (self.directory / "provisioner.yaml").write_text(yaml.safe_dump(self.settings))
        arguments = [part for option, name in files.items() for part in (option, self.directory / name)]
        log = self.directory / f"provisioner-{len(self._parts)}.log"
        daemon = self._daemon = self._start(Daemon(log, sys.executable, "-m", "provisioner", "run", *arguments))
        yield daemon
        self._daemon = None
        assert daemon.stop() == 0
        assert not daemon.logged("bug")
        assert "Traceback" not in log.read_text()

    def use_helper(self, *options: str) -> None:
        """Have the daemon run our helper with these options from its next start on."""
        command = [sys.executable, enroll.__file__, "--network", self._kind, "--dir", str(self.directory), *options]
        self.settings["helper"] = " ".join(command)

    @property
    def gate(self) -> Path:
        """As long as this file exists helpers wait with their answers."""
        return self.directory / "gate"

    def asked(self, identity: str) -> bool:
        """Whether the helper was asked about a node."""
        return (self.directory / "asked" / identity).exists()

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace something in one of the files of the network."""
        text = (self.directory / name).read_text()
        assert old in text
        (self.directory / name).write_text(text.replace(old, new))

    def logs(self) -> Iterator[tuple[str, str]]:
        """The end of every log, by its name."""
        for log in sorted(self.directory.glob("*.log")):
            yield log.name, "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])

    def close(self) -> None:
        """End all that still runs; the files stay."""
        for part in reversed(self._parts):
            part.kill()

    def _start(self, part: _T) -> _T:
        self._parts.append(part)
        return part

    def _command(self, *arguments: str) -> list[str | Path]:
        return [self._program, *arguments, "--dir", self.directory]

    def _broker_listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1) as probe:
            return probe.recv(4) == b"INFO"
        return False


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
