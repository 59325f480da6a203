"""Hosts that keep failing are left alone for a while, and none is lost by that."""

from __future__ import annotations

import concurrent.futures
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria.discovery import Sighting
from provisioner.hosts import history as history_module
from provisioner.hosts.history import (
    CHART_MINUTES,
    COMMON_HOSTS,
    FREED_HOSTS,
    PROBE_INTERVALS,
    RECENT_ATTEMPTS,
    SHORTEST_PART,
    TROUBLED_HOSTS,
    History,
)
from provisioner.monitor.status import Attempt, Outcome

INTERVAL = 60.0
HOUR = 3600.0
EPOCH = 1_800_000_000.0
HELPER = "helper"


class Lab:
    """A history on clocks that the test moves, and shorthands for what is done to it."""

    def __init__(
        self, *, backoff: bool = True, interval: float = INTERVAL, part: Callable[[], float] = lambda: 1.0
    ) -> None:
        self.now = 0.0
        self.history = History(
            backoff=backoff,
            interval=interval,
            clock=lambda: self.now,
            wall_clock=lambda: EPOCH + self.now,
            part=part,
        )

    def record(self, identity: str, outcome: Outcome, *, step: str = "", reason: str = "", hold: float = 0.0) -> None:
        attempt = Attempt(
            identity=identity,
            worker="worker-1",
            ended=EPOCH + self.now,
            seconds=0.5,
            outcome=outcome,
            step=step,
            reason=reason,
        )
        self.history.record(attempt, hold=hold)

    def fail(self, *identities: str, times: int = 1, step: str = HELPER) -> None:
        for identity in identities:
            for _ in range(times):
                self.record(identity, Outcome.FAILED, step=step, reason="it is broken")

    def succeed(self, identity: str) -> None:
        self.record(identity, Outcome.PROVISIONED)

    def choose(self, *identities: str) -> list[str]:
        """Who is admitted of those whom a discovery has found, sooner or later, in order."""
        sightings = [Sighting(identity, self.now) for identity in identities]
        return [sighting.identity for sighting in self.history.choose(sightings)]

    def intervals_until_chosen(self, identity: str) -> int:
        """Discover in every interval until a host is admitted."""
        for count in range(1, 1000):
            self.now += INTERVAL
            if self.choose(identity):
                return count
        pytest.fail("it is lost")

    def failures(self) -> dict[str, int]:
        return {trouble.identity: trouble.failures for trouble in self.history.troubled()}


@pytest.fixture
def lab() -> Lab:
    return Lab()


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


