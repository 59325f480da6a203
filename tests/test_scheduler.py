"""The whole scheduler on a real broker with a simulated fleet: start order, discovery, events, pausing, the end."""

from __future__ import annotations

import collections
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from provisioner.choria import discovery, lifecycle, nats
from provisioner.choria.connector import Connector
from provisioner.choria.discovery import Sighting
from provisioner.choria.errors import ConnectionLostError
from provisioner.choria.nats import Message
from provisioner.host import node
from provisioner.host.host import Host
from provisioner.host.provision import Provisioner, Success
from provisioner.hosts import listener, scheduler
from provisioner.hosts.loop import TURN_LIMIT_SECONDS
from provisioner.hosts.registry import WORK_QUEUE_HOSTS
from provisioner.hosts.scheduler import Ticker
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS, Eventually, StartFleet
from tests.installation import SITE
from tests.scheduled import EVENTS, MakeDaemon, ScheduledDaemon, servers, startup


@pytest.fixture
def connected(daemon: ScheduledDaemon) -> ScheduledDaemon:
    """A daemon none of whose threads run, so that the test can take their turns."""
    assert daemon.connector.connect(PATIENCE_SECONDS)
    daemon.connector.flush()
    return daemon


@attrs.define
class Clock:
    """Stands still at a time that the test says."""

    now: float
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return self.now


