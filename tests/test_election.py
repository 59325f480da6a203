"""The election on a real bucket: who leads, how that ends, who follows, and what becomes of the work in hand."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner import config
from provisioner.choria import election_key, retry
from provisioner.choria.election_key import ELECTION, Key
from provisioner.choria.protocol import reply_prefix
from provisioner.host import node
from provisioner.host.host import Host
from provisioner.host.provisioning_jwt import Verifier
from provisioner.hosts import election
from provisioner.hosts.election import Election
from provisioner.hosts.registry import Registry
from provisioner.monitor.health import Health
from provisioner.monitor.metrics import Metrics
from provisioner.simulate import server as simulated_server
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests import test_provision
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector
from tests.installation import SITE
from tests.networks import public_hex
from tests.scheduled import EVENTS, ScheduledDaemon, hurry, startup, value
from tests.streams import LOGIN, SERVERS_LOGIN, Original, Streams, connector

METRICS = Path(__file__).parent / "fixtures" / "agents"
#: What they are where no test makes them shorter.
CALL_SECONDS = election_key.CALL_SECONDS
LEASE_SECONDS, STILL_SECONDS = election.LEASE_SECONDS, election.STILL_SECONDS


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with Streams(tmp_path / "streams") as streams:
        yield streams


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times of the election are a fraction of what they are, in the same order."""
    monkeypatch.setattr(election_key, "CALL_SECONDS", 0.6)
    monkeypatch.setattr(election_key, "LIFETIME_SECONDS", (1.0, 3600.0))
    monkeypatch.setattr(election, "CAMPAIGN_BACKOFF", retry.Backoff((100, 200, 300, 400)))
    monkeypatch.setattr(election, "CAMPAIGN_LIMIT_SECONDS", 0.4)
    monkeypatch.setattr(election, "LEASE_SECONDS", 1.3)
    monkeypatch.setattr(election, "STILL_SECONDS", 1.6)
    monkeypatch.setattr(election, "YIELD_SECONDS", 0.5)
    hurry(monkeypatch)


class Instance:
    """An election on a broker, and all that it governs in an instance.

    :ivar discoveries: why each was wanted
    """

    def __init__(self, directory: Path, server: NatsServer, identity: str = "prov.example.net") -> None:
        file = directory / "provisioner.yaml"
        file.write_text(json.dumps({"helper": "/bin/true", "token": "s3cret"}))
        self.config = config.load(file)
        self.config.pause()
        self.metrics = Metrics("lab")
        self.registry = Registry(60.0, self.metrics)
        self.discoveries: list[str] = []
        self.connector = connector(server, LOGIN)
        self._stopping = False
        self.election = Election(
            Key(self.connector, identity),
            config=self.config,
            registry=self.registry,
            metrics=self.metrics.election(ELECTION, identity),
            stopping=lambda: self._stopping,
            trigger=self.discoveries.append,
        )

    def stop(self) -> None:
        """Campaign no more."""
        self._stopping = True
        self.election.join(10)
        assert not self.election.alive

    @property
    def leads(self) -> bool:
        return not self.config.paused

    def series(self) -> dict[str, float]:
        """Those of the election, with their labels, as they are on the page of metrics."""
        page = self.metrics.render().decode().splitlines()
        samples = (line.rpartition(" ") for line in page if line.startswith("choria_election_"))
        return {name: float(value) for name, _, value in samples}

    def campaigns(self, state: str) -> float:
        (value,) = (value for name, value in self.series().items() if f'state="{state}"' in name)
        return value


StartInstance = Callable[..., Instance]


@pytest.fixture
def start_instance(tmp_path: Path, streams: Streams) -> Iterator[StartInstance]:
    """Starts elections on the broker, with an identity if wanted."""
    instances: list[Instance] = []

    def start(identity: str = "prov.example.net") -> Instance:
        instance = Instance(tmp_path, streams.server, identity)
        instances.append(instance)
        instance.election.start()
        return instance

    yield start
    for instance in instances:
        instance.stop()
        instance.connector.close()


