"""The one place that knows whether the process is to end, and how soon.

A signal handler may only set flags: it runs between any two instructions of the main thread, which may hold any lock at
that moment. So this is plain attributes that all threads poll, and no event that would need a lock.
"""

from __future__ import annotations

import time


class Shutdown:
    """A request to leave, with a grace time for what is in work.

    :param grace: seconds that work under way is given to end by itself
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._deadline: float | None = None

    def request(self) -> None:
        """Ask the process to leave; asked a second time, it leaves at once. Safe in a signal handler."""
        now = time.monotonic()
        self._deadline = now + self._grace if self._deadline is None else now

    @property
    def requested(self) -> bool:
        """No new work is to be taken."""
        return self._deadline is not None

    @property
    def expired(self) -> bool:
        """The grace time is over, or a second request came: drop what is in work."""
        return self._deadline is not None and time.monotonic() >= self._deadline
