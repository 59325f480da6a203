"""The main loop: starts the threads, discovers in every interval, and ends all of it in order."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable

from provisioner import __version__, systemd
from provisioner.choria import discovery, lifecycle
from provisioner.choria.election_key import ELECTION, Key
from provisioner.errors import ProvisionerError
from provisioner.host import node
from provisioner.host.host import Host
from provisioner.host.provision import Provisioner
from provisioner.hosts.admission import Admission
from provisioner.hosts.election import Election
from provisioner.hosts.finisher import Finisher
from provisioner.hosts.history import History
from provisioner.hosts.listener import Listener
from provisioner.hosts.loop import IDLE_SECONDS, TURN_LIMIT_SECONDS, Loop
from provisioner.hosts.overview import Overview
from provisioner.hosts.registry import Registry
from provisioner.hosts.supervisor import Supervisor
from provisioner.hosts.worker import Worker
from provisioner.monitor import health
from provisioner.monitor.health import Checks, Health

LOG = logging.getLogger(__name__)

#: The component that this program announces itself as.
COMPONENT = "provisioner"
#: How long the threads may take to end once nothing holds them any more.
LEAVE_SECONDS = 5.0
#: When to discover again after the connection came back: servers may take 30 s longer, and do not announce it.
RETURN_SECONDS = (10.0, 35.0)
#: How often the end of the workers is looked at during the grace time.
CHECK_SECONDS = 0.05


class Ticker:
    """Comes due every `interval` seconds from its creation, however long the work between takes.

    A tick that was missed is not made up for.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._next = now + interval

    def remaining(self, now: float) -> float:
        """Seconds until it is due, 0 when it is."""
        return max(0.0, self._next - now)

    def advance(self, now: float) -> None:
        """Wait for the next tick after `now`."""
        while self._next <= now:
            self._next += self._interval


