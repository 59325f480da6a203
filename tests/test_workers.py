"""Workers and the finisher: what becomes of a host that leaves the queue."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest

from provisioner.choria.discovery import Sighting
from provisioner.errors import HostError, SoftError
from provisioner.host import node
from provisioner.host.host import Host
from provisioner.host.node import LockedError
from provisioner.host.provision import Success
from provisioner.hosts import worker as worker_module
from provisioner.hosts.finisher import Finisher
from provisioner.hosts.history import History
from provisioner.hosts.loop import Loop
from provisioner.hosts.registry import Registry
from provisioner.hosts.worker import LEAVING_SECONDS, Worker
from provisioner.monitor.metrics import Metrics
from provisioner.monitor.status import Outcome
from provisioner.shutdown import Shutdown
from tests.scheduled import value
from tests.waiting import wait_until


class Pool:
    """A registry, a finisher and one worker that does to hosts what the test says."""

    def __init__(self) -> None:
        self.metrics = Metrics("lab")
        self.shutdown = Shutdown(grace=5)
        self.registry = Registry(60, self.metrics)
        self.finisher = Finisher(self.registry)
        self.history = History(backoff=True, interval=60)
        self.provision: Callable[[Host], Success] = lambda _host: Success.PROVISIONED
        self.provisioned: list[str] = []
        self.paused = False
        self.worker = Worker(
            1,
            self._provision,
            limit=10,
            paused=lambda: self.paused,
            registry=self.registry,
            finisher=self.finisher,
            history=self.history,
            metrics=self.metrics,
            shutdown=self.shutdown,
        )

    def _provision(self, host: Host) -> Success:
        self.provisioned.append(host.identity)
        return self.provision(host)

    def add(self, identity: str) -> Host:
        host = Host(identity)
        assert self.registry.add(host)
        return host

    def waiting(self) -> float:
        return value(self.metrics, "waiting_nodes")


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    pool.finisher.start()
    pool.worker.start()
    yield pool
    pool.shutdown.request()
    pool.finisher.stop()
    pool.worker.join(5)
    pool.finisher.join(5)
    assert not pool.worker.alive
    assert not pool.finisher.alive


def raising(error: Exception) -> Callable[[Host], Success]:
    def provision(_host: Host) -> Success:
        raise error

    return provision


@pytest.mark.parametrize(
    "error", [HostError("it is broken"), SoftError("not now"), KeyError("a bug")], ids=["error", "soft", "bug"]
)
def test_after_any_error_the_host_is_let_go_at_once_and_counted(pool: Pool, error: Exception) -> None:
    pool.provision = raising(error)
    pool.add("n1")

    wait_until(lambda: pool.waiting() == 0)
    assert value(pool.metrics, "provision_errors") == 1
    assert value(pool.metrics, "provisioned") == 0


def test_a_host_that_is_locked_is_left_alone_as_long_as_trying_again_is_of_no_use(pool: Pool) -> None:
    assert LockedError.hold == 120
    pool.provision = raising(LockedError("choria_provision#configure: refused: Could not obtain provisioning lock"))
    host = pool.add("n1")

    wait_until(lambda: value(pool.metrics, "provision_errors") == 1)
    wait_until(lambda: pool.waiting() == 0)
    assert pool.history.choose([Sighting("n1", host.discovered)]) == [], "so the next discovery skips it"
    pool.history.booted("n1")
    assert pool.history.choose([Sighting("n1", host.discovered)]) != []


def test_a_bug_in_one_host_does_not_cost_the_next_one(pool: Pool) -> None:
    pool.provision = raising(KeyError("a bug"))
    pool.add("n1")
    wait_until(lambda: pool.waiting() == 0)
    pool.provision = lambda _host: Success.UPGRADING
    pool.add("n2")

    wait_until(lambda: pool.waiting() == 0)
    assert pool.provisioned == ["n1", "n2"]


class TestStuck:
    """A host whose worker got stuck in its turn, and was replaced."""

    @pytest.fixture
    def release(self, pool: Pool) -> Callable[[Success | Exception], None]:
        """Have the worker stuck with n1 and replaced; then lets its first thread go on to that end."""
        entered, leave = threading.Event(), threading.Event()
        ends: list[Success | Exception] = []

        def hang(_host: Host) -> Success:
            entered.set()
            assert leave.wait(10)
            if isinstance(ends[0], Exception):
                raise ends[0]
            return ends[0]

        pool.provision = hang
        pool.add("n1")
        assert entered.wait(10)
        stuck = pool.worker._thread
        assert stuck
        pool.provision = lambda _host: Success.UPGRADING
        pool.worker.start()  # what the supervisor does then

        def release(end: Success | Exception) -> None:
            ends.append(end)
            leave.set()
            stuck.join(10)
            assert not stuck.is_alive()

        return release

    def test_it_has_failed_is_told_of_and_let_go(
        self, pool: Pool, release: Callable[[Success | Exception], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        wait_until(lambda: pool.waiting() == 0)
        (attempt,) = pool.history.recent()
        assert (attempt.identity, attempt.outcome, attempt.reason) == ("n1", Outcome.FAILED, "its worker got stuck")
        assert pool.worker.state().identity == ""
        assert value(pool.metrics, "provision_errors") == 1
        (told,) = caplog.get_records("setup")
        assert told.getMessage().endswith(" s: its worker got stuck")
        assert told.__dict__["identity"] == "n1"
        release(Success.UPGRADING)

    @pytest.mark.parametrize("error", [HostError("no reply"), SoftError("let go"), KeyError("a bug")])
    def test_when_its_thread_goes_on_that_is_no_second_failure(
        self,
        pool: Pool,
        release: Callable[[Success | Exception], None],
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ) -> None:
        caplog.set_level("INFO")
        wait_until(lambda: pool.waiting() == 0)
        pool.add("n1")
        wait_until(lambda: value(pool.metrics, "upgrades") == 1)
        release(error)

        assert value(pool.metrics, "provision_errors") == 1
        assert pool.history.troubled() == [], "it was mended meanwhile"
        assert len(pool.history.recent()) == 2
        assert "its worker is no longer stuck" in caplog.text

    def test_when_its_thread_succeeds_in_the_end_that_counts(
        self, pool: Pool, release: Callable[[Success | Exception], None]
    ) -> None:
        wait_until(lambda: pool.history.troubled_count() == 1)
        release(Success.PROVISIONED)

        assert value(pool.metrics, "provisioned") == 1
        assert pool.history.troubled() == []

    def test_one_that_is_replaced_once_more_has_not_failed_once_more(
        self, pool: Pool, release: Callable[[Success | Exception], None]
    ) -> None:
        pool.worker.start()
        release(Success.UPGRADING)

        assert [attempt.outcome for attempt in pool.history.recent()] == [Outcome.UPGRADING, Outcome.FAILED]


def test_a_failure_by_a_bug_is_told_on_one_line_as_any_other(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.provision = raising(KeyError("a bug"))
    pool.add("n1")
    wait_until(lambda: pool.waiting() == 0)

    (told,) = caplog.records
    assert re.fullmatch(r"could not provision after \d+\.\d\d s: a bug", told.getMessage())
    assert told.exc_info
    assert pool.history.troubled()[0].reason == "a bug: KeyError"


@pytest.mark.parametrize(
    ("outcome", "counter"),
    [(Success.PROVISIONED, "provisioned"), (Success.SHUT_DOWN, "helper_shutdown_requests")],
)
def test_a_host_that_is_leaving_stays_known_for_a_minute(pool: Pool, outcome: Success, counter: str) -> None:
    assert LEAVING_SECONDS == 60
    pool.provision = lambda _host: outcome
    host = pool.add("n1")

    wait_until(lambda: value(pool.metrics, counter) == 1)
    wait_until(lambda: value(pool.metrics, "busy_workers") == 0)
    assert pool.registry.is_current(host)
    assert not pool.registry.add(Host("n1")), "so the next discovery skips it"


def test_each_outcome_counts_in_one_counter_alone(pool: Pool) -> None:
    outcomes = iter(Success)
    pool.provision = lambda _host: next(outcomes)
    for identity in ("n1", "n2", "n3"):
        pool.add(identity)

    wait_until(lambda: value(pool.metrics, "upgrades") == 1)
    assert value(pool.metrics, "provisioned") == 1
    assert value(pool.metrics, "helper_shutdown_requests") == 1
    assert value(pool.metrics, "provision_errors") == 0


def test_a_host_sent_to_upgrade_is_let_go_at_once_to_be_provisioned_next_cycle(pool: Pool) -> None:
    pool.provision = lambda _host: Success.UPGRADING
    pool.add("n1")

    wait_until(lambda: pool.waiting() == 0)
    assert value(pool.metrics, "provisioned") == 0


def test_the_minute_passes_and_the_host_is_let_go(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LEAVING_SECONDS", 0.05)
    pool.add("n1")

    wait_until(lambda: pool.waiting() == 0)
    assert value(pool.metrics, "provisioned") == 1


def test_nothing_is_taken_while_paused() -> None:
    pool = Pool()
    pool.paused = True
    host = pool.add("n1")
    pool.worker.turn()

    assert pool.provisioned == []
    assert pool.registry.take(0) is host


def test_a_host_that_was_let_go_while_queued_is_skipped_and_not_done(pool: Pool) -> None:
    entered, leave = threading.Event(), threading.Event()

    def occupy(_host: Host) -> Success:
        entered.set()
        leave.wait(10)
        return Success.UPGRADING

    pool.provision = occupy
    pool.add("busy")
    assert entered.wait(10)
    pool.add("n1")
    # what a lost election does, but for the queue entry that the worker is about to take
    pool.registry.remove(next(host for host in pool.registry._hosts.values() if host.identity == "n1"))
    pool.provision = lambda _host: Success.UPGRADING
    leave.set()
    pool.add("n2")

    wait_until(lambda: pool.waiting() == 0)
    assert pool.provisioned == ["busy", "n2"]


def test_busy_workers_counts_for_the_duration_whatever_happens(pool: Pool) -> None:
    entered, leave = threading.Event(), threading.Event()

    def fail_late(_host: Host) -> Success:
        entered.set()
        leave.wait(10)
        raise KeyError("a bug")

    pool.provision = fail_late
    pool.add("n1")
    assert entered.wait(10)
    assert value(pool.metrics, "busy_workers") == 1
    leave.set()
    wait_until(lambda: value(pool.metrics, "busy_workers") == 0)


def test_no_host_is_taken_once_the_process_is_to_leave(pool: Pool) -> None:
    pool.shutdown.request()
    pool.worker.join(5)
    pool.add("n1")

    assert not pool.worker.alive
    assert pool.provisioned == []


def test_thousands_of_delayed_hosts_need_no_thread_of_their_own(pool: Pool) -> None:
    before = threading.active_count()
    hosts = [pool.add(f"n{number}") for number in range(1000)]
    wait_until(lambda: len(pool.provisioned) == 1000)
    for host in hosts:
        pool.finisher.done(host, delay=60)

    assert threading.active_count() == before


def test_hosts_are_let_go_in_the_order_of_their_time_not_of_their_end(pool: Pool) -> None:
    late, soon = Host("late"), Host("soon")
    removed: list[str] = []
    remove = pool.registry.remove

    def noting(host: Host) -> None:
        removed.append(host.identity)
        remove(host)

    pool.registry.remove = noting  # type: ignore[method-assign]
    pool.finisher.done(late, delay=1.05)
    pool.finisher.done(soon, delay=0.05)

    wait_until(lambda: removed == ["soon", "late"])


class Stumbling(Loop):
    """Has a bug in its first turn."""

    def __init__(self) -> None:
        self.turns = 0
        super().__init__("stumbling", lambda: self.turns == 2, limit=30)

    def turn(self) -> None:
        self.turns += 1
        if self.turns == 1:
            raise KeyError("a bug")


def test_a_loop_survives_a_bug_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loop = Stumbling()
    loop.start()
    loop.join(10)

    assert loop.turns == 2
    assert "bug in thread stumbling" in caplog.text


def test_a_loop_that_is_being_started_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begin, problems = Stumbling(), threading.Thread.start, []

    def look_and_begin(thread: threading.Thread) -> None:
        problems.append(loop.health().problem)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", look_and_begin)
    loop.start()
    loop.join(10)

    assert problems == [None]


@pytest.mark.parametrize("discovery_timeout", [2.0, 300.0])
def test_a_host_whose_every_request_takes_its_time_does_not_make_its_worker_stuck(discovery_timeout: float) -> None:
    configure_alone = 5 * 2 * (discovery_timeout + 20.0)
    assert node.cycle_limit(discovery_timeout) > 3 * configure_alone
