"""A daemon as a process that may be killed and started again, and what its log says."""

from __future__ import annotations

import collections
import contextlib
import gzip
import http.client
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.soak.nodes import SITE
from provisioner.cli.demo_progress import Page
from tests.faults.proxy import Proxy
from tests.installation import Installation
from tests.streams import PASSWORD

HELPER = Path(__file__).with_name("helper.sh")
WORKERS = 32
INTERVAL_SECONDS = 60.0
HELPER_TIMEOUT_SECONDS = 5.0
#: How long a daemon may take to leave: its grace time, and the time to end its threads.
LEAVE_SECONDS = 30.0
#: How long it may take to serve its metrics, which it does not while it is stopped.
METRICS_SECONDS = 1.0
#: The log is begun anew when it has become this long.
LOG_BYTES = 20_000_000
#: Of each kind of lines that tell of a defect so many are kept; so many characters make the kind.
KEPT_LINES = 20
KIND_CHARACTERS = 110

_DEFECT = re.compile(r"\bbug\b|Traceback|\bdefect\b")
_NUMBER = re.compile(r"\b[0-9a-f]{16,}\b|\d+(\.\d+)?")


class Instance(Installation):
    """One daemon, its way to the broker, and what became of its processes.

    :param parent: of its directory
    :param name: of its directory, and the first part of its identity
    :param elected: it provisions only while it is the leader
    :param kept_log: all that it logs is kept in this file, compressed
    :ivar proxy: between the daemon and the broker
    :ivar notes: the directory in which the helper remembers, the same for all daemons
    :ivar exit_codes: of the processes that were told to leave
    :ivar crashes: exit codes of the processes that were not
    """

    def __init__(self, parent: Path, name: str, proxy: Proxy, *, elected: bool, kept_log: Path) -> None:
        super().__init__(parent / name, proxy.url)
        self.choria = self.choria.replace("prov.", f"{name}.")
        self.name = name
        self.proxy = proxy
        self.notes = parent / "notes"
        self.notes.mkdir(exist_ok=True)
        self.settings |= {
            "workers": WORKERS,
            "interval": f"{INTERVAL_SECONDS:.0f}s",
            "helper": f"{HELPER} {self.notes}",
            "helper_timeout": f"{HELPER_TIMEOUT_SECONDS:.0f}s",
            "token": SITE.token,
            "broker_provisioning_password": PASSWORD,
            "leader_election": elected,
            "features": {"upgrades": True},
            "upgrades_repository": SITE.repository,
        }
        self.log_watch = LogWatch(self.log_file, kept_log)
        self.exit_codes: list[int | None] = []
        self.crashes: list[int] = []
        # held while the process is exchanged for another, which is nobody else's doing then
        self._exchange = threading.RLock()

    def begin(self) -> None:
        """Start the daemon, out of reach of the terminal's Ctrl-C."""
        with (self.directory / "output").open("ab") as output:
            self.start("run", stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """It is not there, after a crash."""
        with self._exchange:
            self.kill()
            yield
            self.begin()

    @contextlib.contextmanager
    def terminated(self) -> Iterator[None]:
        """It is not there, for it was told to leave."""
        with self._exchange:
            self.leave()
            yield
            self.begin()

    def leave(self) -> None:
        """Tell it to leave, and note its exit code; None is that of one that had to be killed."""
        with self._exchange:
            try:
                self.exit_codes.append(self.stop(LEAVE_SECONDS))
            except subprocess.TimeoutExpired:
                self.exit_codes.append(None)
                self.kill()

    def revive(self) -> None:
        """Start it again if it has ended by itself, as a service manager would."""
        if not self._exchange.acquire(blocking=False):
            return
        try:
            code = self.process.poll()
            if code is not None:
                self.crashes.append(code)
                self.begin()
        finally:
            self._exchange.release()

    def page(self) -> Page | None:
        """Its metrics; None while it does not serve them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=METRICS_SECONDS)
        try:
            connection.request("GET", "/metrics")
            return Page(connection.getresponse().read().decode())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    @property
    def leads(self) -> bool:
        """Whether it says that it is the one that provisions."""
        page = self.page()
        return page is not None and page.value("leader") == 1

    def said(self) -> str:
        """What it has written past its log, which should be nothing."""
        return (self.directory / "output").read_text(errors="replace")


class LogWatch:
    """Reads a log while it grows, keeps what tells of a defect, and counts the rest.

    :param kept: gets all of it, compressed
    :ivar kinds: how often each kind of warning or worse came; numbers make no difference
    """

    def __init__(self, path: Path, kept: Path) -> None:
        self._path = path
        self._moved = path.with_suffix(".old")
        self._kept = kept
        self._read = 0
        self._rest = b""
        self._defects: dict[str, list[str]] = {}
        self.kinds: collections.Counter[str] = collections.Counter()

    @property
    def defects(self) -> Sequence[str]:
        """Lines that tell of a defect, some of each kind."""
        return [line for lines in self._defects.values() for line in lines]

    def look(self) -> None:
        """Read what has been written since the last time; a log that is long is moved away, and removed next time."""
        if self._moved.exists():
            self._take(self._moved)
            self._moved.unlink()
            self._read, self._rest = 0, b""
        if self._path.exists():
            self._take(self._path)
            if self._read > LOG_BYTES:
                self._path.rename(self._moved)

    def _take(self, path: Path) -> None:
        with path.open("rb") as log:
            log.seek(self._read)
            data = log.read()
        with gzip.open(self._kept, "ab") as kept:
            kept.write(data)
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._judge(line.decode(errors="replace"))

    def _judge(self, line: str) -> None:
        try:
            record: Mapping[str, str] = json.loads(line)
            level, kind = record["level"], _kind(record["msg"])
        except (ValueError, TypeError, KeyError):  # the end of a process may cut its last line
            level, kind = "unreadable", _kind(line)
        if level not in ("debug", "info"):
            self.kinds[f"{level}: {kind}"] += 1
        if level == "fatal" or _DEFECT.search(line):
            kept = self._defects.setdefault(kind, [])
            if len(kept) < KEPT_LINES:
                kept.append(line)


def _kind(text: str) -> str:
    return _NUMBER.sub("N", text)[:KIND_CHARACTERS]
