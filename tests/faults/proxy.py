"""A TCP proxy that stands between a client and a broker, and does to their connections what networks do."""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import attrs

#: How much is read at once.
READ_BYTES = 64 * 1024
#: How much is held back in one direction before no more is taken from the sender.
HELD_BYTES = 256 * 1024
#: With a limited rate, how many seconds' worth is passed on at once.
SLICE_SECONDS = 0.02
#: How long the broker may take to accept a connection, and the proxy to do as it is told.
PATIENCE_SECONDS = 10.0

_P = ParamSpec("_P")


def _between_turns(deed: Callable[Concatenate[Proxy, _P], None]) -> Callable[Concatenate[Proxy, _P], None]:
    """Have a method carried out by the thread of the proxy, and wait until that has been done."""

    @functools.wraps(deed)
    def order(proxy: Proxy, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        done = threading.Event()
        proxy._orders.put((lambda: deed(proxy, *args, **kwargs), done))
        proxy._ringer.send(b"!")
        assert done.wait(PATIENCE_SECONDS), "the proxy does not do as it is told"

    return order


class Proxy:
    """Passes everything on until it is told otherwise, from the beginning of a ``with`` block to its end.

    What it is told holds when the call returns. A client that comes while the broker is away is let in and reset.

    :param host: of the broker
    :param port: of the broker
    :ivar connections: how many were made so far
    """

    def __init__(self, host: str, port: int) -> None:
        self.connections = 0
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="proxy")
        # all that follows belongs to the thread
        self._pairs: list[_Pair] = []
        self._closed = False
        self._dark = False
        self._delay = 0.0
        self._rate = 0.0
        self._tear = b""

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._thread.join()
        for sock in (self._listener, self._bell, self._ringer):
            sock.close()

    @property
    def url(self) -> str:
        """Where clients are to connect to."""
        return f"nats://127.0.0.1:{self.port}"

    # --- what networks do

    @_between_turns
    def black_hole(self) -> None:
        """Pass nothing on, either way; connections stay open, new ones are made and nothing is said on them."""
        self._dark = True

    @_between_turns
    def forget(self) -> None:
        """Half-open: pass nothing on over the connections that there are, ever; new ones are fine."""
        for pair in self._pairs:
            pair.forgotten = True

    @_between_turns
    def delay(self, seconds: float) -> None:
        """Pass everything on so much later."""
        self._delay = seconds

    @_between_turns
    def throttle(self, bytes_per_second: float) -> None:
        """Pass on no more than that, on each connection and in each direction."""
        self._rate = bytes_per_second

    @_between_turns
    def heal(self) -> None:
        """Pass everything on at once again, and what was held back. What was forgotten stays so."""
        self._dark, self._delay, self._rate = False, 0.0, 0.0

    @_between_turns
    def cut(self) -> None:
        """Reset all connections, on both sides."""
        for pair in self._pairs:
            pair.reset()

    @_between_turns
    def half_close(self) -> None:
        """Tell the clients that the broker will send no more; what they send is still passed on."""
        for pair in self._pairs:
            pair.to_client.end()

    @_between_turns
    def tear(self, within: bytes) -> None:
        """Reset a connection in the middle of these bytes, the next time that they pass, either way."""
        self._tear = within

    @property
    def torn(self) -> bool:
        """Whether what :meth:`tear` asked for has happened."""
        return not self._tear

    @_between_turns
    def _close(self) -> None:
        self._closed = True

    # --- the thread

    def _run(self) -> None:
        while not self._closed:
            self._turn()
        for pair in self._pairs:
            pair.reset()

    def _turn(self) -> None:
        readers: dict[socket.socket, Callable[[], None]] = {self._bell: self._obey}
        writers: dict[socket.socket, Callable[[], None]] = {}
        wait = None
        if not self._dark:
            flows = [flow for pair in self._pairs if not pair.forgotten for flow in pair.flows]
            now = time.monotonic()
            readers[self._listener] = self._accept
            readers |= {flow.source: functools.partial(self._receive, flow) for flow in flows if flow.hungry}
            writers = {flow.sink: functools.partial(flow.send, self._rate) for flow in flows if flow.due <= now}
            wait = min((flow.due - now for flow in flows if now < flow.due < _NEVER), default=None)
        readable, writable, _ = select.select(list(readers), list(writers), [], wait)
        if self._bell in readable:  # what is done otherwise is decided anew after that
            readable, writable = [self._bell], []
        for deed in [readers[sock] for sock in readable] + [writers[sock] for sock in writable]:
            deed()
        self._pairs = [pair for pair in self._pairs if not pair.over]

    def _obey(self) -> None:
        self._bell.recv(1)
        deed, done = self._orders.get()
        deed()
        done.set()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.connections += 1
        try:
            broker = socket.create_connection(self._target, PATIENCE_SECONDS)
        except OSError:
            _reset(client)
        else:
            self._pairs.append(_Pair(client, broker))

    def _receive(self, flow: _Flow) -> None:
        data, due = flow.receive(), time.monotonic() + self._delay
        if not data or not self._tear or self._tear not in data:
            flow.put(due, data)
            return
        flow.put(due, data[: data.index(self._tear) + len(self._tear) // 2])
        flow.put(due, None)
        self._tear = b""


_NEVER = float("inf")


class _Pair:
    """The two connections that are one to those at their ends."""

    def __init__(self, client: socket.socket, broker: socket.socket) -> None:
        self.sockets = (client, broker)
        for sock in self.sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.to_broker, self.to_client = _Flow(client, broker, self), _Flow(broker, client, self)
        self.flows = (self.to_broker, self.to_client)
        self.forgotten = False
        self.over = False

    def reset(self) -> None:
        self.over = True
        for sock in self.sockets:
            _reset(sock)

    def close_if_ended(self) -> None:
        if all(flow.ended for flow in self.flows):
            self.over = True
            for sock in self.sockets:
                sock.close()


@attrs.define(eq=False)
class _Flow:
    """One direction of a pair."""

    source: socket.socket
    sink: socket.socket
    pair: _Pair
    #: With the time by which each is to be passed on; no bytes are the end of the connection, None is a reset.
    _pieces: collections.deque[tuple[float, bytes | None]] = attrs.field(factory=collections.deque, init=False)
    _next: float = attrs.field(default=0.0, init=False)
    _exhausted: bool = attrs.field(default=False, init=False)
    ended: bool = attrs.field(default=False, init=False)

    @property
    def hungry(self) -> bool:
        """Whether more is to be taken from the source."""
        return not self._exhausted and sum(len(data or b"") for _, data in self._pieces) < HELD_BYTES

    @property
    def due(self) -> float:
        """When the next piece is to be passed on."""
        return max(self._pieces[0][0], self._next) if self._pieces and not self.ended else _NEVER

    def receive(self) -> bytes | None:
        try:
            data = self.source.recv(READ_BYTES)
        except OSError:
            data = None
        self._exhausted = not data
        return data

    def put(self, due: float, data: bytes | None) -> None:
        self._pieces.append((due, data))

    def send(self, rate: float) -> None:
        """Pass on what is due, at most so many bytes a second; 0: as many as the sink takes."""
        due, data = self._pieces.popleft()
        if data is None:
            self.pair.reset()
        elif not data:
            self.end()
        else:
            self._send(due, data, rate)

    def _send(self, due: float, data: bytes, rate: float) -> None:
        try:
            sent = self.sink.send(data[: max(1, int(rate * SLICE_SECONDS))] if rate else data)
        except OSError:
            self.pair.reset()
            return
        if data[sent:]:
            self._pieces.appendleft((due, data[sent:]))
        self._next = time.monotonic() + sent / rate if rate else 0.0

    def end(self) -> None:
        """Tell the sink that nothing more will come."""
        self.ended = True
        with contextlib.suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)
        self.pair.close_if_ended()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
