"""The connection to the broker: pynats2 made fit for a daemon.

A :class:`Connector` has one thread of its own, the reader, which lives from ``connect()`` to ``close()``. It connects,
subscribes, reads until the connection is lost, and starts again, for ever. Everything else happens in the threads of
the callers: they write to the live connection, and wait for what the reader puts into their queues.

Kept of pynats2 are its options, subscriptions, messages and exceptions, and the calls that its users know. Replaced is
all that reads, writes and waits: as it comes, its reader dies of an error message, spins when the broker is gone, and
is restarted by every subscription.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from provisioner.choria import retry
from provisioner.choria.brokers import Broker
from provisioner.choria.errors import (
    ConnectFailedError,
    ConnectionClosedError,
    ConnectionLostError,
    ConnectorError,
    NoRespondersError,
    NotConnectedError,
    PayloadTooLargeError,
    RequestTimeoutError,
)
from provisioner.choria.link import Link, Pong, Server, Terms
from provisioner.choria.nats import (
    CRLF,
    Message,
    NATSClient,
    NATSSubscription,
    check_pattern,
    check_subject,
    encode_publish,
    encode_subscribe,
    encode_unsubscribe,
)
from provisioner.errors import ProvisionerError
from provisioner.monitor import health
from provisioner.monitor.health import Health
from provisioner.monitor.metrics import ConnectorMetrics

#: How long messages under way are awaited on a connection that was exchanged for another.
READ_OUT_SECONDS = 1.0
#: How long close() waits for the reader, which only a callback that blocks can hold up.
JOIN_SECONDS = 3.0
#: How often it interrupts the reader meanwhile.
INTERRUPT_SECONDS = 0.05
#: The reader must read a frame or try a server at least this often, or its health check fails.
TURN_LIMIT_SECONDS = 180.0

LOG = logging.getLogger(__name__)


class Connector(NATSClient):  # type: ignore[misc]  # pynats2 has no types
    """A connection to one of several brokers, which comes back by itself. Everything may be called from any thread.

    Callbacks run in the reader thread: they must be quick, and must not call ``request()`` or ``flush()``.

    :param brokers: gives the brokers, called anew for every round over them
    :param name: by which the broker's operators recognise the connection
    :param reply_prefix: a subject that no other process uses; replies to requests come below it
    :param authenticate: given the INFO of a broker, returns the members of CONNECT that prove who we are
    :param tls_context: makes the context of a connection that is to be encrypted
    :param tls_always: insist on TLS; otherwise it is used where the broker requires it
    :param account: drop a connection that the broker says is in another account; empty: any will do
    :param advise: says which setting may be the cause of a failure, to be added to its text
    :param connect_timeout: seconds for one broker, all its addresses, TLS and login included
    :param ping_interval: seconds between pings; a broker that answers none is given up after twice that time
    """

    _waiter: threading.Thread | None  # inherited: the reader

    def __init__(
        self,
        brokers: Callable[[], Sequence[Broker]],
        *,
        name: str,
        reply_prefix: str,
        authenticate: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        tls_context: Callable[[], ssl.SSLContext],
        tls_always: bool = False,
        account: str = "",
        advise: Callable[[ConnectorError], str] = lambda _: "",
        connect_timeout: float = 2.0,
        ping_interval: float = 30.0,
        metrics: ConnectorMetrics,
    ) -> None:
        super().__init__(name=name)
        self._brokers = brokers
        self._advise = advise
        self._metrics = metrics
        self._terms = Terms(
            options=self._connect_options(),
            authenticate=authenticate,
            tls_context=tls_context,
            tls_always=tls_always,
            account=account,
            connect_timeout=connect_timeout,
            ping_interval=ping_interval,
            metrics=metrics,
        )
        #: Called in the reader thread when a lost connection and its subscriptions are back.
        self.on_reconnect: Callable[[], None] | None = None
        #: Called in the reader thread with a reply that nobody waits for.
        self.on_unclaimed: Callable[[Message], None] | None = None

        # Writes and the subscriptions (the inherited _subs and _ssid) go by the live connection, so one lock is for
        # them all. A write that is stuck holds it: whoever ends a connection shuts it down before taking the lock.
        self._lock = threading.Lock()
        self._live: Link | None = None
        # these two are set by the reader alone
        self._connecting_link: Link | None = None
        self._last_link: Link | None = None  # the live one, or else the one that was
        self._began = 0.0  # when it turned last to a frame or to an attempt to connect
        self._closing = threading.Event()
        self._up = threading.Event()  # live, or closed

        #: How many connections there were so far.
        self.connections = 0
        #: When the connection came, or went, by the monotonic clock; when this was made as long as there was none.
        self.changed = time.monotonic()
        #: Why there was no connection the last time, or is none; None as long as all went well.
        self.failure: ProvisionerError | None = None

        # by token; touched by single operations only, which are atomic
        self._waiters: dict[str, Expectation] = {}
        self._tokens = itertools.count()
        self._token_prefix = self._nuid.next_().decode()
        check_subject(reply_prefix)
        self._reply_prefix = f"{reply_prefix}."
        self._add_subscription(f"{reply_prefix}.>", self._handle_reply)

    def _connect_options(self) -> dict[str, Any]:
        kept = {key: self._conn_options[key] for key in ("name", "lang", "version", "verbose", "pedantic")}
        return {**kept, "protocol": 1, "echo": True, "headers": True, "no_responders": True}

    # --- the life of the connection

    def connect(self, timeout: float | None = None) -> bool:
        """Start connecting, if that was not done yet, and wait for a connection.

        :param timeout: seconds; None: until there is one, or close() is called
        :returns: whether there is one
        :raises ConnectionClosedError: after close()
        """
        with self._lock:
            self._refuse_if_closed()
            if self._waiter is None:
                self._began = time.monotonic()
                self._waiter = threading.Thread(target=self._waiter_thread, name="connector-reader", daemon=True)
                self._waiter.start()
        self._up.wait(timeout)
        return self.connected

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._live is not None

    def health(self) -> Health:
        """Whether the reader lives, and how long ago it turned to something new."""
        if self._waiter is None or self._closing.is_set():
            return Health(note="does not run")
        if not self._waiter.is_alive():
            return Health("the thread has died")
        return health.of_turn(self._began, TURN_LIMIT_SECONDS)

    @property
    def connected_url(self) -> str:
        """Of the broker that we are, or were last, connected to; empty before."""
        return str(self._last_link or "")

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What that broker has told in its INFO, for example ``remote_account``."""
        return self._last_link.info if self._last_link else {}

    @property
    def last_error(self) -> str:
        """Why there was no connection the last time, or is none; empty as long as all went well."""
        return str(self.failure or "")

    def reconnect(self) -> None:
        """Give up the connection, if there is one, and have the reader make another."""
        link = self._live
        if link is not None:
            link.shutdown()

    def close(self) -> None:
        """End the connection and the reader, whatever it is at. Whoever waits for something is told at once."""
        self._closing.set()
        self._up.set()
        self._interrupt()
        reader = self._waiter
        give_up = time.monotonic() + JOIN_SECONDS
        while reader is not None and reader.is_alive() and reader is not threading.current_thread():
            if time.monotonic() > give_up:
                LOG.error("the reader of the connection does not end: a callback blocks it")
                return
            reader.join(INTERRUPT_SECONDS)
            self._interrupt()  # once more: what it was about to begin a moment ago could not be ended yet

    def _interrupt(self) -> None:
        for link in (self._connecting_link, self._live):
            if link is not None:
                link.shutdown()

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until the broker knows all that was sent, and all that it had sent until then was delivered.

        :param timeout: seconds
        :raises RequestTimeoutError: when it takes longer
        :raises ConnectorError: when there is no connection, or it is lost meanwhile
        """
        pong: Pong = queue.SimpleQueue()
        with self._lock:
            self._live_link().ping(pong)
        try:
            answered = pong.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise RequestTimeoutError(f"the broker did not answer a ping within {timeout:g} s") from None
        if not answered:
            raise ConnectionLostError("the connection was lost before the broker answered")

    def drain(self, timeout: float = 10.0) -> None:
        """End all subscriptions, let what is under way be delivered, and close.

        :param timeout: seconds
        :raises ConnectorError: when that did not come to its end; closed it is all the same
        """
        try:
            with self._lock:
                self._live_link().send(b"".join(map(encode_unsubscribe, self._subs.values())))
            self.flush(timeout)
        finally:
            self.close()

    # --- sending

    def publish(
        self, subject: str, *, payload: bytes = b"", reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message.

        :param reply: NATS reply subject
        :raises NotConnectedError: there is no connection now; nothing is kept for later
        :raises ConnectionLostError: the connection broke; whether the message arrived is unknown
        :raises PayloadTooLargeError: the broker would not take it
        :raises SubjectError: one of the subjects is not one
        :raises HeaderError: one of the headers is not one
        """
        frame, size = encode_publish(subject, reply, payload, headers)
        with self._lock:
            link = self._live_link()
            if size > link.max_payload:
                raise PayloadTooLargeError(f"the message has {size} bytes, the broker takes {link.max_payload}")
            link.send(frame)

    def request(
        self, subject: str, *, payload: bytes = b"", headers: Mapping[str, str] | None = None, timeout: float
    ) -> Message:
        """Send a message with a reply subject and wait for the reply.

        :param timeout: seconds
        :raises ConnectorError: see :meth:`publish` and :meth:`Expectation.get`
        """
        with self.expect(f"{self._token_prefix}{next(self._tokens)}") as replies:
            self.publish(subject, payload=payload, reply=replies.subject, headers=headers)
            return replies.get(timeout)

    def expect(self, token: str) -> Expectation:
        """Collect, within a ``with`` block, what is published to a subject made for that.

        :param token: makes the subject, below the reply prefix; another one for every block
        :raises SubjectError: it cannot be part of a subject
        """
        subject = self._reply_prefix + token
        check_subject(subject)
        return Expectation(token, subject, self._waiters)

    def ping(self) -> None:
        """Send a ping and do not wait for the answer.

        :raises ConnectorError: when there is no connection, or it is lost
        """
        with self._lock:
            self._live_link().ping()

    def _send(self, *parts: bytes | str | int) -> None:
        with self._lock:
            self._live_link().send(b" ".join(map(self._encode, parts)) + CRLF)

    def _live_link(self) -> Link:
        self._refuse_if_closed()
        if self._live is None:
            raise NotConnectedError(f"there is no connection to a broker: {self.last_error or 'not yet'}")
        return self._live

    def _refuse_if_closed(self) -> None:
        if self._closing.is_set():
            raise ConnectionClosedError("the connection was closed")

    # --- subscriptions

    def subscribe(
        self,
        subject: str,
        *,
        callback: Callable[[Message], None],
        queue: str = "",
        max_messages: int | None = None,
    ) -> NATSSubscription:
        """Have messages delivered, now or as soon as there is a connection, and over all connections to come.

        :param subject: wildcards allowed
        :param callback: called in the reader thread; an exception is logged and does no other harm
        :param queue: share the messages with the other members of this queue group
        :param max_messages: unsubscribe after so many
        :raises SubjectError: the subject or the queue is not one
        :raises ConnectionClosedError: after close()
        """
        check_pattern(subject)
        if queue:
            check_subject(queue)
        with self._lock:
            self._refuse_if_closed()
            subscription = self._add_subscription(subject, callback, queue, max_messages)
            self._tell(encode_subscribe(subscription))
        return subscription

    def unsubscribe(self, sub: NATSSubscription) -> None:
        """End a subscription. A message that is being delivered at this moment still is."""
        with self._lock:
            if self._subs.pop(sub.sid, None) is not None:
                self._tell(encode_unsubscribe(sub))

    def _add_subscription(
        self, subject: str, callback: Callable[[Message], None], queue: str = "", max_messages: int | None = None
    ) -> NATSSubscription:
        subscription = NATSSubscription(self._ssid, subject, queue, callback, max_messages)
        self._ssid += 1
        self._subs[subscription.sid] = subscription
        return subscription

    def _tell(self, command: bytes) -> None:
        """Send a command about a subscription; the next connection begins with those in the table anyway."""
        if self._live is not None:
            with contextlib.suppress(ConnectorError):
                self._live.send(command)

    # --- the reader thread: from one connection to the next

    def _waiter_thread(self) -> None:
        while not self._closing.is_set():
            try:
                self._one_connection()
            except Exception:  # the outermost frame: without a reader the daemon would be deaf, so it goes on
                LOG.exception("defect in the reader of the connection")
                self._lose(ConnectionLostError("there is a defect, see the log"))
                self._closing.wait(retry.RECONNECT_BACKOFF.delay(1))
        self._fail_waiters(ConnectionClosedError, "the connection was closed")
        self._up.set()

    def _one_connection(self) -> None:
        """One connection from the first try to its loss, and those for which it is exchanged meanwhile."""
        link = self._establish()
        try:
            while link is not None:
                link = self._deliver(link)
        except ConnectorError as error:
            error.advice = self._advise(error)
            self._lose(error)

    def _establish(self) -> Link | None:
        """Go round the brokers until one takes us; None once close() was called."""
        first = self.connections == 0
        backoff = retry.FIRST_CONNECT_BACKOFF if first else retry.RECONNECT_BACKOFF
        failures = 0 if first else 1  # a loss is one
        delay = 0.0 if first else backoff.delay(1)
        started = time.monotonic()
        while not self._closing.wait(delay):
            try:
                link = self._try(self._servers())
            except ProvisionerError as error:
                failures += 1
                delay = backoff.delay(failures)
                self._report_failure(error, delay)
            else:
                if first:
                    self._metrics.initial_connect_time.observe(time.monotonic() - started)
                return link
        return None

    def _report_failure(self, error: ProvisionerError, delay: float) -> None:
        if self._closing.is_set():
            return
        self.failure = error
        if self.connections == 0:
            self._metrics.initial_connection_attempts.inc()
        LOG.warning("cannot connect, trying again in %.1f s: %s", delay, error)

    def _servers(self) -> list[Server]:
        """The configured brokers and the other members of their cluster, in random order."""
        configured = [Server(broker, broker.host) for broker in self._brokers()]
        advertised = self._last_link.advertised if self._last_link else ()
        servers = {server.address: server for server in (*advertised, *configured)}
        return random.sample(list(servers.values()), len(servers))

    def _try(self, servers: Sequence[Server]) -> Link:
        """A live connection to the first server that takes us.

        :raises ConnectFailedError: none did
        """
        causes: dict[str, ProvisionerError] = {}
        for server in servers:
            self._began = time.monotonic()
            try:
                link = self._open(server)
            except ProvisionerError as error:
                if self._closing.is_set():
                    break
                if isinstance(error, ConnectorError):
                    error.advice = self._advise(error)
                self._metrics.errors.inc()
                causes[str(server.broker)] = error
            else:
                self._report_success(link)
                return link
        raise ConnectFailedError(causes)

    def _open(self, server: Server) -> Link:
        """Connect to a server and subscribe; from then on everybody uses this connection."""
        link = Link(server, self._terms)
        self._connecting_link = link
        try:
            link.open()
            with self._lock:
                link.send(b"".join(map(encode_subscribe, self._subs.values())))
                self._live = self._last_link = link
                self.connections += 1
                self.changed = time.monotonic()
                self._up.set()
        except BaseException:
            link.close()
            raise
        return link

    def _report_success(self, link: Link) -> None:
        LOG.info("connected to %s", link)
        if self.connections > 1:
            self._metrics.reconnections.inc()
            if self.on_reconnect is not None:
                self._call("on_reconnect", self.on_reconnect)

    def _deliver(self, link: Link) -> Link:
        """Pass on messages until the connection is lost, or exchanged for the one returned."""
        while True:
            self._began = time.monotonic()
            message = link.read()
            if message is not None:
                self._handle_message(message)
            elif link.about_to_stop:
                link.about_to_stop = False
                successor = self._change_server(link)
                if successor is not None:
                    return successor

    def _change_server(self, old: Link) -> Link | None:
        """Change to another server, since this one is about to stop; None when there is no other: we stay then.

        The new connection is there before the old one is left, so nothing is missed, and nobody who waits is
        disturbed. What comes over both in between is delivered twice.
        """
        LOG.info("%s is about to stop, looking for another broker", old)
        try:
            link = self._try([server for server in self._servers() if server.address != old.server.address])
        except ProvisionerError as error:
            LOG.warning("%s is about to stop, and there is nowhere to go: %s", old, error)
            return None
        try:
            for message in old.read_out(READ_OUT_SECONDS):
                self._handle_message(message)
        finally:
            self._retire(old)
        return link

    def _lose(self, error: ConnectorError) -> None:
        """Take leave of the live connection, and tell those who wait for something."""
        link = self._live
        if link is None:
            return
        link.shutdown()
        if not self._closing.is_set():
            self.failure = error
        with self._lock:
            self._live = None
            self.changed = time.monotonic()
            self._up.clear()
        self._retire(link)
        if self._closing.is_set():
            LOG.info("left %s", link)
            return
        self._metrics.errors.inc()
        LOG.warning("lost the connection to %s: %s", link, error)
        self._fail_waiters(ConnectionLostError, f"the connection was lost: {error}")

    def _retire(self, link: Link) -> None:
        link.close()
        self._metrics.connection_closed.inc()

    # --- the reader thread: what comes

    def _handle_message(self, message: Message) -> None:
        subscription = self._subs.get(message.sid)
        if subscription is None:  # it was unsubscribed a moment ago
            return
        subscription.received_messages += 1
        if subscription.is_wasted():
            self.unsubscribe(subscription)
        self._call(subscription.subject, subscription.callback, message)

    def _handle_reply(self, message: Message) -> None:
        waiter = self._waiters.get(message.subject[len(self._reply_prefix) :])
        if waiter is not None:
            waiter.put(message)
        elif self.on_unclaimed is not None:
            self.on_unclaimed(message)

    def _call(self, purpose: str, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:  # what is wrong with one callback must not end the connection for all others
            LOG.exception("defect in the callback for %s", purpose)

    def _fail_waiters(self, kind: type[ConnectorError], text: str) -> None:
        for waiter in list(self._waiters.values()):
            waiter.put(kind(text))


class Expectation:
    """What is published to one subject below the reply prefix, from the beginning of a ``with`` block to its end.

    :ivar subject: the subject
    :ivar put: takes a message, or the error that ends it all; for the reader thread
    """

    def __init__(self, token: str, subject: str, waiters: dict[str, Expectation]) -> None:
        self.subject = subject
        self._token = token
        self._waiters = waiters
        self._arrived: queue.SimpleQueue[Message | ConnectorError] = queue.SimpleQueue()
        self._error: ConnectorError | None = None
        self.put = self._arrived.put

    def __enter__(self) -> Expectation:
        if self._waiters.setdefault(self._token, self) is not self:
            raise ValueError(f"{self._token} is expected already")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._waiters[self._token]

    def get(self, timeout: float) -> Message:
        """The next message, in the order of arrival.

        :param timeout: seconds; with 0 and less only what is there
        :raises RequestTimeoutError: nothing came in time
        :raises NoRespondersError: the broker says that nobody got the request
        :raises ConnectionLostError: the connection was lost since the block began; nothing more will come
        """
        if self._error is not None:
            raise self._error
        try:
            arrived = self._arrived.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise RequestTimeoutError(f"no reply within {timeout:g} s") from None
        if isinstance(arrived, ConnectorError):
            self._error = arrived
            raise arrived
        if arrived.no_responders:
            raise NoRespondersError("nobody listens to the subject of the request")
        return arrived

    def drain(self) -> list[Message]:
        """What has arrived and was not taken, also after the end of the block."""
        messages = []
        while True:
            try:
                messages.append(self.get(0))
            except NoRespondersError:
                continue
            except ConnectorError:
                return messages
