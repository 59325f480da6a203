"""What the fault tests stand on: a daemon that is watched, servers to be provisioned by it, a scale, and a report.

Each test does something bad to a daemon at work, and then has the same things hold: every good server is provisioned,
none is configured twice without need, nothing is leaked, and the daemon leaves in good order when it is told to.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs
import pytest

from provisioner.choria import retry
from provisioner.simulate import server
from provisioner.simulate.counts import Counts
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server, Site
from tests.conftest import PATIENCE_SECONDS
from tests.installation import Installation
from tests.usage import Usage

SITE = Site(token="s3cret")
#: What most daemons have here.
WORKERS = 8
#: How long it may take after the last fault until every server is provisioned. A server that was missed is found again
#: by the discovery of the next interval, a minute later at most, and may be waited for by several tries of 22 s then.
PROVISION_SECONDS = 150.0
#: A daemon has done everything once when it has provisioned so many servers.
WARM_UP_SERVERS = 24
#: How much more memory than after the warm-up is taken for the same. It usually is 2 to 9 %.
RSS_GROWTH = 0.15
#: How often it is looked whether it has come so far: each look is a request to the daemon.
POLL_SECONDS = 0.1
#: How long what a process takes up must stay the same to be believed.
SETTLED_SECONDS = 0.1

_T = TypeVar("_T")

#: A request that may have been carried out without our knowing; the next one may then configure a server again.
_UNHEARD = re.compile(
    r"choria_provision#(?:configure|restart), try \d+: (?!refused|no server of this identity|there is no connection)"
)
_DEFECT = re.compile(r"\bbug\b|Traceback|\bdefect\b")


# --- the scale


@attrs.frozen
class Scale:
    """How much of everything.

    :ivar full: real loads and many rounds, else what can be waited for
    :ivar servers: to be provisioned in one test
    :ivar rounds: how often a fault that can be repeated is
    """

    full: bool
    servers: int
    rounds: int

    def of(self, *, short: _T, full: _T) -> _T:
        """One of two values."""
        return full if self.full else short


@pytest.fixture
def scale(pytestconfig: pytest.Config) -> Scale:
    full = bool(pytestconfig.getoption("--full"))
    return Scale(full, servers=400, rounds=6) if full else Scale(full, servers=40, rounds=2)


@pytest.fixture
def full_scale_only(scale: Scale) -> None:
    """For what takes long however small it is."""
    if not scale.full:
        pytest.skip("only at full scale")


# --- the report


class Report(Protocol):
    def __call__(self, what: str, happened: str, **figures: object) -> None: ...


#: Of the lines of a report among the properties of a test: these find their way out of the process that runs it.
_LINE = "report"
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the fixtures of a test know whether it has failed."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or not report.passed
    return report


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Says at the end of a test what was done and what happened, with figures, for the summary of the run.

    The seconds that the test took are added. A test that passes without a report is an error.
    """
    started, properties = time.monotonic(), request.node.user_properties

    def add(what: str, happened: str, **figures: object) -> None:
        figures |= {"seconds": round(time.monotonic() - started, 1)}
        numbers = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
        line = f"{request.node.nodeid.rpartition('/')[2]} | {what} | {happened} | {numbers}"
        properties.append((_LINE, line))

    yield add
    assert properties or request.node.stash.get(_FAILED, False), "the test did not report"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ended = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    # each of the phases of a test has all that were there at its end
    properties = [each for report in ended if report.when == "call" for each in report.user_properties]
    lines = [str(text) for name, text in properties if name == _LINE]
    if lines:
        terminalreporter.section(f"faults, {'full' if config.getoption('--full') else 'short'} scale")
        for line in lines:
            terminalreporter.line(line)


# --- servers


