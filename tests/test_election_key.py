"""The key of the election: what is sent is what the Go original sends, and every answer is understood."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.choria import election_key
from provisioner.choria.connector import Connector
from provisioner.choria.election_key import ElectionError, Key, TakenError, UndecidedError
from provisioner.choria.nats import Message
from provisioner.simulate.broker import NatsServer
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector
from tests.fake_broker import FakeBroker, Peer
from tests.streams import CHORIA_LOGIN, INFO_SUBJECT, KEY, KEY_SUBJECT, LOGIN, STREAM, Streams, connector

FIXTURES = Path(__file__).parent / "fixtures" / "election"

#: What differs from one process to the next.
INBOX = re.compile(r"(?<= )[a-z]+\.reply\.\S+")
#: What the broker's subjects begin with, of the calls that the Go original makes and we do not.
LEFT_OUT = "choria.streams.DIRECT.GET."


@attrs.frozen
class Call:
    """A request and its answer, as they were seen between a member of a Choria network and its broker.

    :ivar request: the frame
    :ivar reply: the frame
    """

    file: str
    request: str
    reply: str

    def __str__(self) -> str:
        return f"{self.file}: {self.subject}, {self.content.get('seq', self.content)}"

    @property
    def subject(self) -> str:
        return self.request.split(" ")[1]

    @property
    def inbox(self) -> str:
        return self.request.split(" ")[2]

    @property
    def expected(self) -> int:
        match = re.search(r"Expected-Last-Subject-Sequence: (\d+)", self.request)
        return int(match[1]) if match else 0

    @property
    def value(self) -> str:
        return self.request.split("\r\n")[-2]

    @property
    def content(self) -> dict[str, Any]:
        return content(self.reply)

    @property
    def refused_with(self) -> int | None:
        """The sequence that a refusal tells."""
        match = re.search(r"wrong last sequence: (\d+)", self.reply)
        return int(match[1]) if match else None


def content(frame: str) -> dict[str, Any]:
    """What a message of the broker says: the JSON in it, or its headers."""
    if frame.startswith("HMSG"):
        return {"headers": frame.split("\r\n")[1:-2]}
    return dict(json.loads(frame.split("\r\n")[1]))


def recorded() -> Iterator[Call]:
    for file in sorted(FIXTURES.glob("*.jsonl")):
        pending: dict[str, str] = {}
        for line in file.read_text().splitlines():
            frame = json.loads(line)["frame"]
            operation, *fields = frame.partition("\r\n")[0].split(" ")
            if operation in ("PUB", "HPUB"):
                pending[fields[1]] = frame
            elif fields[0] in pending:
                yield Call(file.stem, pending.pop(fields[0]), frame)


CALLS = list(recorded())
OURS = [call for call in CALLS if call.subject in (INFO_SUBJECT, KEY_SUBJECT)]


def test_the_recordings_hold_all_that_matters() -> None:
    assert {call.subject for call in OURS} == {INFO_SUBJECT, KEY_SUBJECT}
    assert {call.refused_with is None for call in OURS} == {True, False}
    assert {call.expected > 0 for call in OURS} == {True, False}
    assert any("headers" in call.content for call in OURS)
    assert {call.file for call in CALLS} == {file.stem for file in FIXTURES.glob("*.jsonl")}


class TestTheBrokerOfTheseTests:
    """It stands for Choria's broker, so it has to answer like one."""

    @pytest.fixture
    def streams(self, tmp_path: Path) -> Iterator[Streams]:
        with Streams(tmp_path) as streams:
            yield streams

    @pytest.mark.parametrize(
        "call", [call for call in CALLS if call.file not in ("evict-choria-account", "no-streams-on-broker")], ids=str
    )
    def test_it_answers_each_call_of_a_recording_alike(self, streams: Streams, call: Call) -> None:
        prepare(streams, call)
        assert comparable(answer(streams.server, LOGIN, call)) == comparable(call.content)

    @pytest.mark.parametrize("call", [call for call in CALLS if call.file == "evict-choria-account"], ids=str)
    def test_it_answers_those_who_operate_it_alike(self, streams: Streams, call: Call) -> None:
        prepare(streams, call)
        assert comparable(answer(streams.server, CHORIA_LOGIN, call)) == comparable(call.content)

    @pytest.mark.parametrize("call", [call for call in CALLS if call.file == "no-streams-on-broker"], ids=str)
    def test_without_streams_it_answers_alike(self, tmp_path: Path, call: Call) -> None:
        with Streams(tmp_path, enabled=False) as streams:
            assert answer(streams.server, LOGIN, call) == call.content

    def test_it_evicts_with_the_message_that_choria_evicts_with(self, streams: Streams) -> None:
        streams.make_bucket()
        seen: list[Message] = []
        streams.admin.subscribe(KEY, callback=seen.append)
        streams.evict()
        streams.admin.flush()

        (recording,) = (call.request for call in CALLS if "KV-Operation" in call.request)
        (message,) = seen
        assert recording.split("\r\n")[1:] == ["NATS/1.0", "KV-Operation: DEL", "", "", ""]
        assert (message.headers, message.payload) == ({"KV-Operation": "DEL"}, b"")

    def test_an_evicted_leader_leaves_a_mark_that_keeps_everybody_out(self, streams: Streams) -> None:
        streams.make_bucket()
        streams.write()
        assert streams.evict() == streams.sequence() == 2

    def test_the_bucket_forgets_a_key_after_its_lifetime(self, streams: Streams, eventually: Eventually) -> None:
        streams.make_bucket(lifetime=1.0)
        streams.write()
        assert streams.sequence() == 1
        eventually(lambda: streams.sequence() == 0)


