"""How long credentials are valid: whether they are now, warnings in time, and dates for people.

All times are in seconds since the epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

LOG = logging.getLogger(__name__)

#: How long before its end a credential is first warned about.
WARNING_SECONDS = 30 * 86400.0
#: How often it is warned about then.
REMINDER_SECONDS = 86400.0


class Reminder:
    """Warns at the start, and then once a day, of credentials that are about to expire.

    :param expiries: gives when each does, in seconds since the epoch
    """

    def __init__(
        self,
        expiries: Callable[[], Mapping[str, float]],
        *,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expiries = expiries
        self._clock = clock
        self._now = now
        self._next = now()

    def __call__(self) -> None:
        """Warn when it is time to. Costs next to nothing when it is not."""
        if self._now() < self._next:
            return
        self._next = self._now() + REMINDER_SECONDS
        for warning in warnings(self._expiries(), self._clock()):
            LOG.warning("%s", warning)


def warnings(expiries: Mapping[str, float], now: float) -> list[str]:
    """One line for each credential that has expired, or will before long.

    :param expiries: by credential, in seconds since the epoch
    """
    lines = []
    for credential, expiry in expiries.items():
        if now >= expiry:
            lines.append(f"the {credential} of this provisioner has expired, on {date(expiry)}")
        elif expiry - now < WARNING_SECONDS:
            lines.append(f"the {credential} of this provisioner expires on {date(expiry)}")
    return lines


def problem(not_before: float | None, expiry: float | None, now: float) -> str | None:
    """Why something is not valid at the time `now`; all in seconds since the epoch."""
    if not_before is not None and now < not_before:
        return f"not valid before {date(not_before)}, and the clock of this machine says {date(now)}"
    if expiry is not None and now >= expiry:
        return f"expired since {date(expiry)}"
    return None


def date(seconds: float) -> str:
    """A time for people, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "a time beyond all calendars"
