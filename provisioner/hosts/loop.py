"""What the daemon's own threads have in common."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)

#: How long a turn may wait for something to do before it looks whether to stop.
IDLE_SECONDS = 0.5
#: A turn that only moves something on lasts no longer than this, unless the thread is stuck.
TURN_LIMIT_SECONDS = 30.0
#: Pause after a turn that ended in a bug, so that a bug that repeats itself does not burn a core.
AFTER_BUG_SECONDS = 1.0


class Loop(threading.Thread):
    """A named thread that takes turns until it is told to stop. A bug in one turn is logged, the next turn comes.

    :param stopping: asked before every turn
    :param limit: seconds after which a turn is a sign that the thread is stuck
    """

    def __init__(self, name: str, stopping: Callable[[], bool], *, limit: float) -> None:
        # daemonic: a thread that cannot be ended within the grace time must not keep the process alive
        super().__init__(name=name, daemon=True)
        self._stopping = stopping
        self._limit = limit
        self._turned = time.monotonic()

    def turn(self) -> None:
        """Do the next piece of work, or return after :data:`IDLE_SECONDS` at most."""
        raise NotImplementedError

    def run(self) -> None:
        while not self._stopping():
            self._turned = time.monotonic()
            try:
                self.turn()
            except Exception:  # the outermost frame of the thread
                LOG.exception("bug in thread %s", self.name)
                time.sleep(AFTER_BUG_SECONDS)

    def stuck(self) -> str | None:
        """What is wrong when the present turn has lasted too long, else None. One that does not run is fine."""
        return overdue(self._turned, self._limit) if self.is_alive() else None


def overdue(turned: float, limit: float) -> str | None:
    """What is wrong when a turn that began at `turned`, by the monotonic clock, lasts longer than `limit` seconds."""
    age = time.monotonic() - turned
    return f"the turn has lasted {age:.0f} s" if age > limit else None
