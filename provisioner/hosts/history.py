"""What became of the hosts: the last outcomes, who is in trouble, and who is to be left alone for how long.

A host that keeps failing is left alone for pauses that grow, so that it does not hold a worker in every cycle. No host
is lost: one that is left alone is still discovered, and once its time has come it is admitted as any other.

Hosts that fail at the same step may have one cause in common, such as a broken helper, and must not sit out their
pauses once that is mended. So one of them is tried every few intervals whatever its pause, and each one that succeeds
frees some others.
"""

from __future__ import annotations

import collections
import heapq
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from provisioner.choria.discovery import Sighting
from provisioner.monitor.status import Attempt, Minute, Outcome, Trouble

#: Failures in a row after which the next try still comes with the next discovery.
RETRIES_AT_ONCE = 2
#: No host is left alone for longer than this.
LONGEST_PAUSE_SECONDS = 3600.0
#: Every pause is cut to a random part of itself that is at least this, so that hosts do not come back all at once.
SHORTEST_PART = 0.75
#: So many hosts that are left alone and failed at the same step may have failed for the same cause ...
COMMON_HOSTS = 3
#: ... and one of them is tried every so many intervals ...
PROBE_INTERVALS = 5
#: ... and each that succeeds frees this many others.
FREED_HOSTS = 10
#: A host in trouble that was not seen for so long has gone, and is forgotten. (At least three intervals.)
GONE_SECONDS = 3600.0
#: Hosts in trouble that are known at a time; of more, those not seen for longest are forgotten. As many as may wait.
TROUBLED_HOSTS = 50_000
#: So many of them are copied while others wait for the lock.
COPIED_HOSTS = 1000
#: Attempts that :meth:`History.recent` gives.
RECENT_ATTEMPTS = 500
#: Minutes that :meth:`History.per_minute` gives.
CHART_MINUTES = 60


@attrs.define(eq=False)
class _Record:
    """A host in trouble. Its times are on the monotonic clock, but for `since`, which is for people.

    :ivar counted: failures in a row that count for its pause: those since it has booted
    :ivar tried: when its last attempt ended
    :ivar resume: when it is to be admitted again
    :ivar seen: when it was last tried, or was sighted by a discovery
    """

    last: Attempt
    since: float
    failures: int
    counted: int
    tried: float
    resume: float
    seen: float

    @property
    def step(self) -> str:
        return self.last.step


