"""A fleet on a real broker, seen by the client's half: what a real network of unprovisioned servers would show."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest

from provisioner.choria import brokers, discovery, lifecycle, tls
from provisioner.choria.connector import Connector
from provisioner.choria.nats import Message
from provisioner.choria.protocol import DISCOVERY_SUBJECT, node_subject, reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import Client, NobodyError, RefusedError, RPCError, SilenceError
from provisioner.errors import ProvisionerError
from provisioner.monitor.metrics import ConnectorMetrics
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.counts import Counts
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server, Site
from provisioner.simulate.trust import UntrustedError
from tests.waiting import PATIENCE_SECONDS, wait_until

SITE = Site(token="s3cret", jwt="a.b.c")
GOOD = {"plugin.choria.server.provision": "false"}


Messages = queue.SimpleQueue[Message]


class Network:
    """A provisioner's view of the broker that a fleet is on."""

    def __init__(self, url: str, identity: str = "prov.example.net") -> None:
        caller = f"choria={identity}"
        self.protocol = ProtocolV1(identity=identity, caller=caller, ttl=60)
        address = brokers.parse(url)
        self.connector = Connector(
            lambda: [address],
            name=identity,
            reply_prefix=reply_prefix(caller),
            authenticate=lambda _info: {},
            tls_context=tls.system_trust_context,
            metrics=ConnectorMetrics(),
        )
        assert self.connector.connect(PATIENCE_SECONDS)
        self.client = Client(self.connector, self.protocol)

    def discover(self) -> list[str]:
        sightings = discovery.discover(
            self.connector,
            self.protocol,
            target_agent="choria_provision",
            first_reply=2.0,
            interrupted=lambda: False,
        )
        return sorted(sighting.identity for sighting in sightings)

    def call(self, identity: str, action: str, agent: str = "choria_provision", /, **data: Any) -> dict[str, Any]:
        timeout = data.pop("timeout", PATIENCE_SECONDS)
        session = self.client.session(identity)
        return dict(session.call(agent, action, {"token": "s3cret", **data}, timeout=timeout).data)

    def configure(self, identity: str, config: dict[str, str] | None = None) -> dict[str, Any]:
        return self.call(identity, "configure", config=json.dumps(GOOD if config is None else config))

    def listen(self, subject: str) -> Messages:
        messages: Messages = queue.SimpleQueue()
        self.connector.subscribe(subject, callback=messages.put)
        self.connector.flush()
        return messages

    def events(self, event: str) -> Messages:
        return self.listen(f"choria.lifecycle.event.{event}.provision_mode_server")


@pytest.fixture
def network(broker: NatsServer) -> Iterator[Network]:
    network = Network(broker.url)
    yield network
    network.connector.close()


Start = Callable[..., Fleet]


@pytest.fixture
def start(broker: NatsServer) -> Iterator[Start]:
    """Starts a fleet that is stopped when the test is over."""
    fleets = []

    def start(*servers: Server, **settings: Any) -> Fleet:
        fleet = Fleet(broker.url, servers, **settings)
        fleets.append(fleet)
        fleet.start()
        return fleet

    yield start
    for fleet in fleets:
        fleet.stop()


def server(number: int = 1, **settings: Any) -> Server:
    return Server(**{"identity": f"n{number}.example.net", "site": SITE, **settings})


def wait(fleet: Fleet, condition: Callable[[Counts], bool]) -> Counts:
    assert fleet.wait(condition, PATIENCE_SECONDS), fleet.counts()
    return fleet.counts()


def identity(events: Messages) -> str:
    return lifecycle.parse(events.get(timeout=PATIENCE_SECONDS).payload).identity


def test_servers_that_are_up_are_discovered_and_announce_nothing(network: Network, start: Start) -> None:
    events = network.events("startup")
    fleet = start(*(server(number) for number in range(300)))
    assert network.discover() == sorted(f"n{number}.example.net" for number in range(300))
    assert fleet.counts().booted == 300
    assert fleet.counts().discoveries == 1
    network.connector.flush()
    assert events.empty()


def test_servers_that_boot_announce_themselves_and_can_be_reached_then(network: Network, start: Start) -> None:
    events = network.events("startup")
    start(server(1, boots_after=0.2), server(2, boots_after=0.1))
    assert [identity(events), identity(events)] == ["n2.example.net", "n1.example.net"]
    assert "pong" in network.call("n1.example.net", "ping", "rpcutil")


def test_the_broker_itself_answers_for_a_server_that_is_not_up(network: Network, start: Start) -> None:
    start(server(1, boots_after=3600))
    with pytest.raises(NobodyError):
        network.call("n1.example.net", "ping", "rpcutil")


