"""One connection to one broker: logging in, keeping it alive, reading the messages that come over it."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import json
import logging
import queue
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from provisioner.choria.brokers import AddressError, Broker, parse
from provisioner.choria.errors import (
    AccountError,
    ConnectionLostError,
    ConnectorError,
    NoTLSError,
    TLSError,
    UnreachableError,
    WireError,
    broker_error,
)
from provisioner.choria.nats import PING, PONG, Command, FrameReader, Message
from provisioner.choria.stream import Stream
from provisioner.monitor.metrics import ConnectorMetrics
from provisioner.text import printable

#: How many pings may go unanswered before the connection counts as lost.
MAX_UNANSWERED_PINGS = 2
#: How often a reader without input looks at the clock; more often with a short ping interval.
TICK_SECONDS = 1.0
#: What brokers accept unless they say otherwise.
DEFAULT_MAX_PAYLOAD_BYTES = 1024 * 1024
#: What a NATS server without accounts says that our account is.
GLOBAL_ACCOUNT = "$G"

LOG = logging.getLogger(__name__)


@attrs.frozen
class Server:
    """A broker to try.

    :ivar tls_name: the host name that its certificate must carry
    """

    broker: Broker
    tls_name: str

    @property
    def address(self) -> tuple[str, int]:
        """What tells it from other servers."""
        return self.broker.host, self.broker.port


@attrs.frozen(kw_only=True)
class Terms:
    """How to connect to any of the brokers.

    :ivar options: members of CONNECT
    :ivar authenticate: given the INFO of a broker, returns the members of CONNECT that prove who we are
    :ivar tls_context: makes the context of a connection that is to be encrypted
    :ivar tls_always: insist on TLS; otherwise it is used where the broker requires it
    :ivar account: where the login has to lead; empty: anywhere
    :ivar connect_timeout: seconds for everything up to the answer to the login
    :ivar ping_interval: seconds between pings; a broker that answers none is given up after twice that time
    """

    options: Mapping[str, Any]
    authenticate: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    tls_context: Callable[[], ssl.SSLContext]
    tls_always: bool
    account: str
    connect_timeout: float
    ping_interval: float
    metrics: ConnectorMetrics


#: Where somebody waits for the answer to a ping, and is told whether it came.
Pong = queue.SimpleQueue[bool]


class Link:
    """A connection to one server. It belongs to one thread; others may send, ping and shut down.

    :ivar info: all that the broker has told in its INFO, the latest of each
    :ivar max_payload: bytes that a message may have
    :ivar advertised: other members of the broker's cluster
    :ivar about_to_stop: the broker has said that it is
    """

    def __init__(self, server: Server, terms: Terms) -> None:
        self.server = server
        self.info: Mapping[str, Any] = {}
        self.max_payload = DEFAULT_MAX_PAYLOAD_BYTES
        self.advertised: tuple[Server, ...] = ()
        self.about_to_stop = False
        self._terms = terms
        self._stream = Stream()
        self._frames = FrameReader(self._receive)
        # by when the next thing must have come; None: pings find out whether the broker is alive
        self._deadline: float | None = None
        # for every ping that was not answered who waits for it, if anybody
        self._pongs: collections.deque[Pong | None] = collections.deque()
        self._unanswered_pings = 0
        self._next_ping = 0.0

    def __str__(self) -> str:
        return str(self.server.broker)

    # --- the beginning

    def open(self) -> None:
        """Connect and log in.

        :raises ConnectorError: saying what the matter was
        :raises ProvisionerError: whatever `authenticate` and `tls_context` raise
        """
        deadline = time.monotonic() + self._terms.connect_timeout
        self._stream.connect(self.server.broker.host, self.server.broker.port, deadline=deadline)
        self._deadline = deadline
        self._handle(self._frames.next_frame())
        if not self.info:
            raise WireError("the broker does not begin with INFO")
        tls = self._terms.tls_always or bool(self.info.get("tls_required"))
        if tls:
            self._start_tls(deadline)
        self._log_in(tls)
        self._stream.limit_receive(min(TICK_SECONDS, self._terms.ping_interval / 4))
        self._next_ping = time.monotonic() + self._terms.ping_interval
        self._deadline = None

    def _start_tls(self, deadline: float) -> None:
        if not (self.info.get("tls_required") or self.info.get("tls_available")):
            raise NoTLSError("the broker offers no TLS")
        if self._frames.pending:
            raise TLSError("something was sent in clear after INFO, by somebody in between perhaps")
        self._stream.start_tls(self._terms.tls_context(), self.server.tls_name, deadline=deadline)
        # Named in clear, by anybody perhaps: any holder of a certificate could have put himself there. The broker names
        # them again after the login.
        self.advertised = ()

    def _log_in(self, tls: bool) -> None:
        options = {**self._terms.options, "tls_required": tls, **self._terms.authenticate(self.info)}
        self._pongs.append(None)
        with contextlib.suppress(ConnectorError):  # the reason, if the broker gave one, can still be read
            self._stream.send(b"CONNECT %b\r\n%b" % (json.dumps(options).encode(), PING))
        # the INFO that tells our account comes along with the PONG
        while self._pongs or self._frames.pending:
            self._handle(self._frames.next_frame())

    # --- from any thread

    def send(self, data: bytes) -> None:
        """Send one or more whole commands.

        :raises ConnectorError: the connection is lost, which its reader finds out by itself
        """
        self._stream.send(data)

    def ping(self, pong: Pong | None = None) -> None:
        """Send a ping.

        :param pong: is told of the answer, or of the end of the connection
        :raises ConnectorError: as in :meth:`send`
        """
        # if another ping overtakes this one, its answer is as good: all that was sent before is known to the broker
        self._pongs.append(pong)
        self._stream.send(PING)

    def shutdown(self) -> None:
        """Have the reader find that the connection is lost, whatever it is at; works during :meth:`open` too."""
        self._stream.shutdown()

    # --- reading, and the end

    def read(self) -> Message | None:
        """The next message; None when something else came, which has been dealt with.

        :raises ConnectorError: the connection is lost
        """
        frame = self._frames.next_frame()
        if isinstance(frame, Message):
            return frame
        self._handle(frame)
        return None

    def read_out(self, seconds: float) -> Iterator[Message]:
        """The messages that are still under way, when nobody is interested in the link any more."""
        self._deadline = time.monotonic() + seconds
        with contextlib.suppress(ConnectorError):
            self.ping()
            while self._pongs:
                message = self.read()
                if message is not None:
                    yield message

    def close(self) -> None:
        """Shut down and give all resources back."""
        self._stream.close()
        while self._pongs:
            pong = self._pongs.popleft()
            if pong is not None:
                pong.put(False)

    def _receive(self) -> bytes:
        while True:
            self._check_time()
            data = self._stream.receive()
            if data:
                return data
            if data is not None:
                raise ConnectionLostError("the broker closed the connection")

    def _check_time(self) -> None:
        """Give up a broker that does not answer; ping it when that is due, and more often until it answers."""
        now = time.monotonic()
        if self._deadline is not None:
            if now >= self._deadline:
                raise UnreachableError("no answer in time")
            self._stream.limit_receive(self._deadline - now)
        elif now >= self._next_ping:
            if self._unanswered_pings == MAX_UNANSWERED_PINGS:
                raise ConnectionLostError(f"the broker answered none of the last {MAX_UNANSWERED_PINGS} pings")
            self._unanswered_pings += 1
            self._next_ping = now + self._terms.ping_interval / MAX_UNANSWERED_PINGS
            self.ping()

    # --- everything but messages

    def _handle(self, frame: Message | Command) -> None:
        if isinstance(frame, Message):
            return  # nothing was subscribed to yet
        if frame.name == b"PING":
            self._stream.send(PONG)
        elif frame.name == b"PONG":
            self._handle_pong()
        elif frame.name == b"INFO":
            self._handle_info(frame.argument)
        elif frame.name == b"-ERR":
            self._handle_error(frame.argument)

    def _handle_pong(self) -> None:
        self._unanswered_pings = 0
        self._next_ping = time.monotonic() + self._terms.ping_interval
        pong = self._pongs.popleft() if self._pongs else None
        if pong is not None:
            pong.put(True)

    def _handle_info(self, argument: bytes) -> None:
        try:
            info = json.loads(argument)
        except (ValueError, RecursionError):
            raise WireError("the broker sent an INFO that is not JSON") from None
        if not isinstance(info, dict):
            raise WireError("the broker sent an INFO that is not an object")
        self.info = {**self.info, **info}  # a later one does not repeat everything
        self._check_account(info.get("remote_account"))
        self.about_to_stop = bool(info.get("ldm"))
        limit = self.info.get("max_payload")
        self.max_payload = limit if type(limit) is int and limit > 0 else DEFAULT_MAX_PAYLOAD_BYTES
        if isinstance(info.get("connect_urls"), list):
            self.advertised = tuple(self._advertised(info["connect_urls"]))

    def _check_account(self, account: object) -> None:
        if self._terms.account and account and account not in (self._terms.account, GLOBAL_ACCOUNT):
            name = printable(str(account))
            raise AccountError(f"the broker has put us into account {name!r}, wanted {self._terms.account!r}")

    def _advertised(self, urls: list[object]) -> Iterator[Server]:
        for url in urls:
            try:
                broker = parse(str(url))
            except AddressError as error:
                LOG.debug("ignored an advertised broker: the address %s", error)
                continue
            # certificates carry names: one that is known only by its address has to prove the name of the advertiser
            yield Server(broker, self.server.tls_name if _is_ip(broker.host) else broker.host)

    def _handle_error(self, argument: bytes) -> None:
        text = printable(argument.strip(b"'"))
        if not text.lower().startswith("permissions violation"):
            raise broker_error(text)
        self._terms.metrics.errors.inc()
        LOG.warning("%s reports: %s", self, text)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
