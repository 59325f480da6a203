"""What a connection offers while all goes well, on a real nats-server."""

from __future__ import annotations

import itertools
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pynats2
import pytest

from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.errors import (
    AuthorizationError,
    ConnectFailedError,
    ConnectionClosedError,
    ConnectorError,
    NoRespondersError,
    NotConnectedError,
    PayloadTooLargeError,
    RequestTimeoutError,
    SubjectError,
)
from provisioner.choria.link import Link, Server
from provisioner.choria.nats import Message
from provisioner.errors import ProvisionerError
from provisioner.simulate.broker import NatsServer
from tests.conftest import PATIENCE_SECONDS, Counters, Eventually, MakeConnector, StartBroker
from tests.fake_broker import FakeBroker, Peer

Messages = queue.SimpleQueue[Message]


def payloads(messages: Messages, count: int) -> list[bytes]:
    return [messages.get(timeout=PATIENCE_SECONDS).payload for _ in range(count)]


@pytest.fixture
def messages() -> Messages:
    """Where subscriptions of a test put what they get."""
    return queue.SimpleQueue()


@pytest.fixture
def echo(broker: NatsServer, make_connector: MakeConnector) -> Iterator[Connector]:
    """A second connection that answers on `echo`, and says there who waits for what."""
    other = make_connector(broker, reply_prefix="other")
    other.connect(PATIENCE_SECONDS)
    other.subscribe("echo", callback=lambda message: other.publish(message.reply, payload=message.payload))
    other.flush()
    yield other
    other.close()


