"""A broker that does, byte by byte, what a script says; real ones do not lie well enough."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import Any

from provisioner.choria.brokers import Broker
from tests.waiting import PATIENCE_SECONDS


class Peer:
    """The broker's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lines = sock.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def start_tls(self, context: ssl.SSLContext) -> None:
        """Shake hands with the client; from then on all is encrypted that does not go by :meth:`send_in_clear`."""
        self._socket = context.wrap_socket(self._socket, server_side=True)
        self._lines = self._socket.makefile("rb")

    def send_in_clear(self, data: bytes) -> None:
        """Send these very bytes, whatever was agreed on."""
        socket.socket.sendall(self._socket, data)

    def dribble(self, data: bytes) -> None:
        """Send byte by byte, as packets of their own."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in data:
            self.send(bytes([byte]))

    def info(self, **members: Any) -> None:
        self.send(b"INFO " + json.dumps({"max_payload": 1048576, **members}).encode() + b"\r\n")

    def line(self) -> bytes:
        """The next line of the client, ``b""`` at the end."""
        return self._lines.readline().removesuffix(b"\r\n")

    def receive(self, beginning: bytes) -> bytes:
        """The next line that begins so; others are skipped."""
        while line := self.line():
            if line.startswith(beginning):
                return line
        raise ConnectionError(f"the client left without {beginning!r}")

    def payload(self, size: int) -> bytes:
        """That many bytes, and the line break after them."""
        return self._lines.read(size + 2)[:size]

    def silent(self) -> bool:
        """Whether there is nothing from the client."""
        return not select.select([self._socket], [], [], 0)[0]

    def take(self, size: int) -> bytes:
        """That many bytes."""
        return self._lines.read(size)

    def login(self) -> dict[str, Any]:
        """Take the CONNECT of the client, and its PING."""
        options = json.loads(self.receive(b"CONNECT").removeprefix(b"CONNECT "))
        assert self.line() == b"PING"
        return dict(options)

    def greet(self, **info: Any) -> dict[str, Any]:
        """Be nice until the client believes itself connected and has subscribed to its replies."""
        self.info(**info)
        options = self.login()
        self.send(b"PONG\r\n")
        self.receive(b"SUB")
        return options

    def wait_until_left(self) -> None:
        """Take whatever comes until the client closes."""
        while self._lines.read(65536):
            pass

    def reset(self) -> None:
        """Close so that the client cannot send any more."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._lines.close()
        self._socket.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()


Script = Callable[[Peer], None]


class FakeBroker:
    """Plays one script per connection, the last one for all further connections; the end of a script closes.

    :ivar connections: how many clients came
    """

    def __init__(self, *scripts: Script) -> None:
        self.connections = 0
        self._scripts = scripts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: list[Peer] = []
        self._threads: list[threading.Thread] = []
        self._problems: list[BaseException] = []

    def __enter__(self) -> FakeBroker:
        self._acceptor = threading.Thread(target=self._accept, name="fake-broker")
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        assert not self._problems

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def broker(self) -> Broker:
        return Broker(self.host, self.port)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts[min(self.connections, len(self._scripts) - 1)]
            self.connections += 1
            sock.settimeout(PATIENCE_SECONDS)
            peer = Peer(sock)
            self._peers.append(peer)
            thread = threading.Thread(target=self._play, args=(script, peer), name="fake-broker-peer")
            self._threads.append(thread)
            thread.start()

    def _play(self, script: Script, peer: Peer) -> None:
        try:
            script(peer)
        except OSError:
            pass  # the client has left
        except AssertionError as problem:
            self._problems.append(problem)
        finally:
            peer.close()
