"""Threads that die or get stuck: another one takes over where that is safe, else the daemon has to leave."""

from __future__ import annotations

import contextlib
import http.client
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioner.choria import connector, retry
from provisioner.choria.protocol import reply_prefix
from provisioner.host.host import Host
from provisioner.host.provision import Success
from provisioner.hosts import election, scheduler, supervisor, worker
from provisioner.hosts.loop import Loop
from provisioner.hosts.supervisor import Supervisor
from provisioner.monitor.http import MonitorServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector
from tests.installation import SITE
from tests.scheduled import CALLER, ScheduledDaemon, hurry
from tests.streams import LOGIN, SERVERS_LOGIN, Streams

#: A turn that lasts longer is one of a thread that is stuck, where it is to be noticed soon.
LIMIT_SECONDS = 0.1


class Accident:
    """Something that happens to a loop in one of its turns, and then no more.

    :ivar happened: it has
    :ivar thread: to which it happened
    """

    def __init__(self, loop: Loop) -> None:
        self.happened = threading.Event()
        self.thread: threading.Thread | None = None
        self._loop = loop
        self._turn = loop.turn
        loop.turn = self._happen  # type: ignore[method-assign]

    def _happen(self) -> None:
        self._loop.turn = self._turn  # type: ignore[method-assign]
        self.thread = threading.current_thread()
        self.happened.set()
        self.befall()

    def befall(self) -> None:
        raise NotImplementedError


class Death(Accident):
    """The thread ends."""

    def befall(self) -> None:
        raise SystemExit


class Trap(Accident):
    """The thread is stuck until it is released, and that is noticed soon."""

    def __init__(self, loop: Loop) -> None:
        self._gate = threading.Event()
        self._limit, self._start = loop._limit, loop.start
        super().__init__(loop)

    def befall(self) -> None:
        self._loop._limit = LIMIT_SECONDS
        self._loop.start = self._replace  # type: ignore[method-assign]
        assert self._gate.wait(2 * PATIENCE_SECONDS)

    def _replace(self) -> None:
        self._loop._limit = self._limit
        self._loop.start = self._start  # type: ignore[method-assign]
        self._start()

    def open(self) -> None:
        """Let the thread go."""
        self._gate.set()

    def release(self) -> None:
        """Let the thread go, and wait for its end: it must not take another turn."""
        self.open()
        assert self.thread
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()


SetTrap = Callable[[Loop], Trap]