class Held:
    """Provisions nothing, but keeps hosts in the workers' hands until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: list[Host] = []
        self._taken: queue.SimpleQueue[Host] = queue.SimpleQueue()
        self._gates: collections.defaultdict[Host, threading.Event] = collections.defaultdict(threading.Event)
        monkeypatch.setattr(Provisioner, "provision", lambda _provisioner, host: self._hold(host))

    def next(self) -> Host:
        """The next host that a worker takes."""
        return self._taken.get(timeout=PATIENCE_SECONDS)

    def release(self, *hosts: Host) -> None:
        for host in hosts:
            self._gates[host].set()

    def _hold(self, host: Host) -> Success:
        self.hosts.append(host)
        self._taken.put(host)
        assert self._gates[host].wait(PATIENCE_SECONDS)
        return Success.UPGRADING


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """To be asked for before a daemon is made."""
    held = Held(monkeypatch)
    yield held
    held.release(*held.hosts)


def test_servers_that_wait_are_found_by_broadcast_and_provisioned(
    daemon: ScheduledDaemon, start_fleet: StartFleet
) -> None:
    fleet = start_fleet(*servers(50))
    daemon.start()

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert fleet.counts().duplicate_configures == fleet.counts().lock_conflicts == 0
    assert daemon["discovered"] == 50
    assert daemon["event_discovered"] == 0
    assert daemon["discover_cycles"] == 1


def test_servers_that_boot_are_admitted_by_their_event_without_waiting_for_a_discovery(
    daemon: ScheduledDaemon, start_fleet: StartFleet, eventually: Eventually
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)
    time.sleep(0.1)  # the broadcast is out
    fleet = start_fleet(*servers(20, boots_after=2.5))

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert daemon["event_discovered"] == 20
    assert daemon["discover_cycles"] == 1


def test_the_start_of_the_instance_is_announced(daemon: ScheduledDaemon, connector: Connector) -> None:
    announced: queue.SimpleQueue[Message] = queue.SimpleQueue()
    connector.subscribe("choria.lifecycle.event.startup.provisioner", callback=announced.put)
    connector.flush()
    daemon.start()

    event = json.loads(announced.get(timeout=PATIENCE_SECONDS).payload)
    assert event["protocol"] == "io.choria.lifecycle.v1.startup"
    assert (event["identity"], event["component"]) == ("prov.example.net", "provisioner")


def test_a_paused_instance_sends_no_broadcast_and_drops_events(
    daemon: ScheduledDaemon,
    start_fleet: StartFleet,
    connector: Connector,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    caplog.set_level("INFO")
    fleet = start_fleet(*servers(3))
    daemon.config.pause()
    daemon.start()
    eventually(lambda: daemon.connector.connected)
    daemon.connector.flush()  # the broker knows of the subscription now
    connector.publish(EVENTS, payload=startup("n0.example.net"))

    eventually(lambda: "dropping lifecycle events: paused" in caplog.text)
    eventually(lambda: "not discovering: paused" in caplog.text)
    assert fleet.counts().discoveries == 0
    assert daemon["discover_cycles"] == daemon["waiting_nodes"] == daemon["event_discovered"] == 0

    daemon.config.resume()
    daemon.scheduler.trigger("resumed")
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert daemon["discover_cycles"] == 1


def test_the_main_thread_is_alive_however_long_a_discovery_takes(
    make_daemon: MakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    monkeypatch.setattr(scheduler, "TURN_LIMIT_SECONDS", 1.5)
    caplog.set_level("INFO")
    daemon = make_daemon(discovery_timeout=3.0)
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)

    problems = set()

    def over() -> bool:
        problems.add(daemon.scheduler.liveness["main"]().problem)
        return "discovered no server" in caplog.text

    eventually(over)
    assert problems == {None}


def test_pausing_in_the_middle_of_a_discovery_ends_it_and_nothing_is_admitted(
    daemon: ScheduledDaemon, start_fleet: StartFleet, eventually: Eventually
) -> None:
    fleet = start_fleet(*servers(5), latency=0.2)
    daemon.start()
    assert fleet.wait(lambda counts: counts.discoveries == 1, PATIENCE_SECONDS)
    daemon.config.pause()
    daemon.scheduler.trigger("to know when the first is over")

    eventually(daemon.scheduler._triggers.empty)
    time.sleep(0.5)
    assert daemon["discovered"] == 0


def test_a_trigger_that_is_pending_is_not_doubled_and_never_blocks(daemon: ScheduledDaemon) -> None:
    for _ in range(1000):
        daemon.scheduler.trigger("again")

    assert daemon.scheduler._triggers.qsize() == 1


@pytest.mark.usefixtures("quick_retries")
def test_discoveries_follow_when_the_connection_comes_back_since_servers_may_come_later(
    daemon: ScheduledDaemon,
    start_fleet: StartFleet,
    broker: NatsServer,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "RETURN_SECONDS", (2.5, 5.0))
    fleet = start_fleet(*servers(1))
    daemon.start()
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    broker.restart()

    eventually(lambda: daemon["discover_cycles"] >= 4)


@pytest.mark.usefixtures("quick_retries")
def test_a_paused_instance_looks_no_more_often_after_a_reconnection(
    daemon: ScheduledDaemon,
    broker: NatsServer,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(scheduler, "RETURN_SECONDS", (0.5, 1.0))
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.01)
    turns: list[float] = []
    monkeypatch.setattr(daemon.scheduler, "_each_turn", lambda: turns.append(time.monotonic()))
    daemon.config.pause()
    daemon.start()
    eventually(lambda: daemon.connector.connected)
    broker.restart()
    eventually(lambda: daemon.connector.connections == 2)
    back = time.monotonic()
    eventually(lambda: turns[-1] > back + 2)

    assert sum("not discovering: paused" in line for line in caplog.messages) <= 4


@pytest.mark.usefixtures("quick_retries")
def test_a_broker_that_is_away_is_an_error_of_the_discovery_and_not_of_the_daemon(
    daemon: ScheduledDaemon, broker: NatsServer, start_fleet: StartFleet, eventually: Eventually
) -> None:
    start_fleet(*servers(1)).wait(lambda counts: counts.booted == 1, PATIENCE_SECONDS)
    daemon.start()
    eventually(lambda: daemon["provisioned"] == 1)
    broker.stop()
    eventually(lambda: not daemon.connector.connected)
    daemon.scheduler.trigger("now")

    eventually(lambda: daemon["discovery_errors"] == 1)
    assert daemon["discover_cycles"] == 2
    assert daemon.scheduler.liveness["main"]().problem is None
    assert daemon.scheduler.readiness["broker"]().problem == "not connected"


AWKWARD_EVENTS = {
    "not JSON": b"hello",
    "null": b"null",
    "nothing": b"",
    "deep": b"[" * 100_000,
    "large": b'"' + b"x" * 1_000_000 + b'"',
    "another protocol": b'{"protocol":"io.choria.lifecycle.v2.startup","identity":"n9"}',
    "wild card": startup("a.*"),
    "blank": startup("a b"),
    "line break": startup("a\r\nPUB x 0\r\n"),
    "empty part": startup("a..b"),
    "300 characters": startup("n" * 300),
    "number": b'{"protocol":"io.choria.lifecycle.v1.startup","identity":5}',
}


@pytest.mark.parametrize("kind", AWKWARD_EVENTS)
def test_an_awkward_event_is_dropped_with_one_warning_and_the_next_one_is_taken(
    daemon: ScheduledDaemon,
    connector: Connector,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and daemon.connector.connected)
    daemon.connector.flush()
    connector.publish(EVENTS, payload=AWKWARD_EVENTS[kind])
    connector.publish(EVENTS, payload=startup("n1.example.net"))

    eventually(lambda: daemon["event_discovered"] == 1)
    warnings = [record for record in caplog.records if record.levelname == "WARNING" and "listener" in record.name]
    assert len(warnings) == 1
    assert "\n" not in warnings[0].getMessage()


@pytest.mark.parametrize(
    "event",
    [
        b'{"protocol":"io.choria.lifecycle.v1.startup"}',
        b'{"protocol":"io.choria.lifecycle.v1.shutdown","identity":"n9.example.net"}',
    ],
    ids=["no identity", "another type"],
)
def test_an_event_that_concerns_nobody_is_ignored_without_a_word(
    daemon: ScheduledDaemon,
    connector: Connector,
    event: bytes,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and daemon.connector.connected)
    daemon.connector.flush()
    connector.publish(EVENTS, payload=event)
    connector.publish(EVENTS, payload=startup("n1.example.net"))

    eventually(lambda: daemon["event_discovered"] == 1)
    assert not [record for record in caplog.records if record.levelno > 20 and "listener" in record.name]


def test_an_event_is_taken_whatever_component_its_body_names(
    daemon: ScheduledDaemon, connector: Connector, eventually: Eventually
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and daemon.connector.connected)
    daemon.connector.flush()
    event = lifecycle.startup(identity="n1.example.net", component="another", version="1")
    connector.publish(EVENTS, payload=event)

    eventually(lambda: daemon["event_discovered"] == 1)


@pytest.mark.parametrize(("ahead", "warned"), [(0, False), (20, False), (120, True), (-120, True)])
def test_a_server_whose_clock_is_off_is_admitted_and_told_of(
    daemon: ScheduledDaemon,
    connector: Connector,
    ahead: int,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and daemon.connector.connected)
    daemon.connector.flush()
    event = json.loads(startup("n1.example.net"))
    connector.publish(EVENTS, payload=json.dumps({**event, "timestamp": event["timestamp"] + ahead}).encode())

    eventually(lambda: daemon["event_discovered"] == 1)
    told = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
    assert bool(told) == warned
    assert not warned or "than ttl in the Choria configuration" in told[0]


def test_a_burst_of_events_is_queued_while_requests_go_on(
    daemon: ScheduledDaemon, start_fleet: StartFleet, connector: Connector, eventually: Eventually
) -> None:
    fleet = start_fleet(*servers(20))
    daemon.start()
    eventually(lambda: daemon.connector.connected)
    daemon.connector.flush()
    for number in range(5_000):
        connector.publish(EVENTS, payload=startup(f"ghost{number}.example.net"))

    eventually(lambda: daemon["event_discovered"] + daemon["discovered"] == 5_020)
    assert daemon["events_dropped"] == 0
    assert fleet.counts().booted == 20
    assert WORK_QUEUE_HOSTS >= 5_000


def test_identities_that_are_not_sane_are_refused_by_a_discovery(
    daemon: ScheduledDaemon, start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start_fleet(*servers(3), noise=True)
    daemon.start()

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert daemon["discovered"] == 3
    assert "their identity holds" in caplog.text


def test_misbehaving_servers_do_not_keep_the_good_ones_from_being_provisioned(
    daemon: ScheduledDaemon, start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, -1.0))
    good = servers(10)
    bad = [
        Server(identity=f"bad-{way.value}.example.net", site=SITE, misbehaviour=way)
        for way in Misbehaviour
        if way is not Misbehaviour.TWICE
    ]
    twice = Server(identity="twice.example.net", site=SITE, misbehaviour=Misbehaviour.TWICE)
    fleet = start_fleet(*bad, twice, *good)
    daemon.start()

    assert fleet.wait(lambda counts: counts.complete, 2 * PATIENCE_SECONDS)
    assert not any(check().problem for check in daemon.scheduler.liveness.values())


def test_hosts_in_work_are_finished_within_the_grace_time(daemon: ScheduledDaemon, start_fleet: StartFleet) -> None:
    fleet = start_fleet(*servers(4), latency=0.3)
    daemon.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] >= 4, PATIENCE_SECONDS)
    daemon.stop()

    assert daemon.healthy
    assert fleet.counts().provisioned == 4


def test_waiting_hosts_are_dropped_at_the_end(daemon: ScheduledDaemon, start_fleet: StartFleet) -> None:
    fleet = start_fleet(*servers(40), latency=0.3)
    daemon.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] >= 4, PATIENCE_SECONDS)
    daemon.stop()

    assert daemon.healthy
    assert fleet.counts().provisioned <= 8, "those in work, and what they were followed by until it was told to leave"


def test_a_second_request_to_leave_drops_what_is_in_work(daemon: ScheduledDaemon, start_fleet: StartFleet) -> None:
    silent = [Server(identity="silent.example.net", site=SITE, misbehaviour=Misbehaviour.SILENT)]
    fleet = start_fleet(*silent)
    daemon.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] >= 1, PATIENCE_SECONDS)
    daemon.shutdown.request()
    daemon.stop()

    assert daemon.healthy


def test_it_can_be_ended_while_it_still_connects(daemon: ScheduledDaemon, broker: NatsServer) -> None:
    broker.kill()
    daemon.start()
    daemon.stop()

    assert daemon.healthy


def test_a_bug_in_the_main_loop_is_logged_and_ends_the_daemon_in_order(
    daemon: ScheduledDaemon, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon.scheduler, "_each_turn", lambda: next(iter(())))
    daemon.start()

    eventually(lambda: daemon.healthy is False)
    assert "bug in the main loop" in caplog.text


def test_a_host_counts_as_discovered_from_the_time_at_which_its_reply_arrived(
    connected: ScheduledDaemon, start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_fleet(*servers(1))
    arrival = time.monotonic() - 50
    monkeypatch.setattr(nats, "time", Clock(arrival))
    connected.scheduler.discover()

    host = connected.scheduler._registry.take(0)
    assert host is not None
    assert (host.identity, host.discovered) == ("n0.example.net", arrival)


def test_a_host_counts_as_discovered_from_the_time_at_which_its_event_arrived(
    connected: ScheduledDaemon, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = time.monotonic() - 50
    monkeypatch.setattr(nats, "time", Clock(arrival))
    connector.publish(EVENTS, payload=startup("n0.example.net"))
    connector.flush()
    connected.connector.flush()
    connected.scheduler._listener.turn()

    host = connected.scheduler._registry.take(0)
    assert host is not None
    assert (host.identity, host.discovered) == ("n0.example.net", arrival)


def test_every_instance_gets_every_event(make_daemon: MakeDaemon, connector: Connector) -> None:
    daemons = [make_daemon() for _ in range(3)]
    for daemon in daemons:
        assert daemon.connector.connect(PATIENCE_SECONDS)
        daemon.connector.flush()
    connector.publish(EVENTS, payload=startup("n0.example.net"))
    connector.flush()

    for daemon in daemons:
        daemon.connector.flush()
        daemon.scheduler._listener.turn()
        assert daemon["event_discovered"] == daemon["waiting_nodes"] == 1


def test_a_burst_of_more_events_than_fit_is_counted_and_warned_of_once(
    make_daemon: MakeDaemon,
    connector: Connector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener, "WORK_QUEUE_HOSTS", 2)
    daemon = make_daemon()
    assert daemon.connector.connect(PATIENCE_SECONDS)
    daemon.connector.flush()
    for number in range(5):
        connector.publish(EVENTS, payload=startup(f"n{number}.example.net"))
    connector.flush()
    daemon.connector.flush()

    assert daemon["events_dropped"] == 3
    for _ in range(2):
        daemon.scheduler._listener.turn()
    assert daemon["event_discovered"] == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["dropped 3 lifecycle events: too many at once"]


def test_a_discovery_is_made_in_every_interval(make_daemon: MakeDaemon, eventually: Eventually) -> None:
    daemon = make_daemon(interval=0.2, discovery_timeout=0.05)
    daemon.start()

    eventually(lambda: daemon["discover_cycles"] >= 4)
    assert daemon["discovery_errors"] == 0


def test_no_discovery_is_made_before_the_interval_is_over(
    make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    clock, turns = Clock(time.monotonic()), list[float]()
    daemon = make_daemon(interval=60.0, discovery_timeout=0.0)
    monkeypatch.setattr(scheduler, "time", clock)
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(daemon.scheduler, "_each_turn", lambda: turns.append(clock.now))

    def after_some_turns(now: float) -> float:
        clock.now = now
        seen = len(turns)
        eventually(lambda: len(turns) >= seen + 3)
        return daemon["discover_cycles"]

    start = clock.now
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)
    assert after_some_turns(start + 59) == 1
    assert after_some_turns(start + 61) == 2
    assert after_some_turns(start + 119) == 2
    assert after_some_turns(start + 121) == 3


def test_threads_start_in_order_once_the_start_is_announced(
    daemon: ScheduledDaemon, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    order: list[str] = []
    start, publish = threading.Thread.start, daemon.connector.publish

    def noting_start(self: threading.Thread) -> None:
        order.append(self.name)
        start(self)

    def noting_publish(subject: str, **options: Any) -> None:
        order.append(subject)
        publish(subject, **options)

    monkeypatch.setattr(threading.Thread, "start", noting_start)
    monkeypatch.setattr(daemon.connector, "publish", noting_publish)
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and len(order) >= 10)

    assert order[:10] == [
        "main-of-the-test",
        "connector-reader",
        "choria.lifecycle.event.startup.provisioner",
        *("listener", "finisher", "worker-1", "worker-2", "worker-3", "worker-4"),
        "provisioning.broadcast.agent.discovery",
    ]


def test_an_instance_that_is_to_be_elected_is_paused_before_anything_starts(
    make_daemon: MakeDaemon, start_fleet: StartFleet, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start_fleet(*servers(3))
    caplog.set_level(logging.INFO)
    daemon = make_daemon(leader_election=True)
    daemon.start()

    eventually(lambda: "not discovering: paused" in caplog.messages)
    assert list(daemon.scheduler.liveness) == [
        *("main", "connector-reader", "election", "listener", "finisher"),
        *(f"worker-{number}" for number in range(1, 5)),
    ]
    assert list(daemon.scheduler.readiness) == ["broker", "election"]
    assert fleet.counts().discoveries == daemon["discover_cycles"] == 0


def test_a_start_that_cannot_be_announced_is_none_that_fails(
    daemon: ScheduledDaemon,
    start_fleet: StartFleet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish = daemon.connector.publish

    def refusing(subject: str, **options: Any) -> None:
        if subject.startswith("choria.lifecycle."):
            raise ConnectionLostError("the connection was lost")
        publish(subject, **options)

    monkeypatch.setattr(daemon.connector, "publish", refusing)
    fleet = start_fleet(*servers(2))
    daemon.start()

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert "could not announce the start of this instance: the connection was lost" in caplog.text


def test_leaving_in_the_middle_of_a_discovery_ends_it_and_nothing_is_admitted(
    daemon: ScheduledDaemon, start_fleet: StartFleet
) -> None:
    fleet = start_fleet(*servers(5), latency=1.0)
    daemon.start()
    assert fleet.wait(lambda counts: counts.discoveries == 1, PATIENCE_SECONDS)
    daemon.stop()

    assert daemon.healthy
    assert daemon["discovered"] == daemon["waiting_nodes"] == 0


@pytest.mark.parametrize("how", ["pause", "leave"])
def test_what_was_found_is_not_admitted_when_the_daemon_is_paused_or_leaves_meanwhile(
    connected: ScheduledDaemon, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def discover(*_arguments: Any, **_options: Any) -> list[Sighting]:
        (connected.config.pause if how == "pause" else connected.shutdown.request)()
        return [Sighting("n0.example.net", time.monotonic())]

    monkeypatch.setattr(discovery, "discover", discover)
    connected.scheduler.discover()

    assert connected["discover_cycles"] == 1
    assert connected["discovered"] == connected["waiting_nodes"] == 0


def test_a_bug_in_a_discovery_costs_that_discovery_only(
    daemon: ScheduledDaemon,
    start_fleet: StartFleet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    really, calls = discovery.discover, list[int]()

    def stumbling(*arguments: Any, **options: Any) -> list[Sighting]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bug")
        return really(*arguments, **options)

    monkeypatch.setattr(discovery, "discover", stumbling)
    fleet = start_fleet(*servers(2))
    daemon.start()
    eventually(lambda: "bug in a discovery" in caplog.text)
    daemon.scheduler.trigger("again")

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    daemon.stop()
    assert daemon.healthy
    assert (daemon["discover_cycles"], daemon["discovery_errors"]) == (2, 1)


def test_a_host_in_work_when_an_election_is_lost_is_admitted_again_when_it_is_done(
    held: Held, make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    daemon = make_daemon()
    registry, removed = daemon.scheduler._registry, list[Host]()
    remove = registry.remove

    def noting(host: Host) -> None:
        remove(host)
        removed.append(host)

    monkeypatch.setattr(registry, "remove", noting)
    daemon.start()
    first, second = Host("n0.example.net"), Host("n0.example.net")
    assert registry.add(first)
    assert held.next() is first
    registry.remove_all()
    assert daemon["waiting_nodes"] == 0
    assert not registry.add(second), "it may still have to be restarted"
    held.release(first)

    eventually(lambda: removed == [first])
    assert registry.add(second)
    assert held.next() is second
    held.release(second)
    eventually(lambda: removed == [first, second])
    assert daemon["waiting_nodes"] == 0


def test_a_host_that_is_taken_after_the_request_to_leave_is_not_provisioned(
    held: Held, make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    registry = daemon.scheduler._registry
    take = registry.take

    def leaving(timeout: float) -> Host | None:
        daemon.shutdown.request()
        return take(timeout)

    monkeypatch.setattr(registry, "take", leaving)
    host = Host("n0.example.net")
    held.release(host)
    assert registry.add(host)
    daemon.scheduler._workers[0].turn()

    assert registry.take(0) is None, "it was taken"
    assert held.hosts == []


def test_liveness_stays_fine_during_a_grace_time_that_is_long(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(shutdown_grace=3600.0)
    daemon.scheduler._turned = time.monotonic() - TURN_LIMIT_SECONDS - 1
    main = daemon.scheduler.liveness["main"]
    assert main().problem == "the turn has lasted 31 s"
    daemon.shutdown.request()

    assert main().problem is None
    daemon.scheduler._turned -= 3600
    assert main().problem == "the turn has lasted 3631 s"


def test_a_thread_that_does_not_end_is_left_behind_and_the_daemon_has_failed(
    held: Held,
    make_daemon: MakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(scheduler, "LEAVE_SECONDS", 1.0)
    daemon = make_daemon()
    daemon.start()
    assert daemon.scheduler._registry.add(Host("n0.example.net"))
    held.next()
    daemon.shutdown.request()
    daemon.stop()

    assert daemon.healthy is False
    assert re.search(r"worker-\d does not end: leaving it behind", caplog.text)


def test_every_thread_has_a_name_and_ends(daemon: ScheduledDaemon, eventually: Eventually) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)
    names = {thread.name for thread in threading.enumerate()}
    daemon.stop()

    expected = {"listener", "finisher", "connector-reader", *(f"worker-{number}" for number in range(1, 5))}
    assert expected <= names
    assert not expected & {thread.name for thread in threading.enumerate()}


class TestTicker:
    """When the next discovery is due."""

    def test_it_does_not_drift_with_the_time_that_work_takes(self) -> None:
        ticker = Ticker(60.0, now=0.0)
        for tick in range(1, 10):
            assert ticker.remaining(60.0 * tick - 1) == 1
            assert ticker.remaining(60.0 * tick + 0.3) == 0
            ticker.advance(60.0 * tick + 0.3)

    def test_a_missed_tick_is_not_made_up_for(self) -> None:
        ticker = Ticker(60.0, now=0.0)
        ticker.advance(200.0)

        assert ticker.remaining(200.0) == 40.0
