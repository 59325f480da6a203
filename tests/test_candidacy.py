"""When a candidate claims the key, when it leads, and that never two of several do, whatever happens to them."""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
import json
import random
import threading
from collections.abc import Callable

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from provisioner import config as config_module
from provisioner.choria.election_key import CALL_SECONDS, ELECTION, ElectionError, Key, TakenError
from provisioner.choria.retry import CAMPAIGN_BACKOFF
from provisioner.config import Config
from provisioner.hosts import election
from provisioner.hosts.election import (
    CAMPAIGN_LIMIT_SECONDS,
    LEASE_SECONDS,
    STILL_SECONDS,
    YIELD_SECONDS,
    Candidacy,
    Election,
    Standing,
)
from provisioner.hosts.registry import Registry
from provisioner.monitor.metrics import ElectionMetrics, Metrics
from tests.streams import Original

# --- one candidate, told what becomes of its writes


@pytest.fixture
def candidacy() -> Candidacy:
    return Candidacy()


def test_a_candidate_begins_by_claiming_a_key_that_is_not_there(candidacy: Candidacy) -> None:
    assert candidacy.expected(now=1000.0) == 0


def test_it_goes_on_so_while_the_key_moves(candidacy: Candidacy) -> None:
    for second in range(1000):
        candidacy.taken(sequence=second + 1, now=float(second))
        assert candidacy.expected(now=second + 0.999) == 0


def test_a_key_that_stands_still_is_claimed_after_fifteen_seconds(candidacy: Candidacy) -> None:
    assert STILL_SECONDS == 15
    candidacy.taken(7, now=100.0)
    candidacy.taken(7, now=101.0)
    candidacy.taken(7, now=114.9)

    assert candidacy.expected(now=114.999) == 0
    assert candidacy.expected(now=115.0) == 7
    assert candidacy.expected(now=200.0) == 7


def test_a_move_begins_the_watch_anew(candidacy: Candidacy) -> None:
    candidacy.taken(7, now=100.0)
    candidacy.taken(8, now=114.0)

    assert candidacy.expected(now=128.9) == 0
    assert candidacy.expected(now=129.0) == 8


def test_a_write_that_met_another_one_says_nothing_about_the_key(candidacy: Candidacy) -> None:
    candidacy.taken(7, now=100.0)
    candidacy.undecided()

    assert candidacy.expected(now=115.0) == 7


def test_a_failure_begins_the_watch_anew_since_nobody_else_may_have_got_through(candidacy: Candidacy) -> None:
    candidacy.taken(7, now=100.0)
    candidacy.failed()
    assert candidacy.expected(now=200.0) == 0

    candidacy.taken(7, now=200.0)
    assert candidacy.expected(now=214.9) == 0
    assert candidacy.expected(now=215.0) == 7


def test_a_key_that_is_gone_is_claimed_as_one_that_is_not_there(candidacy: Candidacy) -> None:
    candidacy.taken(7, now=100.0)
    candidacy.taken(0, now=101.0)

    assert candidacy.expected(now=200.0) == 0


def test_the_second_good_write_makes_the_leader_and_each_next_write_names_the_last(candidacy: Candidacy) -> None:
    roles = []
    for sequence in (5, 6, 9):
        candidacy.written(sequence)
        roles.append(candidacy.standing)
        assert candidacy.expected(now=1000.0) == sequence

    assert roles == [Standing.ELECT, Standing.LEADER, Standing.LEADER]


@pytest.mark.parametrize("writes", [1, 2])
def test_a_refusal_makes_a_candidate_of_whoever_held_the_key_who_leaves_it_to_others_first(
    candidacy: Candidacy, writes: int
) -> None:
    assert YIELD_SECONDS == 5
    for sequence in range(1, writes + 1):
        candidacy.written(sequence)
    candidacy.taken(50, now=100.0)
    candidacy.taken(50, now=101.0)

    assert candidacy.standing is Standing.CANDIDATE
    assert candidacy.expected(now=119.9) == 0
    assert candidacy.expected(now=120.0) == 50