class Population:
    """Servers to be provisioned, on one connection to a broker."""

    def __init__(self, servers: Sequence[Server], fleet: Fleet) -> None:
        self.servers = servers
        self.fleet = fleet

    def wait_until(self, condition: Callable[[Counts], bool]) -> None:
        """Wait until what the servers have counted meets a condition."""
        assert self.fleet.wait(condition, PROVISION_SECONDS), (self.fleet.counts(), self.left())

    def wait_until_provisioned(self) -> None:
        """Wait until every good server is; none may have been left with something that it cannot live with."""
        self.wait_until(lambda counts: counts.complete)
        assert self.fleet.counts().unfit == 0

    def provision_while(self, *faults: Callable[[], object]) -> None:
        """Have faults occur in turn, each as another part of the servers is provisioned, and wait until all are."""
        for number, fault in enumerate(faults, 1):
            self.wait_until(functools.partial(_provisioned, len(self.servers) * number // (len(faults) + 2)))
            fault()
        self.wait_until_provisioned()

    @property
    def configured_again(self) -> collections.Counter[str]:
        """How often each server was configured beyond the first time, where it was."""
        return collections.Counter({each.identity: each.configures - 1 for each in self.servers if each.configures > 1})

    def left(self) -> list[str]:
        """Good servers that are not provisioned."""
        return [each.identity for each in self.servers if each.good and not each.departure]


def _provisioned(number: int, counts: Counts) -> bool:
    return counts.provisioned >= number


_AS_USUAL: Mapping[str, Any] = {"latency": 0.03}


class StartServers(Protocol):
    def __call__(
        self, broker: str, count: int, *, over: float = ..., fleet: Mapping[str, Any] = ..., **of_each: Any
    ) -> Population: ...


@pytest.fixture
def start_servers(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServers]:
    """Boots servers on a broker, stopped when the test is over.

    Servers that have lost their broker look for it with growing pauses, and restart two seconds after they are told to.
    At the short scale they come back with the broker and restart sooner, so that there is less to be waited for.

    :param over: seconds from the first to the last that boots; 0: all are up from the start, and announce nothing
    :param fleet: options of their :class:`Fleet`; by default each takes 30 ms to reply
    :param of_each: attributes of each :class:`Server`
    """
    if not scale.full:
        monkeypatch.setattr(retry, "RECONNECT_BACKOFF", retry.Backoff((20,)))
        monkeypatch.setattr(server, "RESTART_SECONDS", 0.5)
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def start(
            broker: str, count: int, *, over: float = 0.0, fleet: Mapping[str, Any] = _AS_USUAL, **of_each: Any
        ) -> Population:
            servers = [
                Server(
                    **{
                        "identity": f"n{next(numbers)}.example.net",
                        "site": SITE,
                        "boots_after": over * (number + 1) / count,
                        **of_each,
                    }
                )
                for number in range(count)
            ]
            running = Fleet(broker, servers, **{**_AS_USUAL, **fleet})
            stack.callback(running.stop)
            running.start()
            return Population(servers, running)

        yield start


# --- the daemon


class Daemon(Installation):
    """An installation whose process is watched."""

    before: Usage
    after: Usage
    _changes: tuple[str, ...] = ()

    def change(self, *lines: str) -> None:
        """Have some more lines run before its program, which must not have been started yet.

        They set other values for the constants of the program, so that less has to be waited for.
        """
        self._changes += lines
        self.program = ("-c", _CHANGED.format("\n".join(self._changes)))

    def idle(self) -> bool:
        """Connected, and no host in work or waiting for it. Those that restart are still known."""
        return self.ready() and not self.metric("busy_workers") and not self.metric("work_queue_entries")

    def warm_up(self, start_servers: StartServers, broker: str) -> None:
        """Have it start, unless it has, and do everything once; note what it takes up then.

        :param broker: where the servers for that connect to
        """
        population = start_servers(broker, WARM_UP_SERVERS, fleet={"latency": 0.0})
        if not self.processes:
            self.start("run", "--debug")
        self.until(self.ready)
        population.wait_until_provisioned()
        self.until(self.idle)
        population.fleet.stop()
        self.before = self.settled()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, or the process has ended."""
        give_up = time.monotonic() + PROVISION_SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < give_up, "it never happened"
            time.sleep(POLL_SECONDS)

    def settled(self) -> Usage:
        """What it takes up, once that does not change any more."""
        since, seen = time.monotonic(), self._usage_now()
        give_up = since + PATIENCE_SECONDS
        while time.monotonic() - since < SETTLED_SECONDS:
            now = self._usage_now()
            if (now.threads, now.descriptors) != (seen.threads, seen.descriptors):
                since = time.monotonic()
            seen = now
            assert since < give_up, f"what it takes up keeps changing: {now}"
            time.sleep(SETTLED_SECONDS / 20)
        return seen

    def _usage_now(self) -> Usage:
        now = self.usage()
        assert now, "the daemon is not there"
        return now

    def assert_unharmed(self, *, rss_growth: float = RSS_GROWTH, idle: bool = True) -> None:
        """It has become idle again without having leaked anything, saw no defect, and leaves when told to.

        :param idle: wait until it is; else it is asked to leave as it is
        """
        self.until(self.idle if idle else self.ready)
        self.after = after = self.settled()
        assert after.threads <= self.before.threads
        assert after.descriptors <= self.before.descriptors
        assert after.rss_bytes <= self.before.rss_bytes * (1 + rss_growth)
        assert self.stop() == 0
        assert self.process.communicate() == ("", "")
        self.assert_no_defect()

    def assert_no_defect(self) -> None:
        """Its log tells of no bug, whichever thread it was in."""
        lines = self.log_file.read_text().splitlines()
        assert [line for line in lines if _DEFECT.search(line)] == []

    @property
    def reconnections(self) -> float:
        """How often it lost its broker and came back."""
        return self.metric("choria_connector_reconnections")

    def unheard(self) -> collections.Counter[str]:
        """How often it did not learn whether a server was configured or restarted, by identity."""
        return collections.Counter(line["identity"] for line in self.log() if _UNHEARD.match(line["msg"]))

    def figures(self, *populations: Population) -> dict[str, object]:
        """For the report: what it did and what it took, once it was found to be unharmed."""
        return {
            "servers": sum(len(population.servers) for population in populations),
            "configured_again": sum(population.configured_again.total() for population in populations),
            "MB": f"{self.before.rss_bytes / 1e6:.0f} → {self.after.rss_bytes / 1e6:.0f}",
            "threads": f"{self.before.threads} → {self.after.threads}",
            "descriptors": f"{self.before.descriptors} → {self.after.descriptors}",
        }


class InstallDaemon(Protocol):
    def __call__(self, *brokers: str, name: str = ..., **settings: Any) -> Daemon: ...


_CHANGED = """
import sys
from provisioner.cli import main
{}
sys.exit(main(prog_name="choria-provisioner"))
"""
#: At the short scale servers come back with their broker, answer at once and restart soon: a daemon need not wait for
#: them as long as usual, but must give them the time to leave.
_HASTE = (
    "from provisioner.host import node",
    "from provisioner.hosts import scheduler",
    "node.RETURN_SECONDS = 1.0",
    "node.AGENT_TIMEOUT_SECONDS['choria_provision'] = 3.0",
    "scheduler.RETURN_SECONDS = (0.5, 2.0)",
)


@pytest.fixture
def install_daemon(tmp_path: Path, scale: Scale) -> Iterator[InstallDaemon]:
    """Installs daemons side by side, not started yet; what still runs of them is killed when the test is over.

    :param name: of its directory
    :param settings: of ``provisioner.yaml``
    """
    with contextlib.ExitStack() as stack:

        def install(*brokers: str, name: str = "daemon", **settings: Any) -> Daemon:
            daemon = stack.enter_context(Daemon(tmp_path / name, *brokers))
            daemon.settings |= settings
            if not scale.full:
                daemon.change(*_HASTE)
            return daemon

        yield install


class StartDaemon(Protocol):
    def __call__(self, *brokers: str, servers_on: str = ..., **options: Any) -> Daemon: ...


@pytest.fixture
def start_daemon(install_daemon: InstallDaemon, start_servers: StartServers) -> StartDaemon:
    """Installs a daemon, and warms it up: see :meth:`Daemon.warm_up`.

    :param servers_on: the broker that its servers for that connect to, when it is not the daemon's first
    """

    def start(*brokers: str, servers_on: str = "", **options: Any) -> Daemon:
        daemon = install_daemon(*brokers, **options)
        daemon.warm_up(start_servers, servers_on or brokers[0])
        return daemon

    return start


# --- both


@attrs.frozen
class Stage:
    """A daemon that was warmed up, and servers for it to provision."""

    daemon: Daemon
    population: Population
    report: Report

    def report_unharmed(self, what: str, happened: str, **options: Any) -> None:
        """The end of a test: see :meth:`Daemon.assert_unharmed`."""
        self.daemon.assert_unharmed(**options)
        self.report(what, happened, **self.daemon.figures(self.population))


class SetStage(Protocol):
    def __call__(
        self,
        *brokers: str,
        servers_on: str = ...,
        servers: int = ...,
        over: float = ...,
        fleet: Mapping[str, Any] = ...,
        changes: Sequence[str] = ...,
        **settings: Any,
    ) -> Stage: ...


@pytest.fixture
def set_stage(install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report) -> SetStage:
    """Starts a daemon on some brokers, and then servers.

    :param servers_on: the broker of the servers, when it is not the daemon's first
    :param servers: their number, when it is not that of the scale
    :param over: see :func:`start_servers`; by default a second or some
    :param fleet: the same
    :param changes: see :meth:`Daemon.change`
    :param settings: see :func:`install_daemon`
    """

    def set_stage(
        *brokers: str,
        servers_on: str = "",
        servers: int = scale.servers,
        over: float = scale.of(short=0.6, full=10.0),
        fleet: Mapping[str, Any] = _AS_USUAL,
        changes: Sequence[str] = (),
        **settings: Any,
    ) -> Stage:
        daemon = install_daemon(*brokers, **{"workers": WORKERS, **settings})
        if changes:
            daemon.change(*changes)
        daemon.warm_up(start_servers, servers_on or brokers[0])
        return Stage(daemon, start_servers(servers_on or brokers[0], servers, over=over, fleet=fleet), report)

    return set_stage


def assert_configured_again_only_if_unheard(
    population: Population, daemon: Daemon, *, interruptions: int | None = None
) -> None:
    """A server is configured again only where the daemon could not know whether it had been.

    :param interruptions: how often the connection was lost, if known; none costs more replies than there are workers
    """
    assert population.configured_again - daemon.unheard() == collections.Counter()
    if interruptions is not None:
        assert population.configured_again.total() <= interruptions * daemon.settings["workers"]