class History:
    """Safe to use from any thread. The lock is held for a moment, and for some 0.1 s while 50,000 are chosen from.

    :param backoff: whether hosts that keep failing are left alone; False: all are tried in every cycle
    :param interval: seconds between two discoveries
    :param clock: monotonic, for pauses
    :param wall_clock: in seconds since the epoch, for people
    :param part: gives the part of a pause that is kept, at random
    """

    def __init__(
        self,
        *,
        backoff: bool,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        part: Callable[[], float] = lambda: random.uniform(SHORTEST_PART, 1.0),
    ) -> None:
        self._backoff = backoff
        self._interval = interval
        self._clock = clock
        self._wall_clock = wall_clock
        self._part = part
        self._lock = threading.Lock()
        # all below under the lock
        self._recent: collections.deque[Attempt] = collections.deque(maxlen=RECENT_ATTEMPTS)
        self._minutes: collections.OrderedDict[int, collections.Counter[Outcome]] = collections.OrderedDict()
        # both: the one not seen for longest comes first
        self._troubled: collections.OrderedDict[str, _Record] = collections.OrderedDict()
        self._locked: collections.OrderedDict[str, float] = collections.OrderedDict()
        # by step: when one of those left alone was tried last, and how many are to be tried since others succeeded
        self._probed: dict[str, float] = {}
        self._freed: collections.Counter[str] = collections.Counter()

    def record(self, attempt: Attempt, *, hold: float = 0.0) -> Trouble | None:
        """Note how an attempt ended.

        :param hold: seconds for which the host is to be left alone whatever else is known of it
        :return: the trouble that the host is in
        """
        now = self._clock()
        with self._lock:
            self._recent.append(attempt)
            self._count(attempt)
            if hold:
                self._locked[attempt.identity] = now + hold
                self._locked.move_to_end(attempt.identity)
                _limit(self._locked)
            if attempt.outcome is Outcome.FAILED:
                self._fail(attempt, now)
            elif attempt.outcome is not Outcome.LEFT_ALONE:
                self._recover(attempt.identity)
            record = self._troubled.get(attempt.identity)
            return self._trouble(record, now) if record else None

    def choose(self, sightings: Iterable[Sighting]) -> list[Sighting]:
        """Who of those that a discovery has found is to be admitted now: those in no trouble first."""
        now = self._clock()
        with self._lock:
            self._unlock(now)
            chosen: list[tuple[int, Sighting]] = []
            waiting: collections.defaultdict[str, list[tuple[_Record, Sighting]]] = collections.defaultdict(list)
            for sighting in sightings:
                record = self._see(sighting.identity, now)
                if sighting.identity in self._locked:
                    continue
                if record is None:
                    chosen.append((0, sighting))
                elif record.resume <= now:
                    chosen.append((record.failures, sighting))
                else:
                    waiting[record.step].append((record, sighting))
            chosen += self._let_through(waiting, now)
            self._forget_gone(now)
        return [sighting for _, sighting in sorted(chosen, key=lambda pair: pair[0])]

    def booted(self, identity: str) -> None:
        """Note that a host has just started: it may be mended, and is no longer locked."""
        with self._lock:
            self._locked.pop(identity, None)
            if record := self._troubled.get(identity):
                record.counted = 0
                record.resume = -math.inf

    def forget(self) -> None:
        """Forget who is in trouble; for an instance that does not provision: another one knows better by now."""
        with self._lock:
            self._troubled.clear()
            self._locked.clear()

    def recent(self) -> list[Attempt]:
        """The last attempts, newest first."""
        with self._lock:
            return list(reversed(self._recent))

    def troubled(self, search: str = "", limit: int | None = None) -> list[Trouble]:
        """The hosts whose last attempt failed, the one that failed most often first.

        :param search: only those that have this in their identity, in any case of its letters
        :param limit: so many of them; None: all
        """
        with self._lock:
            records = list(self._troubled.values())
        found = [record for record in records if search.lower() in record.last.identity.lower()]
        found = heapq.nlargest(len(found) if limit is None else limit, found, key=lambda record: record.failures)
        troubled: list[Trouble] = []
        for start in range(0, len(found), COPIED_HOSTS):
            now = self._clock()
            with self._lock:
                troubled += [self._trouble(record, now) for record in found[start : start + COPIED_HOSTS]]
        return troubled

    def troubled_count(self) -> int:
        """How many hosts there are whose last attempt failed."""
        return len(self._troubled)

    def per_minute(self) -> list[Minute]:
        """The attempts of the last hour by minute, oldest first, minutes without any included."""
        last = int(self._wall_clock() // 60)
        with self._lock:
            return [
                Minute(start=minute * 60.0, outcomes=dict(self._minutes.get(minute, {})))
                for minute in range(last - CHART_MINUTES + 1, last + 1)
            ]

    # --- under the lock

    def _count(self, attempt: Attempt) -> None:
        minute = int(attempt.ended // 60)
        self._minutes.setdefault(minute, collections.Counter())[attempt.outcome] += 1
        while len(self._minutes) > CHART_MINUTES:
            self._minutes.popitem(last=False)

    def _fail(self, attempt: Attempt, now: float) -> None:
        record = self._troubled.get(attempt.identity)
        if record is None:
            record = _Record(attempt, since=attempt.ended, failures=0, counted=0, tried=now, resume=now, seen=now)
            self._troubled[attempt.identity] = record
        record.last = attempt
        record.failures += 1
        record.counted += 1
        record.tried = now
        record.resume = now + self._pause(record.counted)
        self._see(attempt.identity, now)
        _limit(self._troubled)

    def _pause(self, failures: int) -> float:
        """Seconds until a host may be tried again that has failed so often in a row."""
        doublings = failures - RETRIES_AT_ONCE
        if not self._backoff or doublings <= 0:
            return 0.0
        # what comes on top is the time until the next discovery
        longest = max(0.0, LONGEST_PAUSE_SECONDS - self._interval)
        return min(self._interval * 2.0 ** min(doublings, 20), longest) * self._part()

    def _recover(self, identity: str) -> None:
        record = self._troubled.pop(identity, None)
        if record and record.failures > RETRIES_AT_ONCE:
            self._freed[record.step] += FREED_HOSTS

    def _see(self, identity: str, now: float) -> _Record | None:
        record = self._troubled.get(identity)
        if record:
            record.seen = now
            self._troubled.move_to_end(identity)
        return record

    def _let_through(
        self, waiting: Mapping[str, list[tuple[_Record, Sighting]]], now: float
    ) -> Iterator[tuple[int, Sighting]]:
        """Give those who are tried before their time, as others of their step have shown or are to show."""
        self._probed = {step: self._probed.get(step, now) for step in waiting}
        for step, hosts in waiting.items():
            count = self._freed[step]
            if len(hosts) >= COMMON_HOSTS and now - self._probed[step] >= PROBE_INTERVALS * self._interval:
                count = max(count, 1)
                self._probed[step] = now
            # the one that was not tried for longest first
            for record, sighting in heapq.nsmallest(count, hosts, key=lambda host: host[0].tried):
                record.resume = now
                yield record.failures, sighting
        self._freed.clear()

    def _unlock(self, now: float) -> None:
        for identity in [identity for identity, until in self._locked.items() if until <= now]:
            del self._locked[identity]

    def _forget_gone(self, now: float) -> None:
        gone = now - max(GONE_SECONDS, 3 * self._interval)
        while self._troubled and next(iter(self._troubled.values())).seen < gone:
            self._troubled.popitem(last=False)

    def _trouble(self, record: _Record, now: float) -> Trouble:
        return Trouble(
            identity=record.last.identity,
            failures=record.failures,
            since=record.since,
            last=record.last.ended,
            step=record.last.step,
            reason=record.last.reason,
            next_try=self._wall_clock() + record.resume - now if record.resume > now else 0.0,
        )


def _limit(hosts: collections.OrderedDict[str, Any]) -> None:
    while len(hosts) > TROUBLED_HOSTS:
        hosts.popitem(last=False)
