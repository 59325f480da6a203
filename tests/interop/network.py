"""A network of real Choria parts in a folder, and the daemon on it."""

from __future__ import annotations

import contextlib
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
from tests.interop.parts import PATIENCE_SECONDS, Candidate, Daemon, Part, Server

POLL_SECONDS = 0.05
#: How much of every log is shown when a test fails.
SHOWN_LINES = 60
#: Below those that the kernel gives to outgoing connections: nobody takes the broker's port while it is down.
PORTS = range(15400, 15500)

_T = TypeVar("_T", bound=Part)


class Network:
    """A network in a folder.

    :param program: the real parts, as built from the folder ``choria``
    :param directory: where it is made
    :param kind: ``insecure``, ``x509`` or ``org``
    :param election_ttl: a Go duration: the broker holds elections, and forgets their leaders after that time
    :ivar settings: of the daemon, as they are written to ``provisioner.yaml`` at its next start
    """

    def __init__(self, program: Path, directory: Path, kind: str, *, election_ttl: str = "0s") -> None:
        self.directory = directory
        self._program = program
        self._kind = kind
        self._port = _free_port()
        self._parts: list[Part] = []
        self._broker: Part | None = None
        make = ("--network", kind, "--port", str(self._port), "--election-ttl", election_ttl)
        subprocess.run(self._command("make", *make), check=True)
        self.settings: dict[str, Any] = yaml.safe_load((directory / "provisioner.yaml").read_text())
        self.settings |= {"logfile": "stdout", "log_format": "json", "helper_timeout": f"{PATIENCE_SECONDS:.0f}s"}
        self.use_helper()

    def eventually(self, condition: Callable[[], object], what: str, within: float = PATIENCE_SECONDS) -> None:
        """Wait until a condition holds, as long as broker and provisioners run that were started and not ended.

        :param within: seconds
        """
        give_up = time.monotonic() + within
        while not condition():
            for part in self._parts:
                lasts = isinstance(part, Server) or part.ended is not None or part.exit_code is None
                assert lasts, f"{part.log.stem} has ended, this did not happen: {what}"
            assert time.monotonic() < give_up, f"it did not happen within {within:.0f} s: {what}"
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

    def start_servers(self, *identities: str) -> list[Server]:
        """Start servers, without waiting for anything."""
        return [
            self._start(Server(self.directory / f"{identity}.log", *self._command("server", "--identity", identity)))
            for identity in identities
        ]

    def start_daemon(self, choria: str = "choria.cfg") -> Daemon:
        """Start the daemon.

        :param choria: its Choria configuration: ``choria.cfg``, or ``standby.cfg`` for a second instance
        """
        (self.directory / "provisioner.yaml").write_text(yaml.safe_dump(self.settings))
        files = {"--config": "provisioner.yaml", "--choria-config": choria}
        arguments = [part for option, name in files.items() for part in (option, self.directory / name)]
        command = (sys.executable, "-m", "provisioner", "run", *arguments)
        return self._start(Daemon(self._log("provisioner"), self._identity(choria), *command))

    @contextlib.contextmanager
    def daemon(self) -> Iterator[Daemon]:
        """Run the daemon, and have it end in good order."""
        daemon = self.start_daemon()
        yield daemon
        daemon.leave()

    def start_go_candidate(self) -> Candidate:
        """Have the Go original's candidate campaign."""
        return self._start(Candidate(self._log("candidate"), self._identity("choria.cfg"), *self._command("candidate")))

    def evict(self) -> None:
        """Evict the leader, as an operator may."""
        subprocess.run(self._command("evict"), check=True)

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

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}-{len(self._parts)}.log"

    def _identity(self, choria: str) -> str:
        settings = (self.directory / choria).read_text().splitlines()
        (identity,) = (line.removeprefix("identity = ") for line in settings if line.startswith("identity"))
        return identity

    def _command(self, *arguments: str) -> list[str | Path]:
        return [self._program, *arguments, "--dir", self.directory]

    def _broker_listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1) as probe:
            return probe.recv(4) == b"INFO"
        return False


def _free_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
