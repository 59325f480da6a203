"""The whole scheduler on a real broker with a simulated fleet: start order, discovery, events, pausing, the end."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner import config
from provisioner.choria import lifecycle
from provisioner.choria.connector import Connector, Message
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import Client
from provisioner.config import Config
from provisioner.host import node
from provisioner.host.provision import Provisioner
from provisioner.hosts import scheduler
from provisioner.hosts.registry import WORK_QUEUE_HOSTS
from provisioner.hosts.scheduler import Scheduler, Ticker
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server, Site
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector
from tests.test_registry import value

CALLER = "choria=prov.example.net"
SITE = Site(token="s3cret")
EVENTS = "choria.lifecycle.event.startup.provision_mode_server"


class Daemon:
    """A scheduler that runs in a thread of the test, with everything it needs."""

    def __init__(self, directory: Path, connector: Connector) -> None:
        helper = directory / "helper"
        helper.write_text(
            '#!/bin/sh\ncat >/dev/null\necho \'{"configuration":{"plugin.choria.server.provision":"0"}}\'\n'
        )
        helper.chmod(0o755)
        file = directory / "provisioner.yaml"
        file.write_text(json.dumps({"helper": str(helper), "token": "s3cret", "choria_insecure": True, "workers": 4}))
        self.config: Config = config.load(file)
        self.metrics = Metrics("lab")
        self.shutdown = Shutdown(grace=PATIENCE_SECONDS)
        self.connector = connector
        provisioner = Provisioner(
            config=self.config,
            client=Client(connector, ProtocolV1(identity="prov.example.net", caller=CALLER, ttl=60)),
            metrics=self.metrics,
            shutdown=self.shutdown,
            verifier=None,
            discovery_timeout=2.0,
        )
        self.scheduler = Scheduler(provisioner)
        self.healthy: bool | None = None
        self._thread = threading.Thread(target=self._run, name="main-of-the-test")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown.request()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_SECONDS)
            assert not self._thread.is_alive()
        self.connector.close()

    def __getitem__(self, name: str) -> float:
        return value(self.metrics, name)

    def _run(self) -> None:
        self.healthy = self.scheduler.run()


@pytest.fixture
def daemon(tmp_path: Path, broker: NatsServer, make_connector: MakeConnector) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, make_connector(broker, reply_prefix=reply_prefix(CALLER)))
    yield daemon
    daemon.shutdown.request()
    daemon.stop()  # the second request: what is in work is of no interest any more


StartFleet = Callable[..., Fleet]


@pytest.fixture
def start_fleet(broker: NatsServer) -> Iterator[StartFleet]:
    fleets: list[Fleet] = []

    def start(*servers: Server, **options: Any) -> Fleet:
        fleet = Fleet(broker.url, servers, **options)
        fleets.append(fleet)
        fleet.start()
        return fleet

    yield start
    for fleet in fleets:
        fleet.stop()


def servers(count: int, **options: Any) -> list[Server]:
    return [Server(identity=f"n{number}.example.net", site=SITE, **options) for number in range(count)]


def startup(identity: str) -> bytes:
    return lifecycle.startup(identity=identity, component="provision_mode_server", version="0.30.0")


def test_servers_that_wait_are_found_by_broadcast_and_provisioned(daemon: Daemon, start_fleet: StartFleet) -> None:
    fleet = start_fleet(*servers(50))
    daemon.start()

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert fleet.counts().duplicate_configures == fleet.counts().lock_conflicts == 0
    assert daemon["discovered"] == 50
    assert daemon["event_discovered"] == 0
    assert daemon["discover_cycles"] == 1


def test_servers_that_boot_are_admitted_by_their_event_without_waiting_for_a_discovery(
    daemon: Daemon, start_fleet: StartFleet, eventually: Eventually
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)
    time.sleep(0.1)  # the broadcast is out
    fleet = start_fleet(*servers(20, boots_after=2.5))

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert daemon["event_discovered"] == 20
    assert daemon["discover_cycles"] == 1


def test_the_start_of_the_instance_is_announced(daemon: Daemon, connector: Connector) -> None:
    announced: queue.SimpleQueue[Message] = queue.SimpleQueue()
    connector.subscribe("choria.lifecycle.event.startup.provisioner", callback=announced.put)
    connector.flush()
    daemon.start()

    event = json.loads(announced.get(timeout=PATIENCE_SECONDS).payload)
    assert event["protocol"] == "io.choria.lifecycle.v1.startup"
    assert (event["identity"], event["component"]) == ("prov.example.net", "provisioner")


def test_a_paused_instance_sends_no_broadcast_and_drops_events(
    daemon: Daemon,
    start_fleet: StartFleet,
    connector: Connector,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    fleet = start_fleet(*servers(3))
    daemon.config.pause()
    daemon.start()
    eventually(lambda: daemon.connector.connected)
    connector.publish(EVENTS, payload=startup("n0.example.net"))

    eventually(lambda: "dropped a lifecycle event: paused" in caplog.text)
    assert fleet.counts().discoveries == 0
    assert daemon["discover_cycles"] == daemon["waiting_nodes"] == daemon["event_discovered"] == 0

    daemon.config.resume()
    daemon.scheduler.trigger("resumed")
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert daemon["discover_cycles"] == 1


def test_pausing_in_the_middle_of_a_discovery_ends_it_and_nothing_is_admitted(
    daemon: Daemon, start_fleet: StartFleet, eventually: Eventually
) -> None:
    fleet = start_fleet(*servers(5), latency=0.2)
    daemon.start()
    assert fleet.wait(lambda counts: counts.discoveries == 1, PATIENCE_SECONDS)
    daemon.config.pause()
    daemon.scheduler.trigger("to know when the first is over")

    eventually(daemon.scheduler._triggers.empty)
    time.sleep(0.5)
    assert daemon["discovered"] == 0


def test_a_trigger_that_is_pending_is_not_doubled_and_never_blocks(daemon: Daemon) -> None:
    for _ in range(1000):
        daemon.scheduler.trigger("again")

    assert daemon.scheduler._triggers.qsize() == 1


@pytest.mark.usefixtures("quick_retries")
def test_discoveries_follow_when_the_connection_comes_back_since_servers_may_come_later(
    daemon: Daemon,
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

    eventually(lambda: daemon["discover_cycles"] == 2)
    eventually(lambda: daemon["discover_cycles"] == 4)


@pytest.mark.usefixtures("quick_retries")
def test_a_broker_that_is_away_is_an_error_of_the_discovery_and_not_of_the_daemon(
    daemon: Daemon, broker: NatsServer, start_fleet: StartFleet, eventually: Eventually
) -> None:
    start_fleet(*servers(1)).wait(lambda counts: counts.booted == 1, PATIENCE_SECONDS)
    daemon.start()
    eventually(lambda: daemon["provisioned"] == 1)
    broker.stop()
    eventually(lambda: not daemon.connector.connected)
    daemon.scheduler.trigger("now")

    eventually(lambda: daemon["discovery_errors"] == 1)
    assert daemon["discover_cycles"] == 2
    assert daemon.scheduler.liveness()["main"]() is None
    assert daemon.scheduler.readiness()["broker"]() == "not connected"


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
    daemon: Daemon,
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
    daemon: Daemon, connector: Connector, event: bytes, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and daemon.connector.connected)
    daemon.connector.flush()
    connector.publish(EVENTS, payload=event)
    connector.publish(EVENTS, payload=startup("n1.example.net"))

    eventually(lambda: daemon["event_discovered"] == 1)
    assert not [record for record in caplog.records if record.levelno > 20 and "listener" in record.name]


def test_an_event_is_taken_whatever_component_its_body_names(
    daemon: Daemon, connector: Connector, eventually: Eventually
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1 and daemon.connector.connected)
    daemon.connector.flush()
    event = lifecycle.startup(identity="n1.example.net", component="another", version="1")
    connector.publish(EVENTS, payload=event)

    eventually(lambda: daemon["event_discovered"] == 1)


def test_a_burst_of_events_is_queued_while_requests_go_on(
    daemon: Daemon, start_fleet: StartFleet, connector: Connector, eventually: Eventually
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
    daemon: Daemon, start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start_fleet(*servers(3), noise=True)
    daemon.start()

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert daemon["discovered"] == 3
    assert "their identity holds" in caplog.text


def test_misbehaving_servers_do_not_keep_the_good_ones_from_being_provisioned(
    daemon: Daemon, start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
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
    assert all(check() is None for check in daemon.scheduler.liveness().values())


def test_hosts_in_work_are_finished_within_the_grace_time(daemon: Daemon, start_fleet: StartFleet) -> None:
    fleet = start_fleet(*servers(4), latency=0.3)
    daemon.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] == 4, PATIENCE_SECONDS)
    daemon.stop()

    assert daemon.healthy
    assert fleet.counts().provisioned == 4


def test_waiting_hosts_are_dropped_at_the_end(daemon: Daemon, start_fleet: StartFleet) -> None:
    fleet = start_fleet(*servers(40), latency=0.3)
    daemon.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] == 4, PATIENCE_SECONDS)
    daemon.stop()

    assert daemon.healthy
    assert fleet.counts().provisioned < 40


def test_a_second_request_to_leave_drops_what_is_in_work(daemon: Daemon, start_fleet: StartFleet) -> None:
    silent = [Server(identity="silent.example.net", site=SITE, misbehaviour=Misbehaviour.SILENT)]
    fleet = start_fleet(*silent)
    daemon.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] == 1, PATIENCE_SECONDS)
    daemon.shutdown.request()
    daemon.stop()

    assert daemon.healthy


def test_it_can_be_ended_while_it_still_connects(daemon: Daemon, broker: NatsServer) -> None:
    broker.kill()
    daemon.start()
    daemon.stop()

    assert daemon.healthy


def test_a_thread_that_died_ends_the_daemon_with_a_failure(
    daemon: Daemon, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.start()
    eventually(lambda: daemon["discover_cycles"] == 1)
    daemon.scheduler._finisher.stop()

    eventually(lambda: daemon.healthy is False)
    assert "thread finisher died" in caplog.text


def test_every_thread_has_a_name_and_ends(daemon: Daemon, eventually: Eventually) -> None:
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