def prepare(streams: Streams, call: Call) -> None:
    """Have a bucket with the sequences that the recorded call has found."""
    if call.refused_with:
        streams.make_bucket(first_seq=call.refused_with)
        streams.write()
        return
    streams.make_bucket(first_seq=call.expected or call.content.get("seq") or 0)
    if call.expected:
        streams.write()


def comparable(said: dict[str, Any]) -> dict[str, Any]:
    """What was said without that which differs from one broker to the next: versions, times and names."""
    kept = {key: value for key, value in said.items() if key not in ("created", "state", "cluster", "ts")}
    if "config" in kept:
        kept["config"] = {key: value for key, value in kept["config"].items() if key not in ("metadata", "first_seq")}
    return kept


def answer(server: NatsServer, login: dict[str, str], call: Call) -> dict[str, Any]:
    """What a broker answers to the very bytes that were recorded."""
    with (
        socket.create_connection((server.host, server.port), PATIENCE_SECONDS) as client,
        client.makefile("rb") as lines,
    ):
        lines.readline()
        options = {**login, "verbose": False, "headers": True, "no_responders": True}
        client.sendall(f"CONNECT {json.dumps(options)}\r\nSUB {call.inbox} 1\r\n{call.request}".encode())
        while not (line := lines.readline()).startswith((b"MSG", b"HMSG")):
            assert line, "the broker has closed the connection"
        size = int(line.split()[-1])
        return content((line + lines.read(size + 2)).decode())


class TestRecordings:
    """What the Go original and its broker said to each other."""

    @pytest.mark.parametrize("call", OURS, ids=str)
    def test_each_call_is_made_as_it_was_recorded_and_its_answer_understood(
        self, make_connector: MakeConnector, call: Call
    ) -> None:
        requests: list[str] = []

        def script(peer: Peer) -> None:
            peer.greet()
            line = peer.line().decode()
            size = int(line.split(" ")[-1])
            requests.append(f"{line}\r\n{peer.payload(size).decode()}\r\n")
            inbox = line.split(" ")[2]
            peer.send(INBOX_AND_ID.sub(lambda match: f"{match[1]} {inbox} 0", call.reply, count=1).encode())
            peer.wait_until_left()

        with FakeBroker(script) as broker:
            connection = make_connector(broker, reply_prefix="provisioning.reply.x")
            assert connection.connect(PATIENCE_SECONDS)
            outcome = tried(Key(connection, call.value), call)
            connection.close()

        assert [INBOX.sub("INBOX", request) for request in requests] == [INBOX.sub("INBOX", call.request)]
        assert outcome == wanted(call)