def test_a_server_is_provisioned_and_then_gone(network: Network, start: Start) -> None:
    configured, leaving = network.events("provisioned"), network.events("shutdown")
    fleet = start(server(1))
    assert network.call("n1.example.net", "jwt")["jwt"] == "a.b.c"
    assert network.call("n1.example.net", "inventory", "rpcutil")["version"] == "0.30.0"
    assert network.configure("n1.example.net")["message"].startswith("Wrote 2 lines")
    assert network.call("n1.example.net", "restart", splay=1)["message"] == "Restarting Choria Server after 2s"
    assert (identity(configured), identity(leaving)) == ("n1.example.net", "n1.example.net")
    counts = fleet.counts()
    assert counts.complete
    assert counts.actions == {
        "choria_provision#jwt": 1,
        "rpcutil#inventory": 1,
        "choria_provision#configure": 1,
        "choria_provision#restart": 1,
    }
    assert (counts.duplicate_configures, counts.lock_conflicts, counts.dropped, counts.lost) == (0, 0, 0, 0)
    assert counts.first_request is not None
    assert counts.last_restart is not None
    assert counts.servers_per_minute > 0
    wait_until_gone(fleet, network, "n1.example.net")


def wait_until_gone(fleet: Fleet, network: Network, name: str) -> None:
    wait(fleet, lambda counts: counts.gone == 1)
    wait_until(lambda: not is_connected(network, name))


def is_connected(network: Network, name: str) -> bool:
    try:
        network.call(name, "ping", "rpcutil", timeout=0.1)
    except NobodyError:
        return False
    except SilenceError:
        pass
    return True


def test_a_server_that_restarts_is_silent_to_provisioners_only(network: Network, start: Start) -> None:
    start(server(1, site=SITE))
    network.configure("n1.example.net")
    network.call("n1.example.net", "restart", splay=100)
    with pytest.raises(SilenceError):
        network.call("n1.example.net", "restart", splay=1, timeout=0.2)
    assert "pong" in network.call("n1.example.net", "ping", "rpcutil")


def test_a_server_restarted_without_the_decisive_setting_comes_back_and_announces_itself(
    network: Network, start: Start
) -> None:
    events = network.events("startup")
    fleet = start(server(1))
    network.configure("n1.example.net", {"loglevel": "info"})
    network.call("n1.example.net", "restart", splay=1)
    assert identity(events) == "n1.example.net"
    counts = wait(fleet, lambda counts: counts.booted == 1 and counts.returned == 1)
    assert (counts.provisioned, counts.complete) == (0, False)
    network.configure("n1.example.net")
    assert fleet.counts().duplicate_configures == 0


def test_a_server_that_upgrades_says_so_and_comes_back_with_its_new_version(network: Network, start: Start) -> None:
    upgraded, startups = network.events("upgraded"), network.events("startup")
    repository = "https://releases.example.net"
    fleet = start(server(1, site=attrs.evolve(SITE, upgradable=True, repository=repository, releases=("0.31.0",))))
    name = "n1.example.net"
    with pytest.raises(RefusedError, match="rolled back"):
        network.call(name, "release_update", repository=repository, version="0.32.0")
    network.call(name, "release_update", repository=repository, version="0.31.0")
    event = json.loads(upgraded.get(timeout=PATIENCE_SECONDS).payload)["data"]
    assert (event["version"], event["new_version"]) == ("0.30.0", "0.31.0")
    startup = json.loads(startups.get(timeout=PATIENCE_SECONDS).payload)["data"]
    assert (startup["identity"], startup["version"]) == (name, "0.31.0")
    assert network.call(name, "inventory", "rpcutil")["version"] == "0.31.0"
    counts = fleet.counts()
    assert (counts.upgraded, counts.returned, counts.provisioned, counts.gone) == (1, 1, 0, 0)


class Strict:
    """A network in which nothing is ever right."""

    def check_request(self, signed: bytes, *, signature: str, proof: str, caller: str) -> str:
        return f"{caller} sent {len(signed) > 0}, {signature}, {proof}"

    def check_server(self, settings: Mapping[str, str], files: Mapping[str, str], *, identity: str) -> None:
        raise UntrustedError(
            f"{identity} with {len(files)} file is not fit: {settings['plugin.choria.server.provision']}"
        )


def test_a_server_that_cannot_live_with_what_it_got_does_not_count_as_provisioned(
    network: Network, start: Start
) -> None:
    fleet = start(server(1, site=attrs.evolve(SITE, trust=Strict())))
    network.configure("n1.example.net")
    network.call("n1.example.net", "restart", splay=1)
    counts = wait(fleet, lambda counts: counts.gone == 1)
    assert (counts.unfit, counts.provisioned, counts.complete) == (1, 0, False)
    assert counts.objections == {"n1.example.net with 1 file is not fit: false": 1}


def test_a_wrong_signature_is_counted_and_answered_all_the_same(network: Network, start: Start) -> None:
    fleet = start(server(1), envelopes=EnvelopesV1(Strict().check_request))
    network.call("n1.example.net", "jwt")
    counts = fleet.counts()
    assert (counts.good_signatures, counts.bad_signatures, counts.dropped) == (0, 1, 0)
    assert counts.objections == {"choria=prov.example.net sent True, insecure, insecure": 1}


