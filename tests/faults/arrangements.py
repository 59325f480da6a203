"""Daemons and fleets that are not as usual: what differs is said where it is asked for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests.faults.conftest import SITE, Daemon, Population, Scale


def one_of(request: pytest.FixtureRequest, scale: Scale, *, short: str) -> str:
    """The parameter of a fixture; at the short scale all but one of its values are skipped.

    A test has to name the fixture before `report`, which is not content with a test that is skipped later.
    """
    if request.param != short and not scale.full:
        pytest.skip("only at full scale")
    return str(request.param)


def discover_often(daemon: Daemon, *, seconds: float) -> None:
    """Have it discover more often than a configuration may ask for: a minute is long to be waited for."""
    daemon.change("from provisioner import config", "config.MIN_INTERVAL_SECONDS = 0.0")
    daemon.settings["interval"] = f"{round(seconds * 1000)}ms"


def wait_shortly(daemon: Daemon, *, seconds: float) -> None:
    """Have it wait so long for a reply, and some milliseconds between its tries."""
    discovery = 2.0  # which comes on top
    daemon.change(
        "from provisioner.choria import retry",
        "from provisioner.host import node",
        f"node.AGENT_TIMEOUT_SECONDS = dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, {seconds - discovery})",
        "node.RPC_BACKOFF = retry.Backoff((50,))",
    )


def servers_named(identities: Iterable[str], *, over: float = 0.0, **of_each: Any) -> list[Server]:
    """Make servers, which announce themselves one after the other within `over` seconds unless that is 0."""
    named = list(identities)
    return [
        Server(**{"identity": name, "site": SITE, "boots_after": over * (number + 1) / len(named), **of_each})
        for number, name in enumerate(named)
    ]


@contextlib.contextmanager
def population(broker: str, servers: Sequence[Server], **options: Any) -> Iterator[Population]:
    """Have these servers on a broker.

    :param options: of their :class:`Fleet`
    """
    with Fleet(broker, servers, **options) as fleet:
        yield Population(servers, fleet)


def processes_of(daemon: Daemon) -> dict[int, str]:
    """The processes that it started, those that it has left alone included, with their command lines.

    They are known by their working directory, which is the daemon's.
    """
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.joinpath("cwd").readlink() == daemon.directory:
                found[int(process.name)] = process.joinpath("cmdline").read_text().replace("\0", " ").strip()
    found.pop(daemon.process.pid, None)
    return found


def zombies_of(daemon: Daemon) -> list[int]:
    """Children that it has not waited for, though they have ended."""
    children = Path("/proc", str(daemon.process.pid), "task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if _state(pid) == "Z"]


@contextlib.contextmanager
def nothing_left_of(daemon: Daemon) -> Iterator[None]:
    """End what helpers leave running in the end, whatever happens."""
    try:
        yield
    finally:
        for pid in processes_of(daemon):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
