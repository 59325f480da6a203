"""The NATS protocol, byte by byte: nothing that arrives can do harm, and nothing harmful is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provisioner.choria.errors import (
    AuthorizationError,
    BrokerError,
    ConnectorError,
    HeaderError,
    SubjectError,
    WireError,
    broker_error,
)
from provisioner.choria.nats import (
    MAX_LINE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SUBJECT_BYTES,
    Command,
    FrameReader,
    Message,
    NATSSubscription,
    check_pattern,
    check_subject,
    encode_publish,
    encode_subscribe,
    encode_unsubscribe,
    parse_headers,
)
from provisioner.text import printable


class EndOfInputError(Exception):
    """All chunks were read."""


def reader(chunks: list[bytes]) -> FrameReader:
    remaining = iter(chunks)

    def receive() -> bytes:
        try:
            return next(remaining)
        except StopIteration:
            raise EndOfInputError from None

    return FrameReader(receive)


def frames(*chunks: bytes) -> Iterator[Message | Command]:
    """All frames until the input ends."""
    source = reader(list(chunks))
    while True:
        try:
            yield source.next_frame()
        except EndOfInputError:
            return


def only_message(data: bytes) -> Message:
    (frame,) = frames(data)
    assert isinstance(frame, Message)
    return frame


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in chunks of the given sizes, the rest in one."""
    chunks = []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    return [chunk for chunk in (*chunks, data) if chunk]


SIZES = st.lists(st.integers(1, 40), max_size=60)
TOKENS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters=".*>"), min_size=1)
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
HEADER_NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1)
HEADER_VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))).map(str.strip)
HEADERS = st.dictionaries(HEADER_NAMES, HEADER_VALUES, max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Message]:
    """A message as a broker sends it, and what must become of it."""
    message = Message(
        sid=draw(st.integers(0, 10**9)),
        subject=draw(SUBJECTS),
        reply=draw(st.one_of(st.just(""), SUBJECTS)),
        payload=draw(st.binary(max_size=60)),
        headers=draw(HEADERS),
        status=draw(st.sampled_from((0, 100, 404, 503))),
    )
    target = " ".join(filter(None, (message.subject, str(message.sid), message.reply))).encode()
    if not message.headers and not message.status:
        return b"MSG %b %d\r\n%b\r\n" % (target, len(message.payload), message.payload), message
    first = f"NATS/1.0 {message.status} Some Words" if message.status else "NATS/1.0"
    lines = [first, *(f"{name}: {value}" for name, value in message.headers.items()), "", ""]
    block = "\r\n".join(lines).encode()
    size = len(block) + len(message.payload)
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (target, len(block), size, block, message.payload), message


COMMANDS = st.sampled_from(
    (
        (b"PING\r\n", Command(b"PING", b"")),
        (b"PONG\r\n", Command(b"PONG", b"")),
        (b"+OK\r\n", Command(b"+OK", b"")),
        (b"-ERR 'Stale Connection'\r\n", Command(b"-ERR", b"'Stale Connection'")),
        (b'INFO {"max_payload": 1} \r\n', Command(b"INFO", b'{"max_payload": 1}')),
    )
)