def test_where_nobody_looks_at_signatures_none_is_counted(network: Network, start: Start) -> None:
    fleet = start(server(1))
    network.call("n1.example.net", "jwt")
    assert (fleet.counts().good_signatures, fleet.counts().bad_signatures) == (0, 0)


def test_a_server_told_to_shut_down_at_once_is_gone_without_an_answer(network: Network, start: Start) -> None:
    fleet = start(server(1, draw=lambda _below: 0))
    with pytest.raises(SilenceError):
        network.call("n1.example.net", "shutdown", timeout=0.2)
    wait_until_gone(fleet, network, "n1.example.net")
    assert (fleet.counts().shut_down, fleet.counts().provisioned) == (1, 0)


def test_duplicates_locks_and_failures_are_counted(broker: NatsServer, network: Network, start: Start) -> None:
    fleet = start(server(1, fails=True))
    with pytest.raises(RefusedError, match="no space left"):
        network.configure("n1.example.net")
    network.configure("n1.example.net")
    network.configure("n1.example.net")
    other = Network(broker.url, "other.example.net")
    with pytest.raises(RefusedError, match="lock"):
        other.configure("n1.example.net")
    other.connector.close()
    counts = fleet.counts()
    assert (counts.failed, counts.duplicate_configures, counts.lock_conflicts) == (1, 1, 1)


def test_every_server_answers_in_its_own_time(network: Network, start: Start) -> None:
    start(*(server(number) for number in range(20)), latency=0.05)
    assert len(network.discover()) == 20


def test_a_request_that_no_server_looks_at_is_counted(network: Network, start: Start) -> None:
    fleet = start(server(1))
    network.connector.publish(node_subject("n1.example.net"), payload=b"{}")
    wait(fleet, lambda counts: counts.dropped == 1)


def test_a_reply_subject_that_brokers_forbid_gets_no_reply(network: Network, start: Start) -> None:
    fleet = start(server(1))
    replies = network.listen("elsewhere.>")
    for subject in ("elsewhere.a", "provisioning.reply", "provisioning.reply.a b", "provisioning.reply.>"):
        network.connector.publish(
            DISCOVERY_SUBJECT,
            payload=network.protocol.request(
                agent="discovery",
                target_agent="choria_provision",
                body="cGluZw==",
                request_id="a" * 32,
                reply_to=subject,
                connected_url="nats://x:1",
            ),
        )
    wait(fleet, lambda counts: counts.lost == 4)
    network.connector.flush()
    assert replies.empty()


@pytest.mark.parametrize("way", [way for way in Misbehaviour if way is not Misbehaviour.TWICE])
def test_a_server_that_misbehaves_cannot_be_provisioned(way: Misbehaviour, network: Network, start: Start) -> None:
    fleet = start(server(1, misbehaviour=way), server(2))
    assert (fleet.counts().servers, fleet.counts().misbehaving) == (1, 1)
    session = network.client.session("n1.example.net")

    def fetch_jwt() -> None:
        session.call("choria_provision", "jwt", {"token": "s3cret"}, timeout=0.3).text("jwt")

    with pytest.raises(RPCError):  # noqa: PT012 one way is noticed some time after the first reply, all others with it
        fetch_jwt()
        wait_until(lambda: session.conflict)
        fetch_jwt()
    network.call("n2.example.net", "jwt")
    assert network.discover() == ["n1.example.net", "n2.example.net"]


def test_noise_in_a_discovery_hides_no_server(network: Network, start: Start) -> None:
    start(*(server(number) for number in range(5)), noise=True)
    assert network.discover() == [f"n{number}.example.net" for number in range(5)]


def test_servers_outlive_the_broker_and_those_that_boot_meanwhile_wait_for_it() -> None:
    broker = NatsServer()
    broker.start()
    fleet = Fleet(broker.url, [server(1), server(2, boots_after=0.5)])
    network = Network(broker.url)
    try:
        events = network.events("startup")
        fleet.start()
        broker.kill()
        wait_until(lambda: not network.connector.connected)
        assert fleet.counts().booted == 1
        broker.start()
        wait(fleet, lambda counts: counts.booted == 2)
        wait_until(lambda: network.connector.connected)
        assert network.discover() == ["n1.example.net", "n2.example.net"]
        announced = [identity(events) for _ in range(events.qsize())]
        assert announced in ([], ["n2.example.net"])
    finally:
        fleet.stop()
        network.connector.close()
        broker.close()


def test_without_a_broker_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.simulate.fleet.CONNECT_SECONDS", 0.1)
    fleet = Fleet("nats://127.0.0.1:1", [server(1)])
    with pytest.raises(ProvisionerError, match="cannot connect"):
        fleet.start()
    fleet.stop()


def test_it_leaves_no_thread_behind(start: Start) -> None:
    before = set(threading.enumerate())
    fleet = start(server(1))
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"simulated-fleet"}
    fleet.stop()
    assert set(threading.enumerate()) <= before
