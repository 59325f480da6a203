"""Admits servers as soon as they have booted, by the startup event that they publish."""

from __future__ import annotations

import logging
import queue
import time

from provisioner.choria import lifecycle
from provisioner.choria.connector import Connector
from provisioner.choria.identity import reason_insane
from provisioner.choria.nats import Message
from provisioner.config import Config
from provisioner.host.host import Host
from provisioner.hosts.admission import Admission
from provisioner.hosts.history import History
from provisioner.hosts.loop import IDLE_SECONDS, TURN_LIMIT_SECONDS, Loop
from provisioner.hosts.registry import WORK_QUEUE_HOSTS, Registry
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.text import printable

LOG = logging.getLogger(__name__)

#: A difference between a server's clock and ours that is worth a warning; an event takes a while to arrive.
CLOCK_TOLERANCE_SECONDS = 30.0


class Listener(Loop):
    """The one subscriber of startup events of the configured component.

    The subscription has no queue group: within one, the broker would hand an event to a single instance, and a
    standby would drop it.
    """

    replaceable = True

    def __init__(
        self,
        connector: Connector,
        *,
        config: Config,
        admission: Admission,
        history: History,
        registry: Registry,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> None:
        super().__init__("listener", lambda: shutdown.requested, limit=TURN_LIMIT_SECONDS)
        self._config = config
        self._admission = admission
        self._history = history
        self._registry = registry
        self._metrics = metrics
        # a burst waits here, not in the reader thread, which has RPC replies to deliver
        self._messages: queue.Queue[Message] = queue.Queue(WORK_QUEUE_HOSTS)
        self._dropped = self._told = 0
        self._told_paused = False
        connector.subscribe(lifecycle.startup_subject(config.lifecycle_component), callback=self._receive)

    def _receive(self, message: Message) -> None:
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._dropped += 1
            self._metrics.events_dropped.inc()

    def turn(self) -> None:
        if self._told != self._dropped:
            LOG.warning("dropped %d lifecycle events: too many at once", self._dropped - self._told)
            self._told = self._dropped
        try:
            message = self._messages.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            return
        identity = self.handle(message)
        if identity is None or not self._admission.permits(identity):
            return
        self._history.booted(identity)
        if self._registry.add(Host(identity, message.received)):
            self._metrics.event_discovered.inc()
            LOG.info("added, it has just started", extra={"identity": identity})

    def handle(self, message: Message) -> str | None:
        """The identity that a startup event announces, or None when there is nobody to admit."""
        if self._config.paused:
            # once: to a standby they all are of no interest
            LOG.log(logging.DEBUG if self._told_paused else logging.WARNING, "dropping lifecycle events: paused")
            self._told_paused = True
            return None
        self._told_paused = False
        try:
            event = lifecycle.parse(message.payload)
        except lifecycle.EventError as error:
            LOG.warning("dropped a message on %s: %s", message.subject, error)
            return None
        if event.type != lifecycle.STARTUP or not event.identity:
            LOG.debug("ignored an event of type %s", event.type)
            return None
        if reason := reason_insane(event.identity):
            LOG.warning("refused the identity %r in an event: %s", printable(event.identity), reason)
            return None
        self._compare_clocks(event, message)
        return event.identity

    def _compare_clocks(self, event: lifecycle.Event, message: Message) -> None:
        """Warn of a server that will drop our requests for their time, without a word."""
        if event.timestamp is None:
            return
        ahead = event.timestamp - (time.time() - (time.monotonic() - message.received))
        if abs(ahead) > CLOCK_TOLERANCE_SECONDS:
            LOG.warning(
                "its clock and the one of this machine differ by %.0f s: servers do not answer requests that are older "
                "or younger than ttl in the Choria configuration (60 s by default)",
                abs(ahead),
                extra={"identity": event.identity},
            )