class TestConnecting:
    def test_a_connection_knows_its_broker(self, broker: NatsServer, connector: Connector) -> None:
        assert connector.connected
        assert connector.connected_url == broker.url
        assert connector.connections == 1
        assert connector.last_error == ""

    def test_it_knows_the_account_that_it_is_in_from_the_beginning(
        self, broker: NatsServer, connector: Connector
    ) -> None:
        link = Link(Server(Broker(broker.host, broker.port), broker.host), connector._terms)
        link.open()
        link.close()
        assert link.info["remote_account"] == "$G"
        assert connector.server_info["remote_account"] == "$G"

    def test_before_there_is_one_nothing_is_known(self, broker: NatsServer, make_connector: MakeConnector) -> None:
        connector = make_connector(broker)
        assert (connector.connected, connector.connected_url, connector.server_info) == (False, "", {})

    def test_the_broker_is_told_what_we_can(self, make_connector: MakeConnector) -> None:
        told: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()

        def script(peer: Peer) -> None:
            told.put(peer.greet(nonce="abc"))
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(
                fake, name="prov.example.net", authenticate=lambda info: {"user": "u", "sig": info["nonce"] + "!"}
            )
            assert connector.connect(PATIENCE_SECONDS)
            connector.close()
        assert told.get(timeout=PATIENCE_SECONDS) == {
            "name": "prov.example.net",
            "lang": "python",
            "version": "0.9.0",
            "verbose": False,
            "pedantic": False,
            "protocol": 1,
            "echo": True,
            "headers": True,
            "no_responders": True,
            "tls_required": False,
            "user": "u",
            "sig": "abc!",
        }

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_a_name_of_several_addresses_is_tried_to_the_last(
        self, host: str, start_broker: StartBroker, make_connector: MakeConnector, two_addresses: str
    ) -> None:
        server = start_broker(host=host)
        connector = make_connector(Broker(two_addresses, server.port))
        assert connector.connect(PATIENCE_SECONDS)

    def test_when_none_of_them_answers_each_is_named(
        self, make_connector: MakeConnector, two_addresses: str, eventually: Eventually
    ) -> None:
        connector = make_connector(Broker(two_addresses, 1))
        connector.connect(0)
        eventually(lambda: connector.last_error)
        assert connector.last_error == (
            f"nats://{two_addresses}:1: ::1: connection refused, 127.0.0.1: connection refused"
        )

    def test_an_ipv6_address_will_do(self, start_broker: StartBroker, make_connector: MakeConnector) -> None:
        connector = make_connector(start_broker(host="::1"))
        assert connector.connect(PATIENCE_SECONDS)
        assert connector.connected_url.startswith("nats://[::1]:")

    @pytest.mark.parametrize("password", ["@ : / %", "%40", "ä€😀", 'q"\\'])
    def test_a_password_may_hold_anything(
        self, password: str, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        quoted = password.replace("\\", "\\\\").replace('"', '\\"')
        server = start_broker(f'authorization {{ user: provisioner, password: "{quoted}" }}')
        connector = make_connector(server, authenticate=lambda _: {"user": "provisioner", "pass": password})
        assert connector.connect(PATIENCE_SECONDS)

    @pytest.mark.usefixtures("quick_retries")
    def test_a_refused_login_is_tried_again_with_what_is_right_by_then(
        self, start_broker: StartBroker, make_connector: MakeConnector, eventually: Eventually, counters: Counters
    ) -> None:
        server = start_broker('authorization { user: u, password: "s3cret" }')
        passwords = {"pass": "wr0ng"}
        connector = make_connector(server, authenticate=lambda _: {"user": "u", **passwords})
        assert not connector.connect(0)
        eventually(lambda: counters["initial_connection_attempts_total"] >= 2)
        assert isinstance(connector.failure, ConnectFailedError)
        assert isinstance(connector.failure.causes[server.url], AuthorizationError)
        assert connector.last_error == f"{server.url}: the broker refuses the login: Authorization Violation"
        passwords["pass"] = "s3cret"
        assert connector.connect(PATIENCE_SECONDS)

    @pytest.mark.usefixtures("quick_retries")
    def test_brokers_are_asked_for_anew_in_every_round(
        self, broker: NatsServer, make_connector: MakeConnector, caplog: pytest.LogCaptureFixture
    ) -> None:
        gone = Broker("127.0.0.1", 1)
        answers = iter(([gone], ProvisionerError("no DNS today"), [], [gone, Broker(broker.host, broker.port)]))

        def brokers() -> list[Broker]:
            answer = next(answers)
            if isinstance(answer, ProvisionerError):
                raise answer
            return answer

        assert make_connector(brokers=brokers).connect(PATIENCE_SECONDS)
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [warning.partition(" s: ")[2] for warning in warnings] == [
            "nats://127.0.0.1:1: connection refused",
            "no DNS today",
            "there is no broker to connect to",
        ]

    def test_the_first_to_answer_is_taken_in_random_order(
        self, start_broker: StartBroker, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        servers = [start_broker(), start_broker()]
        urls = set()
        for seed in range(8):
            monkeypatch.setattr("provisioner.choria.connector.random", random.Random(seed))
            connector = make_connector(*servers)
            connector.connect(PATIENCE_SECONDS)
            urls.add(connector.connected_url)
            connector.close()
        assert urls == {server.url for server in servers}

    def test_a_name_that_does_not_exist_is_named(self, make_connector: MakeConnector, eventually: Eventually) -> None:
        connector = make_connector(Broker("no-such-host.invalid", 4222))
        connector.connect(0)
        eventually(lambda: connector.last_error)
        assert "the name no-such-host.invalid could not be looked up" in connector.last_error

    @pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example.net", "é" * 300])
    def test_a_name_that_is_none_is_an_ordinary_failure(
        self, name: str, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        connector = make_connector(Broker(name, 4222))
        connector.connect(0)
        eventually(lambda: "could not be looked up" in connector.last_error)

    def test_the_time_it_took_is_observed_once(self, connector: Connector, counters: Counters) -> None:
        assert connector.connected
        assert counters["initial_connect_time_count"] == 1
        assert counters["initial_connection_attempts_total"] == 0

    def test_small_writes_are_not_delayed(self, connector: Connector) -> None:
        assert connector._live is not None
        assert connector._live._stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_connecting_again_is_the_same_connection(self, connector: Connector) -> None:
        assert connector.connect(0)
        assert connector.connections == 1
        assert [thread.name for thread in threading.enumerate()].count("connector-reader") == 1

    def test_a_closed_connector_stays_closed(self, connector: Connector, counters: Counters) -> None:
        connector.close()
        connector.close()
        assert not connector.connected
        assert counters["connection_closed_total"] == 1
        for call in (
            connector.connect,
            connector.ping,
            connector.flush,
            lambda: connector.publish("a"),
            lambda: connector.subscribe("a", callback=print),
            lambda: connector.request("a", timeout=1),
        ):
            with pytest.raises(ConnectionClosedError):
                call()

    def test_it_is_a_context_manager(self, broker: NatsServer, make_connector: MakeConnector) -> None:
        with make_connector(broker) as connector:
            assert connector.connected
        assert not connector.connected


class TestMessages:
    def test_they_arrive_in_order_with_headers(self, connector: Connector, messages: Messages) -> None:
        connector.subscribe("a.*", callback=messages.put)
        for number in range(100):
            connector.publish("a.b", payload=b"%d" % number, reply="c", headers={"X-Number": str(number)})
        for number in range(100):
            message = messages.get(timeout=PATIENCE_SECONDS)
            assert (message.subject, message.reply, message.payload) == ("a.b", "c", b"%d" % number)
            assert message.headers == {"X-Number": str(number)}
            assert message.status == 0

    def test_they_are_stamped_on_arrival(self, connector: Connector, messages: Messages) -> None:
        connector.subscribe("a", callback=messages.put)
        before = time.monotonic()
        connector.publish("a")
        assert before <= messages.get(timeout=PATIENCE_SECONDS).received <= time.monotonic()

    @pytest.mark.parametrize("size", [0, 1, 65536, 1048576])
    def test_they_may_be_as_large_as_the_broker_takes(
        self, size: int, connector: Connector, messages: Messages
    ) -> None:
        connector.subscribe("a", callback=messages.put)
        payload = random.Random(size).randbytes(size)
        connector.publish("a", payload=payload)
        assert messages.get(timeout=PATIENCE_SECONDS).payload == payload

    @pytest.mark.parametrize(("size", "headers"), [(1000, None), (982, {"a": "b"})])
    def test_a_larger_one_is_refused_before_it_is_sent(
        self, size: int, headers: dict[str, str] | None, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        connector = make_connector(start_broker("max_payload: 1000"))
        connector.connect(PATIENCE_SECONDS)
        connector.publish("a", payload=bytes(size), headers=headers)
        with pytest.raises(PayloadTooLargeError, match="has 1001 bytes, the broker takes 1000"):
            connector.publish("a", payload=bytes(size + 1), headers=headers)
        connector.flush()
        assert connector.connections == 1

    def test_subscribing_leaves_the_reader_alone(self, connector: Connector, messages: Messages) -> None:
        reader = connector._waiter
        for number in range(50):
            connector.unsubscribe(connector.subscribe(f"a.{number}", callback=messages.put))
        connector.flush()
        assert connector._waiter is reader
        assert reader is not None
        assert reader.is_alive()

    def test_an_ended_subscription_gets_nothing_more(self, connector: Connector, messages: Messages) -> None:
        subscription = connector.subscribe("a", callback=messages.put)
        connector.publish("a")
        connector.flush()
        connector.unsubscribe(subscription)
        connector.publish("a")
        connector.flush()
        assert messages.qsize() == 1
        connector.unsubscribe(subscription)  # once more does no harm

    def test_a_subscription_for_some_messages_ends_by_itself(self, connector: Connector, messages: Messages) -> None:
        connector.subscribe("a", callback=messages.put, max_messages=3)
        for _ in range(5):
            connector.publish("a")
        connector.flush()
        assert messages.qsize() == 3

    def test_a_queue_group_shares_messages(self, connector: Connector, echo: Connector, messages: Messages) -> None:
        connector.subscribe("a", callback=messages.put, queue="workers")
        echo.subscribe("a", callback=messages.put, queue="workers")
        echo.flush()
        for number in range(100):
            connector.publish("a", payload=b"%d" % number)
        connector.flush()
        echo.flush()
        assert sorted(map(int, payloads(messages, 100))) == list(range(100))
        assert messages.empty()

    def test_one_can_subscribe_before_there_is_a_connection(
        self, broker: NatsServer, make_connector: MakeConnector, messages: Messages
    ) -> None:
        connector = make_connector(broker)
        connector.subscribe("a", callback=messages.put)
        dropped = connector.subscribe("a", callback=messages.put)
        connector.unsubscribe(dropped)
        connector.connect(PATIENCE_SECONDS)
        connector.publish("a")
        connector.flush()
        assert messages.qsize() == 1

    def test_but_not_publish(self, broker: NatsServer, make_connector: MakeConnector) -> None:
        connector = make_connector(broker)
        with pytest.raises(NotConnectedError, match="no connection"):
            connector.publish("a")

    @pytest.mark.parametrize("subject", ["a b", "a..b", "a.*", "a.>", "", "x\r\nPUB y 0\r\n"])
    def test_a_subject_that_is_none_is_refused(self, subject: str, connector: Connector) -> None:
        with pytest.raises(SubjectError):
            connector.publish(subject)
        with pytest.raises(SubjectError):
            connector.publish("a", reply=subject or " ")
        with pytest.raises(SubjectError):
            connector.expect(subject)
        with pytest.raises(SubjectError):
            connector.subscribe("a", callback=print, queue=subject or " ")

    def test_an_exception_of_a_callback_is_logged_and_survived(
        self, connector: Connector, messages: Messages, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_: Message) -> None:
            raise RuntimeError("no good")

        connector.subscribe("a.broken", callback=broken)
        connector.subscribe("a.>", callback=messages.put)
        connector.publish("a.broken")
        connector.publish("a.b")
        assert payloads(messages, 2) == [b"", b""]
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.message == "defect in the callback for a.broken"
        assert record.exc_info is not None

    def test_callbacks_run_in_the_reader(self, connector: Connector) -> None:
        names: queue.SimpleQueue[str] = queue.SimpleQueue()
        connector.subscribe("a", callback=lambda _: names.put(threading.current_thread().name))
        connector.publish("a")
        assert names.get(timeout=PATIENCE_SECONDS) == "connector-reader"

    def test_a_callback_can_subscribe_publish_and_unsubscribe(self, connector: Connector, messages: Messages) -> None:
        def first(message: Message) -> None:
            connector.subscribe("second", callback=messages.put)
            connector.publish("second", payload=message.payload)
            connector.unsubscribe(subscription)

        subscription = connector.subscribe("first", callback=first)
        connector.publish("first", payload=b"hello")
        assert payloads(messages, 1) == [b"hello"]

    def test_flushing_waits_for_what_was_sent_before(self, connector: Connector, messages: Messages) -> None:
        connector.subscribe("a", callback=messages.put)
        for count in range(1, 100):
            connector.publish("a")
            connector.flush()
            assert messages.qsize() == count

    def test_draining_delivers_what_is_under_way_and_closes(self, connector: Connector, messages: Messages) -> None:
        connector.subscribe("a", callback=messages.put)
        for _ in range(1000):
            connector.publish("a", payload=bytes(100))
        connector.drain(PATIENCE_SECONDS)
        assert messages.qsize() == 1000
        assert not connector.connected

    def test_a_refused_subject_is_logged_and_counted_and_harms_nothing_else(
        self,
        start_broker: StartBroker,
        make_connector: MakeConnector,
        counters: Counters,
        caplog: pytest.LogCaptureFixture,
        messages: Messages,
    ) -> None:
        server = start_broker(
            'authorization { users: [ {user: u, password: p, permissions: {publish: ["ok"], subscribe: [">"]}} ] }'
        )
        connector = make_connector(server, authenticate=lambda _: {"user": "u", "pass": "p"})
        connector.connect(PATIENCE_SECONDS)
        connector.subscribe("ok", callback=messages.put)
        connector.publish("forbidden")
        connector.publish("ok", payload=b"fine")
        assert payloads(messages, 1) == [b"fine"]
        assert counters["errors_total"] == 1
        assert connector.connections == 1
        (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert warning == f'{server.url} reports: Permissions Violation for Publish to "forbidden"'


class TestRequests:
    @pytest.mark.usefixtures("echo")
    def test_a_request_gets_its_reply(self, connector: Connector) -> None:
        assert connector.request("echo", payload=b"hello", timeout=PATIENCE_SECONDS).payload == b"hello"

    @pytest.mark.usefixtures("echo")
    def test_requests_of_many_threads_get_each_their_own_reply(self, connector: Connector) -> None:
        def ask(number: int) -> bool:
            payload = b"%d" % number
            return bytes(connector.request("echo", payload=payload, timeout=PATIENCE_SECONDS).payload) == payload

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(ask, range(2000)))
        assert connector._waiters == {}

    def test_when_nobody_listens_it_fails_at_once(self, connector: Connector) -> None:
        with pytest.raises(NoRespondersError):
            connector.request("nobody", timeout=PATIENCE_SECONDS)

    def test_when_nobody_answers_it_ends_in_time(self, connector: Connector) -> None:
        connector.subscribe("silent", callback=lambda _: None)
        with pytest.raises(RequestTimeoutError, match=r"no reply within 0\.01 s") as failure:
            connector.request("silent", timeout=0.01)
        assert isinstance(failure.value, pynats2.NATSRequestTimeoutError)

    def test_headers_go_along(self, connector: Connector, echo: Connector) -> None:
        echo.subscribe("headers", callback=lambda m: echo.publish(m.reply, payload=m.headers["X-A"].encode()))
        echo.flush()
        reply = connector.request("headers", headers={"X-A": "b"}, timeout=PATIENCE_SECONDS)
        assert reply.payload == b"b"

    def test_replies_come_below_the_prefix_over_one_subscription(
        self, connector: Connector, messages: Messages
    ) -> None:
        connector.subscribe("ask", callback=messages.put)
        before = len(connector._subs)
        for _ in range(2):
            with pytest.raises(RequestTimeoutError):
                connector.request("ask", timeout=0)
        replies = {messages.get(timeout=PATIENCE_SECONDS).reply for _ in range(2)}
        assert len(replies) == 2
        assert all(reply.startswith("test.reply.") for reply in replies)
        assert len(connector._subs) == before


class TestExpectations:
    def test_several_replies_are_taken_one_by_one_until_a_deadline(self, connector: Connector) -> None:
        with connector.expect("abc") as replies:
            assert replies.subject == "test.reply.abc"
            for number in range(3):
                connector.publish("test.reply.abc", payload=b"%d" % number)
            arrived = [replies.get(PATIENCE_SECONDS) for _ in range(3)]
            with pytest.raises(RequestTimeoutError):
                replies.get(0)
            with pytest.raises(RequestTimeoutError):
                replies.get(-1)
        assert [message.payload for message in arrived] == [b"0", b"1", b"2"]
        assert all(early.received <= late.received for early, late in itertools.pairwise(arrived))

    def test_what_was_not_taken_can_be_had_later(self, connector: Connector) -> None:
        with connector.expect("abc") as replies:
            connector.publish("test.reply.abc", payload=b"1")
            connector.publish("test.reply.abc", payload=b"2")
            connector.flush()
            replies.get(0)
        assert [message.payload for message in replies.drain()] == [b"2"]
        assert replies.drain() == []

    def test_the_brokers_word_that_nobody_listens_is_no_reply(self, connector: Connector) -> None:
        with connector.expect("abc") as replies:
            connector.publish("nobody", reply=replies.subject)
            connector.publish("test.reply.abc", payload=b"1")
            connector.flush()
            assert [message.payload for message in replies.drain()] == [b"1"]

    def test_a_reply_that_nobody_waits_for_goes_to_who_wants_those(
        self, connector: Connector, messages: Messages
    ) -> None:
        connector.publish("test.reply.lost")
        connector.flush()
        connector.on_unclaimed = messages.put
        with connector.expect("abc"):
            connector.publish("test.reply.abc")
            connector.flush()
        connector.publish("test.reply.abc", payload=b"late")
        connector.publish("test.reply.x.y", payload=b"deep")
        assert payloads(messages, 2) == [b"late", b"deep"]

    def test_nobody_else_gets_what_is_expected_under_another_token(self, connector: Connector) -> None:
        with connector.expect("abc") as mine, connector.expect("ab") as other:
            connector.publish("test.reply.abc")
            connector.flush()
            assert len(mine.drain()) == 1
            assert other.drain() == []

    def test_a_token_is_expected_once_at_a_time(self, connector: Connector) -> None:
        with connector.expect("abc"), pytest.raises(ValueError, match="abc is expected already"):
            connector.expect("abc").__enter__()
        with connector.expect("abc"):
            pass


class TestPynats2:
    """Who knows pynats2 finds what they know."""

    def test_types(self, connector: Connector, messages: Messages) -> None:
        subscription = connector.subscribe("a", callback=messages.put)
        connector.publish("a")
        assert isinstance(connector, pynats2.NATSClient)
        assert isinstance(subscription, pynats2.NATSSubscription)
        assert isinstance(messages.get(timeout=PATIENCE_SECONDS), pynats2.NATSMessage)
        assert issubclass(ConnectorError, pynats2.NATSError)
        assert issubclass(ConnectorError, ProvisionerError)

    def test_calls_that_are_inherited_work(self, connector: Connector, messages: Messages) -> None:
        subscription = connector.subscribe("a", callback=messages.put, max_messages=2)
        connector.auto_unsubscribe(subscription)
        connector.ping()
        for _ in range(4):
            connector.publish("a")
        connector.flush()
        assert messages.qsize() == 2
        assert connector.connections == 1

    @pytest.mark.usefixtures("quick_retries")
    def test_reconnecting_on_demand(self, connector: Connector, eventually: Eventually) -> None:
        connector.reconnect()
        eventually(lambda: connector.connections == 2 and connector.connected)

    def test_importing_it_warns_of_nothing(self) -> None:
        command = (sys.executable, "-W", "error", "-c", "import provisioner.choria.connector")
        assert subprocess.run(command, check=False, timeout=PATIENCE_SECONDS).returncode == 0


def test_a_quiet_connection_costs_no_time(connector: Connector) -> None:
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2
    assert connector.connected
