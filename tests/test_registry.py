"""Admission and release: the rules of the fleet-level scheduler, as its design document states them."""

from __future__ import annotations

import threading
import time

import pytest

from provisioner.host.host import Host
from provisioner.hosts.registry import WORK_QUEUE_HOSTS, Registry
from provisioner.monitor.metrics import Metrics
from tests.scheduled import value

INTERVAL = 60.0


def sighted(identity: str, ago: float = 0.0) -> Host:
    return Host(identity, time.monotonic() - ago)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("lab")


@pytest.fixture
def registry(metrics: Metrics) -> Registry:
    return Registry(INTERVAL, metrics)


def test_a_new_host_is_admitted_and_queued(registry: Registry, metrics: Metrics) -> None:
    host = sighted("n1")

    assert registry.add(host)
    assert value(metrics, "waiting_nodes") == 1
    assert value(metrics, "work_queue_entries") == 1
    assert registry.take(0) is host
    assert registry.is_current(host)
    assert value(metrics, "work_queue_entries") == 0
    assert value(metrics, "waiting_nodes") == 1


def test_a_known_identity_is_admitted_once(registry: Registry) -> None:
    first = sighted("n1")
    registry.add(first)

    assert not registry.add(sighted("n1"))
    assert registry.take(0) is first
    assert registry.take(0) is None


def test_it_is_the_age_of_the_new_sighting_that_counts_not_that_of_the_entry(registry: Registry) -> None:
    registry.add(sighted("n1", ago=10 * INTERVAL))

    assert not registry.add(sighted("n1")), "a fresh sighting of a host known for long is a duplicate"
    assert registry.add(sighted("n1", ago=INTERVAL)), "an old sighting is admitted again: no host may be lost"


def test_a_host_that_waits_and_is_sighted_once_more_may_wait_that_much_longer(registry: Registry) -> None:
    host, again = sighted("n1", ago=2 * INTERVAL), sighted("n1", ago=1)
    registry.add(host)
    registry.add(again)

    assert registry.take(0) is host
    assert host.discovered == again.discovered

    registry.add(sighted("n1", ago=30))
    assert host.discovered == again.discovered, "a sighting that was held up does not make it older"


def test_a_host_admitted_again_is_worked_on_once(registry: Registry) -> None:
    stale, renewed = sighted("n1"), sighted("n1", ago=INTERVAL)
    registry.add(stale)
    registry.add(renewed)

    assert registry.take(0) is stale
    assert not registry.is_current(stale), "its queue entry was left behind by the new sighting"
    assert registry.take(0) is renewed
    assert registry.is_current(renewed)


def test_a_late_done_does_not_remove_a_newer_sighting(registry: Registry, metrics: Metrics) -> None:
    old, new = sighted("n1"), sighted("n1", ago=INTERVAL)
    registry.add(old)
    registry.add(new)

    registry.remove(old)

    assert registry.is_current(new)
    assert value(metrics, "waiting_nodes") == 1


def test_a_full_queue_drops_the_host_and_says_so(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(INTERVAL, metrics, work_queue_hosts=2)
    assert registry.add(sighted("n1"))
    assert registry.add(sighted("n2"))

    dropped = sighted("n3")
    assert not registry.add(dropped)
    assert not registry.is_current(dropped), "the map holds only what is on the queue"
    assert value(metrics, "waiting_nodes") == 2
    assert value(metrics, "queue_full") == 1
    assert "full with 2 entries, 2 hosts are waiting" in caplog.text
    assert caplog.records[0].identity == "n3"  # type: ignore[attr-defined]

    registry.take(0)
    assert registry.add(sighted("n3")), "it is admitted at its next sighting"


def test_the_queue_holds_fifty_thousand_hosts(registry: Registry, metrics: Metrics) -> None:
    for number in range(WORK_QUEUE_HOSTS):
        assert registry.add(sighted(f"n{number}"))

    assert not registry.add(sighted("one-more"))
    assert value(metrics, "work_queue_entries") == WORK_QUEUE_HOSTS == 50_000


def test_a_removed_host_can_be_admitted_again_at_once(registry: Registry, metrics: Metrics) -> None:
    host = sighted("n1")
    registry.add(host)
    registry.take(0)
    registry.remove(host)

    assert value(metrics, "waiting_nodes") == 0
    assert registry.add(sighted("n1"))


def test_a_lost_election_empties_map_and_queue(registry: Registry, metrics: Metrics) -> None:
    taken, queued = sighted("n1"), sighted("n2")
    registry.add(taken)
    registry.add(queued)
    registry.take(0)

    registry.remove_all()

    assert value(metrics, "waiting_nodes") == value(metrics, "work_queue_entries") == 0
    assert registry.take(0) is None
    registry.remove(taken)  # its delayed end finds nothing of its own, and does no harm
    assert registry.add(sighted("n1"))


def test_a_host_that_was_taken_but_not_begun_when_an_election_was_lost_is_admitted_again(registry: Registry) -> None:
    taken = sighted("n1")
    registry.add(taken)
    registry.take(0)
    registry.remove_all()

    assert not registry.is_current(taken), "so nobody is going to be done with it"
    assert registry.add(sighted("n1"))


def test_a_host_in_work_when_an_election_is_lost_is_let_go_and_not_admitted_before_it_is_done(
    registry: Registry,
) -> None:
    taken, queued = sighted("n1"), sighted("n2")
    registry.add(taken)
    assert registry.take(0) is taken
    registry.add(queued)
    registry.remove_all()

    assert taken.let_go
    assert not registry.add(sighted("n1"))
    assert registry.add(sighted("n2"))
    registry.remove(taken)
    assert registry.add(sighted("n1"))


def test_taking_from_an_empty_queue_gives_up_in_time(registry: Registry) -> None:
    assert registry.take(0.01) is None


def test_many_threads_admit_every_identity_exactly_once(registry: Registry, metrics: Metrics) -> None:
    admitted: list[str] = []
    barrier = threading.Barrier(8)

    def admit_all() -> None:
        barrier.wait()
        admitted.extend(f"n{number}" for number in range(500) if registry.add(sighted(f"n{number}")))

    threads = [threading.Thread(target=admit_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(admitted) == sorted(f"n{number}" for number in range(500))
    assert value(metrics, "waiting_nodes") == value(metrics, "work_queue_entries") == 500
