"""Two daemons of one identity on one broker: without an election both provision, with it the one that was elected."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from provisioner.simulate.envelopes import Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from tests.conftest import PATIENCE_SECONDS, StartBroker
from tests.faults.conftest import WORKERS, Daemon, InstallDaemon, Report, Scale, StartDaemon, StartServers
from tests.installation import free_port
from tests.streams import PASSWORD, SERVERS_LOGIN, Streams
from tests.waiting import wait_until

#: What a daemon says of replies that were not for it.
FOREIGN_REPLIES = ("dropped a reply", "two different replies", "further repl")


class Watched:
    """A broker that can be asked who is subscribed to what."""

    def __init__(self, start_broker: StartBroker) -> None:
        self._monitor = free_port()
        self.server = start_broker(f'http: "127.0.0.1:{self._monitor}"')

    def reply_subjects(self) -> list[set[str]]:
        """Where each daemon has its replies sent."""
        monitor = http.client.HTTPConnection("127.0.0.1", self._monitor, timeout=PATIENCE_SECONDS)
        with contextlib.closing(monitor):
            monitor.request("GET", "/connz?subs=1")
            connections = json.load(monitor.getresponse())["connections"]
        subjects = [set(each.get("subscriptions_list", ())) for each in connections if "prov" in each["name"]]
        return [{subject for subject in each if ".reply." in subject} for each in subjects]


def test_two_instances_of_one_identity_without_an_election(
    start_broker: StartBroker, start_daemon: StartDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """Both hear of each server and try to provision it: the least that must hold is that they do each other no harm."""
    broker = Watched(start_broker)
    workers = scale.of(short=32, full=16)
    daemons = [
        start_daemon(broker.server.url, name=name, workers=workers, shutdown_grace="1s") for name in ("one", "other")
    ]
    ours, others = broker.reply_subjects()
    servers = scale.of(short=scale.servers, full=60)  # a worker waits for 22 s when the other has restarted a server
    population = start_servers(broker.server.url, servers, over=scale.of(short=0.6, full=5.0))
    population.wait_until_provisioned()

    assert ours
    assert others
    assert not ours & others
    for daemon in daemons:
        assert daemon.metric("provisioned") > 0
        assert not any(daemon.logged(text) for text in FOREIGN_REPLIES)
        daemon.assert_unharmed(idle=scale.full)
    # each server by each instance, and once more where one did not learn what came of it
    unheard = daemons[0].unheard() + daemons[1].unheard()
    assert all(times <= 1 + unheard[identity] for identity, times in population.configured_again.items())
    report(
        "two instances of one identity, and no election, provisioned the same servers at once",
        "all were provisioned; nobody got replies that were not for him",
        **daemons[0].figures(population),
    )


# --- with an election


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    """A broker with the bucket of the election."""
    with Streams(tmp_path / "streams") as streams:
        streams.make_bucket()
        yield streams


@attrs.frozen
class Witness(EnvelopesV1):
    """Servers that remember who has begun something with them.

    :ivar seen: for each request, in their order, the process that it came from
    """

    seen: list[str] = attrs.field(factory=list)

    def open(self, payload: bytes) -> Request:
        request = EnvelopesV1.open(self, payload)
        # of the leader that was, one request may still come: it finishes what it has begun
        if request.agent != "discovery" and json.loads(request.body)["action"] != "restart":
            self.seen.append(request.reply_to.rpartition(".")[0])
        return request


@pytest.mark.usefixtures("full_scale_only")
def test_two_instances_of_one_identity_with_an_election(
    streams: Streams, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemons = [
        install_daemon(
            streams.server.url,
            name=name,
            workers=WORKERS,
            leader_election=True,
            broker_provisioning_password=PASSWORD,
        )
        for name in ("one", "other")
    ]
    for daemon in daemons:
        start(daemon)
    witness = Witness()
    gaps: dict[str, float] = {}
    populations = []
    ends: list[Callable[[Daemon], object]] = [Daemon.kill, Daemon.stop] * 2
    for end in ends:
        population = start_servers(
            streams.server.url,
            scale.servers // len(ends),
            over=5.0,
            fleet={"envelopes": witness, "login": SERVERS_LOGIN},
        )
        leader, standby = leader_of(daemons)
        population.provision_while(functools.partial(take_over, leader, standby, end, gaps))
        populations.append(population)
        start(leader)

    leaderships = [process for process, _ in itertools.groupby(witness.seen)]
    assert len(leaderships) == len(set(leaderships)) == len(ends) + 1
    assert gaps["kill"] < 30.0
    assert gaps["stop"] < 20.0
    assert sum(population.configured_again.total() for population in populations) <= len(ends) // 2 * WORKERS
    for daemon in daemons:
        daemon.assert_unharmed()
    report(
        f"the leader of two instances of one identity was killed and stopped in turn, {len(ends)} times",
        "all were provisioned; no server had to do with both instances at once",
        seconds_without_a_leader=", ".join(f"{gap:.0f} ({how})" for how, gap in gaps.items()),
        **daemons[0].figures(*populations),
    )


def take_over(leader: Daemon, standby: Daemon, end: Callable[[Daemon], object], gaps: dict[str, float]) -> None:
    """End the leader and wait until the standby leads; note the longest time that this took for each way to end."""
    started = time.monotonic()
    end(leader)
    standby.until(lambda: standby.metric("leader"))
    how = "kill" if end is Daemon.kill else "stop"
    gaps[how] = max(gaps.get(how, 0.0), time.monotonic() - started)


def start(daemon: Daemon) -> None:
    daemon.start("run", "--debug")
    daemon.until(daemon.ready)
    daemon.before = daemon.settled()


def leader_of(daemons: list[Daemon]) -> tuple[Daemon, Daemon]:
    """The leader and the standby; one of the two as soon as there is one."""
    found: list[Daemon] = []

    def one_leads() -> bool:
        found.extend(daemon for daemon in daemons if daemon.metric("leader"))
        return bool(found)

    wait_until(one_leads)
    (leader,) = found
    (standby,) = (daemon for daemon in daemons if daemon is not leader)
    assert not standby.metric("leader")
    return leader, standby
