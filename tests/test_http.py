"""The monitor port serves scrapers and probes, and no client can keep it from the others."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from provisioner.errors import ProvisionerError
from provisioner.monitor import http as monitor
from provisioner.monitor.health import Checks, Health
from provisioner.monitor.http import MonitorServer
from provisioner.monitor.metrics import Metrics
from provisioner.monitor.page import ROWS
from provisioner.monitor.status import Connection, Look, Queue, Role, Status
from tests.installation import free_port
from tests.waiting import PATIENCE_SECONDS, wait_until

#: More than all buffers between the server and a client hold.
LARGE_BYTES = 20_000_000

Serve = Callable[..., MonitorServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that are stopped at the test's end, with all their threads."""
    with ExitStack() as stack:

        def start(
            address: str = "127.0.0.1",
            *,
            metrics: Callable[[], bytes] = lambda: b"page\n",
            liveness: Checks | None = None,
            readiness: Checks | None = None,
            status: Look | None = None,
        ) -> MonitorServer:
            return stack.enter_context(
                MonitorServer(
                    address, 0, metrics=metrics, liveness=liveness or {}, readiness=readiness or {}, status=status
                )
            )

        yield start
    await_no_thread("monitor")


def connect(server: MonitorServer, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, server.port), timeout=PATIENCE_SECONDS)


