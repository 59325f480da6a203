"""Lets hosts go that workers are done with, at once or after a while."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import time

from provisioner.host.host import Host
from provisioner.hosts.loop import IDLE_SECONDS, TURN_LIMIT_SECONDS, Loop
from provisioner.hosts.registry import Registry


class Finisher(Loop):
    """The one caller of :meth:`Registry.remove`, so that workers never wait for the lock to delete.

    Delayed hosts wait in one heap, not in a thread each: tens of thousands may be restarting at a time.
    """

    def __init__(self, registry: Registry) -> None:
        self._stopped = False
        super().__init__("finisher", lambda: self._stopped, limit=TURN_LIMIT_SECONDS)
        self._registry = registry
        self._done: queue.SimpleQueue[tuple[float, int, Host]] = queue.SimpleQueue()
        self._delayed: list[tuple[float, int, Host]] = []
        self._order = itertools.count()

    def done(self, host: Host, delay: float) -> None:
        """Let go of `host` in `delay` seconds. Called from any thread, never blocks."""
        self._done.put((time.monotonic() + delay, next(self._order), host))

    def stop(self) -> None:
        """End the thread with its present turn. Hosts that are still delayed stay as they are."""
        self._stopped = True

    def turn(self) -> None:
        until_due = self._delayed[0][0] - time.monotonic() if self._delayed else IDLE_SECONDS
        with contextlib.suppress(queue.Empty):
            heapq.heappush(self._delayed, self._done.get(timeout=max(0.0, min(until_due, IDLE_SECONDS))))
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._registry.remove(heapq.heappop(self._delayed)[2])
