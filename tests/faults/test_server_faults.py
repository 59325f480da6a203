"""Servers that reply with what is none, or nothing, or share a name, or all start at once."""

from __future__ import annotations

import functools
import itertools
import random
import re
import socket
import time
from collections.abc import Sequence

import attrs
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner.choria.connector import Connector
from provisioner.simulate import csr, events, pki, tokens
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.misbehaviour import INSANE_IDENTITIES, Misbehaviour
from provisioner.simulate.server import Site
from tests.conftest import PATIENCE_SECONDS
from tests.faults.arrangements import discover_often, one_of, population, servers_named, wait_shortly
from tests.faults.conftest import (
    RSS_GROWTH,
    SITE,
    Daemon,
    InstallDaemon,
    Population,
    Report,
    Scale,
    StartServers,
    assert_configured_again_only_if_unheard,
)
from tests.faults.hostile_replies import (
    ALL,
    FATAL,
    HARMLESS,
    HostileServer,
    hostile_population,
    hostile_servers,
)
from tests.installation import HELPER

#: How long the good servers may take although silent ones tie up workers.
ALL_GOOD_SECONDS = 120.0
#: What servers take to reply.
LATENCY_SECONDS = 0.03
#: In one storm.
EVENTS = 20_000
#: Payloads on the subject of startup events that are none.
NO_EVENTS = (
    b"",
    b"x" * 10_000,
    b"null",
    b"[" * 10_000,
    b'{"protocol":"io.choria.lifecycle.v1.startup","identity":7}',
    b'{"protocol":"io.choria.lifecycle.v9.startup","identity":"n1.example.org"}',
    b'{"specversion":"1.0","source":"io.choria.lifecycle","time":"now"}',
)

STEPS = {
    "pki": (
        "choria_provision#jwt",
        "rpcutil#inventory",
        "choria_provision#gencsr",
        "choria_provision#configure",
        "choria_provision#restart",
    ),
    "ed25519": (
        "choria_provision#jwt",
        "choria_provision#gen25519",
        "rpcutil#inventory",
        "choria_provision#configure",
        "choria_provision#restart",
    ),
}

#: Where servers that may have their names are asked.
SUBJECT = re.compile(r"provisioning\.node\.(n|hostile\d+-)\d+\.example\.net")


@pytest.fixture(params=STEPS)
def feature(request: pytest.FixtureRequest, scale: Scale) -> str:
    return one_of(request, scale, short="pki")