def ask(
    server: MonitorServer,
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    host: str = "127.0.0.1",
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(host, server.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def raw(server: MonitorServer, request: bytes) -> bytes:
    """Send bytes and give all that comes back until the server ends the connection."""
    with connect(server) as client:
        client.sendall(request)
        return to_the_end(client)


def to_the_end(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(65536):
        received += data
    return received


@pytest.mark.parametrize("accept", [None, "application/openmetrics-text;version=1.0.0", "text/html", "*/*;q=0"])
def test_metrics_come_in_the_same_format_whatever_is_accepted(serve: Serve, accept: str | None) -> None:
    server = serve(metrics=Metrics("lab").render)
    response, body = ask(server, "/metrics", headers={"Accept": accept} if accept else {})
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b'\nchoria_provisioner_provisioned{site="lab"} 0\n' in body
    assert b"choria_provisioner_provisioned_total" not in body
    assert b"_created" not in body


def test_head_gives_the_headers_of_get_and_no_body(serve: Serve) -> None:
    server = serve()
    get, body = ask(server, "/metrics")
    head, nothing = ask(server, "/metrics", method="HEAD")
    assert (head.status, nothing) == (200, b"")
    assert head.headers["Content-Length"] == get.headers["Content-Length"] == str(len(body))
    assert head.headers["Content-Type"] == get.headers["Content-Type"]


class Looks:
    """Gives an empty status, and notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []

    def __call__(self, search: str = "", limit: int | None = None) -> Status:
        self.asked.append((search, limit))
        return Status(
            time=time.time(),
            identity="prov.example.net",
            site="",
            version="1.2.3",
            started=time.time(),
            role=Role.ALONE,
            problems=[],
            connection=Connection(connected=True, broker="", since=time.time(), reconnections=0, error=""),
            queue=Queue(waiting=0, queued=0, busy=0),
            workers=[],
            troubled=[],
            troubled_count=0,
            recent=[],
            reasons=[],
            minutes=[],
            expiries={},
            search=search,
        )


def test_the_status_is_there_for_people_and_for_machines(serve: Serve) -> None:
    looks = Looks()
    server = serve(status=looks)
    response, page = ask(server, "/")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.startswith(b"<!DOCTYPE html>")
    response, document = ask(server, "/status.json")
    assert response.headers["Content-Type"] == "application/json"
    assert json.loads(document)["version"] == "1.2.3"
    # the page shows some of those in trouble, the document has all
    assert looks.asked == [("", ROWS), ("", None)]


@pytest.mark.parametrize(
    ("query", "search"),
    [
        ("identity=", ""),
        ("identity", ""),
        ("identity=+web%31.example.net%0A", "web1.example.net"),
        ("identity=a&identity=b", "a"),
        ("identity=%FF%C3%BC", "\ufffd\u00fc"),
        (f"identity={'x' * 1000}", "x" * 255),
        ("&&;=&identity=a%", "a%"),
    ],
)
def test_hosts_can_be_searched_for(serve: Serve, query: str, search: str) -> None:
    looks = Looks()
    server = serve(status=looks)
    page = ask(server, f"/?{query}")[1]
    ask(server, f"/status.json?{query}")

    assert [asked for asked, _ in looks.asked] == [search, search]
    assert b'http-equiv="refresh"' not in page
    assert b'name="identity"' in page


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics", "/livez", "/nowhere"])
def test_other_sites_can_do_nothing_with_an_answer(serve: Serve, path: str) -> None:
    headers = ask(serve(status=Looks()), path)[0].headers
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))

    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert "script-src" not in policy
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert not any(name.startswith("Access-Control") for name in headers)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW", "get"])
def test_other_methods_are_told_what_is_allowed(serve: Serve, method: str) -> None:
    response, _ = ask(serve(), "/metrics", method=method)
    assert response.status == 405
    assert response.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/", "/metrics/", "/Metrics", "/../metrics", "/status.json", "*"])
def test_other_paths_are_not_found_nor_is_the_status_where_there_is_none(serve: Serve, path: str) -> None:
    assert ask(serve(), path)[0].status == 404


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
def test_liveness_does_not_ask_for_readiness(serve: Serve, path: str) -> None:
    server = serve(liveness={"main": Health}, readiness={"broker": lambda: Health("not connected")})

    assert ask(server, path)[0].status == 200
    assert ask(server, "/readyz")[0].status == 503


def test_failed_checks_are_named_and_verbose_names_all(serve: Serve) -> None:
    server = serve(readiness={"broker": lambda: Health("not connected"), "election": lambda: Health(note="leader")})

    assert ask(server, "/readyz")[1] == b"broker: not connected\n"
    assert ask(server, "/readyz?verbose")[1] == b"broker: not connected\nelection: ok, leader\n"


def test_checks_are_made_anew_for_every_request(serve: Serve) -> None:
    answers = iter([None, "not connected", None])
    server = serve(readiness={"broker": lambda: Health(next(answers))})

    assert [ask(server, "/readyz")[0].status for _ in range(3)] == [200, 503, 200]


def test_a_bug_in_a_page_is_logged_and_the_server_lives(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Health:
        raise KeyError("a bug")

    server = serve(readiness={"broker": broken})
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(server, "/readyz")

    assert ask(server, "/livez")[0].status == 200
    assert "a bug" in caplog.text


def test_nothing_of_a_request_is_logged_above_debug(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve()
    ask(server, "/s3cret")
    raw(server, b"s3cret\r\n\r\n")

    assert {record.levelno for record in caplog.records} <= {logging.DEBUG}


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"\0\xff\xfe\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n", b"G" * 70_000])
def test_what_is_no_request_ends_its_connection_alone(serve: Serve, request_: bytes) -> None:
    server = serve()
    with suppress(ConnectionError):
        raw(server, request_)

    assert ask(server, "/livez")[0].status == 200


def test_half_a_request_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor._Handler, "timeout", 0.1)
    server = serve()
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b"GET /metrics HTT")
        assert to_the_end(silent) == b""
        assert to_the_end(slow) == b""


def test_a_client_that_does_not_read_holds_nobody_up_and_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor._Handler, "timeout", 0.5)
    server = serve(metrics=lambda: bytes(LARGE_BYTES))
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(1) == b"H"
        assert ask(server, "/livez")[0].status == 200
        await_no_thread("monitor-connection")


def test_too_many_connections_cost_the_oldest(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "CONNECTIONS_LIMIT", 3)
    server = serve()
    with connect(server) as first, connect(server) as second, connect(server):
        assert ask(server, "/livez")[0].status == 200
        assert to_the_end(first) == b""
        second.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert to_the_end(second).endswith(b"page\n")


def test_of_many_that_linger_another_one_is_closed_for_each_that_comes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "CONNECTIONS_LIMIT", 2)
    entered, leave = threading.Semaphore(0), threading.Event()

    def linger() -> bytes:
        entered.release()
        leave.wait(PATIENCE_SECONDS)
        return b"page\n"

    server = serve(metrics=linger)
    with ExitStack() as stack:
        clients = []
        for _ in range(4):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert entered.acquire(timeout=PATIENCE_SECONDS)
        assert [to_the_end(client) for client in clients[:2]] == [b"", b""]
        leave.set()
        assert all(to_the_end(client).endswith(b"page\n") for client in clients[2:4])
    await_no_thread("monitor-connection")
    assert ask(server, "/livez")[0].status == 200


class LastingLooks(Looks):
    """Looks that last until the test ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.leave = threading.Semaphore(0), threading.Event()

    def __call__(self, search: str = "", limit: int | None = None) -> Status:
        self.entered.release()
        self.leave.wait(PATIENCE_SECONDS)
        return super().__call__(search, limit)


def test_few_ask_for_the_status_at_a_time_and_nobody_else_waits_for_them(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "STATUS_WAIT_SECONDS", 0.1)
    looks = LastingLooks()
    server = serve(status=looks)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(monitor.STATUS_LIMIT)]
        for client in clients:
            client.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
            assert looks.entered.acquire(timeout=PATIENCE_SECONDS)
        response, _ = ask(server, "/")  # its turn does not come
        assert (response.status, response.headers["Refresh"]) == (503, "5")
        assert [ask(server, path)[0].status for path in ("/metrics", "/livez", "/readyz")] == [200] * 3
        looks.leave.set()
        assert all(b'"version"' in to_the_end(client) for client in clients)
    assert [ask(server, "/")[0].status for _ in range(20)] == [200] * 20


def test_of_many_that_ask_for_the_status_most_are_turned_away_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "STATUS_LINE_LIMIT", monitor.STATUS_LIMIT)
    monkeypatch.setattr(monitor, "STATUS_WAIT_SECONDS", 2 * PATIENCE_SECONDS)
    looks = LastingLooks()
    server = serve(status=looks)
    with ExitStack() as stack:
        for _ in range(monitor.STATUS_LIMIT):
            stack.enter_context(connect(server)).sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert looks.entered.acquire(timeout=PATIENCE_SECONDS)
        assert ask(server, "/status.json")[0].status == 503
        looks.leave.set()
    await_no_thread("monitor-connection")
    assert ask(server, "/status.json")[0].status == 200


def test_what_is_no_request_is_answered_without_its_words(serve: Serve) -> None:
    server = serve()

    assert raw(server, b"GET <b>s3cret</b> HTTP/s3cret\r\n\r\n") == b"bad request\n"
    answer = raw(server, b"GET / HTTP/1.0\r\n" + b"s3cret: 1\r\n" * 200 + b"\r\n")
    assert answer.startswith(b"HTTP/1.0 431 ")
    assert b"Content-Security-Policy: default-src 'none'" in answer
    assert b"s3cret" not in answer


def await_no_thread(prefix: str) -> None:
    wait_until(lambda: not any(thread.name.startswith(prefix) for thread in threading.enumerate()))


def test_it_listens_on_all_addresses_unless_told_otherwise(serve: Serve) -> None:
    server = serve("")
    for host in ("127.0.0.1", "127.0.0.2", *(["::1"] if has_ipv6() else [])):
        assert ask(server, "/livez", host=host)[0].status == 200
    narrow = serve("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        ask(narrow, "/livez", host="127.0.0.2")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_it_listens_on_an_ipv6_address(serve: Serve) -> None:
    server = serve("::1")
    assert ask(server, "/livez", host="::1")[0].status == 200
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/livez", host="127.0.0.1")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_port_in_use_is_an_error_that_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProvisionerError, match=rf"^monitor_port.*port {port}: Address already in use$"):
            MonitorServer("127.0.0.1", port, metrics=bytes, liveness={}, readiness={})


@pytest.mark.parametrize("address", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_here_is_an_error_that_names_it(address: str) -> None:
    with pytest.raises(ProvisionerError, match=f"monitor_address: cannot listen on {address}, port 0"):
        MonitorServer(address, 0, metrics=bytes, liveness={}, readiness={})


def test_stopping_cuts_connections_and_frees_the_port() -> None:
    port = free_port()
    with MonitorServer("127.0.0.1", port, metrics=bytes, liveness={}, readiness={}) as server:
        idle = connect(server)
        assert ask(server, "/livez")[0].status == 200
    with idle:
        assert to_the_end(idle) == b""
    with MonitorServer("127.0.0.1", port, metrics=bytes, liveness={}, readiness={}) as again:
        assert ask(again, "/livez")[0].status == 200


def test_stopping_before_it_serves_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, serve = threading.Event(), MonitorServer._serve

    def late(server: MonitorServer) -> None:
        begun.wait(PATIENCE_SECONDS)
        serve(server)

    monkeypatch.setattr(MonitorServer, "_serve", late)
    server = MonitorServer("127.0.0.1", 0, metrics=bytes, liveness={}, readiness={}).__enter__()
    stopping = threading.Thread(target=server.__exit__)
    stopping.start()
    wait_until(lambda: server._stopping)
    begun.set()
    stopping.join(PATIENCE_SECONDS)
    assert not stopping.is_alive()


def test_however_many_clients_are_served_stopping_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "STOP_SECONDS", 0.5)
    looks, waited = LastingLooks(), []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "monitor-connection":
            waited.append(timeout or 0.0)
        join(thread, timeout)

    with ExitStack() as stack:
        with MonitorServer("127.0.0.1", 0, metrics=bytes, liveness={}, readiness={}, status=looks) as server:
            for _ in range(monitor.STATUS_LIMIT):
                stack.enter_context(connect(server)).sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert looks.entered.acquire(timeout=PATIENCE_SECONDS)
            monkeypatch.setattr(threading.Thread, "join", noted)
        looks.leave.set()
    assert len(waited) == monitor.STATUS_LIMIT
    assert sum(waited) < 2 * monitor.STOP_SECONDS
    await_no_thread("monitor-connection")
