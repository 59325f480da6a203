"""TLS: used when the broker requires it, always verified, and every refusal told in plain words."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.choria import stream as stream_module
from provisioner.choria import tls
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.errors import ConnectFailedError, ConnectionLostError, TLSError, UnreachableError
from provisioner.choria.nats import Message
from provisioner.choria.stream import Stream
from provisioner.simulate.broker import NatsServer
from tests.certificates import Authority, Files
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector, StartBroker
from tests.fake_broker import FakeBroker, Peer
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def localhost(authority: Authority) -> Files:
    """What a broker on this machine proves who it is with."""
    return authority.issue("broker", hosts=("localhost", "127.0.0.1"))


@pytest.fixture
def _trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system trusts the authority of these tests."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))


def configuration(files: Files, more: str = "") -> str:
    return f'tls {{ cert_file: "{files.certificate}", key_file: "{files.key}"\n {more} }}'


def server_context(files: Files) -> ssl.SSLContext:
    """Of a broker that is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


def client_context(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.certificate)
    return context


@contextlib.contextmanager
def encrypted(client: ssl.SSLContext, server: ssl.SSLContext) -> Iterator[tuple[Stream, ssl.SSLSocket]]:
    """A stream, and the other end of its connection."""
    stream = Stream()
    deadline = time.monotonic() + PATIENCE_SECONDS
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(lambda: server.wrap_socket(listener.accept()[0], server_side=True))
        stream.connect("127.0.0.1", listener.getsockname()[1], deadline=deadline)
        stream.start_tls(client, "localhost", deadline=deadline)
        peer = accepted.result(PATIENCE_SECONDS)
    with contextlib.closing(stream), peer:
        yield stream, peer


def limited_to(version: str) -> ssl.SSLContext:
    context = tls.system_trust_context()
    context.maximum_version = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}[version]
    return context


def failure(connector: Connector) -> Exception:
    """Why the one broker could not be connected to."""
    connector.connect(0)
    wait_until(lambda: connector.failure)
    assert isinstance(connector.failure, ConnectFailedError)
    return next(iter(connector.failure.causes.values()))


