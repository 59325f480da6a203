"""What the daemon's own threads have in common."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from provisioner.monitor import health
from provisioner.monitor.health import Health

LOG = logging.getLogger(__name__)

#: How long a turn may wait for something to do before it looks whether to stop.
IDLE_SECONDS = 0.5
#: A turn that only moves something on lasts no longer than this, unless the thread is stuck.
TURN_LIMIT_SECONDS = 30.0
#: Pause after a turn that ended in a bug, so that a bug that repeats itself does not burn a core.
AFTER_BUG_SECONDS = 1.0


class Loop:
    """Something that takes turns in a thread of its own until it is told to stop.

    A bug in one turn is logged, and the next turn comes. The thread may be exchanged for a new one at any time: the old
    one takes no further turn.

    :param name: of its threads
    :param stopping: asked before every turn
    :param limit: seconds after which a turn is a sign that the thread is stuck
    """

    #: Whether a new thread may take over while the old one is still stuck somewhere in its turn.
    replaceable = False

    def __init__(self, name: str, stopping: Callable[[], bool], *, limit: float) -> None:
        self.name = name
        self._stopping = stopping
        self._limit = limit
        # replaced by start(), which the owner alone calls: who may take turns, and the same once it really runs
        self._turning: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def turn(self) -> None:
        """Do the next piece of work, or return after :data:`IDLE_SECONDS` at most."""
        raise NotImplementedError

    def start(self) -> None:
        """Take turns in a new thread from now on."""
        self._began = time.monotonic()
        # daemonic: a thread that cannot be ended within the grace time must not keep the process alive
        self._turning = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._turning.start()
        self._thread = self._turning

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, if it was started."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def health(self) -> Health:
        """How long ago the thread began its present turn. One that was not started, or is to end, is fine."""
        if self.alive:
            return health.of_turn(self._began, self._limit)
        if self._thread is None or self._stopping():
            return Health(note="does not run")
        return Health("the thread has died")

    def _run(self) -> None:
        me = threading.current_thread()
        while self._turning is me and not self._stopping():
            self._began = time.monotonic()
            try:
                self.turn()
            except Exception:  # the outermost frame of the thread
                LOG.exception("bug in thread %s", self.name)
                time.sleep(AFTER_BUG_SECONDS)