@pytest.fixture
def set_trap() -> Iterator[SetTrap]:
    """Makes traps; to be asked for after that whose threads it is for."""
    traps: list[Trap] = []

    def make(loop: Loop) -> Trap:
        traps.append(Trap(loop))
        return traps[-1]

    yield make
    for trap in traps:
        trap.open()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Set at the latest when the test is over; to be asked for after that whose threads it holds up."""
    gate = threading.Event()
    yield gate
    gate.set()


#: For what is printed when a thread dies.
deadly = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Turning(Loop):
    """Notes which threads take its turns."""

    def __init__(self, *, replaceable: bool = False) -> None:
        self.stopping = False
        self.turned: list[threading.Thread] = []
        self.replaceable = replaceable
        super().__init__("turning", lambda: self.stopping, limit=PATIENCE_SECONDS)

    def turn(self) -> None:
        if threading.current_thread() not in self.turned:
            self.turned.append(threading.current_thread())
        threading.Event().wait(0.001)


class TestSupervisor:
    """Of one loop."""

    @pytest.fixture
    def loop(self) -> Iterator[Turning]:
        loop = Turning()
        yield loop
        loop.stopping = True
        loop.join(PATIENCE_SECONDS)

    @pytest.fixture
    def supervised(self, loop: Turning, eventually: Eventually) -> Supervisor:
        """The loop is at work."""
        supervisor = Supervisor([loop], {})
        supervisor.start()
        eventually(lambda: loop.turned)
        return supervisor

    def test_a_thread_that_does_its_work_is_left_alone(
        self, supervised: Supervisor, loop: Turning, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(10):
            assert supervised.mend()
        assert len(loop.turned) == 1
        assert caplog.messages == []

    @deadly
    def test_one_that_died_is_replaced(
        self, supervised: Supervisor, loop: Turning, eventually: Eventually, caplog: pytest.LogCaptureFixture
    ) -> None:
        death = Death(loop)
        assert death.happened.wait(PATIENCE_SECONDS)
        eventually(lambda: not loop.alive)
        assert loop.health().problem == "the thread has died"
        assert supervised.mend()

        eventually(lambda: len(loop.turned) == 2)
        assert loop.health().problem is None
        assert caplog.messages == ["thread turning: the thread has died: another thread takes over"]

    def test_one_that_is_stuck_is_replaced_where_that_is_safe_and_takes_no_further_turn(
        self,
        supervised: Supervisor,
        loop: Turning,
        set_trap: SetTrap,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        loop.replaceable = True
        trap = set_trap(loop)
        eventually(lambda: loop.health().problem)
        assert supervised.mend()

        eventually(lambda: len(loop.turned) == 2)
        assert re.fullmatch(
            r"thread turning: the turn has lasted \d+ s: another thread takes over", "\n".join(caplog.messages)
        )
        loop.turned.clear()
        trap.release()
        eventually(lambda: loop.turned)
        assert trap.thread not in loop.turned

    def test_elsewhere_the_daemon_has_to_leave(
        self,
        supervised: Supervisor,
        loop: Turning,
        set_trap: SetTrap,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        trap = set_trap(loop)
        eventually(lambda: loop.health().problem)

        assert not supervised.mend()
        assert re.fullmatch(r"thread turning: the turn has lasted \d+ s: leaving", "\n".join(caplog.messages))
        assert supervised.join(0.0) == ["turning"]
        loop.stopping = True
        trap.release()
        assert supervised.join(PATIENCE_SECONDS) == []

    @deadly
    def test_so_it_has_when_a_thread_dies_again_and_again(
        self, supervised: Supervisor, loop: Turning, eventually: Eventually, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert supervisor.REPLACEMENTS_LIMIT == 3
        mended = []
        for _ in range(4):
            Death(loop)
            eventually(lambda: not loop.alive)
            mended.append(supervised.mend())

        assert mended == [True, True, True, False]
        assert caplog.messages[-1] == "thread turning: the thread has died: leaving"

    def test_after_the_whole_process_stood_still_threads_are_given_time(
        self,
        supervised: Supervisor,
        loop: Turning,
        set_trap: SetTrap,
        monkeypatch: pytest.MonkeyPatch,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        trap = set_trap(loop)
        eventually(lambda: loop.health().problem)
        supervised._looked -= 60  # as if it had been stopped for a minute
        assert supervised.mend()
        assert caplog.messages == ["the process stood still for 60 s"]
        monkeypatch.setattr(supervisor, "TURN_LIMIT_SECONDS", 0.0)
        supervised._looked -= 60
        assert not supervised.mend()
        trap.open()

    def test_a_thread_that_was_to_end_is_not_missed(
        self, supervised: Supervisor, loop: Turning, eventually: Eventually
    ) -> None:
        loop.stopping = True
        eventually(lambda: not loop.alive)
        assert loop.health().problem is None
        assert supervised.mend()
        assert not loop.alive

    def test_a_thread_that_was_not_started_is_not_missed(self, loop: Turning) -> None:
        assert Supervisor([loop], {}).mend()
        assert Supervisor([loop], {}).join(0.0) == []
        assert loop.health().note == "does not run"


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with Streams(tmp_path / "streams") as streams:
        streams.make_bucket()
        yield streams


@pytest.fixture
def daemon(
    tmp_path: Path,
    streams: Streams,
    make_connector: MakeConnector,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> Iterator[ScheduledDaemon]:
    """All of an instance that leads, with one worker; it lets servers go at once when it has provisioned them."""
    hurry(monkeypatch)
    monkeypatch.setattr(election, "CAMPAIGN_BACKOFF", retry.Backoff((100,)))
    monkeypatch.setattr(worker, "LEAVING_SECONDS", 0.0)
    connection = make_connector(streams.server, reply_prefix=reply_prefix(CALLER), authenticate=lambda _: LOGIN)
    daemon = ScheduledDaemon(tmp_path, connection, discovery_timeout=0.1, leader_election=True, workers=1)
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)
    yield daemon
    daemon.shutdown.request()
    daemon.stop()


@pytest.fixture
def boot(streams: Streams) -> Iterator[Callable[[str], Fleet]]:
    """Boots a server."""
    with contextlib.ExitStack() as stack:

        def boot(identity: str) -> Fleet:
            server = Server(identity=identity, site=SITE, boots_after=0.01)
            fleet = Fleet(streams.server.url, [server], login=SERVERS_LOGIN)
            stack.enter_context(fleet)
            return fleet

        yield boot


def loop_of(daemon: ScheduledDaemon, name: str) -> Loop:
    (loop,) = (loop for loop in daemon.scheduler._supervisor._loops if loop.name == name)
    return loop


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that do not end are left behind soon."""
    monkeypatch.setattr(scheduler, "LEAVE_SECONDS", 0.3)