def test_who_lost_the_key_to_another_one_that_is_gone_as_well_waits_no_longer_than_the_others(
    candidacy: Candidacy,
) -> None:
    candidacy.written(1)
    candidacy.taken(2, now=100.0)
    candidacy.taken(3, now=101.0)

    assert candidacy.expected(now=115.9) == 0
    assert candidacy.expected(now=116.0) == 3


def test_a_leader_whose_writes_fail_tries_again_with_its_own_sequence(candidacy: Candidacy) -> None:
    candidacy.written(5)
    candidacy.written(6)
    candidacy.failed()

    assert (candidacy.standing, candidacy.expected(now=100.0)) == (Standing.LEADER, 6)


def test_a_leader_whose_lease_has_run_out_is_one_again_with_its_next_good_write(candidacy: Candidacy) -> None:
    candidacy.written(5)
    candidacy.written(6)
    candidacy.lapsed()
    assert (candidacy.standing, candidacy.expected(now=100.0)) == (Standing.ELECT, 6)

    candidacy.written(7)
    assert candidacy.standing is Standing.LEADER


class TestWaits:
    """Between two campaigns."""

    @given(st.floats(0, 1e6))
    def test_a_leader_writes_every_quarter_to_three_quarters_of_a_second(self, now: float) -> None:
        candidacy = Candidacy()
        candidacy.written(1)
        assert 0.25 <= candidacy.delay(now) < 0.75

    @given(st.integers(1, 200))
    def test_a_candidate_waits_two_seconds_at_most(self, refusals: int) -> None:
        assert CAMPAIGN_LIMIT_SECONDS == 2
        candidacy = Candidacy()
        for sequence in range(1, refusals + 1):
            candidacy.taken(sequence, now=0.0)
        steps = CAMPAIGN_BACKOFF.steps_ms
        step = steps[min(refusals, len(steps) - 1)] / 1000
        assert min(step / 2, 2.0) <= candidacy.delay(0.0) <= min(step * 1.5, 2.0)

    def test_waits_are_not_all_alike(self, candidacy: Candidacy) -> None:
        candidacy.taken(1, now=0.0)
        assert len({candidacy.delay(0.0) for _ in range(50)}) > 10

    def test_a_candidate_does_not_sleep_beyond_the_time_at_which_the_key_may_be_claimed(
        self, candidacy: Candidacy
    ) -> None:
        for _ in range(50):
            candidacy.taken(7, now=100.0)
        assert candidacy.delay(now=114.75) == 0.25
        assert candidacy.delay(now=114.75) + 114.75 >= 115.0

    def test_winning_ends_the_growth(self, candidacy: Candidacy) -> None:
        for _ in range(50):
            candidacy.taken(7, now=0.0)
        candidacy.written(8)
        assert candidacy.delay(0.0) < 0.75
        candidacy.taken(9, now=0.0)
        assert 0.375 <= candidacy.delay(0.0) <= 1.125


def test_a_lease_is_over_before_anybody_may_claim_the_key() -> None:
    """Even when one clock runs a tenth too fast and the other a tenth too slow."""
    assert LEASE_SECONDS * 1.1 < STILL_SECONDS * 0.9


# --- several candidates, in virtual time, to whom everything happens that may

#: Clocks run so much faster or slower, at most.
DRIFT = 0.05
#: When all is well again somebody leads after this time: a call that hangs, a wait, the watch, a former leader's extra
#: wait, two more writes.
RECOVERY_SECONDS = 31.0
#: How much longer is looked whether he still does.
STABILITY_SECONDS = 15.0
#: How often the candidates are looked at even if nothing happens.
LOOK_SECONDS = 0.25
#: What a message takes, at most, when nothing is wrong, and on a slow network.
LATENCY_SECONDS, SLOW_SECONDS = 0.05, 2.5
#: An original that is frozen for longer goes on where it was, beside whoever leads then.
ORIGINAL_FROZEN_SECONDS = 8.0