#: The beginning of a message of the broker.
INBOX_AND_ID = re.compile(r"^(H?MSG) \S+ \d+")


def tried(key: Key, call: Call) -> object:
    """What becomes of a recorded call."""
    try:
        return key.lifetime() if call.subject == INFO_SUBJECT else key.write(call.expected)
    except TakenError as error:
        return error.sequence, str(error)
    except ElectionError as error:
        return str(error)


def wanted(call: Call) -> object:
    if call.refused_with:
        return call.refused_with, f"the key has the sequence {call.refused_with}"
    if "headers" in call.content:
        return (
            "no Choria Streams here: plugin.choria.network.stream.store must be set in the configuration of the broker,"
            " and we be in its provisioning account (broker_provisioning_password)"
        )
    return 60.0 if call.subject == INFO_SUBJECT else call.content["seq"]


class Answering:
    """Somebody in the place of JetStream, who answers as a test says.

    :ivar payload: of all answers; None: there is none
    """

    def __init__(self, connection: Connector) -> None:
        self.payload: bytes | None = None
        self._connection = connection
        for subject in (INFO_SUBJECT, KEY_SUBJECT):
            connection.subscribe(subject, callback=self._answer)
        connection.flush()

    def _answer(self, request: Message) -> None:
        if self.payload is not None:
            self._connection.publish(request.reply, payload=self.payload)


@pytest.fixture
def answering(broker: NatsServer, make_connector: MakeConnector) -> Answering:
    connection = make_connector(broker)
    assert connection.connect(PATIENCE_SECONDS)
    return Answering(connection)


@pytest.fixture
def key(connector: Connector) -> Key:
    """Of a candidate on :func:`broker`."""
    return Key(connector, "prov.example.net")


def info(**config: Any) -> bytes:
    return json.dumps({"config": {"max_msgs_per_subject": 1, "max_age": 60_000_000_000} | config}).encode()


def refusal(description: object, code: object = 10071) -> bytes:
    return json.dumps({"error": {"code": 400, "err_code": code, "description": description}, "seq": 0}).encode()


def good(**members: Any) -> bytes:
    return json.dumps({"stream": STREAM, "seq": 7} | members).encode()


GARBAGE = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "null": b"null",
    "a number": b"7",
    "a list": b"[]",
    "an empty object": b"{}",
    "deep": b"[" * 100_000,
    "huge": json.dumps({"x": "y" * 500_000}).encode(),
    "an error of no kind": b'{"error": null}',
    "an error that is text": b'{"error": "no"}',
    "an error that is a list": b'{"error": [10071]}',
    "an error without a text": b'{"error": {"err_code": 10071}}',
    "a number that Python does not read": b'{"seq": 1%b}' % (b"0" * 4400),
    "another error": refusal("insufficient storage resources", 10047),
    "its code as text": refusal("wrong last sequence: 7", "10071"),
}


def named(payload: bytes) -> str:
    """The beginning of an answer, or what it is called if it has a name."""
    names = [name for name, content in GARBAGE.items() if content == payload]
    return names[0] if names else payload[:70].decode("ascii", "backslashreplace")


