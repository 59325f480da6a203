"""The network between the daemon and its broker is slow, mute, cut. That of the servers is fine throughout."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from provisioner.simulate.broker import NatsServer
from tests.faults.conftest import Scale, SetStage, Stage, assert_configured_again_only_if_unheard
from tests.faults.proxy import Proxy

#: Usually they are 30 s apart.
PINGS_EVERY_SECOND = (
    "from provisioner.choria.connector import Connector",
    "Connector.__init__.__kwdefaults__['ping_interval'] = 1.0",
)
PINGS_UNANSWERED = "lost the connection to {}: the broker answered none of the last 2 pings"
#: What only replies, and what only requests of the daemon, have in them.
REPLY, REQUEST = b'"mc_sender":"n', b'"mc_sender":"prov'
#: How late the daemon may look at the clock, and we at the daemon.
TICK_SECONDS = 2.0


@pytest.fixture
def proxy(broker: NatsServer) -> Iterator[Proxy]:
    with Proxy(broker.host, broker.port) as proxy:
        yield proxy


def test_black_hole_that_heals(broker: NatsServer, proxy: Proxy, set_stage: SetStage, scale: Scale) -> None:
    stage = set_stage(proxy.url, servers_on=broker.url)
    seconds, times = scale.of(short=2.0, full=15.0), scale.of(short=1, full=2)

    def swallow() -> None:
        proxy.black_hole()
        time.sleep(seconds)
        proxy.heal()

    stage.population.provision_while(*[swallow] * times)

    assert proxy.connections == 1
    assert stage.population.configured_again.total() == 0
    stage.report_unharmed(
        f"nothing came through, in either direction, for {seconds:g} s (times: {times})",
        "all were provisioned, over the same connection",
    )


def test_black_hole_and_half_open_connection_are_found_by_pings(
    broker: NatsServer, proxy: Proxy, set_stage: SetStage, scale: Scale
) -> None:
    """In a black hole nothing comes through; half-open is a connection that the other side has forgotten."""
    changes = scale.of(short=PINGS_EVERY_SECOND, full=())
    stage = set_stage(proxy.url, servers_on=broker.url, changes=changes)
    seconds = []

    def swallow() -> None:
        proxy.black_hole()
        seconds.append(seconds_until(stage, lambda: not stage.daemon.ready()))
        stage.daemon.until(lambda: stage.daemon.logged("cannot connect"))
        proxy.heal()
        stage.daemon.until(stage.daemon.ready)

    def forget() -> None:
        connections = proxy.connections
        proxy.forget()
        seconds.append(seconds_until(stage, lambda: proxy.connections > connections))

    stage.population.provision_while(swallow, forget)

    interval = scale.of(short=1.0, full=30.0)
    if scale.full:  # else a moment in which this machine is busy counts for too much
        assert max(seconds) < 2 * interval + TICK_SECONDS
    assert stage.daemon.messages().count(PINGS_UNANSWERED.format(proxy.url)) >= 2
    assert_configured_again_only_if_unheard(stage.population, stage.daemon, interruptions=2)
    stage.report_unharmed(
        f"nothing came through; later, the other side had forgotten the connection; pings are {interval:g} s apart",
        f"the connection was given up after {seconds[0]:.1f} and {seconds[1]:.1f} s; all were provisioned over another",
    )


def seconds_until(stage: Stage, condition: Callable[[], object]) -> float:
    started = time.monotonic()
    stage.daemon.until(condition)
    return time.monotonic() - started


def test_connection_ends_in_every_way(broker: NatsServer, proxy: Proxy, set_stage: SetStage, scale: Scale) -> None:
    stage = set_stage(proxy.url, servers_on=broker.url)

    def end(way: Callable[[], None]) -> None:
        connections = proxy.connections
        way()
        stage.daemon.until(lambda: proxy.connections > connections and stage.daemon.ready())

    def tear(within: bytes) -> None:
        proxy.tear(within)
        stage.daemon.until(lambda: proxy.torn)

    in_a_reply, in_a_request = functools.partial(tear, REPLY), functools.partial(tear, REQUEST)
    ways: list[Callable[[], None]] = [proxy.cut, proxy.half_close, in_a_reply, in_a_request]
    ways *= scale.of(short=1, full=4)
    stage.population.provision_while(*(functools.partial(end, way) for way in ways))

    assert stage.daemon.reconnections == len(ways)
    assert_configured_again_only_if_unheard(stage.population, stage.daemon, interruptions=len(ways))
    stage.report_unharmed(
        "the connection was reset, half-closed by the broker's side, reset in the middle of a reply, and of a request, "
        f"in turn, {len(ways)} times",
        "all were provisioned",
    )


def test_slow_connection(broker: NatsServer, proxy: Proxy, set_stage: SetStage, scale: Scale) -> None:
    stage = set_stage(proxy.url, servers_on=broker.url)
    seconds = scale.of(short=0.05, full=0.1)
    proxy.delay(seconds)
    proxy.throttle(50_000)
    stage.population.wait_until_provisioned()

    assert proxy.connections == 1
    assert stage.population.configured_again.total() == 0
    stage.report_unharmed(
        f"all came {seconds:g} s later, and no more than 50 kB a second, in either direction",
        "all were provisioned, over the same connection",
    )


def test_one_of_two_brokers_accepts_and_says_nothing(broker: NatsServer, set_stage: SetStage, scale: Scale) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        stage = set_stage(f"nats://127.0.0.1:{mute.getsockname()[1]}", broker.url, servers_on=broker.url)
        times = scale.of(short=1, full=6)
        stage.population.provision_while(*[broker.restart] * times)

        assert_configured_again_only_if_unheard(stage.population, stage.daemon, interruptions=times)
        stage.report_unharmed(
            f"one of two brokers accepts connections and says nothing; the other was restarted (times: {times})",
            "all were provisioned",
        )
