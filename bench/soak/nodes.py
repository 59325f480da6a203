"""The servers that arrive: which ones, when, and what they know of what was done to them."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from provisioner.errors import ProvisionerError
from provisioner.simulate.envelopes import Request
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import LOCKED, Answer, Server, Site

#: Servers that boot within this time make up a wave. One wave follows the other.
WAVE_SECONDS = 10.0
#: How often it is looked whether a wave is due or over.
LOOK_SECONDS = 0.5
#: What the helper does for a server, by the weights of the parts: most of it in its first run for the server only.
HELPER = {"work": 930, "defer": 20, "leave": 20, "upgrade": 20, "crash": 5, "flood": 3, "hang": 2}
#: Of all servers, the parts that reply twice, or refuse their first configure: for a moment, or for so long that it
#: takes another discovery.
TWICE = 0.01
FAILING, FAILING_LONG, FAILING_SECONDS = 0.01, 0.002, 15.0
#: Whoever leads does so for longer: nobody else can before the key has stood still for 15 s.
LEAST_TERM_SECONDS = 10.0
#: Of what a server says about itself, characters that nobody needs.
FACTS_CHARACTERS = 1024

SITE = Site(
    token="s3cret",
    upgradable=True,
    version="0.30.0",
    repository="https://releases.example.net",
    releases=("0.31.0",),
)
BAD = tuple(way for way in Misbehaviour if way is not Misbehaviour.TWICE)


@attrs.frozen
class Duplicate:
    """A server was configured once more although it had been.

    :ivar first: when it was configured the time before, by the monotonic clock
    :ivar second: when it was configured again
    :ivar first_by: name of the daemon that did the one, and the other
    """

    identity: str
    first: float
    first_by: str
    second: float
    second_by: str


@attrs.frozen(kw_only=True)
class Standing:
    """How the good servers fare.

    :ivar arrived: servers that have booted, each counted once
    :ivar provisioned: those that were told to restart with what they need
    :ivar waiting: the others
    :ivar oldest: seconds that the one of them has waited that has waited longest
    :ivar longest: seconds that any server had to wait from its boot to its restart
    :ivar duplicates: times that one was configured once more although it had been
    :ivar lock_conflicts: times that one refused to be configured since another daemon had it in work
    :ivar handovers: times that the work was begun by another daemon than before
    :ivar overlaps: those of them that came too soon after the one before
    """

    arrived: int
    provisioned: int
    waiting: int
    oldest: float
    longest: float
    duplicates: int
    lock_conflicts: int
    handovers: int
    overlaps: int


class Ledger:
    """What the good servers know, all together; what it keeps does not grow with their number. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._arrived = self._provisioned = self._lock_conflicts = 0
        self._longest = 0.0
        self._leader, self._leads_since = "", 0.0
        self._handovers = self._overlaps = 0
        #: How many servers waited so many whole seconds.
        self._waits: collections.Counter[int] = collections.Counter()
        self._duplicates: list[Duplicate] = []

    def booted(self, identity: str) -> None:
        """One has booted, for the first time or anew."""
        with self._lock:
            if identity not in self._since:
                self._arrived += 1
                self._since[identity] = time.monotonic()

    def restarted(self, identity: str) -> None:
        """One was told to restart with all that it needs."""
        with self._lock:
            waited = time.monotonic() - self._since.pop(identity)
            self._provisioned += 1
            self._waits[int(waited)] += 1
            self._longest = max(self._longest, waited)

    def configured_again(self, duplicate: Duplicate) -> None:
        with self._lock:
            self._duplicates.append(duplicate)

    def worked(self, daemon: str, sent: float) -> None:
        """A daemon has begun to work on one.

        :param sent: when it sent that request, by its clock
        """
        with self._lock:
            if daemon == self._leader or sent < self._leads_since:  # the latter was under way for long
                return
            if self._leader:
                self._handovers += 1
                self._overlaps += sent - self._leads_since < LEAST_TERM_SECONDS
            self._leader, self._leads_since = daemon, sent

    def was_locked(self) -> None:
        with self._lock:
            self._lock_conflicts += 1

    def standing(self) -> Standing:
        with self._lock:
            # the one that came first is the one that stands first
            oldest = time.monotonic() - next(iter(self._since.values())) if self._since else 0.0
            return Standing(
                arrived=self._arrived,
                provisioned=self._provisioned,
                waiting=len(self._since),
                oldest=oldest,
                longest=max(self._longest, oldest),
                duplicates=len(self._duplicates),
                lock_conflicts=self._lock_conflicts,
                handovers=self._handovers,
                overlaps=self._overlaps,
            )

    def duplicates(self) -> Sequence[Duplicate]:
        with self._lock:
            return tuple(self._duplicates)

    def waiting(self) -> Sequence[str]:
        """Identities, those that wait longest first."""
        with self._lock:
            return tuple(self._since)

    def waited(self, part: float) -> int:
        """Seconds within which this part of all provisioned servers had their restart."""
        with self._lock:
            left = part * self._waits.total()
            for seconds in sorted(self._waits):
                left -= self._waits[seconds]
                if left <= 0:
                    return seconds + 1
            return 0


