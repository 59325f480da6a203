"""The monitor port: metrics for Prometheus, health for probes, a status page for people."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

import attrs

from provisioner.errors import ProvisionerError
from provisioner.monitor import page
from provisioner.monitor.health import Checks, Health
from provisioner.monitor.metrics import CONTENT_TYPE
from provisioner.monitor.status import Look

LOG = logging.getLogger(__name__)

#: How long a client may leave a read or a write waiting.
IO_TIMEOUT_SECONDS = 10.0
#: Connections at a time; one more closes the oldest, which a scraper that keeps its time has long left.
CONNECTIONS_LIMIT = 64
#: Answers about the status at a time, from the look to the last byte: with 50,000 nodes in trouble one has 20 MB.
STATUS_LIMIT = 4
#: Clients at a time that get it or wait for their turn, and how long one waits.
STATUS_LINE_LIMIT = 16
STATUS_WAIT_SECONDS = 10.0
#: Pause after a connection that could not be accepted.
ACCEPT_PAUSE_SECONDS = 0.1
#: How often the serving thread looks whether to stop.
STOP_POLL_SECONDS = 0.1
#: How long the serving thread and those of its connections may take to end.
STOP_SECONDS = 5.0

#: Longest text that is searched for: no identity is longer.
SEARCH_CHARACTERS = 255

_Page: TypeAlias = tuple[HTTPStatus, str, bytes]
_Query: TypeAlias = Mapping[str, list[str]]

_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_PLAIN = "text/plain; charset=utf-8"

#: With every answer. No other site may show, read or be told about any of it, and nobody keeps it.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": page.CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class MonitorServer:
    """Serves health, metrics and status; a context manager.

    The port is bound when the server is made, so that a port in use is an error of the start-up, and served within
    the context.

    ``/livez``, ``/healthz`` (the same as ``/livez``) and ``/readyz`` are 200 when every check is fine, else 503 with
    the failed ones; ``?verbose`` lists all of them. ``/`` is the status page and ``/status.json`` the same for
    machines; both take ``?identity=`` to tell about some hosts alone.

    :param address: to listen on; empty means all addresses, IPv4 and IPv6
    :param port: 0 takes a free one, see :attr:`port`
    :param metrics: gives the page for ``/metrics``
    :param status: gives what the status page shows; None: there is no such page
    :raises ProvisionerError: when it is impossible to listen there
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        metrics: Callable[[], bytes],
        liveness: Checks,
        readiness: Checks,
        status: Look | None = None,
    ) -> None:
        routes = {
            "/metrics": _Route(lambda _query: (HTTPStatus.OK, CONTENT_TYPE, metrics())),
            "/livez": _Route(partial(_health, liveness)),
            "/healthz": _Route(partial(_health, liveness)),
            "/readyz": _Route(partial(_health, readiness)),
        }
        if status:
            routes["/"] = _Route(partial(_status_page, status), large=True)
            routes["/status.json"] = _Route(partial(_status_document, status), large=True)
        try:
            self._server = _Server(address, port, routes)
        except OSError as error:
            where = f"{address or 'all addresses'}, port {port}"
            reason = error.strerror or error
            raise ProvisionerError(f"monitor_port, monitor_address: cannot listen on {where}: {reason}") from error
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="monitor", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port that is listened on."""
        return self._server.server_port

    def __enter__(self) -> MonitorServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._server.shutdown()
        self._thread.join(STOP_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        while True:
            try:
                # at least once, or shutdown() would wait for it for ever
                self._server.serve_forever(STOP_POLL_SECONDS)
            except Exception:  # the outermost frame of the thread
                LOG.exception("bug in thread monitor")
                time.sleep(ACCEPT_PAUSE_SECONDS)
            if self._stopping:
                return


@attrs.frozen
class _Route:
    """What is served under a path.

    :ivar large: it may have tens of megabytes, so only few clients get it at a time, see :meth:`_Server.status_turn`
    """

    page: Callable[[_Query], _Page]
    large: bool = False


class _Server(HTTPServer):
    """A thread for each connection, so that a client that is slow or silent holds up no other."""

    request_queue_size = CONNECTIONS_LIMIT

    def __init__(self, address: str, port: int, routes: Mapping[str, _Route]) -> None:
        self.routes = routes
        self._status_line = threading.Semaphore(STATUS_LINE_LIMIT)
        self._status_turns = threading.Semaphore(STATUS_LIMIT)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        family, host = _family(address)
        self.address_family = family
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # not HTTPServer's own, which looks the host name up in DNS and may hang there
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is left, and the connection stays in line
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="monitor-connection", daemon=True
        )
        with self._lock:
            if len(self._connections) >= CONNECTIONS_LIMIT:
                self._cut_oldest()
            self._connections[request] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            LOG.warning("the monitor port has no thread for a client")
            self._forget(request)

    @contextlib.contextmanager
    def status_turn(self) -> Iterator[bool]:
        """Wait for the turn to be told the status; gives whether it came.

        Few wait at a time: were there any number of threads that do, all of them would hold up metrics and health.
        """
        with contextlib.ExitStack() as stack:
            came = False
            if self._status_line.acquire(blocking=False):
                stack.callback(self._status_line.release)
                came = self._status_turns.acquire(timeout=STATUS_WAIT_SECONDS)
                if came:
                    stack.callback(self._status_turns.release)
            yield came

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            _cut(connection)
        give_up = time.monotonic() + STOP_SECONDS
        for thread in connections.values():
            thread.join(max(0.0, give_up - time.monotonic()))

    def _cut_oldest(self) -> None:
        oldest = next(iter(self._connections))
        _cut(oldest)
        # until its thread has ended it is the newest, so that one more connection does not cut the same once more
        self._connections[oldest] = self._connections.pop(oldest)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            LOG.debug("a client of the monitor port went away: %s", error)
        except Exception:  # the outermost frame of the thread
            LOG.exception("bug in a page of the monitor port")
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            del self._connections[request]
        self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request; the connection ends with it, as HTTP/1.0 has it."""

    server: _Server
    server_version = "choria-provisioner"
    sys_version = ""
    timeout = IO_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, _PLAIN, b"bad request\n")
            return
        route, query = self.server.routes.get(url.path), parse_qs(url.query, keep_blank_values=True)
        if route is None:
            self._send(HTTPStatus.NOT_FOUND, _PLAIN, b"not found\n")
        elif not route.large:
            self._send(*route.page(query))
        else:
            with self.server.status_turn() as came:
                if came:
                    self._send(*route.page(query))
                else:  # the live page of a browser is to come back by itself
                    self._send(HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"too many ask for the status\n", Refresh="5")

    do_HEAD = do_GET  # noqa: N815 - a name of the base class

    def __getattr__(self, name: str) -> Any:
        # the base class looks for a do_METHOD of whatever method was asked for
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def send_error(self, code: int, *_: object) -> None:
        """Answer what is no request, without a word of what it was."""
        self._send(HTTPStatus(code), _PLAIN, b"bad request\n")

    def _refuse_method(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"method not allowed\n", Allow="GET, HEAD")

    def _send(self, status: HTTPStatus, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        own = {"Content-Type": content_type, "Content-Length": str(len(body))}
        for name, text in {**own, **_HEADERS, **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        LOG.debug(format, *args)


def _family(address: str) -> tuple[socket.AddressFamily, str]:
    """The address family for a listening address, and that address."""
    if not address:
        return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    family, _, _, _, where = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, str(where[0])


def _status_page(look: Look, query: _Query) -> _Page:
    body = page.render(look(_search(query), page.ROWS), still="identity" in query)
    return HTTPStatus.OK, _HTML, body


def _status_document(look: Look, query: _Query) -> _Page:
    return HTTPStatus.OK, _JSON, look(_search(query)).to_json()


def _search(query: _Query) -> str:
    return query.get("identity", [""])[0].strip()[:SEARCH_CHARACTERS]


def _health(checks: Checks, query: _Query) -> _Page:
    verbose = "verbose" in query
    results = {name: check() for name, check in checks.items()}
    healthy = not any(result.problem for result in results.values())
    lines = [_line(name, result, verbose) for name, result in results.items() if verbose or result.problem] or ["ok"]
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    return status, _PLAIN, "".join(f"{line}\n" for line in lines).encode()


def _line(name: str, result: Health, verbose: bool) -> str:
    note = f", {result.note}" if verbose and result.note else ""
    return f"{name}: {result.problem or 'ok'}{note}"


def _cut(connection: socket.socket) -> None:
    """End a connection under the thread that serves it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
