"""What counts as an answer to a broadcast discovery, and when it is over: on a real broker, by a clock of the test."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from provisioner.choria import discovery, nats, window
from provisioner.choria.connector import Connector
from provisioner.choria.discovery import Sighting
from provisioner.choria.errors import ConnectionLostError, NotConnectedError
from provisioner.choria.nats import Message
from provisioner.choria.protocol import DISCOVERY_SUBJECT, reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector
from tests.test_rpc import CALLER, relabelled

#: When every discovery here begins, by the clock of the test.
START = 1000.0

#: Makes what is published in answer to a request, or has published it itself.
Reply = Callable[[Request], bytes | None]
#: Seconds after the start, and what arrives then.
Step = tuple[float, Sequence[Reply]]


@attrs.define
class Clock:
    """Stands still unless it is set; for both the stamps of arrival and the window."""

    now: float = START

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Network:
    """A provisioner and one node that answers a discovery by a script, at times that the script says."""

    def __init__(self, connector: Connector, node: Connector, clock: Clock) -> None:
        self.connector = connector
        self.node = node
        self.clock = clock
        self.asked: queue.SimpleQueue[Message] = queue.SimpleQueue()
        node.subscribe(DISCOVERY_SUBJECT, callback=self.asked.put)
        node.flush()
        #: The one request, once it has come.
        self.request: Request | None = None
        self.message: Message | None = None

    def discover(
        self,
        *script: Step,
        first_reply: float = 2.0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Sighting]:
        """Discover while the script is played: replies by the seconds after the start at which they arrive."""
        steps = list(script)

        def turn() -> bool:
            if steps:
                after, replies = steps.pop(0)
                self.clock.now = START + after
                self.publish(replies)
            else:
                self.clock.now += 3600
            return interrupted()

        return discovery.discover(
            self.connector,
            ProtocolV1(identity="prov.example.net", caller=CALLER, ttl=60),
            target_agent="choria_provision",
            first_reply=first_reply,
            interrupted=turn,
        )

    def identities(self, *script: Step, first_reply: float = 2.0) -> list[str]:
        return [sighting.identity for sighting in self.discover(*script, first_reply=first_reply)]

    def publish(self, replies: Sequence[Reply]) -> None:
        """Publish replies and wait until they have arrived."""
        if self.request is None:
            self.message = self.asked.get(timeout=PATIENCE_SECONDS)
            self.request = EnvelopesV1().open(self.message.payload)
        for reply in replies:
            if payload := reply(self.request):
                self.node.publish(self.request.reply_to, payload=payload)
        if replies:
            self.node.flush()
            self.connector.flush()


@pytest.fixture
def network(broker: NatsServer, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch) -> Network:
    connector, node = make_connector(broker, reply_prefix=reply_prefix(CALLER)), make_connector(broker)
    assert connector.connect(PATIENCE_SECONDS)
    assert node.connect(PATIENCE_SECONDS)
    clock = Clock()
    monkeypatch.setattr(discovery, "time", clock)
    monkeypatch.setattr(window, "time", clock)
    monkeypatch.setattr(nats, "time", clock)
    return Network(connector, node, clock)


def at(seconds: float, *replies: Reply) -> Step:
    return seconds, replies


def pong(identity: str, *, sender: str | None = None, body: str = "pong", **changes: Any) -> Reply:
    """A reply of a server; `changes` are members of the request that it answers.

    :param sender: as the outermost envelope names it, if another one
    """

    def reply(request: Request) -> bytes:
        payload = EnvelopesV1().seal(attrs.evolve(request, **changes), sender=identity, body=body, time=request.time)
        return payload if sender is None else relabelled(payload, sender)

    return reply


def forger(network: Network) -> Reply:
    """Publishes what a broker says to a request that nobody listens to."""

    def forge(request: Request) -> None:
        network.node._send("HPUB", request.reply_to, 16, "16\r\nNATS/1.0 503\r\n\r\n")

    return forge


def test_all_servers_with_the_agent_are_asked_and_the_broker_is_not(network: Network) -> None:
    network.discover(at(0.0))

    assert network.request is not None
    assert network.message is not None
    assert (network.request.agent, network.request.filter["agent"]) == ("discovery", ["choria_provision"])
    assert network.request.body == b"ping"
    assert network.message.reply == "", "with a reply subject, a broker that knows of nobody yet would answer"


class TestWindow:
    """Until when replies count."""

    def test_it_slides_by_300_ms_from_reply_to_reply(self, network: Network) -> None:
        script = [at(0.29 * number, pong(f"n{number}")) for number in range(6)]

        assert network.identities(*script) == [f"n{number}" for number in range(6)]

    def test_it_ends_300_ms_after_the_last_reply_and_what_comes_then_does_not_count(self, network: Network) -> None:
        assert network.identities(at(0.0, pong("n1")), at(0.31, pong("late"))) == ["n1"]

    def test_it_is_over_as_soon_as_it_ends(self, network: Network) -> None:
        network.discover(at(0.0, pong("n1")), at(0.2), at(0.31), at(0.32), at(0.33))

        assert network.clock.now == START + 0.31

    def test_it_ends_after_two_seconds_however_many_replies_come(self, network: Network) -> None:
        script = [at(0.25 * number, pong(f"n{number}")) for number in range(20)]

        assert network.identities(*script) == [f"n{number}" for number in range(9)], "the last one at 2.0 s"

    def test_the_first_reply_may_take_longer_than_those_that_follow(self, network: Network) -> None:
        script = [at(0.0), at(1.4, pong("n1")), at(1.6, pong("n2")), at(1.91, pong("late"))]

        assert network.identities(*script, first_reply=1.5) == ["n1", "n2"]

    def test_the_first_reply_may_not_take_longer_than_configured(self, network: Network) -> None:
        assert network.identities(at(0.0), at(1.51, pong("late")), first_reply=1.5) == []

    def test_the_first_reply_may_not_take_longer_than_two_seconds_whatever_is_configured(
        self, network: Network
    ) -> None:
        assert network.identities(at(0.0), at(2.01, pong("late")), first_reply=60.0) == []

    def test_what_has_arrived_in_time_counts_however_late_it_is_looked_at(self, network: Network) -> None:
        script = [at(0.1, pong("n1"), pong("n2"), pong("n3"), pong("n4")), at(3600.0)]

        assert network.identities(*script) == ["n1", "n2", "n3", "n4"]

    def test_it_slides_by_when_replies_arrived_not_by_when_they_were_looked_at(self, network: Network) -> None:
        assert network.identities(at(0.1, pong("n1"), pong("n2")), at(1.0), at(1.05, pong("late"))) == ["n1", "n2"]

    def test_a_flood_does_not_keep_it_from_ending(self, network: Network) -> None:
        network.discover(at(0.0, pong("n1")), at(0.31, *[pong("late")] * 5), *[at(0.32)] * 5)

        assert network.clock.now == START + 0.31

    def test_nor_does_a_flood_of_forged_words_that_nobody_is_there(self, network: Network) -> None:
        network.discover(at(0.0, pong("n1")), at(0.31, *[forger(network)] * 5), *[at(0.32)] * 5)

        assert network.clock.now == START + 0.31

    def test_a_reply_that_does_not_count_does_not_make_it_longer(self, network: Network) -> None:
        assert network.identities(
            at(0.0, pong("n1")), at(0.31, pong("late"), pong("later")), at(0.6, pong("last"))
        ) == ["n1"]

    def test_nobody_answers(self, network: Network, caplog: pytest.LogCaptureFixture) -> None:
        assert network.discover(at(0.0), at(1.9), at(2.0), at(3.0)) == []
        assert network.clock.now == START + 2.0
        assert not caplog.records


def test_a_sighting_carries_the_time_at_which_its_reply_arrived(network: Network) -> None:
    found = network.discover(at(0.125, pong("n1")), at(0.25, pong("n2")))

    assert found == [Sighting("n1", START + 0.125), Sighting("n2", START + 0.25)]


def test_a_sighting_tells_how_far_the_clock_of_the_server_is_ahead(network: Network) -> None:
    def reply(request: Request) -> bytes:
        return EnvelopesV1().seal(request, sender="n1", body="pong", time=START + 90)

    (found,) = network.discover(at(0.25, reply))
    assert found.ahead == 89.75


def test_a_server_that_answers_more_than_once_is_found_once_by_its_first_answer(network: Network) -> None:
    found = network.discover(at(0.125, pong("n1"), pong("n1")), at(0.25, pong("n1"), pong("n2")))

    assert found == [Sighting("n1", START + 0.125), Sighting("n2", START + 0.25)]


FORGERIES: dict[str, tuple[Reply, str]] = {
    "another request": (pong("n1", id="0" * 32), "they name another request"),
    "another sender outside": (pong("n1", sender="n2"), "their envelopes name different senders"),
    "another agent": (pong("n1", agent="rpcutil"), "they answer something else than a discovery"),
    "another body": (pong("n1", body='{"statuscode":0}'), "they answer something else than a discovery"),
    "the question": (pong("n1", body="ping"), "they answer something else than a discovery"),
    "not JSON": (lambda _request: b"hello", "the transport is not JSON"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_reply_that_fails_a_check_finds_nobody_and_hides_nobody(
    network: Network, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    forgery, reason = FORGERIES[kind]

    assert network.identities(at(0.0, forgery, pong("good"), forgery)) == ["good"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("refused 2 discovery replies, one from ")
    assert line.endswith(f": {reason}")


def test_a_forgery_does_not_keep_the_server_itself_from_being_found(network: Network) -> None:
    found = network.discover(at(0.125, pong("n1", sender="n2"), pong("n1", id="0" * 32)), at(0.25, pong("n1")))

    assert found == [Sighting("n1", START + 0.25)]


def test_identities_that_are_not_sane_are_counted_by_reason_with_one_example(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    blanks = [pong(f"a b{number}") for number in range(3)]
    wild = [pong("a.*"), pong(">")]

    assert network.identities(at(0.0, blanks[0], wild[0], pong("good"), *blanks[1:], wild[1], pong("a\r\nb"))) == [
        "good"
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "refused 4 discovery replies, one from 'a b0': their identity holds white space or control characters",
        "refused 2 discovery replies, one from 'a.*': their identity holds * or >",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_the_example_is_fit_for_one_line_of_a_log(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    network.discover(at(0.0, pong("a\r\n\x1b[31m" + "x" * 5000)))

    assert caplog.messages[0].isprintable()
    assert len(caplog.messages[0]) < 500


def test_a_forged_word_that_nobody_is_there_does_not_end_it(network: Network) -> None:
    forge = forger(network)

    assert network.identities(at(0.0, forge), at(0.1, pong("n1")), at(0.2, forge), at(0.3, pong("n2"))) == ["n1", "n2"]


def test_when_it_is_interrupted_nothing_is_found(network: Network) -> None:
    turns = iter([False, False, True])

    assert network.discover(at(0.0, pong("n1")), at(0.1, pong("n2")), at(0.2), interrupted=lambda: next(turns)) == []


def test_when_it_is_not_wanted_from_the_start_nothing_is_found(network: Network) -> None:
    assert network.discover(at(0.0, pong("n1")), interrupted=lambda: True) == []


def test_a_connection_that_is_lost_meanwhile_is_an_error_even_after_replies(
    network: Network, broker: NatsServer
) -> None:
    def lose() -> bool:
        if network.clock.now == START + 0.2:
            broker.kill()
        return False

    with pytest.raises(ConnectionLostError):
        network.discover(at(0.1, pong("n1")), *[at(0.2)] * 300, interrupted=lose)


def test_without_a_connection_it_is_an_error(network: Network, broker: NatsServer, eventually: Eventually) -> None:
    broker.kill()
    eventually(lambda: not network.connector.connected)

    with pytest.raises(NotConnectedError):
        network.discover()