class TestReading:
    @given(st.lists(st.one_of(messages(), COMMANDS), max_size=6), SIZES)
    def test_frames_arrive_whole_however_they_were_cut(
        self, sent: list[tuple[bytes, Message | Command]], sizes: list[int]
    ) -> None:
        arrived = list(frames(*cut(b"".join(data for data, _ in sent), sizes)))
        for frame in arrived:
            if isinstance(frame, Message):
                frame.received = 0.0
        assert arrived == [frame for _, frame in sent]

    @given(st.binary(max_size=300), SIZES)
    @example(b"MSG a 1 99999999999999999999\r\n", [])
    @example(b"MSG a 1 -5\r\n", [])
    @example(b"HMSG a 1 99999999999 3\r\nabc\r\n", [])
    @example(b"MSG \r\n", [])
    @example(b"MSG a 1_0 1_0\r\n0123456789\r\n", [])
    @example(b"MSG a 1 \xc2\xb2\r\n\r\n", [])
    def test_arbitrary_bytes_raise_nothing_but_the_typed_error(self, data: bytes, sizes: list[int]) -> None:
        try:
            for _ in frames(*cut(data, sizes)):
                pass
        except WireError:
            pass

    @given(messages(), st.integers(0, 60), st.binary(min_size=1, max_size=3), SIZES)
    def test_nor_does_a_damaged_message(
        self, sent: tuple[bytes, Message], place: int, damage: bytes, sizes: list[int]
    ) -> None:
        data = sent[0][:place] + damage + sent[0][place + len(damage) :]
        try:
            for _ in frames(*cut(data, sizes)):
                pass
        except WireError:
            pass

    def test_blanks_may_be_several_or_tabs(self) -> None:
        message = only_message(b"MSG  a.b\t7   back 2 \r\nhi\r\n")
        assert (message.subject, message.sid, message.reply, message.payload) == ("a.b", 7, "back", b"hi")

    def test_a_subject_in_other_than_utf8_is_shown_as_far_as_it_goes(self) -> None:
        assert only_message(b"MSG a.\xff\xfe 1 0\r\n\r\n").subject == "a.��"

    def test_a_form_feed_in_a_subject_is_part_of_it(self) -> None:
        assert only_message(b"MSG a\x0cb 1 0\r\n\r\n").subject == "a\x0cb"

    @pytest.mark.parametrize(
        "data",
        [
            b"HELLO\r\n",
            b"\r\n",
            b"msg a 1 0\r\n\r\n",
            b"MSG a\r\n",
            b"MSG a b c d e\r\n",
            b"MSG a one 0\r\n\r\n",
            b"MSG a 1 2\r\nabc\r\n",
            b"MSG a 1 3\r\nab\r\nPING\r\n",
            b"HMSG a 1 9 3\r\nabc\r\n",
            b"MSG a 1 %d\r\n" % (MAX_MESSAGE_BYTES + 1),
            b"x" * (MAX_LINE_BYTES + 1),
        ],
    )
    def test_what_is_not_nats_is_refused(self, data: bytes) -> None:
        with pytest.raises(WireError):
            list(frames(data))

    def test_a_line_may_be_as_long_as_the_limit(self) -> None:
        argument = b"x" * (MAX_LINE_BYTES - 5)
        assert list(frames(b"INFO ", argument, b"\r\n")) == [Command(b"INFO", argument)]

    def test_a_message_is_stamped_when_the_end_of_it_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter((1.0, 2.0, 3.0, 4.0))
        monkeypatch.setattr("time.monotonic", lambda: next(clock))
        arrived = list(frames(b"MSG a 1 4\r\nab", b"cd\r\nMSG a 1 0\r\n\r\nMSG a 1 0", b"\r\n", b"\r\n"))
        assert [frame.received for frame in arrived if isinstance(frame, Message)] == [2.0, 2.0, 4.0]

    def test_what_came_after_the_last_frame_is_told(self) -> None:
        source = reader([b"PING\r\nPO"])
        source.next_frame()
        assert source.pending == 2

    def test_a_message_does_not_show_its_payload(self) -> None:
        assert "s3cret" not in repr(only_message(b"MSG a 1 6\r\ns3cret\r\n"))


class TestHeaders:
    @given(st.binary(max_size=200))
    @example(b"NATS/1.0 \xb2\xb2\xb2\r\n")
    @example(b"NATS/1.0 5_3\r\n")
    def test_what_a_publisher_puts_there_never_raises(self, block: bytes) -> None:
        status, headers = parse_headers(block)
        assert 0 <= status <= 999
        assert all(isinstance(text, str) for pair in headers.items() for text in pair)

    def test_names_keep_their_case_and_the_first_value_counts(self) -> None:
        assert parse_headers(b"NATS/1.0\r\nNats-Stream:  x \r\nnats-stream: y\r\nNats-Stream: z\r\n\r\n") == (
            0,
            {"Nats-Stream": "x", "nats-stream": "y"},
        )

    @pytest.mark.parametrize(
        ("data", "no_responders"),
        [
            (b"HMSG a 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n", True),
            (b"HMSG a 1 35 35\r\nNATS/1.0 503\r\nNats-Subject: x.y\r\n\r\n\r\n", True),
            (b"HMSG a 1 16 17\r\nNATS/1.0 503\r\n\r\nx\r\n", False),
            (b"HMSG a 1 16 16\r\nNATS/1.0 404\r\n\r\n\r\n", False),
            (b"MSG a 1 0\r\n\r\n", False),
        ],
    )
    def test_that_nobody_listens_is_told_by_the_status_of_an_empty_message(
        self, data: bytes, no_responders: bool
    ) -> None:
        assert only_message(data).no_responders is no_responders


