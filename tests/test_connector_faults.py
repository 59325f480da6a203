"""What a connection makes of brokers that die, freeze, move, babble or lie, and of being closed at any moment."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from provisioner.choria import retry, stream
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.errors import (
    AuthorizationError,
    BrokerError,
    ConnectFailedError,
    ConnectionClosedError,
    ConnectionLostError,
    ConnectorError,
    NotConnectedError,
    UnreachableError,
    WireError,
)
from provisioner.choria.link import Link
from provisioner.choria.nats import Message
from provisioner.simulate.broker import NatsServer
from tests.conftest import PATIENCE_SECONDS, Counters, Eventually, MakeConnector, StartBroker
from tests.fake_broker import FakeBroker, Peer, Script
from tests.waiting import wait_until

Messages = queue.SimpleQueue[Message]

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def messages() -> Messages:
    """Where subscriptions of a test put what they get."""
    return queue.SimpleQueue()


def texts(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    return [record.message for record in caplog.records if record.levelname == level]


#: How many connections that nobody accepts are enough for further ones to get no answer.
DEAF_CALLERS = 4


@contextlib.contextmanager
def deaf_port(host: str, port: int = 0) -> Iterator[int]:
    """A port on which nothing is answered, as if all packets were dropped."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, port), family=family, backlog=0))
        address = listener.getsockname()[:2]
        for _ in range(DEAF_CALLERS):
            caller = stack.enter_context(socket.socket(family))
            caller.setblocking(False)
            caller.connect_ex(address)
        yield address[1]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


#: Threads that were there before the test.
_OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> Iterator[None]:
    _OTHERS.update(threading.enumerate())
    yield
    _OTHERS.clear()


def readers() -> list[threading.Thread]:
    """Those that connections of the test have."""
    return [thread for thread in threading.enumerate() if thread.name == "connector-reader" and thread not in _OTHERS]


def await_connections(connector: Connector, count: int) -> None:
    """Wait until it has been connected so often."""
    wait_until(lambda: connector.connections >= count)


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._threads = ThreadPoolExecutor(1)
        self._future = self._threads.submit(call)
        self._threads.shutdown(wait=False)

    def outcome(self) -> object:
        """What it gave, or the exception that it raised."""
        return self._future.exception(PATIENCE_SECONDS) or self._future.result()