@attrs.define(eq=False, kw_only=True)
class Node(Server):
    """A server that keeps a ledger. Misbehaving ones are not in it."""

    ledger: Ledger
    _configured: float = attrs.field(default=0.0, init=False)
    _configured_by: str = attrs.field(default="", init=False)

    def boot(self) -> None:
        super().boot()
        if self.good:
            self.ledger.booted(self.identity)

    def answer(self, request: Request) -> Answer:
        configures, stays = self.configures, self.departure is None
        answer = super().answer(request)
        if not self.good:
            return answer
        if answer.action == "rpcutil#inventory":
            self.ledger.worked(request.sender, request.time)
        if answer.text == LOCKED:
            self.ledger.was_locked()
        if self.configures > configures:
            now, daemon = time.monotonic(), request.sender.partition(".")[0]
            if configures:
                again = Duplicate(self.identity, self._configured, self._configured_by, now, daemon)
                self.ledger.configured_again(again)
            self._configured, self._configured_by = now, daemon
        if stays and self.departure and self.departure.provisioned:
            self.ledger.restarted(self.identity)
        return answer


class Arrivals:
    """Has servers boot at a steady rate until told to stop, in a thread of its own.

    They come in waves: a wave has a connection of its own, and goes when all its good servers are provisioned. Its bad
    ones go with it, so that there is never more of anything than what the waves of some minutes hold.

    :param connect: makes the fleet of some servers
    :param rate: servers a second
    :param seed: decides about all that is left to chance
    """

    def __init__(self, connect: Callable[[Sequence[Server]], Fleet], ledger: Ledger, *, rate: float, seed: int) -> None:
        self._connect = connect
        self._ledger = ledger
        self._per_wave = max(1, round(rate * WAVE_SECONDS))
        self._random = random.Random(f"nodes {seed}")
        self._numbers = itertools.count(1)
        self._bad = itertools.cycle(BAD)
        self._waves: list[Fleet] = []
        self._ending = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def start(self) -> None:
        """Begin with the first wave."""
        self._thread.start()

    def end(self) -> None:
        """Begin no further wave. The servers of the present one still boot, and all of them stay."""
        self._ending.set()

    @property
    def ended(self) -> bool:
        """Whether all servers that were to boot have done so and have left again."""
        return self._ending.is_set() and not self._waves

    def stop(self) -> None:
        """Take all servers away."""
        self._ending.set()
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        due, nodes = time.monotonic(), self._nodes()
        while not self._stopping.wait(LOOK_SECONDS):
            while time.monotonic() > due and not self._ending.is_set() and self._begin(nodes, due):
                due, nodes = due + WAVE_SECONDS, self._nodes()
            self._retire()
        for wave in self._waves:
            wave.stop()

    def _retire(self) -> None:
        """Take away the waves whose good servers have all left."""
        before = len(self._waves)
        for wave in [wave for wave in self._waves if wave.counts().gone >= wave.counts().servers]:
            wave.stop()
            self._waves.remove(wave)
        if len(self._waves) < before:
            gc.collect()  # it comes by itself, but so late that it looks like a leak

    def _begin(self, nodes: Sequence[Node], due: float) -> bool:
        """Have a wave boot from now on, what should have booted at once; False when there is no broker."""
        late = time.monotonic() - due
        for number, node in enumerate(nodes):
            node.boots_after = max(0.01, number / len(nodes) * WAVE_SECONDS - late)
        wave = self._connect(nodes)
        try:
            wave.start()
        except ProvisionerError:
            wave.stop()
            return False
        self._waves.append(wave)
        return True

    def _nodes(self) -> Sequence[Node]:
        """Make the servers of a wave, good ones and a bad one."""
        nodes = [self._good() for _ in range(self._per_wave - 1)]
        nodes.insert(self._random.randrange(self._per_wave), self._node("bad", misbehaviour=next(self._bad)))
        return nodes

    def _good(self) -> Node:
        chance = self._random.random
        failing, seconds = chance() < FAILING, FAILING_SECONDS * (chance() < FAILING_LONG)
        return self._node(
            self._random.choices(list(HELPER), list(HELPER.values()))[0],
            misbehaviour=Misbehaviour.TWICE if chance() < TWICE else None,
            fails=failing or seconds > 0,
            fails_seconds=seconds,
        )

    def _node(self, helper: str, **attributes: Any) -> Node:
        identity = f"n{next(self._numbers):07}.example.net"
        return Node(identity=identity, site=SITE, facts=_facts(helper), ledger=self._ledger, **attributes)


@functools.cache
def _facts(helper: str) -> Mapping[str, str]:
    return {"helper": helper, "rest": "x" * FACTS_CHARACTERS}
