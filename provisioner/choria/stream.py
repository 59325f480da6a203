"""A stream of bytes to a broker over TCP, in clear at first and encrypted once TLS was started on it.

It may be shut down from any thread at any time, which ends whatever another thread does with it. The time limits are
the kernel's, so that a write that is stuck ends too.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import struct
import threading
import time
from typing import Any

from provisioner.choria.errors import (
    AlertError,
    CertificateError,
    ConnectionLostError,
    ConnectorError,
    TLSError,
    UnreachableError,
)

#: How long a write may make no progress before the connection counts as lost.
SEND_SECONDS = 10.0
#: How much is read at once.
READ_BYTES = 256 * 1024


class Stream:
    """One connection, by one socket after the other until an address answers.

    One thread connects, receives and closes; any thread may send, and shut down, at any time.
    """

    _socket: socket.socket  # there once connect() was called

    def __init__(self) -> None:
        self._tls: _TLS | None = None
        self._open = False  # whether there is a descriptor
        self._looked_up: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Two locks, so that a write that is stuck can be ended: one is held for as long as a write takes, the other
        # for a moment. A socket is closed under both: its number is used again at once, by something else.
        self._send_lock = threading.Lock()
        self._state_lock = threading.Lock()

    def connect(self, host: str, port: int, *, deadline: float) -> None:
        """Try every address of a host, IPv6 or IPv4, until one answers; they share the time that is left.

        :param deadline: seconds of ``time.monotonic()``, as are all deadlines here
        :raises UnreachableError: saying for every address what was wrong with it
        """
        addresses = self._resolve(host, port, deadline)
        problems = []
        for number, (family, address) in enumerate(addresses):
            try:
                self._connect_to(family, address, (deadline - time.monotonic()) / (len(addresses) - number))
            except OSError as error:
                self._close_socket()
                problems.append(f"{address[0]}: {_words(error)}" if len(addresses) > 1 else _words(error))
            else:
                return
        raise UnreachableError(", ".join(problems))

    def start_tls(self, context: ssl.SSLContext, host: str, *, deadline: float) -> None:
        """Encrypt from now on. The broker has to prove by its certificate that it is `host`.

        :raises TLSError: when one side refuses the other
        :raises ConnectorError: when the connection breaks, or it takes too long
        """
        try:
            tls = _TLS(context, host)
            self._shake_hands(tls, deadline)
        except (BlockingIOError, TimeoutError):
            raise TLSError("the broker did not finish the TLS handshake in time") from None
        except OSError as error:
            raise _typed(error, host) from None
        except ValueError:
            raise TLSError(f"{host!r} is not a host name") from None
        self._tls = tls

    def limit_receive(self, seconds: float) -> None:
        """Have :meth:`receive` wait for so long at most."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def receive(self) -> bytes | None:
        """Some bytes, at least one; ``b""`` once the broker has closed; None when nothing came in time, or too little.

        However little comes at a time, it returns then: whoever receives has to look at the clock.

        :raises ConnectorError: when the connection is broken
        """
        try:
            return self._receive_encrypted(self._tls) if self._tls else self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise _typed(error) from None

    def send(self, data: bytes) -> None:
        """Send all of `data`. After an error part of it may be gone, so the stream is shut down.

        :raises ConnectorError: when the connection is broken, or the broker takes nothing for :data:`SEND_SECONDS`
        """
        try:
            with self._send_lock:
                if not self._open:
                    raise ConnectionLostError("the connection is closed")
                self._send_all(self._tls.encrypt(data) if self._tls else data)
        except OSError as error:
            self.shutdown()
            raise _typed(error) from None

    def shutdown(self) -> None:
        """End whatever is going on, in any thread. What had arrived can still be received."""
        self._looked_up.put(ConnectionAbortedError())
        with self._state_lock:
            if self._open:
                with contextlib.suppress(OSError):  # not connected, or no longer
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and give the descriptor back."""
        self.shutdown()
        self._close_socket()

    def _resolve(self, host: str, port: int, deadline: float) -> list[tuple[int, Any]]:
        """The families and addresses of a host.

        Only an address gives an answer at once. A name is looked up in a thread of its own, since the look-up has no
        time limit and cannot be interrupted; one that takes too long is left behind.
        """
        try:
            found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            arguments = (host, port, self._looked_up)
            threading.Thread(target=_look_up, args=arguments, name="name-look-up", daemon=True).start()
            try:
                found = self._looked_up.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise UnreachableError(f"the name {host} could not be looked up in time") from None
        if isinstance(found, Exception):
            reason = _words(found) if isinstance(found, OSError) else "it is not a host name"
            raise UnreachableError(f"the name {host} could not be looked up: {reason}")
        return [(family, address) for family, _, _, _, address in found]

    def _connect_to(self, family: int, address: Any, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError
        with self._state_lock:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._open = True
        self._socket.settimeout(seconds)
        self._socket.connect(address)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))

    def _close_socket(self) -> None:
        with self._send_lock, self._state_lock:
            if self._open:
                self._open = False
                self._socket.close()

    def _shake_hands(self, tls: _TLS, deadline: float) -> None:
        try:
            while not tls.handshake():
                self._send_records(tls)
                if time.monotonic() >= deadline:
                    raise TimeoutError
                self.limit_receive(deadline - time.monotonic())
                data = self._socket.recv(READ_BYTES)
                if not data:
                    raise TLSError("the broker closed the connection during the TLS handshake")
                tls.feed(data)
        except ssl.SSLError:
            with contextlib.suppress(OSError, ConnectionLostError):
                self._send_records(tls)  # the alert that tells the broker why
            raise
        self._send_records(tls)

    def _receive_encrypted(self, tls: _TLS) -> bytes | None:
        if tls.fed and (data := tls.decrypt()) is not None:
            return data
        self._send_records(tls)  # the answer to a key update, say
        records = self._socket.recv(READ_BYTES)
        if not records:
            return b""
        tls.feed(records)
        return tls.decrypt()  # None: not a whole record yet, or one without data

    def _send_records(self, tls: _TLS) -> None:
        if tls.has_records:
            with self._send_lock:
                self._send_all(tls.take_records())

    def _send_all(self, data: bytes) -> None:
        """Send, under the lock for that. When it takes too long part of a record or a command may be gone."""
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            self.shutdown()
            raise ConnectionLostError(f"the broker took no data for {SEND_SECONDS:g} s") from None


class _TLS:
    """The encryption of a stream; it does no input or output.

    OpenSSL's objects must not be used by two threads at once and Python's do not see to it, so an SSLSocket that one
    thread reads and another writes breaks now and then. Hence an SSLObject, under a lock that is never held while
    anything waits. Records have to be sent in the order in which they were made, which is the stream's business.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._lock = threading.Lock()
        #: Whether there is something to send that no data goes with. What :meth:`encrypt` makes does not count: a
        #: reader that went to send it would wait for as long as the write takes.
        self.has_records = False

    def handshake(self) -> bool:
        """Go on with the handshake; False when more must be fed for that."""
        with self._lock:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                return False
            finally:
                self.has_records = self._outgoing.pending > 0
            return True

    def feed(self, records: bytes) -> None:
        with self._lock:
            self._incoming.write(records)

    @property
    def fed(self) -> bool:
        """Whether there are bytes that OpenSSL has not read yet."""
        return self._incoming.pending > 0

    def decrypt(self) -> bytes | None:
        """What was fed, ``b""`` when the other side says that this is the end, None when more must be fed first."""
        with self._lock:
            try:
                return self._object.read(READ_BYTES)
            except ssl.SSLWantReadError:
                return None
            finally:
                self.has_records = self._outgoing.pending > 0

    def encrypt(self, data: bytes) -> bytes:
        """The records that carry `data`, after any that were due before."""
        with self._lock:
            rest = memoryview(data)
            while rest:
                rest = rest[self._object.write(rest) :]
            return self._take_records()

    def take_records(self) -> bytes:
        with self._lock:
            return self._take_records()

    def _take_records(self) -> bytes:
        self.has_records = False
        return self._outgoing.read()


def _look_up(host: str, port: int, answers: queue.SimpleQueue[Any]) -> None:
    try:
        answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        answers.put(error)


def _timeval(seconds: float) -> bytes:
    # zero would mean no limit
    microseconds = max(1000, int(seconds * 1_000_000))
    return struct.pack("ll", *divmod(microseconds, 1_000_000))


def _typed(error: OSError, host: str = "") -> ConnectorError:
    """The exception for what went wrong with a socket or with TLS, in plain words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of {host} is not to be trusted: {error.verify_message.rstrip('.')}"
        return CertificateError(text, error.verify_code)
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or type(error).__name__).lower().replace("_", " ")
        _, alert, what = reason.partition(" alert ")
        return AlertError(f"the broker refuses TLS with us: {what}") if alert else TLSError(f"TLS failed: {reason}")
    return ConnectionLostError(_words(error))


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = error.strerror or type(error).__name__
    return text[0].lower() + text[1:]