class TestABrokerThatDies:
    def test_everything_comes_back_by_itself(
        self,
        broker: NatsServer,
        make_connector: MakeConnector,
        messages: Messages,
        counters: Counters,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        back = threading.Event()
        connector = make_connector(broker)
        connector.on_reconnect = back.set
        connector.connect(PATIENCE_SECONDS)
        for number in range(50):
            connector.subscribe(f"a.{number}", callback=messages.put)
        connector.flush()
        assert not back.is_set()
        broker.kill()
        broker.start()
        assert back.wait(PATIENCE_SECONDS)
        for number in range(50):
            connector.publish(f"a.{number}", payload=b"%d" % number)
        connector.flush()
        payloads = [messages.get(timeout=PATIENCE_SECONDS).payload for _ in range(50)]
        assert payloads == [b"%d" % number for number in range(50)]
        assert (connector.connections, connector.connected) == (2, True)
        assert counters["reconnections_total"] == 1
        assert counters["connection_closed_total"] == 1
        assert counters["initial_connect_time_count"] == 1
        assert counters["initial_connection_attempts_total"] == 0
        logged = texts(caplog, "INFO") + texts(caplog)
        assert logged.count(f"connected to {broker.url}") == 2
        assert any(line.startswith(f"lost the connection to {broker.url}: ") for line in logged)

    def test_who_waits_is_told_at_once(self, broker: NatsServer, connector: Connector) -> None:
        connector.subscribe("silent", callback=lambda _: None)
        with connector.expect("abc") as replies:
            waiting = [
                Background(lambda: connector.request("silent", timeout=3600)),
                Background(lambda: replies.get(3600)),
            ]
            wait_until(lambda: len(connector._waiters) == 2)
            broker.kill()
            assert [type(each.outcome()) for each in waiting] == [ConnectionLostError] * 2
            with pytest.raises(ConnectionLostError, match="the connection was lost: "):
                replies.get(3600)

    def test_so_is_who_waits_for_a_flush(self, broker: NatsServer, connector: Connector) -> None:
        broker.pause()
        flushing = Background(lambda: connector.flush(3600))
        wait_until(lambda: connector._live and connector._live._pongs)
        broker.kill()
        assert isinstance(flushing.outcome(), ConnectionLostError)

    def test_what_had_arrived_before_is_still_delivered(self, broker: NatsServer, connector: Connector) -> None:
        with connector.expect("abc") as replies:
            connector.publish("test.reply.abc", payload=b"early")
            connector.flush()
            broker.kill()
            assert replies.get(PATIENCE_SECONDS).payload == b"early"
            with pytest.raises(ConnectionLostError):
                replies.get(PATIENCE_SECONDS)

    def test_nothing_is_sent_or_kept_meanwhile(
        self, broker: NatsServer, connector: Connector, eventually: Eventually, messages: Messages
    ) -> None:
        connector.subscribe("a", callback=messages.put)
        broker.kill()
        eventually(lambda: not connector.connected)
        for call in (
            lambda: connector.publish("a", payload=b"lost"),
            lambda: connector.request("a", timeout=3600),
            connector.flush,
            connector.ping,
        ):
            with pytest.raises(NotConnectedError, match=r"no connection to a broker: \w"):
                call()
        assert not connector.connect(0)
        broker.start()
        assert connector.connect(PATIENCE_SECONDS)
        connector.publish("a", payload=b"kept")
        connector.flush()
        assert messages.get(timeout=PATIENCE_SECONDS).payload == b"kept"

    def test_subscriptions_made_and_ended_meanwhile_count(
        self, broker: NatsServer, connector: Connector, eventually: Eventually, messages: Messages
    ) -> None:
        ended = connector.subscribe("a", callback=messages.put)
        broker.kill()
        eventually(lambda: not connector.connected)
        connector.unsubscribe(ended)
        connector.subscribe("b", callback=messages.put)
        broker.start()
        connector.connect(PATIENCE_SECONDS)
        connector.publish("a", payload=b"a")
        connector.publish("b", payload=b"b")
        connector.flush()
        assert (messages.get(timeout=PATIENCE_SECONDS).payload, messages.empty()) == (b"b", True)

    def test_five_times_under_load_leaves_nobody_waiting(self, broker: NatsServer, connector: Connector) -> None:
        connector.subscribe("echo", callback=lambda message: connector.publish(message.reply, payload=message.payload))
        for number in range(200):
            connector.subscribe(f"a.{number}", callback=lambda _: None)
        deaths = 5
        done = threading.Event()

        def ask() -> int:
            answered = 0
            while not done.is_set():
                try:
                    connector.request("echo", payload=bytes(2048), timeout=PATIENCE_SECONDS)
                    answered += 1
                except (NotConnectedError, ConnectionLostError):
                    connector.connect(PATIENCE_SECONDS)
            return answered

        with ThreadPoolExecutor(16) as threads, contextlib.ExitStack() as stack:
            stack.callback(done.set)
            answers = [threads.submit(ask) for _ in range(16)]
            for death in range(deaths):
                before = broker.pid
                broker.kill()
                broker.start()
                assert broker.pid != before
                await_connections(connector, death + 2)
            connector.request("echo", timeout=PATIENCE_SECONDS)
            done.set()
            assert all(answer.result(PATIENCE_SECONDS) > 0 for answer in answers)
        assert connector.connections == deaths + 1
        assert connector._waiters == {}

    def test_being_without_one_costs_no_time(
        self, broker: NatsServer, connector: Connector, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retry, "RECONNECT_BACKOFF", retry.Backoff((200,)))
        broker.kill()
        eventually(lambda: not connector.connected)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.2

    def test_each_round_over_the_brokers_is_one_line_in_the_log(
        self, make_connector: MakeConnector, caplog: pytest.LogCaptureFixture, counters: Counters
    ) -> None:
        connector = make_connector(Broker("127.0.0.1", 1), Broker("127.0.0.1", 2))
        connector.connect(0)
        wait_until(lambda: counters["initial_connection_attempts_total"] >= 3)
        connector.close()
        assert len(texts(caplog)) == counters["initial_connection_attempts_total"]
        for line in texts(caplog):
            assert line.startswith("cannot connect, trying again in 0.0 s: nats://127.0.0.1:")
            assert line.count("connection refused") == 2
        assert counters["errors_total"] >= 2 * counters["initial_connection_attempts_total"]
        assert counters["reconnections_total"] == counters["connection_closed_total"] == 0

    def test_pauses_grow_with_each_failure(
        self, make_connector: MakeConnector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = retry.Backoff((9999, 10, 200, 300, 60000), random=lambda: 0.5)
        monkeypatch.setattr(retry, "FIRST_CONNECT_BACKOFF", steps)
        connector = make_connector(Broker("127.0.0.1", 1))
        connector.connect(0)
        wait_until(lambda: len(texts(caplog)) >= 4)
        assert [line.split(":")[0].rsplit(" ", 2)[1] for line in texts(caplog)] == ["0.0", "0.2", "0.3", "60.0"]

    def test_200_reconnections_leak_nothing(self, make_connector: MakeConnector) -> None:
        counts = []

        def script(peer: Peer) -> None:
            peer.greet()
            counts.append((descriptors(), threading.active_count()))

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            # threads of the fake come and go; its sockets too
            await_connections(connector, 200)
            connector.close()
        few = 8
        assert max(fds for fds, _ in counts[100:]) <= min(fds for fds, _ in counts[:10]) + few
        assert max(threads for _, threads in counts) <= min(threads for _, threads in counts) + few
        assert readers() == []


class TestABrokerThatFreezes:
    def test_unanswered_pings_find_it(
        self,
        broker: NatsServer,
        make_connector: MakeConnector,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        connector = make_connector(broker, ping_interval=0.1, connect_timeout=1.0)
        connector.connect(PATIENCE_SECONDS)
        broker.pause()
        caplog.clear()
        lost = f"lost the connection to {broker.url}: the broker answered none of the last 2 pings"
        eventually(lambda: lost in texts(caplog) and not connector.connected)
        broker.resume()
        assert connector.connect(PATIENCE_SECONDS)

    def test_answered_ones_keep_the_connection(
        self, make_connector: MakeConnector, messages: Messages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = time.monotonic()
        clock = Mock(monotonic=Mock(return_value=start))
        monkeypatch.setattr("provisioner.choria.link.time", clock)
        monkeypatch.setattr("provisioner.choria.link.TICK_SECONDS", 0.01)

        def script(peer: Peer) -> None:
            peer.greet()
            for _ in range(10):
                clock.monotonic.return_value += 899.0
                exchange(peer)
                assert peer.silent()
                clock.monotonic.return_value += 2.0
                peer.receive(b"PING")
                peer.send(b"PONG\r\n")
                exchange(peer)
            done.set()
            peer.wait_until_left()

        def exchange(peer: Peer) -> None:
            for _ in range(2):  # when the second one is delivered the clock has been looked at after the first
                peer.send(b"MSG test.reply.x 0 0\r\n\r\n")
                messages.get(timeout=PATIENCE_SECONDS)

        done = threading.Event()
        with FakeBroker(script) as fake:
            connector = make_connector(fake, ping_interval=900.0)
            connector.on_unclaimed = messages.put
            connector.connect(PATIENCE_SECONDS)
            assert done.wait(PATIENCE_SECONDS)
            assert connector.connections == 1
            connector.close()

    def test_a_write_that_is_stuck_ends_and_so_does_the_connection(
        self,
        broker: NatsServer,
        connector: Connector,
        eventually: Eventually,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(stream, "SEND_SECONDS", 0.1)
        connector.reconnect()
        eventually(lambda: connector.connections == 2)
        caplog.clear()
        broker.pause()
        with pytest.raises(ConnectionLostError, match=r"the broker took no data for 0\.1 s"):
            self.fill(connector, [])
        eventually(lambda: any("lost the connection" in line for line in texts(caplog)))
        broker.resume()
        assert connector.connect(PATIENCE_SECONDS)

    @pytest.mark.parametrize("end", ["close", "reconnect"])
    def test_a_write_that_is_stuck_does_not_hold_up_the_end(
        self, broker: NatsServer, connector: Connector, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "SEND_SECONDS", 3600.0)
        connector.reconnect()
        await_connections(connector, 2)
        broker.pause()
        written: list[int] = []
        writers = [Background(lambda: self.fill(connector, written)) for _ in range(3)]
        self.await_stuck(written)
        getattr(connector, end)()
        assert all(isinstance(writer.outcome(), ConnectorError) for writer in writers)
        if end == "close":
            assert readers() == []

    def test_nor_does_it_hold_up_the_loss_of_the_connection(
        self, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "SEND_SECONDS", 3600.0)
        stuck = threading.Event()

        def script(peer: Peer) -> None:
            peer.greet()
            stuck.wait(PATIENCE_SECONDS)
            peer.send(b"-ERR 'Slow Consumer'\r\n")
            closing.wait(PATIENCE_SECONDS)

        closing = threading.Event()
        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            written: list[int] = []
            writer = Background(lambda: self.fill(connector, written))
            self.await_stuck(written)
            stuck.set()
            assert isinstance(writer.outcome(), ConnectorError)
            connector.close()
            closing.set()

    def await_stuck(self, written: list[int]) -> None:
        def stuck() -> bool:
            before = len(written)
            time.sleep(0.1)
            return len(written) == before > 0

        wait_until(stuck)

    def fill(self, connector: Connector, written: list[int]) -> None:
        """Publish until nothing more goes."""
        while True:
            connector.publish("a", payload=bytes(65536))
            written.append(1)


class TestABrokerThatStops:
    """Lame duck mode: it tells its clients to leave before it ends."""

    @pytest.fixture
    def cluster(self, start_broker: StartBroker) -> list[NatsServer]:
        """Two servers that know of each other."""
        routes = []
        for _ in range(2):
            with_a_port = NatsServer()
            with_a_port.close()
            routes.append(with_a_port.address)
        return [
            start_broker(
                f"""
                lame_duck_grace_period: "1s", lame_duck_duration: "30s"
                cluster {{ name: c, listen: "{routes[number]}", routes: ["nats://{routes[1 - number]}"] }}
                """
            )
            for number in range(2)
        ]

    @pytest.fixture
    def advised(self, cluster: list[NatsServer], make_connector: MakeConnector, eventually: Eventually) -> Connector:
        """A connection that was told of the first server alone, and by that of the second."""
        connector = make_connector(cluster[0])
        connector.connect(PATIENCE_SECONDS)
        eventually(lambda: cluster[1].address in connector.server_info.get("connect_urls", ()))
        return connector

    def test_the_others_of_its_cluster_are_tried_when_it_is_gone(
        self, cluster: list[NatsServer], advised: Connector, eventually: Eventually
    ) -> None:
        cluster[0].kill()
        eventually(lambda: advised.connections == 2)
        assert advised.connected_url == cluster[1].url

    def test_one_moves_before_it_ends_and_nobody_notices(
        self,
        cluster: list[NatsServer],
        advised: Connector,
        make_connector: MakeConnector,
        eventually: Eventually,
        messages: Messages,
        counters: Counters,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        other = make_connector(cluster[1], reply_prefix="other")
        other.connect(PATIENCE_SECONDS)
        advised.subscribe("a", callback=messages.put)
        with advised.expect("abc") as replies:
            os.kill(cluster[0].pid, signal.SIGUSR2)
            eventually(lambda: advised.connected_url == cluster[1].url)
            eventually(lambda: counters["connection_closed_total"] == 1)
            other.publish("a", payload=b"subscribed")
            other.publish("test.reply.abc", payload=b"awaited")
            assert replies.get(PATIENCE_SECONDS).payload == b"awaited"
        assert messages.get(timeout=PATIENCE_SECONDS).payload == b"subscribed"
        assert (advised.connections, advised.connected) == (2, True)
        assert counters["reconnections_total"] == 1
        assert f"{cluster[0].url} is about to stop, looking for another broker" in texts(caplog, "INFO")
        assert texts(caplog) == []

    def test_what_was_under_way_is_delivered_before_it_is_left(
        self, make_connector: MakeConnector, eventually: Eventually, messages: Messages
    ) -> None:
        def lame(peer: Peer) -> None:
            peer.greet()
            peer.receive(b"SUB")
            peer.info(ldm=True)
            peer.receive(b"PING")
            peer.send(b"MSG a 1 4\r\nlate\r\nPONG\r\n")
            peer.wait_until_left()

        def other(peer: Peer) -> None:
            peer.greet()
            peer.wait_until_left()

        with FakeBroker(lame) as first, FakeBroker(other) as second:
            known = [first.broker]
            connector = make_connector(brokers=lambda: known)
            connector.connect(PATIENCE_SECONDS)
            known.append(second.broker)
            connector.subscribe("a", callback=messages.put)
            assert messages.get(timeout=PATIENCE_SECONDS).payload == b"late"
            eventually(lambda: connector.connected_url == str(second.broker))
            connector.close()

    def test_it_is_left_for_good_even_if_there_is_a_defect(
        self,
        make_connector: MakeConnector,
        eventually: Eventually,
        counters: Counters,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def lame(peer: Peer) -> None:
            peer.greet()
            told.wait(PATIENCE_SECONDS)
            peer.info(ldm=True)
            peer.wait_until_left()

        def other(peer: Peer) -> None:
            peer.greet()
            peer.wait_until_left()

        told = threading.Event()
        monkeypatch.setattr(Link, "read_out", None)
        with FakeBroker(lame, other) as first, FakeBroker(other) as second:
            known = [first.broker]
            connector = make_connector(brokers=lambda: known)
            connector.connect(PATIENCE_SECONDS)
            known.append(second.broker)
            told.set()
            eventually(lambda: connector.connections == 3)
            connector.close()
        assert texts(caplog, "ERROR") == ["defect in the reader of the connection"]
        assert counters["connection_closed_total"] == 3

    def test_without_another_one_stays_to_the_end(
        self, make_connector: MakeConnector, messages: Messages, caplog: pytest.LogCaptureFixture
    ) -> None:
        def script(peer: Peer) -> None:
            peer.greet()
            peer.receive(b"SUB")
            peer.info(ldm=True)
            peer.send(b"MSG a 1 5\r\nstill\r\n")
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            connector.subscribe("a", callback=messages.put)
            assert messages.get(timeout=PATIENCE_SECONDS).payload == b"still"
            assert connector.connections == 1
            connector.close()
        assert texts(caplog) == [
            f"{fake_url(caplog)} is about to stop, and there is nowhere to go: there is no broker to connect to"
        ]


def fake_url(caplog: pytest.LogCaptureFixture) -> str:
    return texts(caplog)[0].split()[0]


class TestABrokerThatLies:
    def lost(self, make_connector: MakeConnector, lie: bytes) -> Connector:
        """A connection that was lost by what the broker sent, and came back."""

        def liar(peer: Peer) -> None:
            peer.greet()
            peer.send(lie)
            peer.wait_until_left()

        def honest(peer: Peer) -> None:
            peer.greet()
            peer.wait_until_left()

        with FakeBroker(liar, honest) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            await_connections(connector, 2)
            assert connector.connected
            connector.close()
        return connector

    @pytest.mark.parametrize(
        ("lie", "kind", "reason"),
        [
            (b"HELLO\r\n", WireError, "the broker sent something that is not NATS: HELLO"),
            (b"\x16\x03\x01\r\n", WireError, "the broker sent something that is not NATS:    "),
            (b"MSG a 0 3\r\nabcdef\r\n", WireError, "the broker sent a message of another size than it said"),
            (b"MSG a 0 999999999\r\n", WireError, "the broker sent a size that cannot be: MSG a 0 999999999"),
            (b"x" * 100_000, WireError, "the broker sent a line of more than 65536 bytes"),
            (b"INFO {nonsense}\r\n", WireError, "the broker sent an INFO that is not JSON"),
            (b"INFO [1]\r\n", WireError, "the broker sent an INFO that is not an object"),
            (b"INFO " + b"[" * 50_000 + b"\r\n", WireError, "the broker sent an INFO that is not JSON"),
            (b"-ERR 'Stale Connection'\r\n", BrokerError, "the broker reports: Stale Connection"),
            (
                b"-ERR 'User Authentication Expired'\r\n",
                AuthorizationError,
                "the broker refuses the login: User Authentication Expired",
            ),
        ],
    )
    def test_it_loses_the_connection_for_a_reason_that_is_told(
        self,
        lie: bytes,
        kind: type[ConnectorError],
        reason: str,
        make_connector: MakeConnector,
        caplog: pytest.LogCaptureFixture,
        counters: Counters,
    ) -> None:
        connector = self.lost(make_connector, lie)
        assert type(connector.failure) is kind
        assert connector.last_error == reason
        assert texts(caplog) == [f"lost the connection to {connector.connected_url}: {reason}"]
        assert counters["errors_total"] == 1

    def test_a_message_that_ends_in_the_middle_is_not_delivered(
        self, make_connector: MakeConnector, messages: Messages
    ) -> None:
        def script(peer: Peer) -> None:
            peer.greet()
            peer.receive(b"SUB")
            peer.send(b"MSG a 1 10\r\nabc")

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            connector.subscribe("a", callback=messages.put)
            await_connections(connector, 3)
            connector.close()
        assert messages.empty()

    def test_bytes_may_come_one_by_one_with_pauses(
        self, make_connector: MakeConnector, messages: Messages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("provisioner.choria.link.TICK_SECONDS", 0.01)

        def script(peer: Peer) -> None:
            peer.dribble(b'INFO {"max_payload": 1048576}\r\n')
            peer.login()
            peer.dribble(b"PONG\r\n")
            peer.receive(b"SUB a")
            peer.dribble(b"HMSG a 1 28 32\r\nNATS/1.0\r\nX-Colour: blue\r\n\r\nab")
            time.sleep(0.1)
            peer.dribble(b"cd\r\n")
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.subscribe("a", callback=messages.put)
            connector.connect(PATIENCE_SECONDS)
            message = messages.get(timeout=PATIENCE_SECONDS)
            assert (message.payload, message.headers) == (b"abcd", {"X-Colour": "blue"})
            assert connector.connections == 1
            connector.close()

    def test_what_means_nothing_to_us_is_passed_over(self, make_connector: MakeConnector, messages: Messages) -> None:
        def script(peer: Peer) -> None:
            peer.greet()
            peer.receive(b"SUB a")
            peer.send(b"+OK\r\nPONG\r\nMSG b 4711 3\r\nabc\r\nMSG a 1 4\r\nours\r\nPING\r\n")
            peer.receive(b"PONG")
            peer.send(b"MSG a 1 6\r\nponged\r\n")
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            connector.subscribe("a", callback=messages.put)
            assert [messages.get(timeout=PATIENCE_SECONDS).payload for _ in range(2)] == [b"ours", b"ponged"]
            assert connector.connections == 1
            connector.close()

    def test_what_it_says_of_itself_later_is_kept(self, make_connector: MakeConnector, eventually: Eventually) -> None:
        def script(peer: Peer) -> None:
            peer.greet(server_name="first", remote_account="provisioning")
            peer.info(server_name="second", max_payload=10, connect_urls=["127.0.0.1:7", "[::1]:8", "h", 5, None])
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            eventually(lambda: connector.server_info["server_name"] == "second")
            assert connector.server_info["remote_account"] == "provisioning"
            with pytest.raises(ConnectorError, match="the broker takes 10"):
                connector.publish("a", payload=bytes(11))
            addresses = {server.address for server in connector._servers()}
            assert addresses == {(fake.host, fake.port), ("127.0.0.1", 7), ("::1", 8)}
            connector.close()

    @pytest.mark.parametrize("limit", [None, "many", -1, 0, True, 1.5, []])
    def test_a_payload_limit_that_is_none_is_the_usual_one(self, limit: object, make_connector: MakeConnector) -> None:
        def script(peer: Peer) -> None:
            peer.greet(max_payload=limit)
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            with pytest.raises(ConnectorError, match="the broker takes 1048576"):
                connector.publish("a", payload=bytes(1048577))
            connector.close()

    def test_nothing_gets_into_the_middle_of_a_large_message(self, make_connector: MakeConnector) -> None:
        got: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def script(peer: Peer) -> None:
            peer.greet()
            for _ in range(20):
                peer.send(b"PING\r\n" * 20)
                size = int(peer.receive(b"PUB a ").split()[-1])
                got.put(peer.payload(size))
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(PATIENCE_SECONDS)
            sent = [bytes([number]) * 1_000_000 for number in range(20)]
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(lambda payload: connector.publish("a", payload=payload), sent))
            assert sorted(got.get(timeout=PATIENCE_SECONDS) for _ in sent) == sent
            connector.close()


def babble(peer: Peer, first: bytes, words: bytes) -> None:
    """Say something, and then the same again and again until nobody listens any more."""
    peer.send(first)
    while True:
        peer.send(words)
        time.sleep(0.01)


class TestALoginThatFails:
    @pytest.mark.parametrize(
        ("script", "kind", "reason"),
        [
            (lambda _: None, ConnectionLostError, "the broker closed the connection"),
            (lambda peer: peer.send(b"SSH-2.0-OpenSSH_9.6\r\n"), WireError, "not NATS: SSH-2.0-OpenSSH_9.6"),
            (lambda peer: peer.send(b"PING\r\n"), WireError, "the broker does not begin with INFO"),
            (lambda peer: peer.send(b"INFO {}\r\n"), WireError, "the broker does not begin with INFO"),
            (lambda peer: peer.send(b"-ERR 'Maximum Connections Exceeded'\r\n"), BrokerError, "Maximum Connections"),
            (lambda peer: (peer.info(), peer.login()), ConnectionLostError, "the broker closed the connection"),
            (
                lambda peer: (peer.info(), peer.login(), peer.send(b"-ERR 'Authorization Violation'\r\n")),
                AuthorizationError,
                "the broker refuses the login: Authorization Violation",
            ),
        ],
    )
    def test_the_reason_is_told(
        self, script: Script, kind: type[ConnectorError], reason: str, make_connector: MakeConnector
    ) -> None:
        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            connector.connect(0)
            wait_until(lambda: connector.failure)
            connector.close()
            assert isinstance(connector.failure, ConnectFailedError)
            cause = connector.failure.causes[str(fake.broker)]
        assert isinstance(cause, kind)
        assert reason in str(cause)
        assert connector.connections == 0

    def test_the_reason_is_told_even_when_the_broker_did_not_wait_for_us(self, make_connector: MakeConnector) -> None:
        asked, gone = threading.Event(), threading.Event()

        def script(peer: Peer) -> None:
            peer.send(b"INFO {\"a\": 1}\r\n-ERR 'Authentication Timeout'\r\n")
            asked.wait(PATIENCE_SECONDS)
            peer.reset()
            gone.set()

        def authenticate(_: object) -> dict[str, str]:
            asked.set()
            gone.wait(PATIENCE_SECONDS)
            return {}

        with FakeBroker(script) as fake:
            connector = make_connector(fake, authenticate=authenticate)
            connector.connect(0)
            wait_until(lambda: connector.failure)
            connector.close()
        assert "the broker refuses the login: Authentication Timeout" in connector.last_error

    @pytest.mark.parametrize(
        "script",
        [
            lambda peer: peer.wait_until_left(),
            lambda peer: (peer.info(), peer.wait_until_left()),
            lambda peer: (peer.info(tls_required=True), peer.wait_until_left()),
            lambda peer: babble(peer, b"", b"x"),
            lambda peer: babble(peer, b'INFO {"a": 1}\r\n', b"PING\r\n"),
        ],
        ids=["no INFO", "no PONG", "no TLS", "endless line", "endless pings"],
    )
    def test_it_takes_no_longer_than_allowed(self, script: Script, make_connector: MakeConnector) -> None:
        with FakeBroker(script) as fake:
            connector = make_connector(fake, connect_timeout=0.2)
            connector.connect(0)
            wait_until(lambda: connector.failure)
            connector.close()
        assert "in time" in connector.last_error

    def test_what_stands_in_the_way_on_our_side_is_told_too(
        self, broker: NatsServer, make_connector: MakeConnector, caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = iter((UnreachableError("the token file is gone"),))

        def authenticate(_: object) -> dict[str, str]:
            for answer in answers:
                raise answer
            return {}

        assert make_connector(broker, authenticate=authenticate).connect(PATIENCE_SECONDS)
        assert texts(caplog) == [f"cannot connect, trying again in 0.0 s: {broker.url}: the token file is gone"]

    def test_a_defect_does_not_end_the_reader(
        self,
        broker: NatsServer,
        make_connector: MakeConnector,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        connector = make_connector(broker)
        connector.connect(PATIENCE_SECONDS)
        with monkeypatch.context() as defect:
            defect.setattr(connector, "_handle_message", None)
            connector.publish("test.reply.x")
            wait_until(lambda: texts(caplog, "ERROR"))
        await_connections(connector, 2)
        assert texts(caplog, "ERROR") == ["defect in the reader of the connection"]

    def test_a_name_look_up_that_hangs_is_left_behind(
        self, make_connector: MakeConnector, hanging_look_up: threading.Event
    ) -> None:
        connector = make_connector(Broker("slow.example.net", 4222), connect_timeout=0.05)
        connector.connect(0)
        wait_until(lambda: connector.failure)
        assert "the name slow.example.net could not be looked up in time" in connector.last_error
        connector.close()
        assert readers() == []
        hanging_look_up.set()


@pytest.fixture
def hanging_look_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Name look-ups that take until this is set."""
    answer, really = threading.Event(), socket.getaddrinfo

    def look_up(*arguments: Any, **options: Any) -> object:
        if not options.get("flags", 0) & socket.AI_NUMERICHOST:
            answer.wait(PATIENCE_SECONDS)
        return really(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield answer
    answer.set()


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    broker: NatsServer, make_connector: MakeConnector, two_addresses: str
) -> None:
    with deaf_port("::1", broker.port):
        connector = make_connector(Broker(two_addresses, broker.port), connect_timeout=1.0)
        assert connector.connect(PATIENCE_SECONDS)


class TestClosing:
    """close() ends the reader, whatever it is at. All its time limits are an hour here."""

    @pytest.fixture
    def make_patient(self, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch) -> MakeConnector:
        monkeypatch.setattr(stream, "SEND_SECONDS", 3600.0)
        hour = retry.Backoff((3_600_000,))
        monkeypatch.setattr(retry, "FIRST_CONNECT_BACKOFF", hour)
        monkeypatch.setattr(retry, "RECONNECT_BACKOFF", hour)

        def make(*brokers: Broker, **options: object) -> Connector:
            return make_connector(*brokers, connect_timeout=3600.0, ping_interval=14400.0, **options)

        return make  # type: ignore[return-value]

    def check(self, connector: Connector, busy: Callable[[], object]) -> None:
        waiting = Background(connector.connect)
        wait_until(busy)
        with ThreadPoolExecutor(3) as threads:
            for call in [threads.submit(connector.close) for _ in range(3)]:
                call.result(PATIENCE_SECONDS)
        assert readers() == []
        assert waiting.outcome() is False
        assert not connector.connected

    def test_before_it_was_begun(self, broker: NatsServer, make_patient: MakeConnector) -> None:
        connector = make_patient(broker)
        connector.close()
        with pytest.raises(ConnectionClosedError):
            connector.connect()

    def test_while_the_brokers_are_asked_for(self, make_patient: MakeConnector) -> None:
        asked, answer = threading.Event(), threading.Event()

        def brokers() -> list[Broker]:
            asked.set()
            answer.wait(PATIENCE_SECONDS)
            return [fake.broker]

        with FakeBroker(lambda peer: peer.wait_until_left()) as fake:
            connector = make_patient(brokers=brokers)
            connector.connect(0)
            assert asked.wait(PATIENCE_SECONDS)
            closing = Background(connector.close)
            assert connector._closing.wait(PATIENCE_SECONDS)
            answer.set()
            assert closing.outcome() is None
            assert readers() == []

    def test_while_a_name_is_looked_up(self, make_patient: MakeConnector, hanging_look_up: threading.Event) -> None:
        connector = make_patient(Broker("slow.example.net", 4222))
        self.check(connector, lambda: any(thread.name == "name-look-up" for thread in threading.enumerate()))
        hanging_look_up.set()

    def test_while_connecting(self, make_patient: MakeConnector) -> None:
        with deaf_port("127.0.0.1") as port:
            others = self.unanswered(port)
            connector = make_patient(Broker("127.0.0.1", port))
            self.check(connector, lambda: self.unanswered(port) > others)

    def unanswered(self, port: int) -> int:
        """How many connections to a port are in the state SYN_SENT."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
        return sum(row[2].endswith(f":{port:04X}") and row[3] == "02" for row in rows)

    @pytest.mark.parametrize(
        "greeting",
        [
            lambda _: None,
            lambda peer: peer.send(b"INFO {"),
            lambda peer: peer.info(),
            lambda peer: peer.info(tls_required=True),
        ],
        ids=["before INFO", "within INFO", "before PONG", "within TLS"],
    )
    def test_while_logging_in(self, greeting: Script, make_patient: MakeConnector) -> None:
        def script(peer: Peer) -> None:
            greeting(peer)
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_patient(fake)
            self.check(connector, lambda: fake.connections == 1)

    def test_while_backing_off(self, make_patient: MakeConnector) -> None:
        connector = make_patient(Broker("127.0.0.1", 1))
        self.check(connector, lambda: connector.failure)

    def test_while_backing_off_after_a_loss(self, broker: NatsServer, make_patient: MakeConnector) -> None:
        connector = make_patient(broker)
        connector.connect()
        broker.kill()
        wait_until(lambda: not connector.connected)
        self.check(connector, lambda: connector.failure)

    @pytest.mark.parametrize("frozen", [False, True])
    def test_while_reading(self, frozen: bool, broker: NatsServer, make_patient: MakeConnector) -> None:
        connector = make_patient(broker)
        connector.connect()
        asked = threading.Event()
        connector.subscribe("silent", callback=lambda _: asked.set())
        connector.flush()
        asking = Background(lambda: connector.request("silent", timeout=3600))
        assert asked.wait(PATIENCE_SECONDS)
        if frozen:
            broker.pause()
            flushing = Background(lambda: connector.flush(3600))
            wait_until(lambda: connector._live and connector._live._pongs)
        connector.close()
        assert readers() == []
        assert isinstance(asking.outcome(), ConnectionClosedError)
        if frozen:
            assert isinstance(flushing.outcome(), ConnectionLostError)

    def test_who_waits_is_told(self, broker: NatsServer, make_patient: MakeConnector) -> None:
        connector = make_patient(broker)
        connector.connect()
        with connector.expect("abc") as replies:
            connector.close()
            with pytest.raises(ConnectionClosedError):
                replies.get(3600)

    def test_within_a_callback(
        self,
        broker: NatsServer,
        make_patient: MakeConnector,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        connector = make_patient(broker)
        connector.connect()
        connector.subscribe("a", callback=lambda _: connector.close())
        connector.publish("a")
        eventually(lambda: readers() == [])
        connector.close()
        assert texts(caplog, "ERROR") == []

    def test_while_a_callback_blocks_it_says_so(
        self,
        broker: NatsServer,
        make_patient: MakeConnector,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("provisioner.choria.connector.JOIN_SECONDS", 0.05)
        go_on, blocked = threading.Event(), threading.Event()

        def block(_: Message) -> None:
            blocked.set()
            go_on.wait(PATIENCE_SECONDS)

        connector = make_patient(broker)
        connector.connect()
        connector.subscribe("a", callback=block)
        connector.publish("a")
        assert blocked.wait(PATIENCE_SECONDS)
        connector.close()
        assert texts(caplog, "ERROR") == ["the reader of the connection does not end: a callback blocks it"]
        go_on.set()

    def test_at_any_moment_of_the_first_milliseconds(self, broker: NatsServer, make_patient: MakeConnector) -> None:
        before = descriptors()
        for number in range(200):
            connector = make_patient(broker)
            connector.connect(0)
            time.sleep(number * 1e-5)
            connector.close()
            assert readers() == []
        assert descriptors() <= before + 1