class TestPauses:
    """How long a host is left alone."""

    def test_a_host_without_a_history_is_admitted(self, lab: Lab) -> None:
        assert lab.choose("n1", "n2") == ["n1", "n2"]

    def test_two_retries_come_with_the_normal_cycle_then_pauses_double_up_to_an_hour(self, lab: Lab) -> None:
        waited = []
        for _ in range(11):
            lab.fail("n1")
            waited.append(lab.intervals_until_chosen("n1"))

        assert waited == [1, 1, 2, 4, 8, 16, 32, 59, 59, 59, 59]

    def test_the_next_discovery_included_no_pause_is_longer_than_an_hour(self) -> None:
        lab = Lab(part=lambda: 1.0)
        lab.fail("n1", times=2000)
        lab.now += HOUR - INTERVAL

        assert lab.choose("n1") == ["n1"]

    def test_a_pause_ends_at_random_between_three_quarters_and_all_of_it(self) -> None:
        parts = {History(backoff=True, interval=INTERVAL)._part() for _ in range(1000)}

        assert SHORTEST_PART == 0.75
        assert all(SHORTEST_PART <= part <= 1.0 for part in parts)
        assert len(parts) > 900

    def test_hosts_that_failed_at_once_do_not_come_back_at_once(self) -> None:
        lab = Lab(part=lambda: random.uniform(SHORTEST_PART, 1.0))
        steps = {name: f"step {name}" for name in names(200)}  # nothing in common
        for name, step in steps.items():
            lab.fail(name, times=10, step=step)
        back = []
        for _ in range(60):
            lab.now += INTERVAL
            back.append(len(lab.choose(*steps)))

        first = next(number for number, count in enumerate(back, 1) if count)
        assert first >= 44
        assert len(set(back[first - 1 : -1])) > 5
        assert back[-1] == 200

    def test_a_pause_runs_by_the_monotonic_clock(self, lab: Lab) -> None:
        lab.fail("n1", times=3)
        lab.history._wall_clock = lambda: EPOCH + 10 * HOUR  # somebody sets the clock

        assert lab.choose("n1") == []
        assert lab.intervals_until_chosen("n1") == 2

    @pytest.mark.parametrize("outcome", [Outcome.PROVISIONED, Outcome.SHUT_DOWN, Outcome.UPGRADING, Outcome.DEFERRED])
    def test_it_starts_anew_when_nothing_is_wrong_any_more(self, lab: Lab, outcome: Outcome) -> None:
        lab.fail("n1", times=5)
        lab.record("n1", outcome)

        assert lab.failures() == {}
        assert lab.choose("n1") == ["n1"]
        lab.fail("n1", times=2)
        assert lab.choose("n1") == ["n1"]

    def test_an_attempt_that_says_nothing_about_the_host_changes_nothing(self, lab: Lab) -> None:
        lab.fail("n1", times=4)
        lab.record("n1", Outcome.LEFT_ALONE, reason="provisioning is paused")

        assert lab.failures() == {"n1": 4}
        assert lab.intervals_until_chosen("n1") == 4
        lab.record("n1", Outcome.LEFT_ALONE, reason="waited too long")
        assert lab.choose("n1") == ["n1"], "its pause is over, and stays so until it is tried"

    def test_a_host_that_was_chosen_and_did_not_get_its_turn_is_chosen_again(self, lab: Lab) -> None:
        lab.fail("n1", times=3)
        assert lab.intervals_until_chosen("n1") == 2

        assert lab.intervals_until_chosen("n1") == 1

    def test_intervals_longer_than_the_longest_pause_are_pause_enough(self) -> None:
        lab = Lab(interval=2 * HOUR)
        lab.fail("n1", times=20)

        assert lab.choose("n1") == ["n1"]

    def test_switched_off_it_leaves_nobody_alone(self) -> None:
        lab = Lab(backoff=False)
        lab.fail(*names(5), times=20)

        assert sorted(lab.choose(*names(5))) == names(5)
        assert lab.failures() == dict.fromkeys(names(5), 20)

    def test_those_in_no_trouble_are_admitted_first_then_those_that_failed_less_often(self, lab: Lab) -> None:
        lab.fail("often", times=2)
        lab.fail("once")

        assert lab.choose("often", "once", "n1", "n2") == ["n1", "n2", "once", "often"]


class TestLocks:
    """A server that another provisioner has in work."""

    @pytest.mark.parametrize("backoff", [True, False])
    def test_it_is_left_alone_for_as_long_as_it_is_locked(self, backoff: bool) -> None:
        lab = Lab(backoff=backoff)
        lab.record("n1", Outcome.LEFT_ALONE, hold=120)

        assert lab.failures() == {}
        lab.now += 119
        assert lab.choose("n1", "n2") == ["n2"]
        lab.now += 1
        assert lab.choose("n1", "n2") == ["n1", "n2"]

    def test_when_it_boots_the_lock_is_gone(self, lab: Lab) -> None:
        lab.record("n1", Outcome.LEFT_ALONE, hold=120)
        lab.history.booted("n1")

        assert lab.choose("n1") == ["n1"]

    def test_it_does_not_end_because_others_succeed(self, lab: Lab) -> None:
        lab.fail(*names(5), times=3)
        for name in names(4):
            lab.record(name, Outcome.LEFT_ALONE, hold=120)
        lab.succeed("n4")

        assert lab.choose(*names(4)) == []


class TestBoots:
    """A server that starts may be mended."""

    def test_it_is_admitted_at_once_and_its_pauses_start_anew(self, lab: Lab) -> None:
        lab.fail("n1", times=10)
        assert lab.choose("n1") == []
        lab.history.booted("n1")

        assert lab.choose("n1") == ["n1"]
        waited = []
        for _ in range(3):
            lab.fail("n1")
            waited.append(lab.intervals_until_chosen("n1"))
        assert waited == [1, 1, 2]

    def test_its_failures_are_still_counted_for_people(self, lab: Lab) -> None:
        lab.fail("n1", times=10)
        lab.history.booted("n1")
        lab.fail("n1")

        assert lab.failures() == {"n1": 11}

    def test_of_a_host_in_no_trouble_nothing_is_noted(self, lab: Lab) -> None:
        lab.history.booted("n1")

        assert lab.history.troubled() == []


