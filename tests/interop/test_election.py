"""Of several instances on a real broker one provisions; the Go original's candidate takes part in their election."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.interop.conftest import MakeNetwork
from tests.interop.network import Network
from tests.interop.parts import Candidate, Server

#: What Choria's broker forgets a leader after if it is not told otherwise, and less for tests that have to wait for it.
DEFAULT_TTL, SHORT_TTL = "60s", "20s"
#: In which another instance leads, and the Go original's candidate where the broker has forgotten the leader.
AFTER_EXIT_SECONDS = 20.0
AFTER_CRASH_SECONDS = 30.0
AFTER_EVICTION_SECONDS = 30.0
AFTER_SHORT_TTL_SECONDS = 60.0


def wait_for_leader(network: Network, *candidates: Candidate, within: float) -> None:
    network.eventually(lambda: any(candidate.leads for candidate in candidates), "another one leads", within)


def assert_one_at_a_time(candidates: Sequence[Candidate], servers: Sequence[Server]) -> None:
    """No two of the candidates led at one time, and whoever asked something of a server led when it did."""
    reigns = sorted((reign for candidate in candidates for reign in candidate.reigns), key=lambda reign: reign.began)
    for earlier, later in itertools.pairwise(reigns):
        assert earlier.ended < later.began
    for request in (request for server in servers for request in server.requests):
        by = [reign for reign in reigns if reign.began <= request.at <= reign.ended]
        assert [reign.identity for reign in by] == [request.sender], request


def assert_configured_once(*servers: Server) -> None:
    for server in servers:
        actions = [request.action for request in server.requests]
        assert (actions.count("configure"), actions.count("restart")) == (1, 1), server.identity


def test_the_standby_provisions_after_the_leader_has_left_and_after_it_has_crashed(make_network: MakeNetwork) -> None:
    networks = [make_network(kind, election_ttl=DEFAULT_TTL) for kind in ("x509", "org")]
    with ThreadPoolExecutor(len(networks)) as pool:  # side by side, for most of it is waiting
        list(pool.map(_leave_and_crash, networks))


def _leave_and_crash(network: Network) -> None:
    network.settings["leader_election"] = True
    network.start_broker()
    first = network.start_daemon()
    network.eventually(lambda: first.leads, "the first instance leads")
    second = network.start_daemon("standby.cfg")
    network.eventually(lambda: second.logged("connected to"), "the second instance stands by")
    servers = network.start_servers("n1.example.net")
    network.wait_for_members(*servers)

    servers += network.start_servers("n2.example.net")
    first.leave()
    wait_for_leader(network, second, within=AFTER_EXIT_SECONDS)
    network.wait_for_members(*servers)

    third = network.start_daemon()
    network.eventually(lambda: third.logged("connected to"), "the third instance stands by")
    network.gate.touch()
    (half_done,) = network.start_servers("half-done.example.net")
    network.eventually(lambda: network.asked("half-done.example.net"), "the leader has a server in work")
    second.kill()
    network.gate.unlink()
    servers += network.start_servers("n3.example.net")
    wait_for_leader(network, third, within=AFTER_CRASH_SECONDS)
    network.wait_for_members(*servers)
    if first.identity != second.identity:
        # the third is somebody else than the second, to whom the server is promised for two minutes
        network.eventually(lambda: third.logged("Could not obtain provisioning lock"), "the server is locked")
        assert half_done.is_waiting
    else:
        servers.append(half_done)
        network.wait_for_members(*servers)

    assert_configured_once(*servers)
    assert_one_at_a_time([first, second, third], [*servers, half_done])
    third.leave()


def test_the_go_candidate_and_we_take_over_from_each_other(make_network: MakeNetwork) -> None:
    network = make_network("org", election_ttl=SHORT_TTL)
    network.settings["leader_election"] = True
    network.start_broker()
    first = network.start_daemon()
    network.eventually(lambda: first.leads, "the first instance leads")
    original = network.start_go_candidate()
    network.eventually(original.lines, "the Go candidate campaigns")
    first.leave()
    wait_for_leader(network, original, within=AFTER_SHORT_TTL_SECONDS)

    second = network.start_daemon()
    network.eventually(lambda: second.logged("connected to"), "the second instance stands by")
    servers = network.start_servers("n1.example.net")
    network.wait_for_waiting(*servers)
    assert original.stop() == 0
    wait_for_leader(network, second, within=AFTER_CRASH_SECONDS)
    network.wait_for_members(*servers)

    assert_configured_once(*servers)
    assert_one_at_a_time([first, original, second], servers)
    second.leave()


def test_an_evicted_leader_stands_down_and_there_is_another_before_the_broker_has_forgotten_it(
    make_network: MakeNetwork,
) -> None:
    network = make_network("x509", election_ttl=DEFAULT_TTL)
    network.settings["leader_election"] = True
    network.start_broker()
    first = network.start_daemon()
    network.eventually(lambda: first.leads, "the first instance leads")
    second = network.start_daemon("standby.cfg")
    network.eventually(lambda: second.logged("connected to"), "the second instance stands by")

    network.evict()
    network.eventually(lambda: not first.leads, "the first instance stands down")
    servers = network.start_servers("n1.example.net")
    wait_for_leader(network, first, second, within=AFTER_EVICTION_SECONDS)
    network.wait_for_members(*servers)

    assert_configured_once(*servers)
    assert_one_at_a_time([first, second], servers)
    first.leave()
    second.leave()
