"""The broker dies, freezes, stops and stays away, while servers are being provisioned."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable

import pytest

from provisioner.host.node import RESTART, RETURN_SECONDS
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.counts import Counts
from tests.conftest import StartBroker
from tests.faults.conftest import (
    WARM_UP_SERVERS,
    WORKERS,
    InstallDaemon,
    Population,
    Report,
    Scale,
    SetStage,
    StartServers,
    assert_configured_again_only_if_unheard,
)
from tests.installation import free_ports


def test_broker_killed_and_stopped_in_turn_under_load(broker: NatsServer, set_stage: SetStage, scale: Scale) -> None:
    stage = set_stage(broker.url, servers=scale.of(short=scale.servers, full=1500), over=scale.of(short=0.6, full=20.0))

    def restart(end: Callable[[], None]) -> None:
        end()
        broker.start()

    times = scale.rounds
    ends = itertools.islice(itertools.cycle([broker.kill, broker.stop]), times)
    stage.population.provision_while(*(functools.partial(restart, end) for end in ends))

    assert stage.daemon.reconnections == times
    assert_configured_again_only_if_unheard(stage.population, stage.daemon, interruptions=times)
    stage.report_unharmed(
        f"the broker was killed, and stopped in good order, in turn, and started again, {times} times",
        "all were provisioned",
    )


def test_broker_frozen_and_resumed(broker: NatsServer, set_stage: SetStage, scale: Scale) -> None:
    stage = set_stage(broker.url)
    seconds, times = scale.of(short=2.0, full=15.0), scale.of(short=1, full=2)

    def freeze() -> None:
        broker.pause()
        time.sleep(seconds)
        broker.resume()

    stage.population.provision_while(*[freeze] * times)

    assert stage.daemon.reconnections == 0
    assert stage.population.configured_again.total() == 0
    stage.report_unharmed(
        f"the broker was frozen for {seconds:g} s and resumed (times: {times})",
        "all were provisioned, over the same connection",
    )


def test_broker_killed_while_discovery_runs(broker: NatsServer, set_stage: SetStage, scale: Scale) -> None:
    # they announce nothing, and take so long to reply that each discovery is cut off
    stage = set_stage(broker.url, servers=scale.of(short=16, full=scale.servers), over=0.0, fleet={"latency": 0.25})
    times = scale.of(short=1, full=5)
    broker.restart()
    for _ in range(times):
        stage.population.wait_until(another_discovery(stage.population))
        broker.kill()
        broker.start()
    stage.population.wait_until_provisioned()

    assert stage.daemon.metric("discovery_errors") >= times
    assert stage.population.configured_again.total() == 0
    stage.report_unharmed(
        f"the broker was killed in the middle of a discovery (times: {times})",
        "all were found by the next one, and provisioned",
    )


def another_discovery(population: Population) -> Callable[[Counts], bool]:
    before = population.fleet.counts().discoveries
    return lambda counts: counts.discoveries > before


def test_broker_away_for_long_at_the_start_and_later(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """Servers come back to it later than the daemon, without a word, and long before the next regular discovery."""
    seconds = scale.of(short=1.0, full=20.0)
    daemon = install_daemon(broker.url, workers=WORKERS, interval="10m")

    def found_nobody() -> int:
        return sum(message.startswith("discovered no server") for message in daemon.messages())

    def be_away() -> None:
        time.sleep(seconds)
        assert (daemon.get("/livez")[0], daemon.get("/readyz")[0]) == (200, 503)
        before = found_nobody()
        broker.start()
        daemon.until(lambda: found_nobody() > before)

    broker.kill()
    daemon.start("run", "--debug")
    daemon.until(lambda: daemon.logged("cannot connect"))
    be_away()
    daemon.warm_up(start_servers, broker.url)
    broker.kill()
    be_away()
    population = start_servers(broker.url, scale.servers)
    population.wait_until_provisioned()

    assert population.configured_again.total() == 0
    daemon.assert_unharmed()
    report(
        f"the broker was not there for {seconds:g} s, at the start and once more later",
        "the daemon was alive and not ready meanwhile; servers that came back later than it were found and provisioned",
        **daemon.figures(population),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_broker_away_whenever_a_restart_is_repeated(broker: NatsServer, set_stage: SetStage) -> None:
    """Without a broker nothing can be sent, which is no try of a restart, whose reply was lost."""
    stage = set_stage(broker.url, servers=WORKERS, over=0.01, fleet={"latency": 0.5})
    stage.population.wait_until(lambda counts: counts.actions["choria_provision#restart"] == WORKERS)
    broker.kill()
    for _ in range(RESTART.tries - 1):
        broker.start()
        stage.daemon.until(stage.daemon.ready)
        time.sleep(1.0)  # so that all workers see it
        broker.kill()
        time.sleep(RETURN_SECONDS + 2.0)
    broker.start()
    stage.daemon.until(stage.daemon.idle)

    assert stage.daemon.metric("provision_errors") == 0
    assert stage.daemon.metric("provisioned") == WARM_UP_SERVERS + WORKERS
    assert stage.population.configured_again.total() == 0
    stage.report_unharmed(
        "the broker was killed before it passed on the replies of restarts, and away whenever they were to be repeated",
        "all counted as provisioned",
    )


def test_cluster_loses_its_members_one_after_another(
    start_broker: StartBroker, set_stage: SetStage, scale: Scale
) -> None:
    """Daemon and servers are told of one member each; the others they know from these."""
    members = cluster(start_broker)
    stage = set_stage(members[0].url, servers_on=members[1].url)
    victims = itertools.cycle(members)

    def lose_one_after_another() -> None:
        first, second = next(victims), next(victims)
        for victim in (first, second):
            victim.kill()
            stage.daemon.until(stage.daemon.ready)
        for victim in (first, second):
            victim.start()

    stage.population.provision_while(*[lose_one_after_another] * scale.rounds)

    assert stage.daemon.reconnections > 0
    assert_configured_again_only_if_unheard(stage.population, stage.daemon)
    stage.report_unharmed(
        f"two of three members of the cluster were killed one after the other and started again, {scale.rounds} times",
        "all were provisioned",
    )


def cluster(start_broker: StartBroker) -> list[NatsServer]:
    """Three servers that tell their clients of each other, once they all know of each other."""
    routes = [f"127.0.0.1:{port}" for port in free_ports(3)]
    urls = ", ".join(f'"nats://{route}"' for route in routes)
    return [start_broker(f'cluster {{ name: c, listen: "{route}", routes: [{urls}] }}') for route in routes]
