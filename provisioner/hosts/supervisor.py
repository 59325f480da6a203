"""Watches the daemon's threads: a dead or stuck one is replaced where that is safe, else the daemon has to leave."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence

from provisioner.hosts.loop import TURN_LIMIT_SECONDS, Loop
from provisioner.monitor.health import Checks

LOG = logging.getLogger(__name__)

#: So often each loop is given a new thread. What made it die or hang is still there then, and a new process is better.
REPLACEMENTS_LIMIT = 3
#: A look that comes so long after the last one means that the whole process stood still: all threads are late then.
LATE_SECONDS = 10.0


class Supervisor:
    """Owns the threads of `loops`. Belongs to the main thread.

    A loop whose thread died keeps what it was working on in its own attributes, so a new thread can always take over.
    One that is stuck may wake at any moment, and only a loop that is made for it can have two threads then.

    :param vital: checks of what cannot be replaced
    """

    def __init__(self, loops: Sequence[Loop], vital: Checks) -> None:
        self._loops = loops
        self._vital = vital
        self._replaced: Counter[Loop] = Counter()
        self._looked = self._excused_until = -math.inf

    def start(self) -> None:
        """Start all, in their order."""
        for loop in self._loops:
            loop.start()
        self._looked = time.monotonic()

    def checks(self) -> Checks:
        """Checks of all that is watched, by name."""
        return {**self._vital, **{loop.name: loop.health for loop in self._loops}}

    def mend(self) -> bool:
        """Replace threads that died or are stuck.

        :return: False when one cannot be, so that only a new process helps
        """
        now = time.monotonic()
        if now - self._looked > LATE_SECONDS:
            LOG.warning("the process stood still for %.0f s", now - self._looked)
            self._excused_until = now + TURN_LIMIT_SECONDS
        self._looked = now
        return self._vital_are_well() and all(self._mend(loop) for loop in self._loops)

    def join(self, timeout: float) -> list[str]:
        """Wait for the end of all threads that were started, `timeout` seconds at most.

        :return: the names of those that do not end
        """
        end = time.monotonic() + timeout
        for loop in self._loops:
            loop.join(max(0.0, end - time.monotonic()))
        return [loop.name for loop in self._loops if loop.alive]

    @property
    def _excused(self) -> bool:
        return self._looked < self._excused_until

    def _vital_are_well(self) -> bool:
        if self._excused:
            return True
        problems = {name: problem for name, check in self._vital.items() if (problem := check().problem)}
        for name, problem in problems.items():
            LOG.critical("thread %s: %s: leaving", name, problem)
        return not problems

    def _mend(self, loop: Loop) -> bool:
        problem = loop.health().problem
        if problem is None or (loop.alive and self._excused):
            return True
        if (loop.alive and not loop.replaceable) or self._replaced[loop] == REPLACEMENTS_LIMIT:
            LOG.critical("thread %s: %s: leaving", loop.name, problem)
            return False
        LOG.critical("thread %s: %s: another thread takes over", loop.name, problem)
        self._replaced[loop] += 1
        loop.start()
        return True
