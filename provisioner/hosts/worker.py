"""The workers: each takes one host after the other and runs it through its provisioning cycle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from provisioner.errors import DeferredError, HostError, SoftError
from provisioner.host.host import Host
from provisioner.host.provision import Success
from provisioner.hosts.finisher import Finisher
from provisioner.hosts.history import History
from provisioner.hosts.loop import IDLE_SECONDS, Loop
from provisioner.hosts.registry import Registry
from provisioner.monitor.metrics import Metrics
from provisioner.monitor.status import Attempt, Outcome, Trouble, WorkerState, epoch
from provisioner.shutdown import Shutdown

LOG = logging.getLogger(__name__)

#: A host whose server is about to leave stays known for this long, so that the next discovery does not admit it again.
LEAVING_SECONDS = 60.0

_OUTCOMES = {
    Success.PROVISIONED: Outcome.PROVISIONED,
    Success.SHUT_DOWN: Outcome.SHUT_DOWN,
    Success.UPGRADING: Outcome.UPGRADING,
}


class Worker(Loop):
    """One of the pool. Its thread may be replaced while it is stuck, in a helper on a file system that hangs, say.

    :param provision: runs one host's cycle; raises :class:`HostError` for the failures that are expected
    :param limit: seconds after which that is a sign that the thread is stuck
    :param paused: whether no host is to be taken
    """

    replaceable = True

    def __init__(
        self,
        number: int,
        provision: Callable[[Host], Success],
        *,
        limit: float,
        paused: Callable[[], bool],
        registry: Registry,
        finisher: Finisher,
        history: History,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> None:
        super().__init__(f"worker-{number}", lambda: shutdown.requested, limit=limit)
        self._provision = provision
        self._paused = paused
        self._registry = registry
        self._finisher = finisher
        self._metrics = metrics
        self._history = history
        self._counters = {
            Success.PROVISIONED: metrics.provisioned,
            Success.SHUT_DOWN: metrics.helper_shutdown_requests,
            Success.UPGRADING: metrics.upgrades,
        }
        # of the present turn; written by the thread that has it
        self.host: Host | None = None
        self.since = 0.0

    def state(self) -> WorkerState:
        """What it is at; for any thread."""
        host, since = self.host, self.since
        if host is None:
            return WorkerState(name=self.name)
        return WorkerState(name=self.name, identity=host.identity, step=host.step, since=epoch(since))

    def start(self) -> None:
        host = self.host
        if host is not None:  # in the hands of a thread that is stuck
            self._give_up(host, self.since, HostError("its worker got stuck"))
            self.host = None
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
        self.since = time.monotonic()
        self.host = host
        delay = 0.0
        try:
            with self._metrics.busy_workers.track_inprogress():
                delay = self._work_on(host, self.since)
        finally:
            if self.host is host:
                self.host = None
            # only now, when the history knows of it, may it be sighted again
            self._finisher.done(host, delay)

    def _work_on(self, host: Host, started: float) -> float:
        """Provision a host, whatever happens.

        :return: seconds that the host is to stay known
        """
        extra = {"identity": host.identity}
        LOG.info("provisioning", extra=extra)
        try:
            success = self._provision(host)
        except HostError as error:
            self._give_up(host, started, error)
            return 0.0
        except Exception as error:  # noqa: BLE001 - a bug must cost no more than this one host's turn
            self._give_up(host, started, HostError("a bug"), bug=error)
            return 0.0
        self._counters[success].inc()
        self._record(host, _OUTCOMES[success], started)
        LOG.info("%s in %.2f s", success.value, time.monotonic() - started, extra=extra)
        return LEAVING_SECONDS if success.leaving else 0.0

    def _give_up(self, host: Host, started: float, error: HostError, *, bug: Exception | None = None) -> None:
        extra = {"identity": host.identity, "request_id": error.request_id}
        if self.host is not host:
            # a thread that was stuck: this has been counted and told, and the host may be in other hands by now
            level, seconds = logging.ERROR if bug else logging.INFO, time.monotonic() - started
            LOG.log(level, "its worker is no longer stuck, after %.2f s: %s", seconds, error, exc_info=bug, extra=extra)
            return
        self._metrics.provision_errors.inc()
        failed = not isinstance(error, SoftError)
        waits = Outcome.DEFERRED if isinstance(error, DeferredError) else Outcome.LEFT_ALONE
        outcome = Outcome.FAILED if failed else waits
        reason = f"{error}: {type(bug).__name__}" if bug else str(error)
        trouble = self._record(host, outcome, started, reason=reason, hold=error.hold)
        LOG.log(
            logging.ERROR if failed else logging.INFO,
            "could not provision after %.2f s: %s%s",
            time.monotonic() - started,
            error,
            _outlook(trouble) if failed else "",
            exc_info=bug,
            extra=extra,
        )

    def _record(
        self, host: Host, outcome: Outcome, started: float, *, reason: str = "", hold: float = 0.0
    ) -> Trouble | None:
        attempt = Attempt(
            identity=host.identity,
            worker=self.name,
            ended=time.time(),
            seconds=time.monotonic() - started,
            outcome=outcome,
            step=host.step if reason else "",
            reason=reason,
        )
        return self._history.record(attempt, hold=hold)


def _outlook(trouble: Trouble | None) -> str:
    """What is to be expected of a host that keeps failing; empty when it is tried again with the next discovery."""
    if trouble is None or not trouble.next_try:
        return ""
    pause = trouble.next_try - time.time()
    return f" (failed {trouble.failures} times in a row: left alone for {pause:.0f} s, unless it boots)"
