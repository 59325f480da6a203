"""The proxy itself: what it does to connections is what it says."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.conftest import PATIENCE_SECONDS
from tests.faults.proxy import Proxy

#: Nothing came within this time, so nothing will.
NOTHING_SECONDS = 0.2


class Line:
    """Both ends of a connection through the proxy."""

    def __init__(self, proxy: Proxy, listener: socket.socket) -> None:
        self.client = socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS)
        self.broker, _ = listener.accept()
        self.broker.settimeout(PATIENCE_SECONDS)

    def says(self, data: bytes) -> bytes:
        """Have the broker say something, and give what the client hears."""
        self.broker.sendall(data)
        return received(self.client, len(data))

    def close(self) -> None:
        self.client.close()
        self.broker.close()


def received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(65536)):
        data += more
    return data


def silent(sock: socket.socket) -> bool:
    sock.settimeout(NOTHING_SECONDS)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE_SECONDS)
    return False


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        yield listener


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[Proxy]:
    with Proxy(*listener.getsockname()) as proxy:
        yield proxy


@pytest.fixture
def line(proxy: Proxy, listener: socket.socket) -> Iterator[Line]:
    with contextlib.closing(Line(proxy, listener)) as line:
        yield line


def test_it_passes_on_everything_both_ways(line: Line) -> None:
    large = bytes(range(256)) * 8192
    line.client.sendall(b"to the broker")
    assert received(line.broker, 13) == b"to the broker"
    assert line.says(large) == large


def test_it_passes_on_the_end_of_a_connection(line: Line) -> None:
    line.client.sendall(b"last words")
    line.client.close()
    assert received(line.broker, 100) == b"last words"


def test_a_client_is_reset_while_the_broker_is_away(proxy: Proxy, listener: socket.socket) -> None:
    listener.close()
    # which it may notice while it still connects
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS) as client,
    ):
        client.recv(1)


def test_a_black_hole_passes_nothing_on_until_it_heals(line: Line, proxy: Proxy, listener: socket.socket) -> None:
    proxy.black_hole()
    line.broker.sendall(b"x")
    line.client.sendall(b"y")
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS) as newcomer:
        assert silent(line.client)
        assert silent(line.broker)
        assert silent(newcomer)
        proxy.heal()
        assert (received(line.client, 1), received(line.broker, 1)) == (b"x", b"y")
        listener.accept()[0].close()


def test_a_forgotten_connection_is_mute_and_a_new_one_is_fine(
    line: Line, proxy: Proxy, listener: socket.socket
) -> None:
    proxy.forget()
    line.broker.sendall(b"x")
    assert silent(line.client)
    with contextlib.closing(Line(proxy, listener)) as another:
        assert another.says(b"y") == b"y"


def test_a_cut_resets_both_ends(line: Line, proxy: Proxy) -> None:
    proxy.cut()
    for end in (line.client, line.broker):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_half_closed_connection_still_takes_what_the_client_sends(line: Line, proxy: Proxy) -> None:
    proxy.half_close()
    assert line.client.recv(1) == b""
    line.client.sendall(b"y")
    assert received(line.broker, 1) == b"y"


def test_a_message_can_be_torn_in_the_middle(line: Line, proxy: Proxy) -> None:
    proxy.tear(within=b"MIDDLE")
    assert line.says(b"before ") == b"before "
    assert not proxy.torn
    line.broker.sendall(b"and MIDDLE after")
    assert received(line.client, 7) == b"and MID"
    with pytest.raises(ConnectionResetError):
        line.client.recv(1)
    assert proxy.torn


def test_a_delay_delays_and_a_limited_rate_takes_its_time(line: Line, proxy: Proxy) -> None:
    proxy.delay(0.2)
    started = time.monotonic()
    assert line.says(b"x") == b"x"
    assert time.monotonic() - started >= 0.2
    proxy.heal()
    proxy.throttle(10_000)
    started = time.monotonic()
    assert line.says(b"x" * 3000) == b"x" * 3000
    assert time.monotonic() - started >= 0.25
