"""What NATS looks like on the wire: messages, subjects, the frames that go out and those that come in.

No input or output happens here. The types of pynats2 are extended here, and in the errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import attrs
from pynats2 import NATSClient, NATSMessage, NATSSubscription

from provisioner.choria.errors import HeaderError, SubjectError, WireError
from provisioner.text import SHOWN_CHARACTERS, printable

__all__ = ("NATSClient", "NATSSubscription")

CRLF = b"\r\n"
PING = b"PING\r\n"
PONG = b"PONG\r\n"

#: The status of the message with which a broker says that nobody listens to the subject of a request.
NO_RESPONDERS = 503
#: Longest line taken from a broker; the longest ones are INFO with the addresses of a large cluster.
MAX_LINE_BYTES = 65536
#: Largest message taken from a broker: no nats-server can be configured to allow more.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
#: Longest subject sent to a broker. A line of 4096 bytes, subject and reply subject in it, ends the connection.
MAX_SUBJECT_BYTES = 1024

_TOKEN = r"[^\s\x00-\x20\x7f-\x9f\ud800-\udfff.*>]+"
_SUBJECT = re.compile(rf"{_TOKEN}(\.{_TOKEN})*")
_PATTERN = re.compile(rf"(({_TOKEN}|\*)\.)*({_TOKEN}|\*|>)")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_BLANKS = re.compile(rb"[ \t]+")
_COMMANDS = frozenset((b"INFO", b"PING", b"PONG", b"+OK", b"-ERR"))


# --- what goes out


def check_subject(subject: str) -> None:
    """Make sure that a subject can be published to.

    :raises SubjectError: with empty tokens, white space, control characters or wildcards, or too long
    """
    if not _SUBJECT.fullmatch(subject) or len(subject.encode()) > MAX_SUBJECT_BYTES:
        raise SubjectError(f"not a subject to publish to: {subject[:SHOWN_CHARACTERS]!r}")


def check_pattern(subject: str) -> None:
    """Make sure that a subject, wildcards allowed, can be subscribed to.

    :raises SubjectError: with empty tokens, white space, control characters, wildcards out of place, or too long
    """
    if not _PATTERN.fullmatch(subject) or len(subject.encode()) > MAX_SUBJECT_BYTES:
        raise SubjectError(f"not a subject to subscribe to: {subject[:SHOWN_CHARACTERS]!r}")


def encode_publish(subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None) -> tuple[bytes, int]:
    """A message as one buffer, and the number of its bytes that count against the broker's ``max_payload``.

    :param reply: the NATS reply subject, or an empty string
    :raises SubjectError: see :func:`check_subject`
    :raises HeaderError: for a header that would not arrive as it is
    """
    check_subject(subject)
    target = subject
    if reply:
        check_subject(reply)
        target = f"{subject} {reply}"
    if not headers:
        return b"PUB %b %d\r\n%b\r\n" % (target.encode(), len(payload), payload), len(payload)
    block = _encode_headers(headers)
    size = len(block) + len(payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (target.encode(), len(block), size, block, payload), size


def encode_subscribe(subscription: NATSSubscription) -> bytes:
    """The command that makes, or makes again, a subscription."""
    return f"SUB {subscription.subject} {subscription.queue} {subscription.sid}\r\n".encode()


def encode_unsubscribe(subscription: NATSSubscription) -> bytes:
    """The command that ends a subscription."""
    return f"UNSUB {subscription.sid}\r\n".encode()


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    lines = ["NATS/1.0"]
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or "\r" in value or "\n" in value:
            raise HeaderError(f"not a header: {name[:SHOWN_CHARACTERS]!r}")
        lines.append(f"{name}: {value}")
    return "\r\n".join((*lines, "", "")).encode()


# --- what comes in


@dataclass
class Message(NATSMessage):  # type: ignore[misc]
    """What arrives for a subscription.

    :ivar sid: the number of the subscription
    :ivar reply: the subject on which the sender wants an answer, or an empty string
    :ivar headers: names as the sender wrote them; of several values of one name the first
    :ivar status: the number in the first line of the headers, 0 when there is none; see :data:`NO_RESPONDERS`
    :ivar received: when it arrived, in seconds of ``time.monotonic()``
    """

    sid: int
    subject: str
    reply: str
    payload: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    received: float = 0.0

    @property
    def no_responders(self) -> bool:
        """Whether it is the broker's word that nobody listens."""
        return self.status == NO_RESPONDERS and not self.payload