class TestDaemon:
    """With each of its threads in turn."""

    def provisions(self, daemon: ScheduledDaemon, boot: Callable[[str], Fleet], eventually: Eventually) -> None:
        """A server that boots is provisioned, and let go."""
        fleet = boot("n1.example.net")
        assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
        eventually(lambda: daemon["waiting_nodes"] == 0)
        assert daemon.healthy is None

    @deadly
    @pytest.mark.parametrize("name", ["election", "listener", "finisher", "worker-1"])
    def test_one_that_died_is_replaced_and_all_goes_on(
        self,
        daemon: ScheduledDaemon,
        boot: Callable[[str], Fleet],
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
        name: str,
    ) -> None:
        loop = loop_of(daemon, name)
        assert Death(loop).happened.wait(PATIENCE_SECONDS)
        eventually(lambda: f"thread {name}: the thread has died: another thread takes over" in caplog.messages)
        eventually(lambda: loop.alive)
        self.provisions(daemon, boot, eventually)
        assert not daemon.config.paused
        assert "lost the leadership" not in caplog.text

    @pytest.mark.parametrize("name", ["listener", "worker-1"])
    def test_one_of_these_that_is_stuck_is_replaced_and_all_goes_on(
        self,
        daemon: ScheduledDaemon,
        boot: Callable[[str], Fleet],
        set_trap: SetTrap,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
        name: str,
    ) -> None:
        trap = set_trap(loop_of(daemon, name))
        eventually(lambda: re.search(rf"thread {name}: the turn has lasted \d+ s: another", caplog.text))
        self.provisions(daemon, boot, eventually)
        trap.release()
        daemon.stop()
        assert daemon.healthy

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize("name", ["election", "finisher"])
    def test_one_of_these_that_is_stuck_ends_the_daemon_with_a_failure(
        self,
        daemon: ScheduledDaemon,
        set_trap: SetTrap,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
        name: str,
    ) -> None:
        trap = set_trap(loop_of(daemon, name))
        eventually(lambda: daemon.healthy is False)
        assert re.search(rf"thread {name}: the turn has lasted \d+ s: leaving", caplog.text)
        assert re.search(rf"thread .*\b{name}\b.* does not end: leaving it behind", caplog.text)
        trap.release()

    @deadly
    @pytest.mark.usefixtures("impatient")
    def test_the_reader_of_the_connection_that_died_ends_it_with_a_failure(
        self, daemon: ScheduledDaemon, eventually: Eventually, caplog: pytest.LogCaptureFixture
    ) -> None:
        poison(daemon, sys.exit)
        eventually(lambda: daemon.healthy is False)
        assert "thread connector-reader: the thread has died: leaving" in caplog.messages
        assert daemon.connector._last_link
        daemon.connector._last_link.close()  # which the reader can do no more

    @pytest.mark.usefixtures("impatient")
    def test_the_reader_that_is_stuck_ends_it_with_a_failure(
        self,
        daemon: ScheduledDaemon,
        gate: threading.Event,
        monkeypatch: pytest.MonkeyPatch,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        assert connector.TURN_LIMIT_SECONDS == 180
        monkeypatch.setattr(connector, "TURN_LIMIT_SECONDS", 1.0)
        monkeypatch.setattr(connector, "JOIN_SECONDS", 0.1)
        poison(daemon, gate.wait)
        eventually(lambda: daemon.healthy is False)
        assert re.search(r"thread connector-reader: the turn has lasted \d+ s: leaving", caplog.text)

    def test_the_age_of_every_turn_is_shown(self, daemon: ScheduledDaemon) -> None:
        with MonitorServer(
            "127.0.0.1", 0, metrics=bytes, liveness=daemon.scheduler.liveness, readiness=daemon.scheduler.readiness
        ) as server:
            status, page = get(server, "/livez?verbose")
            names = ["main", "connector-reader", "election", "listener", "finisher", "worker-1"]
            ages = [re.fullmatch(r"(\S+): ok, last turn \d+\.\d s ago", line) for line in page.splitlines()]
            assert [age and age[1] for age in ages] == names
            assert status == 200
            assert get(server, "/readyz?verbose") == (200, "broker: ok\nelection: ok, leader\n")

    def test_a_stuck_thread_makes_it_sick_until_another_one_takes_over(
        self, daemon: ScheduledDaemon, set_trap: SetTrap, gate: threading.Event, eventually: Eventually
    ) -> None:
        daemon.scheduler._each_turn = lambda: void(gate.wait(PATIENCE_SECONDS))  # the main thread takes its time
        trap = set_trap(loop_of(daemon, "worker-1"))
        with MonitorServer("127.0.0.1", 0, metrics=bytes, liveness=daemon.scheduler.liveness, readiness={}) as server:
            eventually(lambda: re.fullmatch(r"worker-1: the turn has lasted \d+ s\n", get(server, "/livez")[1]))
            assert get(server, "/livez")[0] == 503
            gate.set()
            eventually(lambda: get(server, "/livez")[0] == 200)
        trap.release()

    def test_a_host_in_the_hands_of_a_stuck_worker_is_let_go_and_provisioned_by_another_thread(
        self,
        daemon: ScheduledDaemon,
        gate: threading.Event,
        monkeypatch: pytest.MonkeyPatch,
        eventually: Eventually,
    ) -> None:
        threads: list[threading.Thread] = []

        def provision(_host: Host) -> Success:
            threads.append(threading.current_thread())
            if len(threads) == 1:
                limit, loop._limit = loop._limit, LIMIT_SECONDS
                eventually(lambda: loop._thread is not threads[0])
                loop._limit = limit
                assert gate.wait(PATIENCE_SECONDS)
            return Success.PROVISIONED

        monkeypatch.setattr(worker, "LEAVING_SECONDS", 60.0)
        registry, (loop,) = daemon.scheduler._registry, daemon.scheduler._workers
        monkeypatch.setattr(loop, "_provision", provision)
        assert registry.add(Host("n1.example.net"))
        eventually(lambda: daemon["waiting_nodes"] == 0)
        again = Host("n1.example.net")
        assert registry.add(again)
        eventually(lambda: daemon["provisioned"] == 1)

        gate.set()
        threads[0].join(PATIENCE_SECONDS)
        assert not threads[0].is_alive(), "it takes no further turn"
        assert daemon["provisioned"] == 2
        assert daemon["busy_workers"] == 0
        assert registry.is_current(again), "which is let go in its own time"


def poison(daemon: ScheduledDaemon, deed: Callable[[], object]) -> None:
    """Have something done by the thread that reads from the connection, in a callback."""
    daemon.connector.subscribe("poison", callback=lambda _: void(deed()))
    daemon.connector.flush()
    daemon.connector.publish("poison")


def get(server: MonitorServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def void(_: object) -> None:
    """Take a result of no interest."""