class TestCausesInCommon:
    """Many hosts that fail at the same step do not sit out their pauses once the cause is mended."""

    def test_one_of_them_is_tried_every_few_intervals_the_one_that_waits_longest_first(self, lab: Lab) -> None:
        for name in names(COMMON_HOSTS):
            lab.fail(name, times=20)
            lab.now += 1
        chosen = []
        for _ in range(4 * PROBE_INTERVALS + 1):
            chosen.append(lab.choose(*names(COMMON_HOSTS)))
            lab.fail(*chosen[-1])
            lab.now += INTERVAL

        assert [name for tried in chosen for name in tried] == ["n0", "n1", "n2", "n0"]
        assert [number for number, tried in enumerate(chosen) if tried] == [5, 10, 15, 20]

    def test_it_is_one_for_each_step(self, lab: Lab) -> None:
        lab.fail(*names(50), times=20)
        lab.fail(*names(50, "m"), times=20, step="rpcutil#inventory")
        assert lab.choose(*names(50), *names(50, "m")) == []
        lab.now += PROBE_INTERVALS * INTERVAL

        assert sorted(lab.choose(*names(50), *names(50, "m"))) == ["m0", "n0"]

    def test_two_hosts_are_not_enough_to_take_the_cause_for_a_common_one(self, lab: Lab) -> None:
        lab.fail("n1", "n2", times=20)
        for _ in range(58):
            lab.now += INTERVAL
            assert lab.choose("n1", "n2") == []

    def test_a_host_that_fails_in_every_cycle_does_not_speak_for_them(self, lab: Lab) -> None:
        lab.fail(*names(COMMON_HOSTS), times=20)
        chosen = []
        for _ in range(PROBE_INTERVALS + 1):
            lab.fail("another")
            lab.history.booted("another")
            chosen += lab.choose(*names(COMMON_HOSTS))
            lab.now += INTERVAL

        assert chosen == ["n0"]

    def test_one_that_did_not_get_its_turn_is_chosen_again_and_no_other(self, lab: Lab) -> None:
        lab.fail(*names(5), times=20)
        lab.choose(*names(5))
        lab.now += PROBE_INTERVALS * INTERVAL
        assert lab.choose(*names(5)) == ["n0"]
        lab.now += INTERVAL
        assert lab.choose(*names(5)) == ["n0"]

    def test_a_success_frees_others_that_failed_at_the_same_step(self, lab: Lab) -> None:
        lab.fail(*names(50), times=10)
        lab.fail(*names(50, "m"), times=10, step="rpcutil#inventory")
        lab.succeed("n0")

        freed = lab.choose(*names(50), *names(50, "m"))
        assert freed == ["n0", *names(FREED_HOSTS + 1)[1:]], "n0 would be a sighting from before it left"
        lab.now += INTERVAL
        assert lab.choose(*names(50)[20:]) == [], "once, not with every discovery"

    def test_every_success_frees_more(self, lab: Lab) -> None:
        lab.fail(*names(100), times=10)
        for name in names(3):
            lab.succeed(name)

        assert len(lab.choose(*names(100)[3:])) == 3 * FREED_HOSTS

    def test_it_does_so_too_when_one_of_them_is_to_be_tried_anyway(self, lab: Lab) -> None:
        lab.fail(*names(50), times=20)
        lab.choose(*names(50))
        lab.now += PROBE_INTERVALS * INTERVAL
        lab.succeed("n0")

        assert len(lab.choose(*names(50)[1:])) == FREED_HOSTS

    def test_a_host_that_just_stumbled_says_nothing_about_the_others(self, lab: Lab) -> None:
        lab.fail(*names(50), times=10)
        lab.fail("n0", times=2, step=HELPER)
        lab.fail("stumbled", times=2)
        lab.succeed("stumbled")

        assert lab.choose(*names(50)) == []

    def test_a_host_mended_by_hand_and_booted_shows_that_the_cause_is_gone(self, lab: Lab) -> None:
        lab.fail(*names(50), times=10)
        lab.history.booted("n0")
        lab.succeed("n0")

        assert len(lab.choose(*names(50)[1:])) == FREED_HOSTS

    @pytest.mark.parametrize("count", [3, 30, 3000])
    def test_a_fleet_that_failed_for_hours_is_back_minutes_after_the_cause_is_mended(self, count: int) -> None:
        lab = Lab(part=lambda: random.uniform(SHORTEST_PART, 1.0))
        waiting = set(names(count))
        for _ in range(3 * 60):
            lab.now += INTERVAL
            lab.fail(*lab.choose(*waiting))
        intervals = 0
        while waiting:
            lab.now += INTERVAL
            intervals += 1
            for name in lab.choose(*waiting):
                lab.succeed(name)
                waiting.remove(name)

        assert intervals <= PROBE_INTERVALS + 4

    def test_hosts_that_are_broken_for_good_do_not_stand_in_the_way_of_that(self) -> None:
        lab = Lab(part=lambda: random.uniform(SHORTEST_PART, 1.0))
        dead, waiting = names(2000, "dead"), set(names(100))
        lab.fail(*dead, times=10, step="rpcutil#inventory")
        for _ in range(60):
            lab.now += INTERVAL
            for name in lab.choose(*dead, *waiting):
                lab.fail(name, step=HELPER if name in waiting else "rpcutil#inventory")
        intervals = 0
        while waiting:
            lab.now += INTERVAL
            intervals += 1
            for name in lab.choose(*dead, *waiting):
                if name in waiting:
                    lab.succeed(name)
                    waiting.remove(name)
                else:
                    lab.fail(name, step="rpcutil#inventory")

        assert intervals <= PROBE_INTERVALS + 4

    def test_broken_hosts_cost_little_beside_the_tries_that_are_due(self) -> None:
        lab = Lab()
        dead = names(COMMON_HOSTS)
        lab.fail(*dead, times=20)
        tries = 0
        for _ in range(60):
            lab.now += INTERVAL
            tried = lab.choose(*dead)
            lab.fail(*tried)
            tries += len(tried)

        assert tries == 60 / PROBE_INTERVALS - 1