@attrs.frozen
class Command:
    """Any other frame than a message.

    :ivar name: one of INFO, PING, PONG, +OK, -ERR
    :ivar argument: the rest of the line
    """

    name: bytes
    argument: bytes


class FrameReader:
    """Cuts a stream of bytes into frames. For one thread.

    What publishers can put into a message never raises: other than the broker they need not be trusted. They choose
    subjects (arbitrary bytes but for blanks), header blocks and payloads.

    :param receive: waits for some more bytes, at least one; whatever it raises ends the stream
    """

    def __init__(self, receive: Callable[[], bytes]) -> None:
        self._receive = receive
        self._buffer = b""
        self._position = 0  # of the first byte in the buffer that was not taken
        self._received = 0.0  # when the last bytes came

    @property
    def pending(self) -> int:
        """How many bytes came after the last frame."""
        return len(self._buffer) - self._position

    def next_frame(self) -> Message | Command:
        """The next frame, once all of it has arrived.

        :raises WireError: for anything that is not a frame of the NATS protocol
        """
        line = self._line()
        if line[:4] == b"MSG ":
            subject, sid, reply, _, size = _fields(line, 1)
            return Message(sid, subject, reply, self._take(size), received=self._received)
        if line[:5] == b"HMSG ":
            subject, sid, reply, header_size, size = _fields(line, 2)
            content = self._take(size)
            status, headers = parse_headers(content[:header_size])
            return Message(sid, subject, reply, content[header_size:], headers, status, self._received)
        name, _, argument = line.partition(b" ")
        if name not in _COMMANDS:
            raise WireError(f"the broker sent something that is not NATS: {printable(line)}")
        return Command(name, argument.strip())

    def _line(self) -> bytes:
        end = self._buffer.find(CRLF, self._position)
        while end < 0:
            searched = self.pending
            if searched > MAX_LINE_BYTES:
                raise WireError(f"the broker sent a line of more than {MAX_LINE_BYTES} bytes")
            self._fill(searched + 1)
            end = self._buffer.find(CRLF, max(0, searched - 1))
        line = self._buffer[self._position : end]
        self._position = end + len(CRLF)
        return line

    def _take(self, size: int) -> bytes:
        if self.pending < size + len(CRLF):
            self._fill(size + len(CRLF))
        end = self._position + size
        if not self._buffer.startswith(CRLF, end):
            raise WireError("the broker sent a message of another size than it said")
        content = self._buffer[self._position : end]
        self._position = end + len(CRLF)
        return content

    def _fill(self, size: int) -> None:
        """Have at least `size` bytes that were not taken, at the beginning of the buffer."""
        chunks = [self._buffer[self._position :]]
        missing = size - len(chunks[0])
        while missing > 0:
            chunk = self._receive()
            self._received = time.monotonic()
            chunks.append(chunk)
            missing -= len(chunk)
        self._buffer = b"".join(chunks)
        self._position = 0


def _fields(line: bytes, sizes: int) -> tuple[str, int, str, int, int]:
    """Subject, sid, reply subject, size of the headers, size of all: the first line of MSG (1 size) or HMSG (2)."""
    words = line.split(b" ")
    if b"" in words or not 3 <= len(words) - sizes <= 4:
        words = _BLANKS.split(line.strip())
        if not 3 <= len(words) - sizes <= 4:
            raise WireError(f"the broker sent something that is not NATS: {printable(line)}")
    sid, header_size, size = words[2], words[-sizes], words[-1]
    if not (sid.isdigit() and header_size.isdigit() and size.isdigit() and len(sid) < 20 and len(size) < 10):
        raise WireError(f"the broker sent something that is not NATS: {printable(line)}")
    if int(size) > MAX_MESSAGE_BYTES or len(header_size) > len(size) or int(header_size) > int(size):
        raise WireError(f"the broker sent a size that cannot be: {printable(line)}")
    reply = words[3].decode(errors="replace") if len(words) - sizes == 4 else ""
    return words[1].decode(errors="replace"), int(sid), reply, int(header_size), int(size)


def parse_headers(block: bytes) -> tuple[int, Mapping[str, str]]:
    """The status and the headers of a header block; what is not in order in it is left out."""
    first, *lines = block.split(CRLF)
    words = first.split()
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() and len(words[1]) == 3 else 0
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode(errors="replace").partition(":")
        if colon:
            headers.setdefault(name.strip(), value.strip())
    return status, headers
