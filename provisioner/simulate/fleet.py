"""Thousands of simulated servers on one connection to a real broker.

Every server has its own subscription, on the subject of its identity alone, as a real one has: so the broker knows
who is there, and a request to a server that has left is answered by the broker, not by silence.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import queue
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from provisioner.choria import brokers, tls
from provisioner.choria.connector import Connector
from provisioner.choria.errors import ConnectorError
from provisioner.choria.nats import Message
from provisioner.errors import ProvisionerError
from provisioner.monitor.metrics import ConnectorMetrics
from provisioner.simulate import events, misbehaviour
from provisioner.simulate.counts import Counts
from provisioner.simulate.envelopes import DroppedError, Envelopes, Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.server import AGENTS, COLLECTIVE, LOCKED, Answer, Server

LOG = logging.getLogger(__name__)

#: How long the first connection to the broker may take.
CONNECT_SECONDS = 10.0
#: How long the broker may take to know all subscriptions of the servers that are up from the start.
FLUSH_SECONDS = 30.0
#: A server that boots while the broker is away looks for it this often.
RETRY_SECONDS = 0.25
#: What a server that restarts without having been provisioned needs until it is back.
RETURN_SECONDS = 1.0
#: How often :meth:`Fleet.wait` looks at the counters.
POLL_SECONDS = 0.02
#: How long the thread may take to end.
STOP_SECONDS = 5.0

#: Brokers let unprovisioned servers reply on these subjects alone.
_REPLY_SUBJECT = re.compile(rf"{COLLECTIVE}\.reply(\.[^\x00-\x20.*>\x7f-\U0010ffff]+)+")


class Fleet:
    """Runs servers on a broker, in one thread beside that of the connection; a context manager.

    :param broker: its URL
    :param login: members of CONNECT that prove who the servers are
    :param tls_context: makes the context of a connection that must be encrypted; None: it need not be
    :param latency: seconds that every server takes to reply
    :param noise: discoveries are also answered by identities that no server may have, and worse
    """

    def __init__(
        self,
        broker: str,
        servers: Sequence[Server],
        *,
        envelopes: Envelopes | None = None,
        login: Mapping[str, str] | None = None,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
        latency: float = 0.0,
        noise: bool = False,
    ) -> None:
        address = brokers.parse(broker)
        self._servers = servers
        self._envelopes = envelopes or EnvelopesV1()
        self._latency = latency
        self._noise = noise
        self._connector = Connector(
            lambda: [address],
            name="simulated-fleet",
            reply_prefix="_INBOX.simulated-fleet",
            authenticate=lambda _info: login or {},
            tls_context=tls_context or tls.system_trust_context,
            tls_always=tls_context is not None,
            metrics=ConnectorMetrics(),
        )
        self._thread = threading.Thread(target=self._run, name="simulated-fleet", daemon=True)
        self._stopping = False
        # filled by the thread of the connection; None as a server stands for all of them
        self._inbox: queue.SimpleQueue[tuple[Server | None, Message] | None] = queue.SimpleQueue()
        # from here to the lock owned by the fleet's thread, once it runs
        self._up: dict[Server, object] = {}
        self._failed: set[Server] = set()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._started = 0.0
        # _counts is written under this lock, by the fleet's thread alone
        self._lock = threading.Lock()
        good = sum(server.good for server in servers)
        self._counts = Counts(servers=good, misbehaving=len(servers) - good)

    def __enter__(self) -> Fleet:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Connect, and boot the servers whose time has come: those that are up from the start can be reached now.

        :raises ProvisionerError: when there is no broker
        """
        if not self._connector.connect(CONNECT_SECONDS):
            raise ProvisionerError(f"the simulated servers cannot connect: {self._connector.last_error}")
        for agent in AGENTS:
            self._subscribe(f"{COLLECTIVE}.broadcast.agent.{agent}", None)
        self._started = time.monotonic()
        for server in self._servers:
            if server.boots_after > 0:
                self._at(self._started + server.boots_after, functools.partial(self._boot, server, announced=True))
            else:
                self._boot(server, announced=False)
        self._connector.flush(FLUSH_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """End all servers at once and without a word, as a power cut would."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self._connector.close()

    def counts(self) -> Counts:
        """Give a copy of the counters."""
        with self._lock:
            counts = self._counts
            return attrs.evolve(counts, actions=counts.actions.copy(), objections=counts.objections.copy())

    def wait(self, condition: Callable[[Counts], bool], timeout: float) -> bool:
        """Wait until the counters meet a condition; gives False when they do not within `timeout` seconds."""
        # a thread that is woken by every count would take half of the time from those that count
        give_up = time.monotonic() + timeout
        while not condition(self.counts()):
            if time.monotonic() >= give_up:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _run(self) -> None:
        while not self._stopping:
            timeout = self._do_what_is_due()
            try:
                received = self._inbox.get(timeout=timeout)
            except queue.Empty:
                continue
            if received is not None:
                self._receive(*received)

    def _at(self, when: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), deed))

    def _do_what_is_due(self) -> float | None:
        """Give the seconds until the next entry of the agenda is due, None when there is none."""
        while self._agenda:
            remaining = self._agenda[0][0] - time.monotonic()
            if remaining > 0:
                return remaining
            heapq.heappop(self._agenda)[2]()
        return None

    # --- coming and going

    def _boot(self, server: Server, *, announced: bool) -> None:
        if not self._connector.connected:
            again = functools.partial(self._boot, server, announced=announced)
            self._at(time.monotonic() + RETRY_SECONDS, again)
            return
        server.boot()
        self._up[server] = self._subscribe(f"{COLLECTIVE}.node.{server.identity}", server)
        if announced:
            self._announce(server, "startup")
        with self._counting() as counts:
            counts.booted += 1

    def _subscribe(self, subject: str, server: Server | None) -> object:
        return self._connector.subscribe(subject, callback=lambda message: self._inbox.put((server, message)))

    def _leave(self, server: Server) -> None:
        departure = server.departure
        if departure is None:
            return
        for event in departure.events:
            self._announce(server, event)
        self._connector.unsubscribe(self._up.pop(server))
        with self._counting() as counts:
            counts.gone += not departure.returns
            counts.booted -= departure.returns
            counts.returned += departure.returns
        if departure.returns:
            self._at(time.monotonic() + RETURN_SECONDS, functools.partial(self._boot, server, announced=True))

    # --- requests

    def _receive(self, server: Server | None, message: Message) -> None:
        try:
            request = self._envelopes.open(message.payload)
        except DroppedError as reason:
            self._drop(reason)
            return
        if request.objection is not None:
            with self._counting() as counts:
                counts.good_signatures += not request.objection
                counts.bad_signatures += bool(request.objection)
                counts.objections.update([request.objection] if request.objection else [])
        if server is not None:
            self._deliver(server, request)
            return
        for each in list(self._up):
            self._deliver(each, request)
        if request.agent == "discovery":
            with self._counting() as counts:
                counts.discoveries += 1
            if self._noise:
                for payload in misbehaviour.discovery_noise(self._envelopes, request, time=time.time()):
                    self._reply(request, payload)

    def _deliver(self, server: Server, request: Request) -> None:
        if server not in self._up:
            return
        leaving = server.departure is not None
        try:
            answer = server.answer(request)
        except DroppedError as reason:
            self._drop(reason)
            return
        if server.departure and not leaving:
            self._at(server.departure.at, functools.partial(self._leave, server))
        self._count(server, answer, left=bool(server.departure) and not leaving)
        if self._latency:
            self._at(time.monotonic() + self._latency, functools.partial(self._utter, server, request, answer))
        else:
            self._utter(server, request, answer)

    def _drop(self, reason: DroppedError) -> None:
        LOG.debug("a simulated server dropped a request: %s", reason)
        with self._counting() as counts:
            counts.dropped += 1

    def _count(self, server: Server, answer: Answer, *, left: bool) -> None:
        now = time.monotonic() - self._started
        with self._counting() as counts:
            counts.actions[answer.action] += 1
            if answer.action == "discovery":
                return
            if counts.first_request is None:
                counts.first_request = now
            if answer.action == "choria_provision#configure" and answer.status == 0:
                counts.duplicate_configures += server.good and server.configures > 1
            counts.upgraded += answer.action == "choria_provision#release_update" and answer.status == 0
            counts.lock_conflicts += answer.text == LOCKED
            if server.failures:
                self._failed.add(server)
                counts.failed = len(self._failed)
            if left and server.departure:
                counts.shut_down += answer.action == "choria_provision#shutdown"
                if server.departure.provisioned and server.good:
                    counts.provisioned += 1
                    counts.last_restart = now
                if server.departure.objection and server.good:
                    counts.unfit += 1
                    counts.objections[server.departure.objection] += 1

    @contextlib.contextmanager
    def _counting(self) -> Iterator[Counts]:
        with self._lock:
            yield self._counts

    # --- what servers say

    def _utter(self, server: Server, request: Request, answer: Answer) -> None:
        if server not in self._up:
            return
        for event in answer.before:
            self._announce(server, event)
        for payload in self._payloads(server, request, answer):
            self._reply(request, payload)
        for event in answer.after:
            self._announce(server, event)

    def _payloads(self, server: Server, request: Request, answer: Answer) -> list[bytes]:
        if answer.body is None:
            return []
        now, sender = server.wall_clock(), server.identity
        if server.misbehaviour and request.agent != "discovery":
            way = server.misbehaviour
            return misbehaviour.payloads(way, self._envelopes, request, sender=sender, body=answer.body, time=now)
        return [self._envelopes.seal(request, sender=sender, body=answer.body, time=now)]

    def _reply(self, request: Request, payload: bytes) -> None:
        if _REPLY_SUBJECT.fullmatch(request.reply_to):
            self._publish(request.reply_to, payload)
        else:
            self._lose(f"a broker forbids to reply on {request.reply_to!r}")

    def _announce(self, server: Server, event: str) -> None:
        payload = events.payload(
            event,
            identity=server.identity,
            version=server.version,
            now=server.wall_clock(),
            new_version=server.next_version,
        )
        self._publish(events.subject(event), payload)

    def _publish(self, subject: str, payload: bytes) -> None:
        try:
            self._connector.publish(subject, payload=payload)
        except ConnectorError as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        LOG.debug("a simulated server could not publish: %s", reason)
        with self._counting() as counts:
            counts.lost += 1