def test_the_first_write_wins_the_key_and_the_second_the_leadership(
    streams: Streams, start_instance: StartInstance, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    streams.make_bucket()
    instance = start_instance()
    eventually(lambda: instance.leads)

    assert streams.sequence() >= 2
    eventually(lambda: instance.discoveries == ["won the leadership"])
    assert instance.election.readiness().problem is None
    assert instance.election.readiness().note == "leader"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "won the leadership: provisioning from now on"
    ]


def test_a_leader_writes_the_key_again_and_again(
    streams: Streams, start_instance: StartInstance, eventually: Eventually
) -> None:
    streams.make_bucket()
    instance = start_instance()
    eventually(lambda: streams.sequence() >= 5)

    assert instance.leads
    assert len(instance.discoveries) == 1
    interval = instance.series()['choria_election_interval_seconds{election="provisioner",identity="prov.example.net"}']
    assert 0.25 <= interval < 0.75


@pytest.mark.usefixtures("brisk")
class TestLosing:
    """How a leadership ends, and how the next one begins."""

    def test_an_evicted_leader_drops_all_it_knows_and_may_win_again(
        self,
        streams: Streams,
        start_instance: StartInstance,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        streams.make_bucket()
        instance = start_instance()
        eventually(lambda: instance.leads)
        for number in range(3):
            assert instance.registry.add(Host(f"n{number}.example.net"))
        mark = streams.evict()
        eventually(lambda: not instance.leads)

        eventually(lambda: value(instance.metrics, "waiting_nodes") == 0)
        eventually(lambda: value(instance.metrics, "work_queue_entries") == 0)
        assert any(message.startswith("lost the leadership: the key was written by") for message in caplog.messages)
        assert streams.sequence() == mark, "nobody has claimed it yet"
        eventually(lambda: instance.leads)
        eventually(lambda: len(instance.discoveries) == 2)

    @pytest.mark.usefixtures("quick_retries")
    def test_a_broker_that_is_away_for_a_moment_costs_nothing(
        self,
        streams: Streams,
        start_instance: StartInstance,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(election_key, "CALL_SECONDS", CALL_SECONDS)
        monkeypatch.setattr(election, "LEASE_SECONDS", LEASE_SECONDS)
        monkeypatch.setattr(election, "STILL_SECONDS", STILL_SECONDS)
        streams.make_bucket()
        instance = start_instance()
        eventually(lambda: instance.leads)
        streams.server.restart()
        eventually(lambda: streams.admin.connected)
        written = streams.sequence()

        def written_again() -> bool:
            assert instance.leads
            return streams.sequence() >= written + 2

        eventually(written_again)
        assert len(instance.discoveries) == 1
        assert "lost the leadership" not in caplog.text

    @pytest.mark.parametrize("how", ["gone", "frozen"])
    @pytest.mark.usefixtures("quick_retries")
    def test_a_leader_whose_broker_stays_away_leads_no_longer_than_its_lease(
        self,
        streams: Streams,
        start_instance: StartInstance,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
        how: str,
    ) -> None:
        streams.make_bucket()
        instance = start_instance()
        eventually(lambda: instance.leads)
        (streams.server.kill if how == "gone" else streams.server.pause)()
        since = led = time.monotonic()

        def lost() -> bool:
            nonlocal led
            now = time.monotonic()
            if instance.leads:
                led = now
                return False
            return True

        eventually(lost)
        assert led - since < election.STILL_SECONDS
        eventually(lambda: "lost the leadership: no write was good for too long; paused" in caplog.messages)
        assert instance.election.readiness().problem is not None
        assert "leader_election: cannot campaign, trying again for ever: " in caplog.text

        (streams.server.start if how == "gone" else streams.server.resume)()
        eventually(lambda: instance.leads)
        eventually(lambda: len(instance.discoveries) == 2)
        assert instance.election.readiness().problem is None
        assert "campaigning for the leadership again" in caplog.messages

    def test_a_bucket_that_is_deleted_ends_it_and_a_new_one_begins_it(
        self, streams: Streams, start_instance: StartInstance, eventually: Eventually
    ) -> None:
        streams.make_bucket()
        instance = start_instance()
        eventually(lambda: instance.leads)
        streams.delete_bucket()
        eventually(lambda: not instance.leads)
        problem = instance.election.readiness().problem
        assert problem is not None
        assert "no bucket CHORIA_LEADER_ELECTION" in problem

        streams.make_bucket()
        eventually(lambda: instance.leads)

    def test_an_answer_that_comes_after_the_end_of_the_lease_begins_a_new_leadership(
        self,
        streams: Streams,
        start_instance: StartInstance,
        eventually: Eventually,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """With a discovery, since the hosts that waited were dropped meanwhile."""
        streams.make_bucket()
        instance = start_instance()
        eventually(lambda: instance.leads)
        write = Key.write

        def late(key: Key, expected: int) -> int:
            sequence = write(key, expected)
            eventually(lambda: not instance.leads)
            return sequence

        with monkeypatch.context() as patch:
            patch.setattr(Key, "write", late)
            eventually(lambda: not instance.leads)
        eventually(lambda: len(instance.discoveries) == 2)
        assert instance.leads


@pytest.mark.usefixtures("brisk")
class TestSeveral:
    """Candidates for one key."""

    def test_they_exclude_each_other_and_the_second_follows_the_first(
        self, streams: Streams, start_instance: StartInstance, eventually: Eventually
    ) -> None:
        streams.make_bucket()
        leader = start_instance()
        eventually(lambda: leader.leads)
        standby = start_instance("other.example.net")

        def refused_often() -> bool:
            assert not (standby.leads and leader.leads), "in this order: the first may have lost it meanwhile"
            return standby.campaigns("candidate") >= 5

        eventually(refused_often)
        assert leader.leads
        assert standby.election.readiness() == Health(None, "candidate")
        assert len(leader.discoveries) == 1
        leader.stop()

        def succeeded() -> bool:
            assert not (standby.leads and leader.leads), "in this order: the first may have lost it meanwhile"
            return standby.leads

        eventually(succeeded)
        assert standby.discoveries == ["won the leadership"]

    def test_an_original_is_left_alone_while_it_lives_and_takes_over_in_its_own_time(
        self, streams: Streams, start_instance: StartInstance, eventually: Eventually
    ) -> None:
        streams.make_bucket(lifetime=2.0)
        with Foreigner(streams.server) as original:
            eventually(lambda: original.leads)
            ours = start_instance()
            eventually(lambda: ours.campaigns("candidate") >= 5)
            assert original.leads
            assert not ours.leads
        eventually(lambda: ours.leads)

        with Foreigner(streams.server) as original:
            ours.stop()
            eventually(lambda: original.leads)
            assert not ours.leads


class Foreigner:
    """A candidate of the Go original with a thread and a connection of its own, in a hurry as well."""

    def __init__(self, server: NatsServer) -> None:
        self._connector = connector(server, LOGIN)
        self._over = threading.Event()
        key = Key(self._connector, "go.example.net")
        self._original = Original(key.write, sleep=self._sleep, random=lambda: 0.0)
        self._thread = threading.Thread(target=self._run, name="foreigner")

    def __enter__(self) -> Foreigner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._connector.close()

    @property
    def leads(self) -> bool:
        return self._original.leads and not self._over.is_set()

    def _run(self) -> None:
        try:
            self._original.run()
        except InterruptedError:
            return

    def _sleep(self, seconds: float) -> None:
        if self._over.wait(min(seconds, 0.2)):
            raise InterruptedError


@pytest.mark.usefixtures("brisk")
class TestWithoutABucket:
    """What has to be told, and that it heals by itself."""

    def test_it_is_waited_for_with_an_error_that_names_the_setting(
        self,
        streams: Streams,
        start_instance: StartInstance,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        instance = start_instance()
        eventually(lambda: instance.campaigns("candidate") >= 3)
        problem = instance.election.readiness().problem
        assert problem is not None
        assert "no bucket CHORIA_LEADER_ELECTION" in problem
        assert "plugin.choria.network.stream.store" in problem
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert errors == [f"leader_election: cannot campaign, trying again for ever: {problem}"], "once, not every time"
        assert not instance.leads

        streams.make_bucket()
        eventually(lambda: instance.leads)
        assert instance.election.readiness().problem is None
        assert "campaigning for the leadership again" in caplog.messages

    def test_the_error_is_told_again_after_a_while(
        self,
        start_instance: StartInstance,
        eventually: Eventually,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        assert election.REPORT_SECONDS == 60
        monkeypatch.setattr(election, "REPORT_SECONDS", 0.1)
        start_instance()
        eventually(lambda: caplog.text.count("cannot campaign") >= 2)

    @pytest.mark.usefixtures("quick_retries")
    def test_streams_that_are_off_are_told_of_until_they_are_on(self, tmp_path: Path, eventually: Eventually) -> None:
        with Streams(tmp_path / "streams", enabled=False) as streams:
            instance = Instance(tmp_path, streams.server)
            instance.election.start()
            eventually(lambda: "no Choria Streams here" in str(instance.election.readiness().problem))
            assert not instance.leads
            streams.enable()
            streams.server.restart()
            eventually(lambda: streams.admin.connected)
            streams.make_bucket()
            eventually(lambda: instance.leads)
            instance.stop()
            instance.connector.close()

    @pytest.mark.parametrize("seconds", [0.0, 0.5])
    def test_a_lifetime_that_will_not_do_is_told_of_until_it_does(
        self, streams: Streams, start_instance: StartInstance, eventually: Eventually, seconds: float
    ) -> None:
        streams.make_bucket(lifetime=seconds)
        instance = start_instance()
        eventually(lambda: "leader_election_ttl" in str(instance.election.readiness().problem))
        assert not instance.leads
        assert streams.sequence() == 0
        streams.change_bucket(lifetime=60.0)
        eventually(lambda: instance.leads)


class TestMetrics:
    """Dashboards of the Go original find what they look for."""

    def originals(self, page: str) -> set[str]:
        """The series of an election on a page of the Go original."""
        text = (METRICS / page).read_text()
        return set(re.findall(r"^choria_election_\S+", text, re.MULTILINE))

    def test_a_leader_has_the_series_of_the_original(
        self, streams: Streams, start_instance: StartInstance, eventually: Eventually
    ) -> None:
        streams.make_bucket()
        instance = start_instance("prov1.lab")
        eventually(lambda: instance.campaigns("leader") >= 2)

        series = instance.series()
        assert set(series) == self.originals("metrics-leader.txt")
        assert instance.campaigns("candidate") == 1
        assert series['choria_election_leader{election="provisioner",identity="prov1.lab"}'] == 1

    @pytest.mark.usefixtures("brisk")
    def test_who_never_won_has_no_series_that_says_so(
        self, streams: Streams, start_instance: StartInstance, eventually: Eventually
    ) -> None:
        streams.make_bucket()
        leader = start_instance("prov1.lab")
        eventually(lambda: leader.leads)
        standby = start_instance("prov2.lab")
        eventually(lambda: standby.campaigns("candidate") >= 2)

        at_zero = {'choria_election_campaigns{election="provisioner",identity="prov2.lab",state="leader"}'}
        assert set(standby.series()) == self.originals("metrics-candidate.txt") | at_zero
        streams.evict()
        lost = 'choria_election_leader{election="provisioner",identity="prov1.lab"}'
        eventually(lambda: leader.series()[lost] == 0)


# --- the work in hand


class Cycle:
    """An instance that leads, all of it, and a server that it is about to provision.

    :ivar directory: where its helper is
    """

    def __init__(self, daemon: ScheduledDaemon, server: PuppetServer, streams: Streams, eventually: Eventually) -> None:
        self.daemon = daemon
        self.server = server
        self._streams = streams
        self._eventually = eventually

    def lose(self) -> None:
        """Have the instance lose its leadership, and notice."""
        assert not self.daemon.config.paused
        self._streams.evict()
        self._eventually(lambda: self.daemon.config.paused)

    def lose_at(self, action: str, *, answered: bool = True) -> None:
        """Have it lose its leadership when the first request for an action has arrived, before the answer."""

        def usual(request: Request) -> list[bytes]:
            return [self.server.ok(request)]

        behaviour = self.server.behaviour.get(action, usual)

        def lose(request: Request) -> list[bytes]:
            self.server.behaviour[action] = behaviour
            self.lose()
            return behaviour(request) if answered else []

        self.server.behaviour[action] = lose

    def run(self) -> list[str]:
        """Have the server announce itself; gives the actions that it was asked for until it was done with."""
        self.server.announce()
        self._eventually(lambda: self.daemon["provision_errors"] + self.daemon["provisioned"] == 1)
        self._eventually(lambda: self.daemon["busy_workers"] == 0)
        return self.server.actions()


class PuppetServer(test_provision.Server):
    """One that can announce itself."""

    def announce(self) -> None:
        self._connector.publish(EVENTS, payload=startup(self.identity))


@pytest.fixture
def make_daemon(
    tmp_path: Path, streams: Streams, make_connector: MakeConnector
) -> Iterator[Callable[..., ScheduledDaemon]]:
    """Makes daemons that elect their leader, not started yet, with the options of :class:`ScheduledDaemon`."""
    daemons: list[ScheduledDaemon] = []

    def make(identity: str, **options: Any) -> ScheduledDaemon:
        connection = make_connector(
            streams.server, reply_prefix=reply_prefix(f"choria={identity}"), authenticate=lambda _: LOGIN
        )
        daemon = ScheduledDaemon(tmp_path, connection, identity=identity, leader_election=True, **options)
        daemons.append(daemon)
        return daemon

    yield make
    for daemon in daemons:
        daemon.shutdown.request()
        daemon.stop()


@pytest.mark.usefixtures("brisk")
class TestWorkInHand:
    """An instance that loses the leadership in the middle of a cycle leaves the server to the next leader."""

    @pytest.fixture
    def cycle(
        self,
        streams: Streams,
        make_daemon: Callable[..., ScheduledDaemon],
        eventually: Eventually,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[Cycle]:
        # requests that are not answered are tried again after half a second
        monkeypatch.setattr(node, "RPC_BACKOFF", retry.Backoff((10,)))
        monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, -1.5))
        streams.make_bucket()
        signer = Ed25519PrivateKey.generate()
        daemon = make_daemon("prov.example.net", verifier=Verifier(public_hex(signer)))
        connection = connector(streams.server, SERVERS_LOGIN)
        server = PuppetServer(connection)
        token = jwt.encode({"purpose": "choria_provisioning"}, signer, algorithm="EdDSA")
        server.reply("jwt", jwt=token, ecdh_public="09" * 32)
        server.reply("inventory", version="0.30.0", upgradable=False)
        daemon.start()
        eventually(lambda: daemon["discover_cycles"] == 1)
        yield Cycle(daemon, server, streams, eventually)
        connection.close()

    def test_a_leader_that_stays_one_does_it_all(self, cycle: Cycle) -> None:
        assert cycle.run() == ["jwt", "inventory", "configure", "restart"]

    @pytest.mark.parametrize(
        ("action", "answered", "actions"),
        [("jwt", True, ["jwt"]), ("jwt", False, ["jwt"]), ("inventory", True, ["jwt", "inventory"])],
    )
    def test_no_request_and_no_helper_follow_a_request_for_facts(
        self, cycle: Cycle, action: str, answered: bool, actions: list[str]
    ) -> None:
        cycle.lose_at(action, answered=answered)
        assert cycle.run() == actions
        assert cycle.daemon["helper_time_count"] == 0

    def test_no_request_follows_a_helper_that_was_running(
        self, cycle: Cycle, tmp_path: Path, eventually: Eventually
    ) -> None:
        go_on = self.held_up_in_the_helper(cycle, tmp_path, eventually)
        cycle.lose()
        go_on()
        eventually(lambda: cycle.daemon["provision_errors"] == 1)
        assert cycle.server.actions() == ["jwt", "inventory"]
        assert cycle.daemon["helper_time_count"] == 1

    def test_a_cycle_is_not_continued_in_the_next_leadership(
        self, cycle: Cycle, tmp_path: Path, eventually: Eventually
    ) -> None:
        """Nor beside another cycle of the same server, which was sighted again meanwhile."""
        go_on = self.held_up_in_the_helper(cycle, tmp_path, eventually)
        cycle.lose()
        eventually(lambda: not cycle.daemon.config.paused)
        go_on()
        eventually(lambda: cycle.daemon["busy_workers"] == 0)
        assert cycle.server.actions() == ["jwt", "inventory"]

    def held_up_in_the_helper(self, cycle: Cycle, directory: Path, eventually: Eventually) -> Callable[[], None]:
        """Have the cycle come to its helper; gives what lets that go on."""
        (directory / "helper").write_text(
            f"#!/bin/sh\ncat >/dev/null\ntouch {directory}/running\n"
            f"while ! test -e {directory}/go-on; do sleep 0.05; done\n"
            'echo \'{"configuration":{"plugin.choria.server.provision":"0"}}\'\n'
        )
        cycle.server.announce()
        eventually((directory / "running").exists)
        return (directory / "go-on").touch

    def test_a_server_that_took_its_configuration_is_restarted(self, cycle: Cycle) -> None:
        cycle.lose_at("configure")
        assert cycle.run() == ["jwt", "inventory", "configure", "restart"]
        assert cycle.daemon["provisioned"] == 1

    def test_one_that_may_or_may_not_have_taken_it_is_asked_no_more(self, cycle: Cycle) -> None:
        cycle.lose_at("configure", answered=False)
        assert cycle.run() == ["jwt", "inventory", "configure"]

    def test_a_restart_is_tried_again(self, cycle: Cycle) -> None:
        cycle.lose_at("restart", answered=False)
        cycle.run()
        assert cycle.server.actions() == ["jwt", "inventory", "configure", "restart", "restart"]
        assert cycle.daemon["provisioned"] == 1


StartServers = Callable[..., Fleet]


@pytest.fixture
def start_servers() -> Iterator[StartServers]:
    """Starts simulated servers on a broker with streams, with the options of :class:`Fleet`."""
    with contextlib.ExitStack() as stack:

        def start(streams: Streams, *servers: Server, **options: Any) -> Fleet:
            fleet = Fleet(streams.server.url, servers, login=SERVERS_LOGIN, **options)
            stack.enter_context(fleet)
            return fleet

        yield start


@pytest.mark.usefixtures("brisk")
def test_a_server_that_was_left_behind_locked_is_tried_once_and_not_again_before_the_lock_has_ended(
    streams: Streams,
    make_daemon: Callable[..., ScheduledDaemon],
    eventually: Eventually,
    start_servers: StartServers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert node.LockedError.hold == simulated_server.LOCK_SECONDS == 120
    monkeypatch.setattr(node.LockedError, "hold", 4.0)
    monkeypatch.setattr(simulated_server, "LOCK_SECONDS", 4.0)
    caplog.set_level(logging.INFO)
    streams.make_bucket()
    locked = Server(identity="n1.example.net", site=SITE, fails=True, fails_seconds=2.0)
    fleet = start_servers(streams, locked)
    former, present = (
        make_daemon(identity, interval=0.5, discovery_timeout=0.1) for identity in ("a.example.net", "b.example.net")
    )
    former.start()
    eventually(lambda: not former.config.paused)
    present.start()
    assert fleet.wait(lambda counts: counts.actions["choria_provision#configure"] >= 1, PATIENCE_SECONDS)
    former.shutdown.request()

    assert fleet.wait(lambda counts: counts.lock_conflicts == 1, PATIENCE_SECONDS)
    eventually(lambda: present["provision_errors"] == 1)
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert fleet.counts().lock_conflicts == 1
    assert locked.configures == 1
    (told,) = (record for record in caplog.records if "Could not obtain provisioning lock" in record.getMessage())
    assert told.levelname == "INFO"