class Scheduler:
    """Finds hosts and has them provisioned, for the life of the process.

    :meth:`run` belongs to the main thread, :meth:`trigger` is for any.

    :param each_turn: called in every turn of the main thread, in a discovery with every reply; must be quick
    :ivar history: of the attempts of this instance
    :ivar overview: of all that this instance is at
    """

    def __init__(self, provisioner: Provisioner, *, each_turn: Callable[[], None] = lambda: None) -> None:
        self._each_turn = each_turn
        self._config = provisioner.config
        self._metrics = provisioner.metrics
        self._shutdown = provisioner.shutdown
        self._connector = provisioner.client.connector
        self._connector.on_reconnect = self._note_reconnection
        self._protocol = provisioner.client.protocol
        self._first_reply = provisioner.discovery_timeout
        self.history = History(backoff=self._config.retry_backoff, interval=self._config.interval)
        self._metrics.troubled_nodes.set_function(self.history.troubled_count)
        self._metrics.paused.set_function(lambda: int(self._config.paused))
        self._metrics.leader.set_function(lambda: int(not self._config.paused))
        self._admission = Admission(self._config, self._metrics)
        self._registry = Registry(self._config.interval, self._metrics)
        self._finisher = Finisher(self._registry)
        self._workers = [
            Worker(
                number,
                provisioner.provision,
                limit=node.cycle_limit(provisioner.discovery_timeout) + self._config.helper_timeout,
                paused=lambda: self._config.paused,
                registry=self._registry,
                finisher=self._finisher,
                history=self.history,
                metrics=self._metrics,
                shutdown=self._shutdown,
            )
            for number in range(1, self._config.workers + 1)
        ]
        self._listener = Listener(
            self._connector,
            config=self._config,
            admission=self._admission,
            history=self.history,
            registry=self._registry,
            metrics=self._metrics,
            shutdown=self._shutdown,
        )
        self._election = self._candidate() if self._config.leader_election else None
        # in the order in which they are started
        loops: list[Loop] = [self._listener, self._finisher, *self._workers]
        readiness = {"broker": self._broker}
        if self._election:
            loops.insert(0, self._election)
            readiness["election"] = self._election.readiness
        self._supervisor = Supervisor(loops, {"connector-reader": self._connector.health})
        #: That each thread's loop turned lately, which does not depend on the broker.
        self.liveness: Checks = {"main": self._health, **self._supervisor.checks()}
        #: That this instance can do its work, or could if it were the leader.
        self.readiness: Checks = readiness
        self.overview = Overview(
            identity=self._protocol.identity,
            config=self._config,
            connector=self._connector,
            metrics=self._metrics,
            history=self.history,
            registry=self._registry,
            workers=self._workers,
            liveness=self.liveness,
            readiness=self.readiness,
        )
        self._watchdog = systemd.Watchdog(self.overview.problems, self.overview.summary)
        self._turned = time.monotonic()
        # by the monotonic clock: when the connection came back, written by its thread, and when a discovery was due
        # last, written by the main thread
        self._reconnected = self._discovered = -math.inf
        # holds one entry at most: a trigger that is pending is not doubled
        self._triggers: queue.Queue[str] = queue.Queue(1)

    def run(self) -> bool:
        """Work until the process is asked to leave, then leave in order.

        :return: False when a thread died, was stuck or could not be ended
        """
        healthy = True
        if self._election:
            self._config.pause()
        try:
            if self._connect():
                self._announce()
                self._supervisor.start()
                healthy = self._loop()
        except Exception:  # the outermost frame of the main loop
            LOG.exception("bug in the main loop: leaving")
            healthy = False
        if not self._shutdown.requested:
            self._shutdown.request()
        return self._stop() and healthy

    def trigger(self, reason: str) -> None:
        """Have a discovery made soon, out of turn. Never blocks."""
        with contextlib.suppress(queue.Full):
            self._triggers.put_nowait(reason)

    def discover(self) -> None:
        """Ask the network who wants to be provisioned, and admit those who answer."""
        self._discovered = time.monotonic()
        if self._config.paused:
            LOG.info("not discovering: paused")
            self.history.forget()
            return
        self._metrics.discover_cycles.inc()
        try:
            sightings = discovery.discover(
                self._connector,
                self._protocol,
                target_agent=node.PROVISIONING_AGENT,
                first_reply=self._first_reply,
                interrupted=self._interrupted,
            )
        except ProvisionerError as error:
            self._metrics.discovery_errors.inc()
            LOG.error("discovery failed: %s", error)
            return
        permitted = [sighting for sighting in sightings if self._admission.permits(sighting.identity)]
        chosen = self.history.choose(permitted)
        added = 0
        for sighting in chosen:
            if self._inert():
                break
            if self._registry.add(Host(sighting.identity, sighting.received)):
                added += 1
                self._metrics.discovered.inc()
                LOG.info("added, it was discovered", extra={"identity": sighting.identity})
        if sightings:
            refused, left_alone = len(sightings) - len(permitted), len(permitted) - len(chosen)
            LOG.info("discovered %d servers, %d of them new%s", len(sightings), added, _others(refused, left_alone))
        else:
            LOG.info("discovered no server that waits (one whose clock is off by more than the ttl stays silent)")

    def _candidate(self) -> Election:
        identity = self._protocol.identity
        return Election(
            Key(self._connector, identity),
            config=self._config,
            registry=self._registry,
            metrics=self._metrics.election(ELECTION, identity),
            stopping=lambda: self._shutdown.requested,
            trigger=self.trigger,
        )

    def _broker(self) -> Health:
        return Health() if self._connector.connected else Health("not connected")

    def _health(self) -> Health:
        limit = TURN_LIMIT_SECONDS + (self._config.shutdown_grace if self._shutdown.requested else 0.0)
        return health.of_turn(self._turned, limit)

    def _interrupted(self) -> bool:
        """Asked often by a discovery, which may be configured to take long."""
        self._live()
        return self._inert()

    def _live(self) -> None:
        """What is due in every turn, whatever the main thread is at."""
        self._turned = time.monotonic()
        self._each_turn()
        self._watchdog.feed()

    def _inert(self) -> bool:
        return self._shutdown.requested or self._config.paused

    def _connect(self) -> bool:
        while not self._shutdown.requested:
            self._live()
            if self._connector.connect(IDLE_SECONDS):
                if self._connector.failure is not None:  # the broker was away, and servers come back after us
                    self._reconnected = time.monotonic()
                return True
        return False

    def _announce(self) -> None:
        event = lifecycle.startup(identity=self._protocol.identity, component=COMPONENT, version=__version__)
        try:
            self._connector.publish(lifecycle.startup_subject(COMPONENT), payload=event)
        except ProvisionerError as error:
            LOG.warning("could not announce the start of this instance: %s", error)

    def _loop(self) -> bool:
        ticker = Ticker(self._config.interval, time.monotonic())
        self._discover_safely()
        while not self._shutdown.requested:
            if not self._supervisor.mend():
                return False
            self._live()
            try:
                reason = self._triggers.get(timeout=min(IDLE_SECONDS, ticker.remaining(time.monotonic())))
                LOG.info("discovering out of turn: %s", reason)
            except queue.Empty:
                now = time.monotonic()
                if ticker.remaining(now) > 0 and not self._are_returning(now):
                    continue
                ticker.advance(now)
            self._discover_safely()
        return True

    def _discover_safely(self) -> None:
        try:
            self.discover()
        except Exception:  # the outermost frame of the thread, nearly: a bug costs one discovery
            self._metrics.discovery_errors.inc()
            LOG.exception("bug in a discovery")

    def _note_reconnection(self) -> None:
        """Have discoveries made, now and later, for the servers that come back with the broker. Never blocks."""
        self._reconnected = time.monotonic()
        self.trigger("the connection to the broker is back")

    def _are_returning(self, now: float) -> bool:
        """Whether it is time to look for servers that came back after the last discovery."""
        return any(self._discovered < self._reconnected + seconds <= now for seconds in RETURN_SECONDS)

    def _stop(self) -> bool:
        """End all threads: the workers with the hosts in their hands, as long as the grace time lasts."""
        systemd.notify("STOPPING=1")
        while any(worker.alive for worker in self._workers) and not self._shutdown.expired:
            time.sleep(CHECK_SECONDS)
        self._finisher.stop()
        if not self._shutdown.expired and self._connector.connected:
            with contextlib.suppress(ProvisionerError):  # there is nothing left to be lost with the connection
                self._connector.drain(LEAVE_SECONDS)
        # whatever still waits for a reply fails now
        self._connector.close()
        if stuck := self._supervisor.join(LEAVE_SECONDS):
            LOG.critical("thread %s does not end: leaving it behind", ", ".join(stuck))
        return not stuck


def _others(refused: int, left_alone: int) -> str:
    """Say what became of those that were not to be admitted."""
    notes = [f"{refused} refused by allow or deny"] if refused else []
    notes += [f"{left_alone} left alone for now after failures or a lock"] if left_alone else []
    return "".join(f", {note}" for note in notes)
