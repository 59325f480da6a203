"""The hosts that are known to need provisioning, and the queue of those that wait for a worker.

Broadcast discovery and the event listener both come through :meth:`Registry.add`; everything after it is the same.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from provisioner.host.host import Host
from provisioner.monitor.metrics import Metrics

LOG = logging.getLogger(__name__)

#: Hosts that may wait for a worker; further ones are dropped and sighted again later. As in the Go original.
WORK_QUEUE_HOSTS = 50_000


class Registry:
    """Admission and release of hosts. Safe to use from any thread; nothing blocks while the lock is held.

    :param interval: seconds between two discoveries
    """

    def __init__(self, interval: float, metrics: Metrics, *, work_queue_hosts: int = WORK_QUEUE_HOSTS) -> None:
        self._interval = interval
        self._metrics = metrics
        self._lock = threading.Lock()
        self._hosts: dict[str, Host] = {}
        # those that were let go while a worker or the finisher had them, until these are done with them
        self._leftovers: dict[str, Host] = {}
        self._work: queue.Queue[Host] = queue.Queue(work_queue_hosts)
        metrics.waiting_nodes.set_function(lambda: self.waiting)
        metrics.work_queue_entries.set_function(lambda: self.queued)

    def add(self, host: Host) -> bool:
        """Admit a host that was just sighted, and put it on the work queue; no other method does.

        A known identity is admitted again only when this sighting is old by itself, as one that waited long in a
        burst is: a second provisioning costs less than a host that never gets one. Else the host that is known has
        been seen once more, and may wait for a worker that much longer.

        :return: whether the host was admitted
        """
        with self._lock:
            if host.identity in self._leftovers:
                return False
            if known := self._hosts.get(host.identity):
                if time.monotonic() - host.discovered < self._interval:
                    known.discovered = max(known.discovered, host.discovered)
                    return False
                del self._hosts[host.identity]
            try:
                self._work.put_nowait(host)
                self._hosts[host.identity] = host
                admitted = True
            except queue.Full:
                self._metrics.queue_full.inc()
                admitted = False
            waiting = len(self._hosts)
        if not admitted:
            LOG.warning(
                "the work queue is full with %d entries, %d hosts are waiting: host dropped until it is sighted again",
                self._work.maxsize,
                waiting,
                extra={"identity": host.identity},
            )
        return admitted

    def take(self, timeout: float) -> Host | None:
        """The next host to work on, or None when there is none within `timeout` seconds.

        It may have been let go meanwhile: ask :meth:`is_current` before doing anything to it.
        """
        try:
            return self._work.get(timeout=timeout)
        except queue.Empty:
            return None

    def is_current(self, host: Host) -> bool:
        """Whether this very sighting is still to be provisioned; if not, whoever has it drops it without a word."""
        with self._lock:
            _discard(self._leftovers, host)
            return self._hosts.get(host.identity) is host

    @property
    def waiting(self) -> int:
        """How many hosts are known."""
        return len(self._hosts)

    @property
    def queued(self) -> int:
        """How many entries the work queue has."""
        return self._work.qsize()

    def find(self, search: str) -> list[Host]:
        """The known hosts that have this in their identity, in any case of its letters."""
        with self._lock:
            hosts = list(self._hosts.values())
        return [host for host in hosts if search.lower() in host.identity.lower()]

    def remove(self, host: Host) -> None:
        """Let go of a host that is done. A newer sighting of the same identity stays."""
        with self._lock:
            host.let_go = True
            _discard(self._hosts, host)
            _discard(self._leftovers, host)

    def remove_all(self) -> None:
        """Forget every host and empty the work queue; for an instance that lost the election.

        One that is in work may still have to be restarted, and must not be given new keys before that: should this
        instance win again, it is not admitted until it is done.
        """
        with self._lock:
            while not self._work.empty():
                try:
                    _discard(self._hosts, self._work.get_nowait())
                except queue.Empty:  # a worker was faster; it will find that its host is not current
                    break
            for host in self._hosts.values():
                host.let_go = True
            self._leftovers.update(self._hosts)
            self._hosts.clear()


def _discard(hosts: dict[str, Host], host: Host) -> None:
    """Take this very sighting out; a newer one of the same identity stays."""
    if hosts.get(host.identity) is host:
        del hosts[host.identity]