class TestWriting:
    """The answers to a write."""

    def test_a_good_one_gives_the_new_sequence(self, answering: Answering, key: Key) -> None:
        answering.payload = good()
        assert key.write(0) == 7

    @pytest.mark.parametrize("sequence", [0, 1, 2**63 - 1])
    def test_a_refusal_tells_the_sequence_that_the_key_has(self, answering: Answering, key: Key, sequence: int) -> None:
        answering.payload = refusal(f"wrong last sequence: {sequence}")
        with pytest.raises(TakenError) as refused:
            key.write(5)
        assert refused.value.sequence == sequence

    def test_a_refusal_while_another_write_is_under_way_tells_nothing(self, answering: Answering, key: Key) -> None:
        answering.payload = refusal("wrong last sequence", 10164)
        with pytest.raises(UndecidedError):
            key.write(5)

    @pytest.mark.parametrize(
        "payload",
        [
            *GARBAGE.values(),
            refusal("wrong last sequence: -1"),
            refusal("wrong last sequence: many"),
            refusal("wrong last sequence: 1" + "0" * 30),
            refusal("wrong last sequence: ٧"),
            refusal("wrong last sequence: 7\n"),
            refusal("wrong last sequence"),
            refusal(["wrong last sequence: 7"]),
            good(stream="KV_OTHER"),
            good(stream=None),
            good(seq=0),
            good(seq=-1),
            good(seq="7"),
            good(seq=7.0),
            good(seq=True),
            good(seq=None),
            good(error={"err_code": 10047}),
        ],
        ids=named,
    )
    def test_anything_else_is_a_failure(self, answering: Answering, key: Key, payload: bytes) -> None:
        answering.payload = payload
        with pytest.raises(ElectionError) as failure:
            key.write(0)
        assert str(failure.value).isprintable()
        assert len(str(failure.value)) < 1000

    def test_the_brokers_own_words_are_told(self, answering: Answering, key: Key) -> None:
        answering.payload = refusal("insufficient\nstorage", 10047)
        with pytest.raises(ElectionError, match=r"^the broker replied: insufficient.{1,2}storage$"):
            key.write(0)


class TestLifetime:
    """The answers to the question for the bucket."""

    @pytest.mark.parametrize("seconds", [4.0, 60.0, 3600.0])
    def test_it_is_told_in_seconds(self, answering: Answering, key: Key, seconds: float) -> None:
        answering.payload = info(max_age=int(seconds * 1e9))
        assert key.lifetime() == seconds

    def test_a_bucket_that_is_not_there_yet_is_told_of_with_the_setting(self, answering: Answering, key: Key) -> None:
        answering.payload = refusal("stream not found", 10059)
        with pytest.raises(ElectionError, match=r"no bucket CHORIA_LEADER_ELECTION.*network\.stream\.store"):
            key.lifetime()

    @pytest.mark.parametrize(("nanoseconds", "told"), [(0, "0 s"), (3_999_999_999, "4 s"), (3601 * 10**9, "3601 s")])
    def test_a_lifetime_that_no_election_can_live_with_is_refused_with_the_setting(
        self, answering: Answering, key: Key, nanoseconds: int, told: str
    ) -> None:
        answering.payload = info(max_age=nanoseconds)
        with pytest.raises(ElectionError, match=rf"keys for {told}, wanted 4 s to 3600 s: .*leader_election_ttl"):
            key.lifetime()

    @pytest.mark.parametrize("history", [0, -1])
    def test_a_bucket_that_keeps_nothing_is_refused(self, answering: Answering, key: Key, history: int) -> None:
        answering.payload = info(max_msgs_per_subject=history)
        with pytest.raises(ElectionError, match="keeps no keys"):
            key.lifetime()

    @pytest.mark.parametrize(
        "payload",
        [
            *GARBAGE.values(),
            b'{"config": []}',
            b'{"config": {}}',
            *(info(max_age=age) for age in ("60s", None, 6e10, True, -1, 10**400, -(10**400))),
            *(info(max_msgs_per_subject=history) for history in ("1", None, True, 1.0)),
        ],
        ids=named,
    )
    def test_anything_else_is_a_failure(self, answering: Answering, key: Key, payload: bytes) -> None:
        answering.payload = payload
        with pytest.raises(ElectionError) as failure:
            key.lifetime()
        assert str(failure.value).isprintable()
        assert len(str(failure.value)) < 1000