class TestNobodyIsLost:
    """Whatever happens, a host that waits is admitted within an hour."""

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([*Outcome, "boot", "discover", "later", "forget"]),
                st.sampled_from(names(4)),
                st.sampled_from(["", HELPER, "rpcutil#inventory"]),
            ),
            max_size=60,
        )
    )
    def test_after_any_past(self, past: list[tuple[str, str, str]]) -> None:
        lab = Lab(part=lambda: random.uniform(SHORTEST_PART, 1.0))
        for event, name, step in past:
            if event == "boot":
                lab.history.booted(name)
            elif event == "discover":
                lab.choose(*names(4))
            elif event == "later":
                lab.now += 3 * INTERVAL
            elif event == "forget":
                lab.history.forget()
            else:
                outcome = Outcome(event)
                lab.record(name, outcome, step=step, hold=120 if outcome is Outcome.LEFT_ALONE and not step else 0)
        waiting, end = set(names(4)), lab.now + HOUR
        while lab.now < end:
            lab.now += INTERVAL
            waiting -= set(lab.choose(*waiting))

        assert waiting == set()


class TestMemory:
    """What is known is bounded, and what has gone is forgotten."""

    def test_a_host_that_was_not_seen_for_an_hour_is_forgotten(self, lab: Lab) -> None:
        lab.fail("gone", "n1", times=3)
        lab.now += HOUR
        lab.choose("n1")
        assert lab.failures() == {"gone": 3, "n1": 3}
        lab.now += 1
        lab.choose("n1")

        assert lab.failures() == {"n1": 3}
        assert lab.history.troubled_count() == 1

    def test_a_discovery_that_comes_rarely_forgets_nobody_it_finds(self) -> None:
        lab = Lab(interval=10 * HOUR)
        lab.fail("n1", "gone")
        for _ in range(4):
            lab.now += 10 * HOUR
            lab.choose("n1")

        assert lab.failures() == {"n1": 1}

    def test_a_host_that_a_discovery_missed_is_not_forgotten_yet(self) -> None:
        lab = Lab(interval=10 * HOUR)
        lab.fail("n1")
        for _ in range(3):
            lab.now += 10 * HOUR
            lab.choose()

        assert lab.failures() == {"n1": 1}

    def test_of_more_hosts_than_can_be_known_those_not_seen_for_longest_are_forgotten(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert TROUBLED_HOSTS == 50_000
        monkeypatch.setattr(history_module, "TROUBLED_HOSTS", 3)
        lab.fail("n1", "n2", "n3", times=3)
        lab.choose("n1")
        lab.fail("n4")

        assert sorted(lab.failures()) == ["n1", "n3", "n4"]
        assert lab.choose("n1", "n2") == ["n2"], "it is admitted as a new one"

    def test_of_locks_too(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(history_module, "TROUBLED_HOSTS", 3)
        for name in names(5):
            lab.record(name, Outcome.LEFT_ALONE, hold=120)

        assert lab.choose(*names(5)) == ["n0", "n1"]

    def test_steps_that_are_long_ago_are_forgotten(self, lab: Lab) -> None:
        for number in range(100):
            lab.fail("n1", times=3, step=f"step {number}")
            lab.choose("n1")
            lab.succeed("n1")
        lab.choose()

        assert not lab.history._probed
        assert not lab.history._freed

    def test_the_recent_attempts_are_the_last_few_hundred_newest_first(self, lab: Lab) -> None:
        for name in names(RECENT_ATTEMPTS + 10):
            lab.succeed(name)

        recent = lab.history.recent()
        assert len(recent) == RECENT_ATTEMPTS == 500
        assert [attempt.identity for attempt in recent[:2]] == ["n509", "n508"]

    def test_an_instance_that_does_not_provision_forgets_the_troubles_but_not_what_it_did(self, lab: Lab) -> None:
        lab.fail("n1", times=10)
        lab.record("n2", Outcome.LEFT_ALONE, hold=120)
        lab.history.forget()

        assert lab.history.troubled() == []
        assert lab.choose("n1", "n2") == ["n1", "n2"]
        assert len(lab.history.recent()) == 11


class TestWhatPeopleSee:
    """The data of the status page."""

    def test_a_trouble_tells_of_the_first_and_the_last_failure_and_of_the_next_try(self, lab: Lab) -> None:
        lab.fail("n1")
        lab.now += 100
        lab.fail("n1", times=2, step="choria_provision#jwt")
        lab.now += 10

        trouble = lab.history.troubled()[0]
        assert (trouble.identity, trouble.failures) == ("n1", 3)
        assert (trouble.since, trouble.last) == (EPOCH, EPOCH + 100)
        assert (trouble.step, trouble.reason) == ("choria_provision#jwt", "it is broken")
        assert trouble.next_try == EPOCH + 100 + 120

    def test_the_next_try_is_0_when_it_comes_with_the_next_discovery(self, lab: Lab) -> None:
        lab.fail("n1", times=2)
        assert lab.history.troubled()[0].next_try == 0
        lab.fail("n1")
        lab.history.booted("n1")
        assert lab.history.troubled()[0].next_try == 0

    def test_the_worst_come_first(self, lab: Lab) -> None:
        for name, times in (("n1", 1), ("n2", 3), ("n3", 2)):
            lab.fail(name, times=times)

        assert list(lab.failures()) == ["n2", "n3", "n1"]

    def test_whoever_records_a_failure_learns_what_comes_of_it(self, lab: Lab) -> None:
        attempt = Attempt(identity="n1", worker="w", ended=EPOCH, seconds=1, outcome=Outcome.FAILED)
        lab.fail("n1", times=2)
        trouble = lab.history.record(attempt)

        assert trouble is not None
        assert (trouble.failures, trouble.next_try) == (3, EPOCH + 120)

    def test_the_chart_has_every_minute_of_the_last_hour(self, lab: Lab) -> None:
        lab.succeed("n0")
        lab.now += 30 * 60
        lab.succeed("n1")
        lab.succeed("n2")
        lab.fail("n3")
        lab.now += 60

        chart = lab.history.per_minute()
        assert len(chart) == CHART_MINUTES == 60
        assert [minute.start for minute in chart[-2:]] == [EPOCH + 30 * 60, EPOCH + 31 * 60]
        assert [minute.outcomes for minute in chart[-3:]] == [{}, {Outcome.PROVISIONED: 2, Outcome.FAILED: 1}, {}]
        assert chart[-32].outcomes == {Outcome.PROVISIONED: 1}
        lab.now += HOUR
        assert all(not minute.outcomes for minute in lab.history.per_minute())

    def test_the_chart_is_bounded_whatever_the_clock_does(self, lab: Lab) -> None:
        for _ in range(300):
            lab.now += random.uniform(-HOUR, HOUR)
            lab.succeed("n1")

        assert len(lab.history._minutes) <= CHART_MINUTES

    def test_a_result_is_a_plain_word(self) -> None:
        assert [str(result) for result in Outcome] == [
            "provisioned",
            "shut down",
            "sent to upgrade",
            "deferred",
            "left alone",
            "failed",
        ]


def test_threads_do_not_disturb_each_other() -> None:
    lab = Lab()

    def succeed() -> None:
        for name in names(200):
            lab.succeed(name)

    def boot() -> None:
        for name in names(200):
            lab.history.booted(name)

    def look() -> None:
        assert len(lab.history.troubled()) <= 200
        assert len(lab.history.recent()) <= RECENT_ATTEMPTS
        assert len(lab.history.per_minute()) == CHART_MINUTES

    deeds: list[Callable[[], object]] = [
        lambda: lab.fail(*names(200)),
        lambda: lab.choose(*names(200)),
        lab.history.forget,
        succeed,
        boot,
        look,
    ]
    barrier = threading.Barrier(len(deeds))

    def again_and_again(deed: Callable[[], object]) -> None:
        barrier.wait()
        for _ in range(20):
            deed()

    with concurrent.futures.ThreadPoolExecutor(len(deeds)) as pool:
        for done in [pool.submit(again_and_again, deed) for deed in deeds]:
            done.result()
