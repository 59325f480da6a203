"""The parts of a network, each a process with a log."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from tests.interop import enroll

#: For everything that is awaited; none of it takes that long unless it fails. It is time for one more discovery, should
#: a server be too slow for the first.
PATIENCE_SECONDS = 120.0


class Part:
    """A process with a log; what it says about itself, one JSON document a line, is among the log's lines.

    :ivar ended: when we ended it, seconds since the epoch; None before
    """

    def __init__(self, log: Path, *command: str | Path) -> None:
        self.log = log
        self.ended: float | None = None
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
        self.ended = self.ended or time.time()


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

    @property
    def requests(self) -> list[Request]:
        """All that was asked of it while it waited to be provisioned."""
        audit = self.log.parent / "servers" / self.identity / "audit.log"
        entries = map(json.loads, audit.read_text().splitlines() if audit.exists() else ())
        return [Request(_moment(entry["timestamp"]), entry["sender"], entry["action"]) for entry in entries]


@attrs.frozen
class Request:
    """What a server tells about a request.

    :ivar at: seconds since the epoch
    :ivar sender: identity of the provisioner
    """

    at: float
    sender: str
    action: str


@attrs.frozen
class Reign:
    """A time in which a candidate was the leader, by its own account.

    :ivar began: when it had not done anything as the leader yet, seconds since the epoch
    :ivar ended: when it did nothing more, the same
    """

    began: float
    ended: float
    identity: str


class Candidate(Part):
    """Takes part in the election. This is the Go original's candidate, which does nothing else."""

    def __init__(self, log: Path, identity: str, *command: str | Path) -> None:
        super().__init__(log, *command)
        self.identity = identity

    @property
    def reigns(self) -> list[Reign]:
        """Its times as the leader, the present one included."""
        reigns: list[Reign] = []
        won: float | None = None
        for at, what in self._campaign():
            if what == "won":
                won = at
            elif won is not None:
                reigns.append(Reign(won, at, self.identity))
                won = None
        return reigns if won is None else [*reigns, Reign(won, self.ended or time.time(), self.identity)]

    @property
    def leads(self) -> bool:
        """Whether it is the leader, by its own account."""
        campaign = list(self._campaign())
        return self.ended is None and bool(campaign) and campaign[-1][1] == "won"

    def _campaign(self) -> Iterator[tuple[float, str]]:
        """When it has won and lost."""
        for line in self.lines():
            if line.get("event") in {"won", "lost"}:
                yield _moment(line["time"]), line["event"]


class Daemon(Candidate):
    """The provisioner, its log in JSON."""

    def __init__(self, log: Path, identity: str, *command: str | Path) -> None:
        super().__init__(log, identity, *command)
        # the other parts end by themselves when we are gone
        guard = ("/bin/sh", "-c", 'read _; kill -9 "$1"', "guard", str(self._process.pid))
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def kill(self) -> None:
        self._guard.kill()  # first: once the daemon is reaped its number may belong to somebody else
        self._guard.communicate()
        super().kill()

    def leave(self) -> None:
        """Have it end, and see that it was and is all right."""
        assert self.stop() == 0
        assert not self.logged("bug")
        assert "Traceback" not in self.log.read_text()

    @property
    def problems(self) -> list[str]:
        """What it has logged as a warning or worse."""
        return [line["msg"] for line in self.lines() if line["level"] not in {"debug", "info"}]

    def logged(self, *parts: str) -> list[dict[str, Any]]:
        """The records whose message has all these parts."""
        return [line for line in self.lines() if all(part in line["msg"] for part in parts)]

    def _campaign(self) -> Iterator[tuple[float, str]]:
        for line in self.logged("the leadership: "):
            yield _moment(line["time"]), line["msg"].partition(" ")[0]


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
