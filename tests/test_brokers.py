"""Which brokers are tried: addresses as Choria writes them, SRV records of a real name server, the last resort."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import brokers
from provisioner.choria.brokers import AddressError, Broker, BrokerList

CHORIA = "_mcollective-server._tcp.example.net."
PUPPET = "_x-puppet-mcollective._tcp.example.net."


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "url"),
        [
            ("h:4222", "nats://h:4222"),
            (" h:4222 ", "nats://h:4222"),
            ("nats://h:4222", "nats://h:4222"),
            ("tls://h:4222", "tls://h:4222"),
            ("TLS://h:4222", "tls://h:4222"),
            ("//h:4222", "nats://h:4222"),
            ("wss://h:443/x", "wss://h:443"),
            ("nats://h:4222?x=1#y", "nats://h:4222"),
            ("nats://user:pass@h:4222", "nats://h:4222"),
            ("nats://user:p@ss@h:4222", "nats://h:4222"),
            ("[::1]:4222", "nats://[::1]:4222"),
            ("nats://[fe80::1%eth0]:4222", "nats://[fe80::1%eth0]:4222"),
            ("192.0.2.1:1", "nats://192.0.2.1:1"),
            ("h:65535", "nats://h:65535"),
        ],
    )
    def test_an_address_is_read_as_choria_reads_it(self, address: str, url: str) -> None:
        assert str(brokers.parse(address)) == url

    def test_the_brackets_are_not_a_part_of_the_host(self) -> None:
        assert brokers.parse("[::1]:4222") == Broker("::1", 4222, "nats")

    @pytest.mark.parametrize(
        ("address", "reason"),
        [
            ("", "is empty"),
            ("nats://", "is empty"),
            ("h", "has no port, and there is no default one"),
            ("nats://h", "has no port, and there is no default one"),
            ("h:abc", "has a port that is not a number from 1 to 65535"),
            ("h:", "has a port that is not a number from 1 to 65535"),
            ("h:0", "has a port that is not a number from 1 to 65535"),
            ("h:65536", "has a port that is not a number from 1 to 65535"),
            ("h:+1", "has a port that is not a number from 1 to 65535"),
            ("h:\u0664", "has a port that is not a number from 1 to 65535"),
            ("::1:4222", "has more than host and port (an IPv6 address needs brackets)"),
            ("[::1:4222", "has more than host and port (an IPv6 address needs brackets)"),
            ("user:pass@h:4222", "has more than host and port (an IPv6 address needs brackets)"),
            ("user@h:4222", "has no usable host name"),
            ("[::1]", "has more than host and port (an IPv6 address needs brackets)"),
            (":4222", "has no usable host name"),
            ("[]:4222", "has no usable host name"),
            ("a b:4222", "has no usable host name"),
            ("a\r\nb:4222", "has no usable host name"),
            ("h/x:4222", "has no usable host name"),
        ],
    )
    def test_an_address_without_host_or_port_is_refused(self, address: str, reason: str) -> None:
        with pytest.raises(AddressError) as raised:
            brokers.parse(address)
        assert str(raised.value) == reason

    @given(st.text(st.sampled_from("ha1:/@[]?# .%") | st.characters(codec="utf-8")))
    def test_any_text_is_an_address_or_an_address_error(self, address: str) -> None:
        try:
            broker = brokers.parse(address)
        except AddressError:
            return
        assert 0 < broker.port < 65536
        assert broker.host.split() == [broker.host]

    def test_credentials_are_noticed_and_not_shown(self) -> None:
        assert brokers.has_credentials("nats://user:pass@h:4222")
        assert not brokers.has_credentials("nats://h:4222/x@y")
        assert brokers.without_credentials("nats://user:p@ss@h") == "h"
        assert brokers.without_credentials("nats://h") == "nats://h"


class TestConfiguredBrokers:
    def test_configured_brokers_are_all_given_in_random_order(self) -> None:
        hosts = [f"h{number}:4222" for number in range(5)]
        broker_list = BrokerList(hosts, resolver=no_resolver)
        orders = {broker_list() for _ in range(100)}
        assert {frozenset(order) for order in orders} == {frozenset(map(brokers.parse, hosts))}
        assert len({order[0] for order in orders}) > 1

    def test_a_wrong_address_spoils_the_whole_list(self) -> None:
        with pytest.raises(AddressError):
            BrokerList(["h:4222", ""])

    def test_without_addresses_and_look_ups_puppet_is_left(self) -> None:
        assert BrokerList(use_srv=False, resolver=no_resolver)() == (Broker("puppet", 4222, "nats"),)


def no_resolver() -> dns.resolver.Resolver:
    pytest.fail("DNS was asked")


class NameServer:
    """A name server on a UDP port of its own.

    :ivar zone: the SRV records by their names
    :ivar questions: the names that were asked for
    """

    def __init__(self) -> None:
        self.zone: dict[str, list[str]] = {}
        self.rcode = dns.rcode.NOERROR
        self.questions: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="name-server")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread by an empty packet, which is no question."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stopper:
            stopper.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self._socket.close()

    def resolver(self) -> dns.resolver.Resolver:
        resolver = dns.resolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = self.port
        return resolver

    def _serve(self) -> None:
        while packet := self._socket.recvfrom(4096):
            data, client = packet
            if not data:
                return
            self._socket.sendto(self._answer(dns.message.from_wire(data)).to_wire(), client)

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        name = query.question[0].name.to_text()
        self.questions.append(name)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        response.set_rcode(self.rcode)
        if self.rcode == dns.rcode.NOERROR and name not in self.zone:
            response.set_rcode(dns.rcode.NXDOMAIN)
        if self.zone.get(name):
            response.answer.append(dns.rrset.from_text(name, 60, "IN", "SRV", *self.zone[name]))
        return response


@pytest.fixture
def name_server() -> Iterator[NameServer]:
    server = NameServer()
    server.start()
    yield server
    server.stop()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker_list(name_server: NameServer, clock: Clock) -> BrokerList:
    return BrokerList(srv_domain="example.net", resolver=name_server.resolver, clock=clock)


class TestLookUps:
    def test_the_records_of_the_domain_are_the_brokers(self, name_server: NameServer, broker_list: BrokerList) -> None:
        name_server.zone = {CHORIA: ["10 1 4222 b1.example.net.", "20 1 4223 b2.example.net."]}
        assert set(broker_list()) == {Broker("b1.example.net", 4222), Broker("b2.example.net", 4223)}
        assert name_server.questions == [CHORIA]

    def test_priorities_do_not_count_in_the_end(self, name_server: NameServer, broker_list: BrokerList) -> None:
        name_server.zone = {CHORIA: ["10 1 4222 b1.example.net.", "20 1 4222 b2.example.net."]}
        assert {broker_list()[0].host for _ in range(100)} == {"b1.example.net", "b2.example.net"}

    def test_the_second_name_is_tried_when_the_first_does_not_exist(
        self, name_server: NameServer, broker_list: BrokerList
    ) -> None:
        name_server.zone = {PUPPET: ["10 1 4222 b1.example.net."]}
        assert broker_list() == (Broker("b1.example.net", 4222),)
        assert name_server.questions == [CHORIA, PUPPET]

    def test_the_second_name_is_tried_when_the_first_has_no_records(
        self, name_server: NameServer, broker_list: BrokerList
    ) -> None:
        name_server.zone = {CHORIA: [], PUPPET: ["10 1 4222 b1.example.net."]}
        assert broker_list() == (Broker("b1.example.net", 4222),)

    def test_a_record_that_says_there_is_no_service_is_none(
        self, name_server: NameServer, broker_list: BrokerList
    ) -> None:
        name_server.zone = {CHORIA: ["0 0 0 ."], PUPPET: ["10 1 4222 b1.example.net."]}
        assert broker_list() == (Broker("b1.example.net", 4222),)

    def test_answers_are_used_again_for_five_seconds(
        self, name_server: NameServer, broker_list: BrokerList, clock: Clock
    ) -> None:
        name_server.zone = {CHORIA: ["10 1 4222 old.example.net."]}
        broker_list()
        name_server.zone = {CHORIA: ["10 1 4222 new.example.net."]}
        clock.now += 4.9
        assert broker_list()[0].host == "old.example.net"
        clock.now += 0.2
        assert broker_list()[0].host == "new.example.net"

    def test_a_configured_broker_makes_look_ups_unnecessary(self, name_server: NameServer) -> None:
        assert BrokerList(["h:1"], srv_domain="example.net", resolver=name_server.resolver)() == (Broker("h", 1),)
        assert name_server.questions == []

    def test_the_domain_comes_from_facter_when_none_is_configured(self, name_server: NameServer) -> None:
        name_server.zone = {CHORIA: ["10 1 4222 b1.example.net."]}
        broker_list = BrokerList(resolver=name_server.resolver, domain_fact=lambda: "example.net")
        assert broker_list() == (Broker("b1.example.net", 4222),)


class TestFailedLookUps:
    def test_without_any_record_puppet_is_left_with_one_warning(
        self, name_server: NameServer, broker_list: BrokerList, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert broker_list() == (Broker("puppet", 4222),)
        assert broker_list() == (Broker("puppet", 4222),)
        assert name_server.questions == [CHORIA, PUPPET] * 2
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        message = caplog.records[0].getMessage()
        assert message.startswith(
            "No broker found in DNS, using nats://puppet:4222: _mcollective-server._tcp.example.net"
        )
        assert "_x-puppet-mcollective._tcp.example.net" in message

    def test_a_failure_after_a_success_is_warned_about_again(
        self, name_server: NameServer, broker_list: BrokerList, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        for zone in ({}, {CHORIA: ["10 1 4222 b1.example.net."]}, {}):
            name_server.zone = zone
            clock.now += 10
            broker_list()
        assert len(caplog.records) == 2

    def test_a_refusing_name_server_is_only_a_warning(
        self, name_server: NameServer, broker_list: BrokerList, caplog: pytest.LogCaptureFixture
    ) -> None:
        name_server.rcode = dns.rcode.REFUSED
        assert broker_list() == (Broker("puppet", 4222),)
        assert len(caplog.records) == 1

    def test_a_silent_name_server_is_only_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(brokers, "SRV_TIMEOUT_SECONDS", 0.05)
        silent = NameServer()
        try:
            broker_list = BrokerList(srv_domain="example.net", resolver=silent.resolver)
            assert broker_list() == broker_list() == (Broker("puppet", 4222),)
        finally:
            silent.start()
            silent.stop()
        assert [record.getMessage() for record in caplog.records] == [
            (
                "No broker found in DNS, using nats://puppet:4222: "
                "_mcollective-server._tcp.example.net: no answer; _x-puppet-mcollective._tcp.example.net: no answer"
            )
        ]

    def test_a_machine_without_a_name_server_is_only_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        def unconfigured() -> dns.resolver.Resolver:
            return dns.resolver.Resolver("/nonexistent/resolv.conf")

        assert BrokerList(srv_domain="example.net", resolver=unconfigured)() == (Broker("puppet", 4222),)
        assert "/nonexistent/resolv.conf" in caplog.text

    @pytest.mark.parametrize("domain", ["a..b", "x" * 70, "y." * 200, "\\300"])
    def test_a_domain_that_is_none_is_only_a_warning(
        self, domain: str, name_server: NameServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert BrokerList(srv_domain=domain, resolver=name_server.resolver)() == (Broker("puppet", 4222),)
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("fact", [lambda: "", lambda: "."])
    def test_without_a_domain_dns_is_not_asked(self, fact: Callable[[], str], caplog: pytest.LogCaptureFixture) -> None:
        assert BrokerList(resolver=no_resolver, domain_fact=fact)() == (Broker("puppet", 4222),)
        assert "plugin.choria.srv_domain is not set and Facter knows no domain" in caplog.text
