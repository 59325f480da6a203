"""A real scheduler and a simulated fleet in which servers keep failing, are locked, or are not wanted here."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from provisioner.choria import discovery
from provisioner.choria.connector import Connector
from provisioner.choria.discovery import Sighting
from provisioner.choria.protocol import reply_prefix
from provisioner.config import Config
from provisioner.host import node
from provisioner.hosts import admission
from provisioner.hosts.admission import Admission
from provisioner.hosts.history import FREED_HOSTS, PROBE_INTERVALS
from provisioner.monitor.metrics import Metrics
from provisioner.monitor.status import Outcome
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector, StartFleet
from tests.installation import SITE
from tests.scheduled import CALLER, EVENTS, ScheduledDaemon, servers, startup, value
from tests.test_config import load

INTERVAL = 60.0
#: What a server may take to reply; each request to one that is silent costs as much.
REPLY_SECONDS = 1.0
HELPER = "#!/bin/sh\ncat >/dev/null\n"
BROKEN_HELPER = f"{HELPER}echo 'no such database' >&2\nexit 1\n"
GOOD_HELPER = f"""{HELPER}echo '{{"configuration":{{"plugin.choria.server.provision":"0"}}}}'\n"""


class Bench(ScheduledDaemon):
    """A daemon whose history is on a clock that the test moves, and which discovers when the test wants it to."""

    def __init__(self, directory: Path, connector: Connector, eventually: Eventually, **settings: Any) -> None:
        super().__init__(directory, connector, discovery_timeout=REPLY_SECONDS, **settings)
        self.now = 0.0
        self.history = self.scheduler.history
        self.history._clock = lambda: self.now
        self.history._part = lambda: 1.0
        self._helper = directory / "helper"
        self._eventually = eventually

    def start(self) -> None:
        assert self.connector.connect(PATIENCE_SECONDS)
        self.connector.flush()  # the broker knows of the subscription to events
        self.scheduler._supervisor.start()

    def stop(self) -> None:
        self.shutdown.request()
        self.scheduler._stop()

    def cycle(self, seconds: float = INTERVAL) -> None:
        """Let time pass, discover once, and wait for the end of all that comes of it."""
        self.now += seconds
        self.scheduler.discover()
        self.settle()

    def settle(self) -> None:
        """Wait until all that were admitted had their turn, and were let go unless they are leaving."""
        ends = ("provisioned", "helper_shutdown_requests", "provision_errors")
        self._eventually(lambda: sum(map(self.__getitem__, ends)) == self["discovered"] + self["event_discovered"])
        self._eventually(lambda: self["waiting_nodes"] == sum(map(self.__getitem__, ends[:2])))

    def helper(self, script: str) -> None:
        """Replace the helper, as an editor does it."""
        new = self._helper.with_suffix(".new")
        new.write_text(script)
        new.chmod(0o755)
        new.replace(self._helper)

    def failures(self) -> dict[str, int]:
        return {trouble.identity: trouble.failures for trouble in self.history.troubled()}

    def outcomes(self, identity: str) -> list[Outcome]:
        """How its attempts ended, the last one first."""
        return [attempt.outcome for attempt in self.history.recent() if attempt.identity == identity]


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(
    tmp_path: Path,
    broker: NatsServer,
    make_connector: MakeConnector,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeBench]:
    """Makes and starts benches, with settings of their configuration; requests take little time."""
    monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, 0.0))
    monkeypatch.setattr(node, "INVENTORY", attrs.evolve(node.INVENTORY, tries=1))
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        connector = make_connector(broker, reply_prefix=reply_prefix(CALLER))
        benches.append(Bench(tmp_path, connector, eventually, **settings))
        benches[-1].start()
        return benches[-1]

    yield make
    for bench in benches:
        bench.shutdown.request()
        bench.stop()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()


@pytest.fixture
def start_fleet(start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch) -> StartFleet:
    """Starts simulated servers. Discoveries take no time, and find all servers that are up: each is counted on."""
    fleets: list[Fleet] = []

    def start(*servers: Server, **options: Any) -> Fleet:
        fleets.append(start_fleet(*servers, **options))
        return fleets[-1]

    def discover(*_: object, **__: object) -> list[Sighting]:
        return [Sighting(server.identity, time.monotonic()) for fleet in fleets for server in list(fleet._up)]

    monkeypatch.setattr(discovery, "discover", discover)
    return start


def silent(count: int) -> list[Server]:
    """Servers each of which holds a worker for a while, in vain."""
    return [
        Server(identity=f"silent{number}.example.net", site=SITE, misbehaviour=Misbehaviour.SILENT)
        for number in range(count)
    ]


def test_servers_that_keep_failing_leave_the_workers_to_those_that_can_be_provisioned(
    make_bench: MakeBench, start_fleet: StartFleet
) -> None:
    bench, broken = make_bench(workers=2), silent(2)
    start_fleet(*broken)
    for _ in range(3):
        bench.cycle()
    assert bench.failures() == dict.fromkeys((server.identity for server in broken), 3)

    good = start_fleet(*servers(20))
    bench.cycle()
    assert good.counts().complete
    assert set(bench.failures().values()) == {3}, "no worker was at a broken one meanwhile"

    bench.cycle(seconds=2 * INTERVAL)
    assert set(bench.failures().values()) == {4}, "they are not lost"
    assert bench["troubled_nodes"] == 2


def test_switched_off_they_are_tried_in_every_cycle(make_bench: MakeBench, start_fleet: StartFleet) -> None:
    bench = make_bench(retry_backoff=False)
    start_fleet(*silent(2))
    for _ in range(5):
        bench.cycle()

    assert set(bench.failures().values()) == {5}


def test_those_that_never_failed_get_a_worker_before_those_that_did(
    make_bench: MakeBench, start_fleet: StartFleet
) -> None:
    bench = make_bench(workers=1)
    start_fleet(*silent(2))
    bench.cycle()
    start_fleet(*servers(5))
    bench.cycle()

    last = [attempt.outcome for attempt in reversed(bench.history.recent()[:7])]
    assert last == [Outcome.PROVISIONED] * 5 + [Outcome.FAILED] * 2


def test_a_fleet_that_an_hour_of_a_broken_helper_has_stopped_is_back_within_minutes(
    bench: Bench, start_fleet: StartFleet
) -> None:
    bench.helper(BROKEN_HELPER)
    fleet = start_fleet(*servers(30))
    for _ in range(60):
        bench.cycle()
    assert len(bench.failures()) == 30
    assert min(bench.failures().values()) >= 6
    assert bench["provision_errors"] < 30 * 10, "they were left alone for ever longer pauses"

    bench.helper(GOOD_HELPER)
    for _ in range(PROBE_INTERVALS + 3):
        bench.cycle()
    assert fleet.counts().complete
    assert bench.failures() == {}
    assert FREED_HOSTS < 30, "it took more than one to free them all"


def test_a_server_that_boots_is_tried_at_once_whatever_its_past(
    bench: Bench, start_fleet: StartFleet, connector: Connector, eventually: Eventually
) -> None:
    start_fleet(*silent(1))
    identity = "silent0.example.net"
    for _ in range(3):
        bench.cycle()
    bench.cycle(seconds=0)
    assert bench.failures() == {identity: 3}

    connector.publish(EVENTS, payload=startup(identity))
    eventually(lambda: bench.failures() == {identity: 4})
    bench.settle()
    bench.cycle(seconds=0)
    assert bench.failures() == {identity: 5}, "the first retries after a boot come with the normal cycle again"
    assert bench["event_discovered"] == 1


def test_a_locked_server_is_left_alone_until_the_lock_has_expired(bench: Bench, start_fleet: StartFleet) -> None:
    server = servers(1)[0]
    fleet = start_fleet(server)
    server._lock_holder, server._locked_until = "another", time.monotonic() + PATIENCE_SECONDS
    bench.cycle()
    assert bench.outcomes(server.identity) == [Outcome.LEFT_ALONE]
    assert bench.failures() == {}

    bench.cycle(seconds=119)
    assert len(bench.outcomes(server.identity)) == 1
    server._lock_holder = ""
    bench.cycle(seconds=1)
    assert bench.outcomes(server.identity) == [Outcome.PROVISIONED, Outcome.LEFT_ALONE]
    assert fleet.counts().lock_conflicts == 1


def test_a_locked_server_that_boots_is_not_locked_any_more(
    bench: Bench, start_fleet: StartFleet, connector: Connector, eventually: Eventually
) -> None:
    server = servers(1)[0]
    fleet = start_fleet(server)
    server._lock_holder, server._locked_until = "another", time.monotonic() + PATIENCE_SECONDS
    bench.cycle()
    server._lock_holder = ""
    connector.publish(EVENTS, payload=startup(server.identity))

    eventually(lambda: bench["provisioned"] == 1)
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)


def test_a_server_that_the_helper_lets_wait_is_in_no_trouble(bench: Bench, start_fleet: StartFleet) -> None:
    bench.helper(f"""{HELPER}echo '{{"defer":true,"msg":"no owner yet"}}'\n""")
    start_fleet(*servers(1))
    for _ in range(5):
        bench.cycle()

    assert bench.outcomes("n0.example.net") == [Outcome.DEFERRED] * 5
    assert bench.failures() == {}
    assert bench.history.recent()[0].reason == "configuration deferred: no owner yet"


def test_an_instance_that_is_paused_has_no_troubled_nodes(bench: Bench, start_fleet: StartFleet) -> None:
    start_fleet(*silent(1))
    for _ in range(3):
        bench.cycle()
    assert bench["troubled_nodes"] == 1
    bench.config.pause()
    bench.cycle()
    assert bench["troubled_nodes"] == 0

    bench.config.resume()
    bench.cycle(seconds=0)
    assert set(bench.failures().values()) == {1}


def test_a_failure_is_told_with_what_comes_of_it(
    bench: Bench, start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench.helper(BROKEN_HELPER)
    start_fleet(*servers(1))
    for _ in range(4):
        bench.cycle()

    reason = "the helper exited with status 1; its standard error: no such database"
    told = [line for line in caplog.messages if line.startswith("could not provision")]
    assert [re.sub(r"[0-9.]+ s:", "N s:", line, count=1) for line in told] == [
        f"could not provision after N s: {reason}",
        f"could not provision after N s: {reason}",
        f"could not provision after N s: {reason} (failed 3 times in a row: left alone for 120 s, unless it boots)",
    ]
    assert caplog.messages[-1] == ("discovered 1 servers, 0 of them new, 1 left alone for now after failures or a lock")


def test_the_step_at_which_a_server_failed_is_noted(bench: Bench, start_fleet: StartFleet) -> None:
    bench.helper(BROKEN_HELPER)
    start_fleet(*silent(1), *servers(1))
    bench.cycle()

    steps = {trouble.identity: trouble.step for trouble in bench.history.troubled()}
    assert steps == {"silent0.example.net": "rpcutil#inventory", "n0.example.net": "helper"}
    attempt = bench.history.recent()[0]
    assert re.fullmatch(r"worker-[1-4]", attempt.worker)
    assert abs(attempt.ended - time.time()) < PATIENCE_SECONDS
    assert 0 < attempt.seconds < PATIENCE_SECONDS


class TestAdmission:
    """The lists of who is to be provisioned here, and who is not."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        lists = "allow: ['\\.example\\.net$', '^lab']\ndeny: ['^db[[:digit:]]+\\.', /^n2/]\n"
        return load(tmp_path / "lists.yaml", f"helper: h\n{lists}")

    @pytest.mark.parametrize(
        ("identity", "reason"),
        [
            ("n1.example.net", None),
            ("lab.example.org", None),
            ("n1.example.org", "no pattern in allow is found in it"),
            ("N1.EXAMPLE.NET", "no pattern in allow is found in it"),
            ("db1.example.net", r"'^db[[:digit:]]+\\.' in deny is found in it"),
            ("n2.example.net", "'^n2' in deny is found in it"),
            ("n2.example.org", "'^n2' in deny is found in it"),
        ],
    )
    def test_a_pattern_in_deny_comes_first_then_one_in_allow_must_fit(
        self, config: Config, identity: str, reason: str | None
    ) -> None:
        assert config.reason_refused(identity) == reason

    @pytest.mark.parametrize("lists", ["", "allow: []\ndeny: []\n", "allow:\ndeny:\n"])
    def test_without_patterns_everybody_is_wanted(self, tmp_path: Path, lists: str) -> None:
        assert load(tmp_path / "lists.yaml", f"helper: h\n{lists}").reason_refused("n1") is None

    def test_neither_a_discovery_nor_an_event_admits_a_host_that_is_not_wanted(
        self,
        config: Config,
        make_bench: MakeBench,
        start_fleet: StartFleet,
        connector: Connector,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO")
        bench = make_bench(allow=config.allow, deny=config.deny)
        fleet = start_fleet(*servers(4))
        bench.cycle()
        assert (fleet.counts().provisioned, bench["discovered"], bench["refused"]) == (3, 3, 1)
        assert "discovered 4 servers, 3 of them new, 1 refused by allow or deny" in caplog.messages

        connector.publish(EVENTS, payload=startup("n2.example.net"))
        connector.publish(EVENTS, payload=startup("n1.example.org"))
        eventually(lambda: bench["refused"] == 3)
        assert bench["event_discovered"] == 0
        told = [
            (record.__dict__["identity"], record.getMessage()) for record in caplog.records if "refused:" in record.msg
        ]
        assert told == [
            ("n2.example.net", "refused: '^n2' in deny is found in it"),
            ("n1.example.org", "refused: no pattern in allow is found in it"),
        ], "each is told of once"

    def test_of_very_many_only_some_are_told_of(
        self, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(admission, "TOLD_HOSTS", 3)
        caplog.set_level("INFO")
        metrics = Metrics("lab")
        admits = Admission(config, metrics)
        for _ in range(2):
            for number in range(10):
                assert not admits.permits(f"db{number}.example.net")

        assert value(metrics, "refused") == 20
        assert [record.levelname for record in caplog.records] == ["INFO"] * 3 + ["WARNING"]
        assert caplog.messages[-1] == "refused 3 hosts: further ones are only counted"
