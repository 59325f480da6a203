"""What tests of several modules share: a real broker, connections to it, and a watch on threads left behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest
from prometheus_client import CollectorRegistry

from provisioner.choria import credentials, retry, tls
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.protocol import reply_prefix
from provisioner.monitor.metrics import ConnectorMetrics
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests.installation import Installation
from tests.scheduled import CALLER, MakeDaemon, ScheduledDaemon, hurry
from tests.waiting import PATIENCE_SECONDS as PATIENCE_SECONDS  # noqa: PLC0414 - most tests import it from here
from tests.waiting import wait_until

# how long an example takes says nothing on a machine that others use as well
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="fault tests at full scale: real loads and many rounds")


def pytest_configure() -> None:
    """Have an interrupt mean something also in the background of a shell, where it is ignored, by children as well."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let reports go from one process to another, whatever a test has logged: no encoding has lone surrogates."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), f"the test left the thread {thread.name} behind"


class Eventually(Protocol):
    def __call__(self, condition: Callable[[], object]) -> None: ...


@pytest.fixture
def eventually() -> Eventually:
    """Waits until a condition holds."""
    return wait_until


class StartBroker(Protocol):
    def __call__(self, config: str = "", *, host: str = "127.0.0.1") -> NatsServer: ...


@pytest.fixture
def start_broker() -> Iterator[StartBroker]:
    """Starts real nats-servers, each with something in its configuration if wanted."""
    with contextlib.ExitStack() as stack:

        def start(config: str = "", *, host: str = "127.0.0.1") -> NatsServer:
            return stack.enter_context(NatsServer(config, host=host))

        yield start


@pytest.fixture
def broker(start_broker: StartBroker) -> NatsServer:
    """A real nats-server, without users or TLS."""
    return start_broker()


@pytest.fixture
def installation(tmp_path: Path, broker: NatsServer) -> Iterator[Installation]:
    """A daemon as it is installed, for :func:`broker`; not started."""
    with Installation(tmp_path, broker.url) as installation:
        yield installation


class StartFleet(Protocol):
    def __call__(self, *servers: Server, **options: Any) -> Fleet: ...


@pytest.fixture
def start_fleet(broker: NatsServer) -> Iterator[StartFleet]:
    """Starts simulated servers on :func:`broker`, which are stopped when the test is over."""
    with contextlib.ExitStack() as stack:

        def start(*servers: Server, **options: Any) -> Fleet:
            fleet = Fleet(broker.url, servers, **options)
            stack.enter_context(fleet)
            return fleet

        yield start


class Counters:
    """The metrics of connectors, and what they have counted."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = ConnectorMetrics(self._registry)

    def __getitem__(self, name: str) -> float:
        value = self._registry.get_sample_value(f"choria_connector_{name}")
        assert value is not None, f"no such series: {name}"
        return value


@pytest.fixture
def counters() -> Counters:
    return Counters()


class Address(Protocol):
    """Where a broker is: a :class:`Broker`, a server, a fake one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


class MakeConnector(Protocol):
    def __call__(self, *brokers: Address, **options: Any) -> Connector: ...


@pytest.fixture
def make_connector(counters: Counters) -> Iterator[MakeConnector]:
    """Makes connectors to the given brokers, not connected yet, with any options of :class:`Connector`."""
    with contextlib.ExitStack() as stack:

        def make(*brokers: Address, **options: Any) -> Connector:
            addresses = [Broker(broker.host, broker.port) for broker in brokers]
            defaults: dict[str, Any] = {
                "brokers": lambda: addresses,
                "name": "test",
                "reply_prefix": "test.reply",
                "authenticate": lambda _: {},
                "tls_context": tls.system_trust_context,
                "connect_timeout": PATIENCE_SECONDS,
                "metrics": counters.metrics,
            }
            connector = Connector(**{**defaults, **options})
            stack.callback(connector.close)
            return connector

        yield make


@pytest.fixture
def connector(broker: NatsServer, make_connector: MakeConnector) -> Connector:
    """A connection to :func:`broker`."""
    connector = make_connector(broker)
    assert connector.connect(PATIENCE_SECONDS)
    return connector


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are tried again after some milliseconds."""
    monkeypatch.setattr(retry, "FIRST_CONNECT_BACKOFF", retry.Backoff((10,)))
    monkeypatch.setattr(retry, "RECONNECT_BACKOFF", retry.Backoff((10,)))


@pytest.fixture
def replaced_files_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials are looked at whenever they are used."""
    monkeypatch.setattr(credentials, "LOOK_SECONDS", 0.0)


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of two addresses."""
    name, really = "two.example.net", socket.getaddrinfo

    def look_up(host: str, port: int, *more: Any, **options: Any) -> list[Any]:
        if host != name:
            return really(host, port, *more, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        return [answer for address in ("::1", "127.0.0.1") for answer in really(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return name


@pytest.fixture
def make_daemon(
    tmp_path: Path, broker: NatsServer, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeDaemon]:
    """Makes daemons, not started yet, with the options of :class:`tests.scheduled.ScheduledDaemon`."""
    hurry(monkeypatch)
    daemons: list[ScheduledDaemon] = []

    def make(**options: Any) -> ScheduledDaemon:
        daemons.append(ScheduledDaemon(tmp_path, make_connector(broker, reply_prefix=reply_prefix(CALLER)), **options))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.shutdown.request()
        daemon.stop()  # the second request: what is in work is of no interest any more


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> ScheduledDaemon:
    return make_daemon()