class TestWriting:
    @given(SUBJECTS, st.one_of(st.just(""), SUBJECTS), st.binary(max_size=50), HEADERS)
    def test_what_is_published_can_be_read(
        self, subject: str, reply: str, payload: bytes, headers: dict[str, str]
    ) -> None:
        data, size = encode_publish(subject, reply, payload, headers)
        # a broker only adds the number of the subscription
        head, _, rest = data.partition(b"\r\n")
        words = head.decode().split(" ")
        words[0:2] = ["HMSG" if headers else "MSG", subject, "1"]
        message = only_message(" ".join(words).encode() + b"\r\n" + rest)
        assert (message.subject, message.reply, message.payload) == (subject, reply, payload)
        assert message.headers == headers
        assert size == len(rest) - 2

    def test_subscriptions(self) -> None:
        plain = NATSSubscription(3, "a.>", "", print)
        shared = NATSSubscription(4, "a.*", "workers", print)
        assert encode_subscribe(plain).split() == [b"SUB", b"a.>", b"3"]
        assert encode_subscribe(shared) == b"SUB a.* workers 4\r\n"
        assert encode_unsubscribe(shared) == b"UNSUB 4\r\n"

    @pytest.mark.parametrize(
        "identity",
        [
            *("a b", "a.*", "a.>", "*", ">", "a*", "", ".", "a.", ".a", "a..b", "x\r\nPUB y 0\r\n", "a\tb", "a\0b"),
            *("a\u2028b", "a\u00a0b", "a\u0085b", "a\x7fb", "\ud800", "a\x0cb", "x" * MAX_SUBJECT_BYTES),
        ],
    )
    def test_an_insane_identity_never_becomes_part_of_a_subject(self, identity: str) -> None:
        with pytest.raises(SubjectError):
            encode_publish(f"provisioning.node.{identity}", "", b"", None)
        with pytest.raises(SubjectError):
            encode_publish("fine", f"provisioning.reply.{identity}", b"", None)

    @pytest.mark.parametrize(
        "subject", ["a", "a.b", "$KV.CHORIA_LEADER_ELECTION.provisioner", "n-1.example.net", "ä.ö"]
    )
    def test_a_sane_subject_passes(self, subject: str) -> None:
        check_subject(subject)
        check_pattern(subject)

    @pytest.mark.parametrize("subject", [">", "*", "a.>", "a.*.b", "*.*", "*.>"])
    def test_one_may_subscribe_to_wildcards(self, subject: str) -> None:
        check_pattern(subject)

    @pytest.mark.parametrize("subject", ["", ">.a", "a>", "a*", "a.", ".a", "a b", "a.>.b", "a\r\n", "x" * 1025])
    def test_but_only_where_they_belong(self, subject: str) -> None:
        with pytest.raises(SubjectError):
            check_pattern(subject)

    @given(st.text(max_size=50))
    def test_a_subject_is_checked_whatever_it_holds(self, subject: str) -> None:
        for check in (check_subject, check_pattern):
            try:
                check(subject)
            except SubjectError:
                continue
            assert len(subject.encode().split()) == 1
            assert subject.isprintable() or not subject.isascii()

    @pytest.mark.parametrize("headers", [{"a b": "c"}, {"a:b": "c"}, {"": "c"}, {"a": "b\r\nc: d"}, {"a": "b\n"}])
    def test_a_header_cannot_smuggle_in_another_one(self, headers: dict[str, str]) -> None:
        with pytest.raises(HeaderError):
            encode_publish("a", "", b"", headers)


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("Authorization Violation", AuthorizationError),
            ("User Authentication Expired", AuthorizationError),
            ("Authentication Timeout", AuthorizationError),
            ("Maximum Connections Exceeded", BrokerError),
            ("Stale Connection", BrokerError),
        ],
    )
    def test_they_are_typed_and_say_what_the_broker_said(self, text: str, kind: type[ConnectorError]) -> None:
        error = broker_error(text)
        assert type(error) is kind
        assert text in str(error)

    def test_what_a_broker_says_fits_on_a_line_of_a_log(self) -> None:
        assert printable(b"a\nb\x1b[31m\xff" + b"x" * 1000) == "a b [31m�" + "x" * 291 + "..."