@pytest.fixture(scope="module")
def anything() -> Iterator[tuple[Answering, Key]]:
    """For many answers on one broker."""
    with NatsServer() as server:
        ours, theirs = connector(server, LOGIN), connector(server, CHORIA_LOGIN)
        yield Answering(theirs), Key(ours, "prov.example.net")
        ours.close()
        theirs.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.integers() | st.sampled_from((1, 7, 60 * 10**9, 2**63, 10**400, 10**4000))


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Bytes, JSON, and much that is nearly a good answer."""
    error = st.fixed_dictionaries(
        {},
        optional={
            "err_code": st.sampled_from((10071, 10059, 10047)) | JSON,
            "description": st.builds("wrong last sequence: {}".format, NUMBERS.map(lambda n: n % 10**30)) | JSON,
        },
    )
    config = st.fixed_dictionaries({}, optional={"max_age": NUMBERS | JSON, "max_msgs_per_subject": NUMBERS | JSON})
    members = {"stream": st.just(STREAM) | JSON, "seq": NUMBERS | JSON, "error": error | JSON, "config": config | JSON}
    document = draw(st.fixed_dictionaries({}, optional=members) | JSON)
    return draw(st.just(json.dumps(document).encode()) | st.binary(max_size=200))


@settings(max_examples=300)
@given(payload=answers())
def test_whatever_is_answered_only_the_two_errors_come_of_it(anything: tuple[Answering, Key], payload: bytes) -> None:
    answering, key = anything
    answering.payload = payload
    with contextlib.suppress(ElectionError, TakenError):
        assert key.write(3) > 0
    with contextlib.suppress(ElectionError):
        assert 4.0 <= key.lifetime() <= 3600.0


class TestSilence:
    """Calls that get no answer."""

    def test_nobody_is_waited_for_longer_than_a_call_may_take(
        self, answering: Answering, key: Key, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert election_key.CALL_SECONDS == 5
        monkeypatch.setattr(election_key, "CALL_SECONDS", 0.1)
        for call in (key.lifetime, lambda: key.write(0)):
            with pytest.raises(ElectionError, match=r"^no reply within 0\.1 s$"):
                call()
        answering.payload = good()
        assert key.write(0) == 7

    def test_without_streams_the_setting_is_named_at_once(self, key: Key) -> None:
        for call in (key.lifetime, lambda: key.write(0)):
            with pytest.raises(ElectionError, match=r"no Choria Streams here: plugin\.choria\.network\.stream\.store"):
                call()

    def test_a_connection_that_is_lost_meanwhile_is_a_failure_at_once(
        self, answering: Answering, key: Key, broker: NatsServer
    ) -> None:
        asked = threading.Event()
        answering._connection.subscribe(KEY_SUBJECT, callback=lambda _: asked.set())
        answering._connection.flush()

        def kill_when_asked() -> None:
            assert asked.wait(PATIENCE_SECONDS)
            broker.kill()

        killer = threading.Thread(target=kill_when_asked)
        killer.start()
        with pytest.raises(ElectionError, match="the connection was lost"):
            key.write(0)
        killer.join()

    def test_without_a_connection_it_fails_at_once(
        self, key: Key, connector: Connector, broker: NatsServer, eventually: Eventually
    ) -> None:
        broker.kill()
        eventually(lambda: not connector.connected)
        with pytest.raises(ElectionError, match="there is no connection to a broker"):
            key.write(0)


def test_the_value_of_the_key_is_the_identity(tmp_path: Path) -> None:
    with Streams(tmp_path) as streams:
        streams.make_bucket()
        seen: list[Message] = []
        streams.admin.subscribe(KEY, callback=seen.append)
        streams.admin.flush()
        connection = connector(streams.server, LOGIN)
        assert Key(connection, "prov1.example.net").write(0) == streams.sequence()
        connection.close()

    assert [message.payload for message in seen] == [b"prov1.example.net"]
