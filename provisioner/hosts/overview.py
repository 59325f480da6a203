"""What this instance is at, copied from those who know into plain data: for the status page and for systemd."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from provisioner import __version__
from provisioner.choria.connector import Connector
from provisioner.config import Config
from provisioner.hosts.history import History
from provisioner.hosts.registry import Registry
from provisioner.hosts.worker import Worker
from provisioner.monitor import health, status
from provisioner.monitor.health import Checks
from provisioner.monitor.metrics import Metrics
from provisioner.monitor.status import Connection, Known, Queue, Role, Status, epoch


@attrs.frozen(kw_only=True)
class Overview:
    """Looks at all the others and changes nothing. For any thread.

    :ivar identity: of this instance
    :ivar liveness: checks that the threads' loops turned lately
    :ivar readiness: checks that this instance can do its work
    :ivar started: when it was started, by the monotonic clock
    """

    identity: str
    config: Config
    connector: Connector
    metrics: Metrics
    history: History
    registry: Registry
    workers: Sequence[Worker]
    liveness: Checks
    readiness: Checks
    started: float = attrs.field(factory=time.monotonic)

    def look(self, search: str = "", limit: int | None = None) -> Status:
        """All of it; see :class:`provisioner.monitor.status.Look`."""
        recent = self.history.recent()
        workers = [worker.state() for worker in self.workers]
        troubled = self.history.troubled(search, limit)
        return Status(
            time=time.time(),
            identity=self.identity,
            site=self.config.site,
            version=__version__,
            started=epoch(self.started),
            role=self._role(),
            problems=[*self.problems(), *health.complaints(self.readiness)],
            connection=self._connection(),
            queue=Queue(
                waiting=self.registry.waiting,
                queued=self.registry.queued,
                busy=sum(bool(worker.identity) for worker in workers),
            ),
            workers=workers,
            troubled=troubled,
            troubled_count=self.history.troubled_count(),
            recent=[attempt for attempt in recent if search.lower() in attempt.identity.lower()],
            reasons=status.reasons(recent),
            minutes=self.history.per_minute(),
            expiries=self.metrics.credential_expiries(),
            search=search,
            known=self._find(search, limit) if search else (),
            refused=(search and self.config.reason_refused(search)) or "",
        )

    def problems(self) -> list[str]:
        """What :attr:`liveness` has to complain about, one line each."""
        return health.complaints(self.liveness)

    def summary(self) -> str:
        """All of it in one line."""
        broker = f"connected to {self.connector.connected_url}" if self.connector.connected else "not connected"
        known, troubled = self.registry.waiting, self.history.troubled_count()
        return f"{self._role()}, {broker}; {known} servers waiting or in work, {troubled} in trouble"

    def _role(self) -> Role:
        paused = self.config.paused
        if self.config.leader_election:
            return Role.STANDBY if paused else Role.LEADER
        return Role.PAUSED if paused else Role.ALONE

    def _connection(self) -> Connection:
        return Connection(
            connected=self.connector.connected,
            broker=self.connector.connected_url,
            since=epoch(self.connector.changed),
            reconnections=max(0, self.connector.connections - 1),
            error=self.connector.last_error,
        )

    def _find(self, search: str, limit: int | None) -> list[Known]:
        holders = {worker.host: worker.name for worker in self.workers}
        return [
            Known(
                identity=host.identity,
                sighted=epoch(host.discovered),
                step=host.step,
                worker=holders.get(host, ""),
            )
            for host in self.registry.find(search)[:limit]
        ]
