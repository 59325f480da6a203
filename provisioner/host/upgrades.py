"""Sending servers to another version: when it is due, and when to stop trying."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from provisioner.errors import HostError
from provisioner.text import printable

#: So many upgrades of one server to one version are tried before one that leads nowhere is an error.
ATTEMPTS = 2
#: How long an upgrade counts as tried.
FORGET_SECONDS = 24 * 3600.0

# servers make a part of a URL from it
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+~^:_-]{0,31}")
_EPOCH = re.compile(r"([0-9]*):(.*)", re.DOTALL)
_SEGMENT = re.compile(r"[0-9]+|[A-Za-z]+|[~^]")


class UpgradeError(HostError):
    """A server that should change its version cannot."""


def is_due(*, version: str, upgradable: bool, target: str, repository: str) -> bool:
    """Whether a server has to be sent to another version; False when it has that version already.

    :param version: what the server says it runs; empty when it does not say
    :param upgradable: whether it says that it can be upgraded
    :param target: the version that the helper named, 1 to 32 characters of a version
    :param repository: the URL of the releases; empty when not configured
    :raises UpgradeError: it should be sent there and cannot
    """
    if not _VERSION.fullmatch(target):
        raise UpgradeError("the version to upgrade to that the helper named is not one")
    if not version:
        raise UpgradeError(f"cannot upgrade to {target}: the server does not say which version it runs")
    if compare(version, target) == 0:
        return False
    change = f"cannot upgrade from {printable(version)} to {target}"
    if not upgradable:
        raise UpgradeError(f"{change}: the server's JWT or version does not allow it (upgradable is false)")
    if not repository:
        raise UpgradeError(f"{change}: upgrades_repository is not set")
    return True


class Attempts:
    """Remembers who was sent to which version, to notice an upgrade that never arrives. Used by every worker at once.

    What is older than `FORGET_SECONDS` is forgotten, so what is kept is bounded by the upgrades in that time.

    :param clock: a monotonic one, in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # by identity and target, in the order of the last attempt
        self._made: dict[tuple[str, str], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def check(self, identity: str, *, version: str, target: str) -> None:
        """Check that one more attempt is worth it.

        :raises UpgradeError: after `ATTEMPTS` that left the server at another version than the target
        """
        if self._count(identity, target) >= ATTEMPTS:
            raise UpgradeError(
                f"after {ATTEMPTS} upgrades to {target} the server still runs {printable(version)}: "
                f"not tried again for a day"
            )

    def add(self, identity: str, target: str) -> None:
        """Note that a server is being sent to a version."""
        with self._lock:
            self._forget_old()
            _, count = self._made.pop((identity, target), (0.0, 0))
            self._made[identity, target] = (self._clock(), count + 1)

    def arrived(self, identity: str, target: str) -> None:
        """Note that a server has the version that it was to go to."""
        with self._lock:
            self._made.pop((identity, target), None)

    def _count(self, identity: str, target: str) -> int:
        with self._lock:
            self._forget_old()
            _, count = self._made.get((identity, target), (0.0, 0))
            return count

    def _forget_old(self) -> None:
        oldest = self._clock() - FORGET_SECONDS
        while self._made and (first := next(iter(self._made.items())))[1][0] <= oldest:
            del self._made[first[0]]


def compare(one: str, other: str) -> int:
    """Compare versions, `[epoch:]version[-release]`, as rpm does.

    Digits compare as numbers, letters in the order of ASCII, numbers are newer than letters, `~` sorts before
    everything, even the end, `^` after the end and before everything else; other characters only separate. A missing
    epoch is 0, a missing release is older than any.

    :returns: less than 0 when the first is older, 0 when they are equal, more than 0 when it is newer
    """
    key, other_key = _sort_key(one), _sort_key(other)
    return (key > other_key) - (key < other_key)


_Segment = tuple[int, int, str]

_END: _Segment = (1, 0, "")


def _sort_key(text: str) -> tuple[list[_Segment], list[_Segment], list[_Segment]]:
    match = _EPOCH.fullmatch(text)
    epoch, rest = (match[1] or "0", match[2]) if match else ("0", text)
    version, dash, release = rest.rpartition("-")
    return _segments(epoch), _segments(version if dash else rest), _segments(release if dash else "")


def _segments(text: str) -> list[_Segment]:
    return [*map(_segment, _SEGMENT.findall(text)), _END]


def _segment(text: str) -> _Segment:
    """What a segment sorts by: its kind, then its value."""
    if text == "~":
        return (0, 0, "")
    if text == "^":
        return (2, 0, "")
    if text.isdigit():
        digits = text.lstrip("0")
        return (4, len(digits), digits)
    return (3, 0, text)
