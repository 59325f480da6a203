"""What the daemon is at: all that the status page shows, as plain data. Times are in seconds since the epoch."""

from __future__ import annotations

import collections
import enum
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import attrs

_DIGITS = re.compile(r"\d+")
_JSON = json.JSONEncoder(default=partial(attrs.asdict, recurse=False))


class Role(enum.StrEnum):
    """What this instance is to the others."""

    #: It holds the leadership, and provisions.
    LEADER = "leader"
    #: It waits for the leadership.
    STANDBY = "standby"
    #: It takes part in no election, and provisions.
    ALONE = "alone"
    #: It takes part in no election, and provisions nobody at the moment.
    PAUSED = "paused"


class Outcome(enum.StrEnum):
    """How an attempt can end."""

    PROVISIONED = "provisioned"
    SHUT_DOWN = "shut down"
    UPGRADING = "sent to upgrade"
    #: The helper wants it to wait: nothing is wrong with it.
    DEFERRED = "deferred"
    #: Nothing is known against it: it was locked, had waited too long, or provisioning was paused.
    LEFT_ALONE = "left alone"
    FAILED = "failed"

    @property
    def good(self) -> bool:
        """Whether the host is done with."""
        return self in (Outcome.PROVISIONED, Outcome.SHUT_DOWN, Outcome.UPGRADING)


@attrs.frozen(kw_only=True)
class Attempt:
    """One turn of a host with a worker.

    :ivar worker: name of its thread
    :ivar seconds: that it took
    :ivar step: at which it failed; what failed at the same step may have the same cause
    :ivar reason: one line without secrets; empty after a success
    """

    identity: str
    worker: str
    ended: float
    seconds: float
    outcome: Outcome
    step: str = ""
    reason: str = ""


@attrs.frozen(kw_only=True)
class Trouble:
    """A host whose last attempt failed.

    :ivar failures: in a row
    :ivar since: when the first of them ended
    :ivar last: when the last of them ended
    :ivar next_try: when it is admitted again at the earliest, should it not boot before; 0: with the next discovery
    """

    identity: str
    failures: int
    since: float
    last: float
    step: str
    reason: str
    next_try: float


@attrs.frozen(kw_only=True)
class Minute:
    """The attempts that ended in one minute.

    :ivar start: of the minute
    """

    start: float
    outcomes: Mapping[Outcome, int]


@attrs.frozen(kw_only=True)
class Reason:
    """Why attempts did not succeed.

    :ivar reason: of the latest of them; those of the others differ in numbers and identities at most
    :ivar last: when the latest of them ended
    """

    outcome: Outcome
    step: str
    reason: str
    count: int
    last: float


@attrs.frozen(kw_only=True)
class Connection:
    """The connection to the broker.

    :ivar broker: URL of the present one, or else of the last; empty when there was none
    :ivar since: when the connection came, or went
    :ivar error: why there is no connection, or was none the last time; empty as long as all went well
    """

    connected: bool
    broker: str
    since: float
    reconnections: int
    error: str


@attrs.frozen(kw_only=True)
class Queue:
    """How many hosts are on their way.

    :ivar waiting: known and not let go: all of the others, and those that are restarting
    :ivar queued: wait for a worker
    :ivar busy: are with a worker
    """

    waiting: int
    queued: int
    busy: int


@attrs.frozen(kw_only=True)
class WorkerState:
    """What a worker is at.

    :ivar identity: of the host that it has; empty: none
    :ivar step: of the cycle of that host
    :ivar since: when it took that host; 0: it has none
    """

    name: str
    identity: str = ""
    step: str = ""
    since: float = 0.0


@attrs.frozen(kw_only=True)
class Known:
    """A host that is known at the moment.

    :ivar sighted: when its reply or its event arrived
    :ivar step: that it is at, or was at last; empty: it waits for a worker
    :ivar worker: name of the worker that has it; empty: none
    """

    identity: str
    sighted: float
    step: str
    worker: str


@attrs.frozen(kw_only=True)
class Status:
    """One look at the daemon.

    :ivar time: of the look
    :ivar identity: of this instance
    :ivar started: when this instance was started
    :ivar problems: one line each, about threads and connections that are not as they should be
    :ivar troubled: the hosts whose last attempt failed, or some of them, the one that failed most often first
    :ivar troubled_count: of all of them
    :ivar recent: the last attempts, newest first
    :ivar minutes: the last hour
    :ivar expiries: of this instance's credentials, by their kind
    :ivar search: part of the identity of the hosts that are told about in `known`, `troubled` and `recent`; empty: all
    :ivar known: the hosts searched for that are known now, or some of them; of a search alone
    :ivar refused: why the host searched for is not to be provisioned here; empty: it may be, as far as that is known
    """

    time: float
    identity: str
    site: str
    version: str
    started: float
    role: Role
    problems: Sequence[str]
    connection: Connection
    queue: Queue
    workers: Sequence[WorkerState]
    troubled: Sequence[Trouble]
    troubled_count: int
    recent: Sequence[Attempt]
    reasons: Sequence[Reason]
    minutes: Sequence[Minute]
    expiries: Mapping[str, float]
    search: str = ""
    known: Sequence[Known] = ()
    refused: str = ""

    def to_json(self) -> bytes:
        """All of it as one JSON object."""
        members = attrs.asdict(self, recurse=False).items()
        return f"{{{', '.join(f'{_JSON.encode(name)}: {_json(value)}' for name, value in members)}}}".encode()


class Look(Protocol):
    """Looks at the daemon. Quick, never raises, for any thread."""

    def __call__(self, search: str = "", limit: int | None = None) -> Status:
        """Give the status.

        :param search: tell about those hosts alone that have this in their identity, in any case of its letters
        :param limit: of hosts that are known, and of those in trouble; None: there is none
        """


def reasons(attempts: Iterable[Attempt]) -> list[Reason]:
    """Count the attempts that did not succeed by their reasons, the most frequent first.

    :param attempts: newest first
    """
    groups: dict[tuple[Outcome, str, str], list[Attempt]] = collections.defaultdict(list)
    for each in attempts:
        if not each.outcome.good:
            groups[each.outcome, each.step, _pattern(each)].append(each)
    counted = [
        Reason(outcome=latest.outcome, step=latest.step, reason=latest.reason, count=len(group), last=latest.ended)
        for group in groups.values()
        for latest in group[:1]
    ]
    return sorted(counted, key=lambda each: each.count, reverse=True)


def epoch(moment: float) -> float:
    """A time of the monotonic clock, in seconds since the epoch."""
    return time.time() - (time.monotonic() - moment)


def _json(value: object) -> str:
    """JSON, of a list in pieces: the encoder lets no other thread run while it is at one, which matters for 50,000."""
    if isinstance(value, list):
        return f"[{', '.join(map(_JSON.encode, value))}]"
    return _JSON.encode(value)


def _pattern(attempt: Attempt) -> str:
    """What the reason has in common with those of other hosts that failed for the same cause."""
    return _DIGITS.sub("0", attempt.reason.replace(attempt.identity, ""))