class Trouble(enum.Enum):
    """What may happen to a candidate for a while, or to all."""

    REFUSED = "there is no connection"
    LOST = "what it sends is lost"
    DEAF = "what it is answered is lost"
    SLOW = "all messages take long"
    STALLED = "all messages are held up until the end"
    LATE = "all answers are held up until the end"
    FROZEN = "its process stands still"
    KILLED = "its process is not there"
    STOPPED = "its process was told to leave, and is started again at the end"
    EVICTED = "whoever leads is evicted, at the beginning"


#: Victims of a fault: who leads when it begins, if somebody does, and everybody.
LEADER, ALL = -1, -2


@attrs.frozen
class Fault:
    """Trouble from one time to another.

    :ivar victim: number of the candidate, or one of the two below
    """

    trouble: Trouble
    victim: int
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + (0.0 if self.trouble is Trouble.EVICTED else self.seconds)


class World:
    """Time, and what happens in it. One thread runs at a time: this one, or a candidate's until it waits.

    :ivar now: seconds, by a clock that is right
    :ivar random: where all accidents come from
    :ivar running: whose clock :mod:`time` is now
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.running: Candidate | None = None
        self.problem: BaseException | None = None
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (max(when, self.now), next(self._order), deed))

    def run(self, until: float, after_each: Callable[[], None]) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, deed = heapq.heappop(self._agenda)
            deed()
            if self.problem:
                raise self.problem
            after_each()

    def monotonic(self) -> float:
        assert self.running
        return self.running.clock

    def sleep(self, seconds: float) -> None:
        assert self.running
        self.running.sleep(seconds)


class Over(BaseException):
    """Ends the thread of a process."""


class Process:
    """A thread that runs when it is given a turn, until it waits or ends."""

    def __init__(self, world: World, body: Callable[[], None]) -> None:
        self.ended = False
        self._world = world
        self._killed = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), name="simulated-process")
        self._thread.start()

    def turn(self) -> None:
        self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        """Give the turn back; called in the thread."""
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Over

    def kill(self) -> None:
        if not self.ended:
            self._killed = True
            self.turn()
        self._thread.join()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            self._go.acquire()
            if not self._killed:
                body()
        except Over:
            pass
        except BaseException as problem:  # noqa: BLE001 - raised again in the thread of the test
            self._world.problem = problem
        self.ended = True
        self._back.release()


class Bucket:
    """The key, as the broker keeps it.

    :param lifetime: seconds
    """

    def __init__(self, world: World, lifetime: float) -> None:
        self.lifetime = lifetime
        self._world = world
        self._sequence = 0
        self._written = -lifetime
        self._writer: Process | None = None

    def write(self, expected: int, writer: Process) -> int:
        now, key = self._world.now, self._sequence if self._world.now < self._written + self.lifetime else 0
        if expected != key:
            raise TakenError(key)
        if expected and writer is not self._writer:
            still = now - self._written
            assert still >= STILL_SECONDS / (1 + DRIFT), f"the key was claimed {still:.2f} s after its last write"
        return self.put(writer)

    def put(self, writer: Process | None) -> int:
        """Write whatever is there, as those who evict do."""
        self._sequence += self._world.random.randrange(1, 4)  # other elections share the bucket
        self._written, self._writer = self._world.now, writer
        return self._sequence


class Candidate:
    """One instance, over all its processes, with its clock and its connection.

    :param rate: of its clock
    :ivar triggered: when it wanted a discovery, by the right clock
    :ivar refused: when it learned that somebody else has written the key
    """

    ours = True

    def __init__(self, world: World, bucket: Bucket, rate: float) -> None:
        self.triggered = self.refused = -1.0
        self.faults: list[Fault] = []
        self._world = world
        self._bucket = bucket
        self._rate = rate
        self._offset = world.random.random() * 1e6
        self._stopping = False
        self._process: Process | None = None

    # --- its process

    def begin(self) -> None:
        """Start a new process in the place of the last one, whatever became of that, unless none is to be there."""
        if self._trouble(Trouble.KILLED):
            return
        self.kill()
        self._stopping = False
        self._process = Process(self._world, self._body())
        self._wake(self._process)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
        self._process = None

    def stop(self) -> None:
        """It campaigns no more, and goes on with the hosts that it has in work."""
        self._stopping = True

    @property
    def leads(self) -> bool:
        """Whether it believes that it may provision."""
        raise NotImplementedError

    @property
    def at_work(self) -> bool:
        """Whether it may send something at this very moment."""
        return self.leads and self._trouble(Trouble.FROZEN) is None

    @property
    def clock(self) -> float:
        return self._offset + self._world.now * self._rate

    def sleep(self, seconds: float) -> None:
        process = self._process
        assert process
        self._in(seconds, lambda: self._wake(process))
        process.wait()

    def _body(self) -> Callable[[], None]:
        """What its process does."""
        raise NotImplementedError

    def _in(self, seconds: float, deed: Callable[[], None]) -> None:
        """Have something done in so many seconds, by its own clock."""
        self._world.at(self._world.now + seconds / self._rate, deed)

    def _wake(self, process: Process) -> None:
        if process is not self._process or process.ended:
            return
        frozen = self._trouble(Trouble.FROZEN)
        if frozen:
            self._world.at(frozen.end, lambda: self._wake(process))
            return
        self._world.running = self
        process.turn()
        self._world.running = None

    # --- its connection

    def write(self, expected: int) -> int:
        process = self._process
        assert process
        return int(self.call(lambda: self._bucket.write(expected, process)))

    def call(self, deed: Callable[[], float]) -> float:
        """Have something done at the broker, and wait for the answer."""
        process, outcomes = self._process, list[float | Exception]()
        assert process

        def settle(outcome: float | Exception) -> None:
            outcomes.append(outcome)
            if len(outcomes) == 1:
                self._wake(process)

        self._send(deed, settle)
        self._in(CALL_SECONDS, lambda: settle(ElectionError("no reply")))
        process.wait()
        (outcome, *_) = outcomes
        if isinstance(outcome, TakenError):
            self.refused = self._world.now
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _send(self, deed: Callable[[], float], settle: Callable[[float | Exception], None]) -> None:
        def arrive() -> None:
            outcome: float | Exception
            try:
                outcome = deed()
            except TakenError as refusal:
                outcome = refusal
            if not self._trouble(Trouble.DEAF, Trouble.LOST):
                self._world.at(self._arrival(Trouble.STALLED, Trouble.LATE), lambda: settle(outcome))

        if self._trouble(Trouble.REFUSED):
            self._world.at(self._world.now, lambda: settle(ElectionError("there is no connection")))
        elif not self._trouble(Trouble.LOST):
            self._world.at(self._arrival(Trouble.STALLED), arrive)

    def _arrival(self, *holding_up: Trouble) -> float:
        """When something that is sent now arrives."""
        held_up = self._trouble(*holding_up)
        longest = SLOW_SECONDS if self._trouble(Trouble.SLOW) else LATENCY_SECONDS
        return (held_up.end if held_up else self._world.now) + self._world.random.random() * longest

    def _trouble(self, *kinds: Trouble) -> Fault | None:
        """The trouble of these kinds that it has now, the one that lasts longest."""
        now = self._world.now
        present = [fault for fault in self.faults if fault.trouble in kinds and fault.start <= now < fault.end]
        return max(present, key=lambda fault: fault.end, default=None)


class Instance(Candidate):
    """One of ours."""

    def __init__(self, world: World, bucket: Bucket, rate: float, config: Config, registry: Registry) -> None:
        super().__init__(world, bucket, rate)
        self._template = config
        self._config: Config | None = None
        self._registry = registry

    def kill(self) -> None:
        super().kill()
        self._config = None

    @property
    def leads(self) -> bool:
        self._world.running = self
        leads = self._config is not None and not self._config.paused
        self._world.running = None
        return leads

    def _body(self) -> Callable[[], None]:
        self._config = config = attrs.evolve(self._template)
        config.pause()
        election = Election(
            SimulatedKey(self, self._bucket),
            config=config,
            registry=self._registry,
            metrics=ElectionMetrics(ELECTION, "prov.example.net", CollectorRegistry()),
            stopping=lambda: self._stopping,
            trigger=self._trigger,
        )

        def campaign() -> None:
            while not self._stopping:
                election.turn()

        return campaign

    def _trigger(self, _reason: str) -> None:
        self.triggered = self._world.now


class SimulatedKey(Key):
    """As one of ours writes it."""

    def __init__(self, candidate: Candidate, bucket: Bucket) -> None:
        self._candidate = candidate
        self._bucket = bucket

    def lifetime(self) -> float:
        return self._candidate.call(lambda: self._bucket.lifetime)

    def write(self, expected: int) -> int:
        return self._candidate.write(expected)

    def reconnect(self) -> None:
        """A message that is held up by the network is so over any connection."""


class Foreigner(Candidate):
    """An instance of the Go original, which does no more work once it was told to leave."""

    ours = False
    _original: Original | None = None

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        super().kill()
        self._original = None

    @property
    def leads(self) -> bool:
        return self._original is not None and self._original.leads

    def _body(self) -> Callable[[], None]:
        self._original = Original(self.write, sleep=self.sleep, random=self._world.random.random)
        return self._original.run


@attrs.frozen(kw_only=True)
class Plan:
    """What is to be simulated."""

    seed: int
    ours: int
    originals: int = 0
    lifetime: float = 60.0
    faults: tuple[Fault, ...] = ()


class Simulation:
    """Candidates around a bucket, and what has to hold all the time.

    :ivar changes: when somebody else led than before, by number; None: nobody
    """

    def __init__(self, plan: Plan, config: Config, registry: Registry) -> None:
        self.changes: list[tuple[float, int | None]] = [(0.0, None)]
        self.world = World(plan.seed)
        self.bucket = Bucket(self.world, plan.lifetime)
        rates = [1 + DRIFT * (2 * self.world.random.random() - 1) for _ in range(plan.ours + plan.originals)]
        self.candidates: list[Candidate] = [
            *(Instance(self.world, self.bucket, rate, config, registry) for rate in rates[: plan.ours]),
            *(Foreigner(self.world, self.bucket, rate) for rate in rates[plan.ours :]),
        ]
        self._led = [False for _ in self.candidates]
        # the originals have to be first, mostly, or they would never lead
        starts = [self.world.random.random() * (12 if candidate.ours else 3) for candidate in self.candidates]
        for start, candidate in zip(starts, self.candidates, strict=True):
            self.world.at(start, candidate.begin)
        for fault in plan.faults:
            self.world.at(fault.start, functools.partial(self._begin, fault))
        self._calm = max(*starts, 0.0, *(fault.end for fault in plan.faults))
        self._look()

    @property
    def leader(self) -> int | None:
        return self.changes[-1][1]

    def run(self) -> None:
        """Until some time after the last fault."""
        try:
            self._run()
        finally:
            for candidate in self.candidates:
                candidate.kill()

    def _run(self) -> None:
        end = self._calm + RECOVERY_SECONDS
        self.world.run(end, self._check)
        assert self.leader is not None, f"nobody leads {RECOVERY_SECONDS} s after all was well again"
        self.world.run(end + STABILITY_SECONDS, self._check)
        assert self.changes[-1][0] <= end, "the leader has lost the leadership without need"

    def _begin(self, fault: Fault) -> None:
        if fault.trouble is Trouble.EVICTED:
            self.bucket.put(None)
        elif fault.victim == ALL:
            for candidate in self.candidates:
                self._afflict(candidate, fault)
        elif fault.victim != LEADER:
            self._afflict(self.candidates[fault.victim], fault)
        elif self.leader is not None:
            self._afflict(self.candidates[self.leader], fault)

    def _afflict(self, victim: Candidate, fault: Fault) -> None:
        if fault.trouble is Trouble.FROZEN and not victim.ours:
            earlier = (each.seconds for each in victim.faults if each.trouble is Trouble.FROZEN)
            fault = attrs.evolve(fault, seconds=min(fault.seconds, ORIGINAL_FROZEN_SECONDS - sum(earlier)))
        victim.faults.append(fault)
        if fault.trouble in (Trouble.KILLED, Trouble.STOPPED):
            (victim.kill if fault.trouble is Trouble.KILLED else victim.stop)()
            self.world.at(fault.end, victim.begin)

    def _look(self) -> None:
        self.world.at(self.world.now + LOOK_SECONDS, self._look)

    def _check(self) -> None:
        now = self.world.now
        at_work = [number for number, candidate in enumerate(self.candidates) if candidate.at_work]
        assert len(at_work) <= 1, f"{now:.2f} s: {at_work} are at work at the same time"
        leads = [candidate.leads for candidate in self.candidates]
        for candidate, led, leading in zip(self.candidates, self._led, leads, strict=True):
            if candidate.ours and leading and not led:
                assert candidate.triggered == now, f"{now:.2f} s: began to lead without a discovery"
            assert not leading or candidate.refused != now, f"{now:.2f} s: leads although it was refused"
        self._led = leads
        leader = at_work[0] if at_work else None
        if leader != self.leader:
            self.changes.append((now, leader))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], Simulation]:
    """Runs a simulation to its end."""
    file = tmp_path_factory.mktemp("simulation") / "provisioner.yaml"
    file.write_text(json.dumps({"helper": "/bin/true", "token": "s3cret"}))
    config, registry = config_module.load(file), Registry(60.0, Metrics("lab"))

    def run(plan: Plan) -> Simulation:
        simulation = Simulation(plan, config, registry)
        backoff = attrs.evolve(CAMPAIGN_BACKOFF, random=simulation.world.random.random)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(election, "time", simulation.world)
            patch.setattr(config_module, "time", simulation.world)
            patch.setattr(election, "CAMPAIGN_BACKOFF", backoff)
            patch.setattr(election.LOG, "disabled", True)
            simulation.run()
        return simulation

    return run


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ours, originals = draw(st.integers(1, 4)), draw(st.sampled_from((0, 0, 1, 2)))
    faults = st.builds(
        Fault,
        trouble=st.sampled_from(Trouble),
        victim=st.just(LEADER) | st.sampled_from((ALL, *range(ours + originals))),
        start=st.floats(0, 120, width=32),
        seconds=st.floats(0, 40, width=32),
    )
    return Plan(
        seed=draw(st.integers(0, 2**32)),
        ours=ours,
        originals=originals,
        lifetime=draw(st.sampled_from((20.0, 60.0, 3600.0) if originals else (4.0, 8.0, 12.0, 20.0, 60.0, 3600.0))),
        faults=tuple(draw(st.lists(faults, max_size=10))),
    )


@settings(max_examples=100)
@given(plan=plans())
@example(Plan(seed=1, ours=2, lifetime=4.0, faults=(Fault(Trouble.SLOW, LEADER, 20.0, 60.0),)))
@example(Plan(seed=2, ours=3, lifetime=8.0, faults=(Fault(Trouble.SLOW, ALL, 10.0, 90.0),)))
@example(Plan(seed=3, ours=1, originals=2, faults=tuple(Fault(Trouble.LOST, LEADER, 30.0 * n, 9.0) for n in range(5))))
def test_never_two_are_at_work_and_when_all_is_well_somebody_is(
    simulate: Callable[[Plan], Simulation], plan: Plan
) -> None:
    simulate(plan)


#: When the trouble of :class:`TestHandOvers` begins.
START = 50.0


@pytest.mark.parametrize("seed", range(5))
class TestHandOvers:
    """What becomes of the leadership, in seconds from the beginning of the trouble, by a clock that is right."""

    @pytest.fixture
    def changes(self, simulate: Callable[[Plan], Simulation], seed: int) -> Callable[[Fault], list[tuple[float, str]]]:
        """Gives when, after a fault, nobody led any more, and when somebody did who was not the last one."""

        def simulated(fault: Fault) -> list[tuple[float, str]]:
            seen = simulate(Plan(seed=seed, ours=3, faults=(fault,))).changes
            last = [leader for time, leader in seen if time < START][-1]
            assert last is not None
            names = {None: "nobody", last: "the last one"}
            return [(time - START, names.get(leader, "another")) for time, leader in seen if time >= START]

        return simulated

    @pytest.mark.parametrize(
        "fault",
        [Fault(Trouble.LOST, LEADER, START, 4.0), Fault(Trouble.REFUSED, ALL, START, 9.0)],
        ids=lambda fault: fault.trouble.name,
    )
    def test_a_broker_that_is_away_for_some_seconds_costs_nothing(
        self, changes: Callable[[Fault], list[tuple[float, str]]], fault: Fault
    ) -> None:
        assert changes(fault) == []

    @pytest.mark.parametrize(
        ("trouble", "earliest", "latest"),
        [
            (Trouble.KILLED, 0.0, 0.0),
            (Trouble.FROZEN, 0.0, LOOK_SECONDS),
            # until the end of the lease, which began up to 0.75 s and a call before
            (Trouble.STOPPED, 10.0, 13.0),
            (Trouble.LOST, 10.0, 13.0),
        ],
        ids=lambda value: value.name if isinstance(value, Trouble) else "",
    )
    def test_a_leader_that_is_gone_is_succeeded_within_twenty_seconds(
        self,
        changes: Callable[[Fault], list[tuple[float, str]]],
        trouble: Trouble,
        earliest: float,
        latest: float,
    ) -> None:
        (gone, nobody), (succeeded, another) = changes(Fault(trouble, LEADER, START, 60.0))
        assert (nobody, another) == ("nobody", "another")
        assert earliest <= gone <= latest
        assert succeeded <= 20

    def test_an_evicted_leader_is_none_any_more_within_a_second_and_another_one_follows(
        self, changes: Callable[[Fault], list[tuple[float, str]]]
    ) -> None:
        (gone, nobody), (succeeded, another) = changes(Fault(Trouble.EVICTED, LEADER, START, 0.0))
        assert (nobody, another) == ("nobody", "another")
        assert gone <= 1
        assert succeeded <= 20

    def test_who_is_alone_leads_again_after_an_eviction(
        self, simulate: Callable[[Plan], Simulation], seed: int
    ) -> None:
        evicted = Fault(Trouble.EVICTED, LEADER, START, 0.0)
        _, (_, before), (_, nobody), (again, after) = simulate(Plan(seed=seed, ours=1, faults=(evicted,))).changes
        assert (before, nobody, after) == (0, None, 0)
        assert again <= START + 25

    def test_an_original_leads_as_long_as_it_lives(self, simulate: Callable[[Plan], Simulation], seed: int) -> None:
        late = [Fault(Trouble.KILLED, ours, 0.0, 20.0) for ours in (0, 1)]
        end = Fault(Trouble.KILLED, LEADER, 100.0, 60.0)
        _, (_, first), (ended, nobody), (succeeded, second) = simulate(
            Plan(seed=seed, ours=2, originals=1, faults=(*late, end))
        ).changes
        assert (first, ended, nobody) == (2, 100.0, None)
        assert second in (0, 1)
        assert succeeded <= 120
