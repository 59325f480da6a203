"""The workers: each takes one host after the other and runs it through its provisioning cycle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from provisioner.errors import HostError, SoftError
from provisioner.host.host import Host
from provisioner.host.provision import Outcome
from provisioner.hosts.finisher import Finisher
from provisioner.hosts.loop import IDLE_SECONDS, Loop
from provisioner.hosts.registry import Registry
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown

LOG = logging.getLogger(__name__)

#: A host whose server is about to leave stays known for this long, so that the next discovery does not admit it again.
LEAVING_SECONDS = 60.0
#: No cycle lasts this long, the helper's time aside: each of its some twenty tries takes up to 22 s, and as long again
#: to wait for the broker.
HOST_LIMIT_SECONDS = 1200.0


class Worker(Loop):
    """One of the pool. A helper on a file system that hangs may hold its thread for ever, so that can be replaced.

    :param provision: runs one host's cycle; raises :class:`HostError` for the failures that are expected
    :param paused: whether no host is to be taken
    :param helper_timeout: seconds that the helper may take of a turn
    """

    replaceable = True

    def __init__(
        self,
        number: int,
        provision: Callable[[Host], Outcome],
        registry: Registry,
        finisher: Finisher,
        metrics: Metrics,
        shutdown: Shutdown,
        paused: Callable[[], bool],
        helper_timeout: float,
    ) -> None:
        super().__init__(f"worker-{number}", lambda: shutdown.requested, limit=HOST_LIMIT_SECONDS + helper_timeout)
        self._provision = provision
        self._paused = paused
        self._registry = registry
        self._finisher = finisher
        self._metrics = metrics
        self._counters = {
            Outcome.PROVISIONED: metrics.provisioned,
            Outcome.SHUT_DOWN: metrics.helper_shutdown_requests,
            Outcome.UPGRADING: metrics.upgrades,
        }
        # of the present turn; written by the thread that has it
        self._host: Host | None = None

    def start(self) -> None:
        host = self._host
        if host is not None:  # in the hands of a thread that is stuck
            self._finisher.done(host, 0.0)
        super().start()

    def turn(self) -> None:
        if self._paused():
            time.sleep(IDLE_SECONDS)
            return
        host = self._registry.take(IDLE_SECONDS)
        # A host that is not current was let go while it waited. It is in nobody's map, so it is not done either.
        if host is None or self._stopping() or not self._registry.is_current(host):
            return
        self._host = host
        delay = 0.0
        try:
            with self._metrics.busy_workers.track_inprogress():
                delay = self._work_on(host)
        finally:
            if self._host is host:
                self._host = None
            self._finisher.done(host, delay)

    def _work_on(self, host: Host) -> float:
        """Provision a host, whatever happens.

        :return: seconds that the host is to stay known
        """
        started = time.monotonic()
        extra = {"identity": host.identity}
        LOG.info("provisioning", extra=extra)
        try:
            outcome = self._provision(host)
        except HostError as error:
            self._metrics.provision_errors.inc()
            level = logging.INFO if isinstance(error, SoftError) else logging.ERROR
            LOG.log(level, "could not provision after %.2f s: %s", time.monotonic() - started, error, extra=extra)
            return error.hold
        except Exception:  # a bug must cost no more than this one host's turn
            self._metrics.provision_errors.inc()
            LOG.exception("could not provision: a bug", extra=extra)
            return 0.0
        self._counters[outcome].inc()
        LOG.info("%s in %.2f s", outcome.value, time.monotonic() - started, extra=extra)
        return LEAVING_SECONDS if outcome.leaving else 0.0
