"""Elects one of several instances: the one that holds a key on the broker provisions, the others are paused.

A leader writes the key about twice a second. A candidate learns from every refusal which sequence the key has. One
that stands still for :data:`STILL_SECONDS` is written by nobody any more, and may be claimed; the Go original waits
for the broker to remove it. So that a former leader is never at work beside the new one, it holds its leadership on a
lease: :attr:`Config.paused` is true by itself from :data:`LEASE_SECONDS` after its last good write on, whatever this
thread is at. What it has sent until then may arrive later, from a broker that was frozen: there the servers' own lock
protects, which needs an identity of its own for each instance.

To stop, a leader just stops writing: there is no way to take the key back.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

import attrs

from provisioner.choria.election_key import ElectionError, Key, TakenError, UndecidedError
from provisioner.choria.retry import CAMPAIGN_BACKOFF
from provisioner.config import Config
from provisioner.hosts.loop import IDLE_SECONDS, TURN_LIMIT_SECONDS, Loop
from provisioner.hosts.registry import Registry
from provisioner.monitor.health import Health
from provisioner.monitor.metrics import ElectionMetrics

LOG = logging.getLogger(__name__)

#: A key whose sequence stays the same for so long is claimed. A live leader, also one of the Go original, writes it
#: at least every 0.75 s, and 5.75 s after a write that hangs.
STILL_SECONDS = 15.0
#: One that has just lost the key waits so much longer: it was evicted, maybe, for another one to lead.
YIELD_SECONDS = 5.0
#: How long after its last good write a leader may act as one. Shorter than the above, for clocks run differently.
LEASE_SECONDS = 12.0
#: The same as a part of the lifetime of the key, after which the broker removes it.
LEASE_SHARE = 0.75
#: A candidate waits no longer between two campaigns, or it would notice too late that a key stands still.
CAMPAIGN_LIMIT_SECONDS = 2.0
#: Between the write that makes the leadership official and the first work: a former leader is to notice first.
OFFICE_SECONDS = 0.2
#: How often a failure that lasts is told again.
REPORT_SECONDS = 60.0


class Standing(enum.Enum):
    """What we are in the election."""

    CANDIDATE = "candidate"
    #: The key is ours, and may be for long, but we are not at work: the next good write makes us the leader.
    ELECT = "leader elect"
    LEADER = "leader"


@attrs.define
class Candidacy:
    """What is known from the answers to our writes, and what to write next. All times are on the monotonic clock.

    :ivar own: sequence of our last good write
    :ivar tries: campaigns since the last good write
    """

    standing: Standing = Standing.CANDIDATE
    own: int = 0
    tries: int = 0
    _seen: int = 0
    _seen_since: float = 0.0

    def expected(self, now: float) -> int:
        """The sequence that the key must have for our next write to be good; 0: there must be no key."""
        if self.standing is not Standing.CANDIDATE:
            return self.own
        return self._seen if self._seen and now >= self._still_at else 0

    def written(self, sequence: int) -> None:
        """A write was good, and gave the key this sequence."""
        self.standing = Standing.ELECT if self.standing is Standing.CANDIDATE else Standing.LEADER
        self.own = sequence
        self.tries = self._seen = 0

    def taken(self, sequence: int, now: float) -> None:
        """A write was refused, since the key has this sequence."""
        yielding = 0.0 if self.standing is Standing.CANDIDATE else YIELD_SECONDS
        self.standing = Standing.CANDIDATE
        self.tries += 1
        if sequence != self._seen:
            self._seen, self._seen_since = sequence, now + yielding

    def undecided(self) -> None:
        """A write was refused, since another one was under way."""
        self.tries += 1

    def failed(self) -> None:
        """A write got no answer. As long as that lasts nobody else gets one, perhaps, and the key stands still."""
        self.tries += 1
        self._seen = 0

    def lapsed(self) -> None:
        """The leader had no good write for too long. The next makes it leader again, if nobody else had one."""
        self.standing = Standing.ELECT

    def delay(self, now: float) -> float:
        """Seconds to wait for the next campaign."""
        delay = min(CAMPAIGN_BACKOFF.delay(self.tries), CAMPAIGN_LIMIT_SECONDS)
        return min(delay, max(0.0, self._still_at - now)) if self._seen and now < self._still_at else delay

    @property
    def _still_at(self) -> float:
        return self._seen_since + STILL_SECONDS


class Election(Loop):
    """Campaigns for this instance, which must be paused when it starts.

    :param trigger: has a discovery made soon; given a reason
    """

    def __init__(
        self,
        key: Key,
        *,
        config: Config,
        registry: Registry,
        metrics: ElectionMetrics,
        stopping: Callable[[], bool],
        trigger: Callable[[str], None],
    ) -> None:
        super().__init__("election", stopping, limit=TURN_LIMIT_SECONDS)
        self._key = key
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._trigger = trigger
        # written by the thread of this loop alone
        self._candidacy = Candidacy()
        self._lifetime: float | None = None
        self._lease_end = 0.0
        self._next = 0.0
        self._failure: str | None = "no campaign was made yet"
        self._reported: float | None = None

    def readiness(self) -> Health:
        """Whether the campaigns are answered; a candidate that waits for its turn is fine."""
        return Health(self._failure, self._candidacy.standing.value)

    def turn(self) -> None:
        now = time.monotonic()
        if self._lapse_if_due(now):
            self._key.reconnect()  # an answer would have come by now over a connection that is alive
        if now < self._next:
            time.sleep(min(IDLE_SECONDS, self._next - now))
            return
        self._campaign()
        now = time.monotonic()
        delay = self._candidacy.delay(now)
        self._next = now + delay
        self._metrics.interval.set(delay)

    def _campaign(self) -> None:
        before = self._candidacy.standing
        self._metrics.campaigns["candidate" if before is Standing.CANDIDATE else "leader"].inc()
        try:
            if self._lifetime is None:
                self._lifetime = self._key.lifetime()
            sent = time.monotonic()
            sequence = self._key.write(self._candidacy.expected(sent))
        except TakenError as refusal:
            self._candidacy.taken(refusal.sequence, time.monotonic())
            if before is Standing.LEADER:
                self._give_up(
                    "the key was written by another instance, by an eviction, or by a write without an answer"
                )
            self._metrics.leader(False)
        except UndecidedError:
            self._candidacy.undecided()
        except ElectionError as error:
            self._lifetime = None  # the bucket may be another one by then
            self._candidacy.failed()
            self._report(error)
            return
        else:
            self._hold_key(sequence, sent + min(LEASE_SECONDS, LEASE_SHARE * self._lifetime))
        if self._reported is not None:
            LOG.warning("campaigning for the leadership again")
        self._failure = self._reported = None

    def _hold_key(self, sequence: int, lease_end: float) -> None:
        self._lapse_if_due(time.monotonic())  # that may have come before the answer
        before = self._candidacy.standing
        self._candidacy.written(sequence)
        self._lease_end = lease_end
        self._metrics.leader(True)
        if self._candidacy.standing is Standing.LEADER:
            self._lead(before)

    def _lapse_if_due(self, now: float) -> bool:
        """Stand down when the lease is over; tells whether that happened now."""
        if self._candidacy.standing is not Standing.LEADER or now < self._lease_end:
            return False
        self._candidacy.lapsed()
        self._give_up("no write was good for too long")
        return True

    def _lead(self, before: Standing) -> None:
        if before is Standing.ELECT:
            time.sleep(OFFICE_SECONDS)
            LOG.warning("won the leadership: provisioning from now on")
        self._config.resume(until=self._lease_end)
        if before is Standing.ELECT:
            self._trigger("won the leadership")

    def _give_up(self, reason: str) -> None:
        self._config.pause()
        LOG.warning("lost the leadership: %s; paused", reason)
        self._registry.remove_all()
        self._metrics.leader(False)

    def _report(self, error: ElectionError) -> None:
        now = time.monotonic()
        self._failure = str(error)
        if self._stopping():  # the connection was closed meanwhile
            return
        if self._reported is None or now >= self._reported + REPORT_SECONDS:
            self._reported = now
            LOG.error("leader_election: cannot campaign, trying again for ever: %s", error)