@pytest.mark.usefixtures("_trusted")
class TestAgreed:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    @pytest.mark.parametrize("version", ["1.2", "1.3"])
    def test_it_is_used_when_the_broker_requires_it(
        self, host: str, version: str, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        server = start_broker(configuration(localhost, f'min_version: "{version}"'))
        connector = make_connector(Broker(host, server.port))
        assert connector.connect(PATIENCE_SECONDS)
        connector.subscribe("echo", callback=lambda message: connector.publish(message.reply, payload=message.payload))
        payload = bytes(range(256)) * 4000
        assert connector.request("echo", payload=payload, timeout=PATIENCE_SECONDS).payload == payload

    def test_it_is_not_used_when_the_broker_only_offers_it(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        def no_context() -> ssl.SSLContext:
            raise AssertionError("no TLS was wanted")

        server = start_broker(configuration(localhost) + "\nallow_non_tls: true")
        connector = make_connector(server, tls_context=no_context)
        assert connector.connect(PATIENCE_SECONDS)
        assert connector.server_info["tls_available"] is True

    def test_but_then_it_is_when_we_insist(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        used = []

        def context() -> ssl.SSLContext:
            used.append(1)
            return tls.system_trust_context()

        server = start_broker(configuration(localhost) + "\nallow_non_tls: true")
        assert make_connector(server, tls_context=context, tls_always=True).connect(PATIENCE_SECONDS)
        assert used == [1]

    def test_many_threads_may_write_while_the_reader_reads(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        server = start_broker(configuration(localhost))
        for _ in range(5):
            connector = make_connector(server)
            connector.connect(PATIENCE_SECONDS)

            def answer(message: Message, connector: Connector = connector) -> None:
                connector.publish(message.reply, payload=message.payload)

            connector.subscribe("echo", callback=answer)

            def ask(number: int, connector: Connector = connector) -> bool:
                payload = b"%d" % number * 500
                return bytes(connector.request("echo", payload=payload, timeout=PATIENCE_SECONDS).payload) == payload

            with ThreadPoolExecutor(8) as threads:
                assert all(threads.map(ask, range(400)))
            assert connector.connections == 1
            connector.close()

    def test_the_first_writes_may_come_at_any_moment(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        server = start_broker(configuration(localhost))
        for number in range(60):
            messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
            connector = make_connector(server)
            connector.subscribe("a", callback=messages.put)
            connector.connect(PATIENCE_SECONDS)
            connector.publish("a", payload=b"%d" % number)
            assert messages.get(timeout=PATIENCE_SECONDS).payload == b"%d" % number
            connector.close()

    def test_a_lost_connection_is_encrypted_again(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        server = start_broker(configuration(localhost))
        connector = make_connector(server)
        connector.connect(PATIENCE_SECONDS)
        server.kill()
        server.start()
        eventually(lambda: connector.connections == 2)
        connector.flush()

    def test_a_frozen_broker_is_found_and_left(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        server = start_broker(configuration(localhost))
        connector = make_connector(server, ping_interval=0.1)
        connector.connect(PATIENCE_SECONDS)
        server.pause()
        eventually(lambda: not connector.connected)
        connector.close()

    def test_a_member_of_the_cluster_known_by_its_address_proves_the_name_of_the_one_that_told_of_it(
        self, authority: Authority, start_broker: StartBroker, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        files = authority.issue("cluster", hosts=("localhost",))
        routes = [unused_address(), unused_address()]
        first, _ = (
            start_broker(
                f"{configuration(files)}\n"
                f'cluster {{ name: c, listen: "{routes[number]}", routes: ["nats://{routes[1 - number]}"] }}'
            )
            for number in range(2)
        )
        connector = make_connector(Broker("localhost", first.port))
        connector.connect(PATIENCE_SECONDS)
        eventually(lambda: len(connector.server_info.get("connect_urls", ())) == 2)
        first.kill()
        eventually(lambda: connector.connections == 2)
        assert connector.connected_url.startswith("nats://127.0.0.1:")


def test_any_thread_may_send_at_any_time(localhost: Files, authority: Authority) -> None:
    def receive() -> list[bytes]:
        with peer.makefile("rb") as lines:
            return [lines.readline() for _ in range(8 * 200)]

    def send(number: int) -> None:
        for count in range(200):
            stream.send(b"%d of %d\n" % (count, number))

    with (
        encrypted(client_context(authority), server_context(localhost)) as (stream, peer),
        ThreadPoolExecutor(9) as threads,
    ):
        received = threads.submit(receive)
        list(threads.map(send, range(8)))
        lines = received.result(PATIENCE_SECONDS)
    assert sorted(lines) == sorted(b"%d of %d\n" % (count, number) for count in range(200) for number in range(8))


class TestAStuckWrite:
    def test_does_not_keep_the_reader_from_reading(
        self, localhost: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream_module, "SEND_SECONDS", PATIENCE_SECONDS)
        with (
            encrypted(client_context(authority), server_context(localhost)) as (stream, peer),
            ThreadPoolExecutor(1) as threads,
        ):
            peer.send(b"all that a handshake leaves to be done is done")
            while stream.receive() is None:
                pass
            stream.limit_receive(0.001)
            # so much that its encryption, during which there are records that the reader is not to send, takes a while
            writing = threads.submit(stream.send, bytes(64 * 1024 * 1024))
            began = time.monotonic()
            timer = threading.Timer(1.0, peer.send, [b"something"])
            timer.start()
            while (data := stream.receive()) is None:
                pass
            assert data == b"something"
            assert time.monotonic() - began < stream_module.SEND_SECONDS
            timer.join()
            stream.shutdown()
            assert isinstance(writing.exception(PATIENCE_SECONDS), ConnectionLostError)

    def test_of_the_reader_ends_the_connection(
        self, localhost: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Part of a record may be gone, so nothing that came after it would be understood."""
        monkeypatch.setattr(stream_module, "SEND_SECONDS", 0.1)
        client, server = client_context(authority), server_context(localhost)
        client.post_handshake_auth = True  # what the reader has to answer
        server.verify_mode = ssl.CERT_OPTIONAL
        server.load_verify_locations(authority.certificate)
        with encrypted(client, server) as (stream, peer):
            with pytest.raises(BlockingIOError):
                stream._socket.sendall(bytes(64 * 1024 * 1024))
            stream.limit_receive(1.0)
            peer.verify_client_post_handshake()
            peer.send(b"something")
            with pytest.raises(ConnectionLostError, match=r"the broker took no data for 0\.1 s"):
                [stream.receive() for _ in range(5)]
            with pytest.raises(ConnectionLostError):
                stream.send(b"more")


class TestABrokerThatDribbles:
    """Its bytes are parts of a record of which there is never enough to decrypt anything."""

    @staticmethod
    def dribble(peer: Peer) -> None:
        peer.send_in_clear(b"\x17\x03\x03\x40\x00")
        while True:
            peer.send_in_clear(b"x")
            time.sleep(0.01)

    def test_does_not_hold_up_the_connecting(
        self, localhost: Files, authority: Authority, make_connector: MakeConnector
    ) -> None:
        def script(peer: Peer) -> None:
            peer.info(tls_required=True)
            peer.start_tls(server_context(localhost))
            self.dribble(peer)

        with FakeBroker(script) as fake:
            context = client_context(authority)
            connector = make_connector(fake, tls_context=lambda: context, connect_timeout=1.0)
            error = failure(connector)
            connector.close()
        assert isinstance(error, UnreachableError)
        assert str(error) == "no answer in time"

    def test_is_pinged_and_left(
        self, localhost: Files, authority: Authority, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        def script(peer: Peer) -> None:
            peer.info(tls_required=True)
            peer.start_tls(server_context(localhost))
            peer.login()
            peer.send(b"PONG\r\n")
            self.dribble(peer)

        with FakeBroker(script) as fake:
            context = client_context(authority)
            connector = make_connector(fake, tls_context=lambda: context, ping_interval=0.1)
            assert connector.connect(PATIENCE_SECONDS)
            eventually(lambda: connector.failure)
            connector.close()
        assert str(connector.failure) == "the broker answered none of the last 2 pings"


class TestRefused:
    def test_an_authority_that_is_not_trusted(
        self,
        localhost: Files,
        start_broker: StartBroker,
        make_connector: MakeConnector,
    ) -> None:
        error = failure(make_connector(Broker("localhost", start_broker(configuration(localhost)).port)))
        assert isinstance(error, TLSError)
        assert str(error) == "the certificate of localhost is not to be trusted: unable to get local issuer certificate"

    def test_the_broker_learns_why(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        """With TLS 1.3, OpenSSL sends this alert in a form that Go does not understand."""
        server = start_broker(configuration(localhost))
        make_connector(server, tls_context=lambda: limited_to("1.2")).connect(0)
        eventually(lambda: "remote error: tls: unknown certificate authority" in server.log_file.read_text())

    @pytest.mark.usefixtures("_trusted")
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    def test_a_certificate_of_another_host(
        self, host: str, authority: Authority, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        server = start_broker(configuration(authority.issue("other", hosts=("other.example.net", "127.0.0.2"))))
        error = failure(make_connector(Broker(host, server.port)))
        assert isinstance(error, TLSError)
        assert f"the certificate of {host} is not to be trusted" in str(error)
        assert "mismatch" in str(error)

    @pytest.mark.usefixtures("_trusted")
    def test_a_certificate_with_the_host_in_its_common_name_alone(
        self, authority: Authority, start_broker: StartBroker, make_connector: MakeConnector
    ) -> None:
        server = start_broker(configuration(authority.issue("localhost")))
        error = failure(make_connector(Broker("localhost", server.port)))
        assert isinstance(error, TLSError)
        assert "mismatch" in str(error)

    @pytest.mark.usefixtures("_trusted")
    @pytest.mark.parametrize("version", ["1.2", "1.3"])
    def test_us_because_we_have_no_certificate(
        self,
        version: str,
        authority: Authority,
        localhost: Files,
        start_broker: StartBroker,
        make_connector: MakeConnector,
    ) -> None:
        """With TLS 1.3 the refusal comes when the handshake seems to have succeeded."""
        server = start_broker(configuration(localhost, f'verify: true, ca_file: "{authority.certificate}"'))
        error = failure(make_connector(server, tls_context=lambda: limited_to(version)))
        assert isinstance(error, TLSError)
        reasons = {"1.2": "handshake failure", "1.3": "certificate required"}
        assert str(error) == f"the broker refuses TLS with us: {reasons[version]}"

    def test_a_broker_without_it_when_we_insist(self, broker: NatsServer, make_connector: MakeConnector) -> None:
        error = failure(make_connector(broker, tls_always=True))
        assert isinstance(error, TLSError)
        assert str(error) == "the broker offers no TLS"

    def test_a_broker_that_answers_with_something_else(self, make_connector: MakeConnector) -> None:
        def script(peer: Peer) -> None:
            peer.info(tls_required=True)
            peer.send(b"-ERR 'what is this?'\r\n")
            peer.wait_until_left()

        def slow(peer: Peer) -> None:
            peer.info(tls_required=True)
            peer.take(1)
            peer.send(b"-ERR 'what is this?'\r\n")
            peer.wait_until_left()

        with FakeBroker(slow, script) as fake:
            connector = make_connector(fake)
            error = failure(connector)
            connector.close()
        assert isinstance(error, TLSError)
        assert str(error) == "TLS failed: wrong version number"

    def test_words_in_clear_between_the_greeting_and_tls(self, make_connector: MakeConnector) -> None:
        """Somebody in between could have us take them for the broker's own."""

        def script(peer: Peer) -> None:
            peer.send(b'INFO {"tls_required": true}\r\nINFO {"max_payload": 1}\r\n')
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            error = failure(connector)
            connector.close()
        assert isinstance(error, TLSError)
        assert "in clear" in str(error)

    def test_a_name_that_no_certificate_can_carry(
        self, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        really = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda _, *more, **options: really("127.0.0.1", *more, **options))

        def script(peer: Peer) -> None:
            peer.info(tls_required=True)
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(Broker("a..b", fake.port))
            error = failure(connector)
            connector.close()
        assert isinstance(error, TLSError)
        assert str(error) == "'a..b' is not a host name"

    def test_a_broker_that_hangs_up(self, make_connector: MakeConnector) -> None:
        def script(peer: Peer) -> None:
            peer.info(tls_required=True)
            peer.take(1)

        with FakeBroker(script) as fake:
            connector = make_connector(fake)
            error = failure(connector)
            connector.close()
        assert "closed the connection during the TLS handshake" in str(error) or "reset" in str(error)

    @pytest.mark.usefixtures("_trusted")
    def test_a_trust_store_that_becomes_right_is_enough(
        self, localhost: Files, start_broker: StartBroker, make_connector: MakeConnector, tmp_path: Path
    ) -> None:
        """The context is made anew for every connection."""
        other = Authority(tmp_path, "Other CA")
        stores = iter((other.certificate, None))

        def context() -> ssl.SSLContext:
            store = next(stores)
            if store is None:
                return tls.system_trust_context()
            context = ssl.create_default_context(cafile=str(store))
            assert context.verify_mode == ssl.CERT_REQUIRED
            return context

        connector = make_connector(start_broker(configuration(localhost)), tls_context=context)
        assert connector.connect(PATIENCE_SECONDS)
        assert isinstance(connector.failure, ConnectFailedError)


def test_the_context_verifies_everything() -> None:
    context = tls.system_trust_context()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.hostname_checks_common_name
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def unused_address() -> str:
    server = NatsServer()
    server.close()
    return server.address