def test_hostile_replies_at_every_step(
    feature: str,
    broker: NatsServer,
    connector: Connector,
    install_daemon: InstallDaemon,
    start_servers: StartServers,
    scale: Scale,
    report: Report,
) -> None:
    """At the short scale each way is tried at one of the steps.

    In the first round, the only one at the short scale, the daemon takes more memory than usual, and keeps it.
    """
    daemon = install_daemon(broker.url, workers=64)
    wait_shortly(daemon, seconds=1.0)
    site = with_feature(daemon, feature, broker)
    asked: set[str] = set()
    connector.subscribe("provisioning.node.>", callback=lambda message: asked.add(message.subject))
    connector.flush()
    with population(broker.url, [], noise=True):
        daemon.warm_up(functools.partial(start_servers, site=site), broker.url)
    rounds = scale.of(short=1, full=2)
    for number in range(1, rounds + 1):
        servers = hostile_servers(f"hostile{number}", STEPS[feature], all_steps=scale.full, site=site, boots_after=0.5)
        good = start_servers(broker.url, scale.servers // rounds, over=1.0, site=site)
        ended = outcomes(daemon) + len(servers) + len(good.servers)
        with hostile_population(broker.url, servers):
            good.wait_until_provisioned()
            await_outcomes(daemon, ended)
        assert [why for server in servers if (why := unexpected(server))] == []
        assert_configured_again_only_if_unheard(good, daemon)
        if number < rounds:
            daemon.until(daemon.idle)
            daemon.before = daemon.settled()

    assert [subject for subject in asked if not SUBJECT.fullmatch(subject)] == []
    assert daemon.logged("their identity holds white space or control characters")
    assert SITE.token not in daemon.log_file.read_text()
    daemon.assert_unharmed(rss_growth=scale.of(short=0.5, full=RSS_GROWTH))
    report(
        f"{len(ALL)} kinds of hostile replies at the {len(STEPS[feature])} steps of a cycle with {feature}, "
        "and discovery replies with names that no server may have",
        "all good servers were provisioned, the others were asked nothing more",
        hostile_servers=len(servers),
        **daemon.figures(good),
    )


def with_feature(daemon: Daemon, feature: str, broker: NatsServer) -> Site:
    """Have the daemon use a feature; gives the site of servers that can be provisioned with it."""
    key = csr.new_key()
    verify, seed = daemon.directory / "jwt.pem", daemon.directory / "seed"
    verify.write_text(pki.public_pem(key))
    seed.write_text(Ed25519PrivateKey.generate().private_bytes_raw().hex())
    daemon.settings |= {
        "features": {"jwt": True, feature: True},
        "jwt_verify_cert": str(verify),
        "jwt_signing_key": str(seed),
    }
    token = tokens.provisioning(SITE.token, broker=broker.url, key=key, secure=False)
    return attrs.evolve(SITE, jwt=token, new_key=csr.pool(4))


def outcomes(daemon: Daemon) -> float:
    """How many cycles have come to an end."""
    return daemon.metric("provisioned") + daemon.metric("provision_errors")


def await_outcomes(daemon: Daemon, total: float) -> None:
    daemon.until(lambda: outcomes(daemon) >= total)


def unexpected(server: HostileServer) -> str:
    """What should not have happened to a server."""
    restarted = server.departure is not None
    what = ""
    if server.way in HARMLESS and not restarted:
        what = "was not provisioned"
    if server.way in FATAL and not server.step.endswith("#restart"):
        if restarted:
            what = "was restarted"
        elif server.configures and not server.step.endswith("#configure"):
            what = "was configured"
    return f"{server.way} at {server.step}: {what}" if what else ""


def test_silent_servers_tie_up_all_workers(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    silent, workers = scale.of(short=(4, 4), full=(48, 16))
    daemon = install_daemon(broker.url, workers=workers)
    if not scale.full:
        wait_shortly(daemon, seconds=0.5)
    daemon.warm_up(start_servers, broker.url)
    hostile = start_servers(broker.url, silent, over=0.1, misbehaviour=Misbehaviour.SILENT)
    daemon.until(lambda: daemon.metric("busy_workers") == workers)
    good = start_servers(broker.url, scale.servers, over=1.0)
    started = time.monotonic()
    good.wait_until_provisioned()
    took = time.monotonic() - started

    assert took <= ALL_GOOD_SECONDS
    assert good.configured_again.total() == 0
    daemon.until(lambda: daemon.metric("provision_errors") >= silent)
    hostile.fleet.stop()
    daemon.assert_unharmed()
    report(
        f"{silent} servers that never reply were there before the others, for {workers} workers",
        f"all good ones were provisioned, the last one after {took:.1f} s",
        **daemon.figures(good),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_two_servers_of_one_identity(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, report: Report
) -> None:
    daemon = install_daemon(broker.url, workers=16)
    # long enough for the reply of the other one to arrive
    daemon.helper(HELPER.replace("cat", "sleep 0.5; cat"))
    discover_often(daemon, seconds=2.0)
    twins = [servers_named(["twin.example.net"], facts={"serial": serial}) for serial in "ab"]
    with population(broker.url, twins[0]) as remaining:
        with population(broker.url, twins[1]) as leaving:
            daemon.warm_up(start_servers, broker.url)
            daemon.until(lambda: daemon.metric("provision_errors") >= 2)
        remaining.wait_until_provisioned()

    configured = [each.fleet.counts().actions["choria_provision#configure"] for each in (remaining, leaving)]
    assert configured == [1, 0]
    assert daemon.logged("two servers share this identity, or one of the replies is forged")
    daemon.assert_unharmed()
    report(
        "two servers had one identity, then one of them left",
        "none was configured, and the log said why, as long as both were there; then the other one was provisioned",
        **daemon.figures(remaining),
    )


def test_storm_of_startup_events(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """Nobody is behind most of them. There are two storms, of which the second one is to take no more memory."""
    daemon = install_daemon(broker.url, workers=scale.of(short=32, full=64))
    if not scale.full:
        wait_shortly(daemon, seconds=1.0)
    daemon.warm_up(start_servers, broker.url)
    for number in range(2):
        if number:
            daemon.until(daemon.idle)
            daemon.before = daemon.settled()
        start = functools.partial(start_servers, broker.url, scale.servers // 2, fleet={"latency": LATENCY_SECONDS})
        booting, silent = start(over=scale.of(short=2.0, full=20.0)), start()
        booting.wait_until(lambda counts: counts.provisioned > 0)
        before = Timing.of(daemon)
        storm, malformed = storm_of_events(silent, ghosts=scale.of(short=60, full=250), number=number)
        took = publish_at_once(broker, storm)
        for good in (booting, silent):
            good.wait_until_provisioned()
            assert good.configured_again.total() == 0
        await_refusals(daemon, malformed * (number + 1))
        assert failed_tries(daemon, booting, silent) == []
        stormy = Timing.of(daemon).since(before)
    assert refused_events(daemon) == malformed * 2
    assert daemon.metric("events_dropped") == 0
    daemon.assert_unharmed(rss_growth=RSS_GROWTH)
    report(
        f"{EVENTS} startup events within {took:.2f} s, most of servers that are known or not there, {malformed} "
        "of them none at all, while servers were being provisioned; twice",
        "all were provisioned, no event was lost, no try of a request failed, the second storm took no more memory; "
        f"configure took {stormy.mean * 1000:.0f} ms on average, {LATENCY_SECONDS * 1000:.0f} of them at the server",
        **daemon.figures(booting, silent),
    )


def test_work_queue_is_full(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """Half of the servers announce themselves and the others are silent; all are up before the queue is empty again."""
    limit = scale.of(short=10, full=100)
    daemon = install_daemon(broker.url)
    daemon.change(
        "from provisioner.hosts.registry import Registry",
        f'Registry.__init__.__kwdefaults__["work_queue_hosts"] = {limit}',
    )
    discover_often(daemon, seconds=scale.of(short=1.0, full=5.0))
    daemon.warm_up(start_servers, broker.url)
    dropped = daemon.metric("queue_full")
    silent = start_servers(broker.url, scale.servers // 2)
    announced = start_servers(broker.url, scale.servers // 2, over=0.1)
    for servers in (silent, announced):
        servers.wait_until_provisioned()
        assert servers.configured_again.total() == 0
    dropped = daemon.metric("queue_full") - dropped

    assert dropped > 0
    assert daemon.logged(f"the work queue is full with {limit} entries")
    daemon.assert_unharmed()
    report(
        f"the work queue took {limit} hosts, for {scale.servers} servers that came at once",
        f"servers were turned away {dropped:g} times, found again, and all provisioned",
        **daemon.figures(silent, announced),
    )


def storm_of_events(silent: Population, *, ghosts: int, number: int) -> tuple[list[bytes], int]:
    """Events in any order: of servers that are there, of some that are not, each many times, and some that are none.

    :returns: also how many are none
    """

    def event(identity: str) -> bytes:
        return events.payload("startup", identity=identity, version="0.30.0", now=time.time())

    proper = [event(server.identity) for server in silent.servers]
    proper += [event(f"ghost{number}-{ghost}.example.net") for ghost in range(ghosts)]
    malformed = [*NO_EVENTS, *(event(identity) for identity in INSANE_IDENTITIES if identity)] * 200
    storm = [*malformed, *itertools.islice(itertools.cycle(proper), EVENTS - len(malformed))]
    random.Random(number).shuffle(storm)
    return storm, len(malformed)


def publish_at_once(broker: NatsServer, payloads: Sequence[bytes]) -> float:
    """Publish startup events as fast as the broker takes them; gives the seconds that it took."""
    subject = events.subject("startup").encode()
    frames = b"".join(b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload) for payload in payloads)
    with socket.create_connection((broker.host, broker.port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
        started = time.monotonic()
        connection.sendall(frames + b"PING\r\n")
        answers = b""
        while b"PONG\r\n" not in answers:
            received = connection.recv(65536)
            assert received, answers
            answers += received
    return time.monotonic() - started


def refused_events(daemon: Daemon) -> int:
    text = daemon.log_file.read_text()
    return text.count("dropped a message on choria.lifecycle.event.") + text.count("refused the identity")


def await_refusals(daemon: Daemon, total: int) -> None:
    daemon.until(lambda: refused_events(daemon) >= total)


def failed_tries(daemon: Daemon, *populations: Population) -> list[str]:
    """What the log says about tries of requests to these servers that failed."""
    identities = {server.identity for population in populations for server in population.servers}
    lines = (line for line in daemon.log() if line.get("identity") in identities)
    return [line["msg"] for line in lines if ", try " in line["msg"]]


@attrs.frozen
class Timing:
    """How many configure requests there were, and what they took together."""

    count: float
    seconds: float

    @classmethod
    def of(cls, daemon: Daemon) -> Timing:
        name, rpc = "choria_provisioner_rpc_time", "choria_provision#configure"
        return cls(daemon.metric(f"{name}_count", rpc=rpc), daemon.metric(f"{name}_sum", rpc=rpc))

    def since(self, earlier: Timing) -> Timing:
        return Timing(self.count - earlier.count, self.seconds - earlier.seconds)

    @property
    def mean(self) -> float:
        return self.seconds / self.count
