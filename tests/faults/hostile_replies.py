"""What servers may say in place of the reply that is due: every layer of it wrong in every way that came to mind.

The ways of :mod:`provisioner.simulate.misbehaviour` spoil each reply of a server, so that it never gets beyond the
first step; here a server is good until it comes to the step that it spoils.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from provisioner.simulate.envelopes import Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Answer, Server
from tests.faults.conftest import SITE

#: When the one that is late replies.
LATE_SECONDS = 1.5
#: Below the million bytes and a bit that a broker takes.
MEGABYTE = 1_000_000
#: Below what fits into a message with all its envelopes, in which it is there as base64 once.
HUGE = 500_000
#: So many brackets in each other are too many for most that read them.
DEPTH = 100_000
FLOOD = 500

_GONE = object()


@attrs.frozen
class Due:
    """A reply that is due, to be spoiled."""

    request: Request
    sender: str
    body: str

    @property
    def good(self) -> bytes:
        return self.with_body(self.body)

    def with_body(self, body: str, *, sender: str = "", request: Request | None = None) -> bytes:
        return EnvelopesV1().seal(request or self.request, sender=sender or self.sender, body=body, time=time.time())

    def with_answer(self, **members: Any) -> bytes:
        return self.with_body(json.dumps(_merged(json.loads(self.body), members)))

    def with_data(self, value: Any) -> bytes:
        """Each member of the data gets this value."""
        return self.with_answer(data=dict.fromkeys(self.data, value))

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.body)["data"]
        return data

    def with_transport(self, **members: Any) -> bytes:
        return json.dumps(_merged(json.loads(self.good), members)).encode()

    def with_secure(self, **members: Any) -> bytes:
        return self._in_transport(_merged(self._secure, members))

    def with_reply(self, **members: Any) -> bytes:
        message = json.dumps(_merged(json.loads(self._secure["message"]), members))
        digest = base64.b64encode(hashlib.sha256(message.encode()).digest()).decode()
        return self.with_secure(message=message, hash=digest)

    def with_envelope(self, **members: Any) -> bytes:
        return self.with_reply(envelope=_merged(json.loads(self._secure["message"])["envelope"], members))

    @property
    def _secure(self) -> dict[str, Any]:
        secure: dict[str, Any] = json.loads(base64.b64decode(json.loads(self.good)["data"]))
        return secure

    def _in_transport(self, secure: Mapping[str, Any]) -> bytes:
        return self.with_transport(data=base64.b64encode(json.dumps(secure).encode()).decode())


def _merged(document: Mapping[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**document, **members}.items() if value is not _GONE}


def _refusal(due: Due, status: object, text: object = "no") -> bytes:
    return due.with_answer(statuscode=status, statusmsg=text, data={})


#: Replies with which the step fails: nothing further is sent but another try of it.
FATAL: dict[str, Callable[[Due], list[bytes]]] = {
    # none of it is a reply
    "nothing": lambda _: [],
    "an empty message": lambda _: [b""],
    "bytes": lambda _: [bytes(range(256))],
    "a megabyte of bytes": lambda _: [b"x" * MEGABYTE],
    "half a reply": lambda due: [due.good[: len(due.good) // 2]],
    "null": lambda _: [b"null"],
    "a number": lambda _: [b"7"],
    "a number without end": lambda _: [b"1" * HUGE],
    "a text": lambda _: [b'"x"'],
    "a list": lambda _: [b"[]"],
    "brackets": lambda _: [b"[" * DEPTH],
    "braces": lambda _: [b'{"protocol":' * (DEPTH // 10)],
    "UTF-16": lambda due: [due.good.decode().encode("utf-16")],
    "a byte order mark": lambda due: [b"\xef\xbb\xbf" + due.good],
    "a byte more": lambda due: [due.good + b"\0"],
    "two in one": lambda due: [due.good * 2],
    "our own request": lambda due: [due.with_transport(protocol="choria:transport:1", data="e30=")],
    # the transport
    "another transport": lambda due: [due.with_transport(protocol="choria:transport:9")],
    "no data": lambda due: [due.with_transport(data=_GONE)],
    "data that is a number": lambda due: [due.with_transport(data=1)],
    "data that is no base64": lambda due: [due.with_transport(data="!!")],
    "data that is a line break": lambda due: [due.with_transport(data="\n")],
    "no headers": lambda due: [due.with_transport(headers=_GONE)],
    "headers that are a list": lambda due: [due.with_transport(headers=[])],
    "no transport sender": lambda due: [due.with_transport(headers={})],
    "another transport sender": lambda due: [due.with_transport(headers={"mc_sender": "n1.example.org"})],
    # what is secure about it
    "another secure protocol": lambda due: [due.with_secure(protocol="choria:secure:request:1")],
    "no message": lambda due: [due.with_secure(message=_GONE)],
    "a message that is an object": lambda due: [due.with_secure(message={})],
    "no hash": lambda due: [due.with_secure(hash=_GONE)],
    "another hash": lambda due: [due.with_secure(hash=base64.b64encode(bytes(32)).decode())],
    "a hash that is a list": lambda due: [due.with_secure(hash=[])],
    # the reply and its envelope
    "another protocol": lambda due: [due.with_reply(protocol="choria:request:1")],
    "no body": lambda due: [due.with_reply(message=_GONE)],
    "a body that is an object": lambda due: [due.with_reply(message=json.loads(due.body))],
    "no envelope": lambda due: [due.with_reply(envelope=_GONE)],
    "an envelope that is a text": lambda due: [due.with_reply(envelope="x")],
    "no request id": lambda due: [due.with_envelope(requestid=_GONE)],
    "another request id": lambda due: [due.with_envelope(requestid="0" * 32)],
    "a request id that is a number": lambda due: [due.with_envelope(requestid=1)],
    "another sender": lambda due: [due.with_body(due.body, sender="n1.example.org")],
    "a sender within, another without": lambda due: [due.with_envelope(senderid="n1.example.org")],
    "another agent": lambda due: [due.with_envelope(agent="discovery")],
    # the body
    "a body that is no JSON": lambda due: [due.with_body("pong")],
    "a body that is null": lambda due: [due.with_body("null")],
    "a body that is a list": lambda due: [due.with_body("[]")],
    "a body of brackets": lambda due: [due.with_body("[" * DEPTH)],
    "a body with NaN": lambda due: [due.with_body('{"statuscode":0,"statusmsg":"OK","data":{"x":NaN}}')],
    "half a surrogate pair": lambda due: [due.with_body('{"statuscode":0,"data":"\ud800')],
    "no status": lambda due: [due.with_answer(statuscode=_GONE)],
    "a status that is a text": lambda due: [due.with_answer(statuscode="0")],
    "a status that is true": lambda due: [due.with_answer(statuscode=True)],
    "a status that is false": lambda due: [due.with_answer(statuscode=False)],
    "a status that is a fraction": lambda due: [due.with_answer(statuscode=0.5)],
    "a status without end": lambda due: [due.with_body('{"statuscode":1' + "0" * 10_000 + "}")],
    "no data within": lambda due: [due.with_answer(data=_GONE)],
    "data that is null": lambda due: [due.with_answer(data=None)],
    "data that is a text": lambda due: [due.with_answer(data="x")],
    "data that is a huge text": lambda due: [due.with_answer(data="x" * HUGE)],
    "data of lists": lambda due: [due.with_data([])],
    "data of numbers": lambda due: [due.with_data(2**70)],
    "data of nulls": lambda due: [due.with_data(None)],
    # a refusal
    "aborted": lambda due: [_refusal(due, 1)],
    "unknown action": lambda due: [_refusal(due, 2)],
    "missing data": lambda due: [_refusal(due, 3)],
    "invalid data": lambda due: [_refusal(due, 4)],
    "unknown error": lambda due: [_refusal(due, 5)],
    "a status of its own": lambda due: [_refusal(due, -(2**70))],
    "refused without a text": lambda due: [_refusal(due, 1, None)],
    "refused with an object": lambda due: [_refusal(due, 1, {"a": 1})],
    "refused with a huge text": lambda due: [_refusal(due, 1, "no " * (HUGE // 3))],
    "refused with control characters": lambda due: [_refusal(due, 1, '\r\n\x1b[2J\x00{"level":"fatal"}\u202e')],
    "refused with our request": lambda due: [_refusal(due, 1, due.request.body.decode())],
    "refused: locked": lambda due: [_refusal(due, 1, "Could not obtain provisioning lock")],
    "refused: wrong token": lambda due: [_refusal(due, 1, "Incorrect provision token supplied")],
    # when and how often
    "too late": lambda _: [],
    "nobody is there": lambda _: [],
}

#: Replies that make a step fail or not, as the step may do without what is wrong with them, or notice it afterwards.
AMBIGUOUS: dict[str, Callable[[Due], list[bytes]]] = {
    "data that is empty": lambda due: [due.with_answer(data={})],
    "data of control characters": lambda due: [due.with_data("\r\n\x00\x1b[2J")],
    "data of huge texts": lambda due: [due.with_data("x" * (HUGE // len(due.data)))],
    "data of brackets": lambda due: [due.with_answer(data={**due.data, "x": _nested(900)})],
    "two different ones": lambda due: [due.good, due.with_answer(statusmsg="OK, too")],
    "good, then refused": lambda due: [due.good, _refusal(due, 1)],
    "refused, then good": lambda due: [_refusal(due, 1), due.good],
    "good, then a flood of it": lambda due: [due.good] * FLOOD,
}

#: Replies that are good enough.
HARMLESS: dict[str, Callable[[Due], list[bytes]]] = {
    "twice": lambda due: [due.good] * 2,
    "a flood of bytes, then good": lambda due: [b"\xff" * 100] * FLOOD + [due.good],
    "another sender, then good": lambda due: [due.with_body(due.body, sender="n1.example.org"), due.good],
    "nobody is there, then good": lambda due: [due.good],
    "a member more": lambda due: [due.with_reply(x=[1])],
    "a name twice": lambda due: [due.with_body('{"statuscode":7,' + due.body[1:])],
    "a time that is a text": lambda due: [due.with_envelope(time="now")],
}

ALL = {**FATAL, **AMBIGUOUS, **HARMLESS}


@attrs.define(eq=False, kw_only=True)
class HostileServer(Server):
    """A server that replies well but for one step.

    :ivar way: one of :data:`ALL`
    :ivar step: agent and action, such as ``rpcutil#inventory``
    """

    way: str
    step: str

    @property
    def good(self) -> bool:
        return False


class HostileFleet(Fleet):
    """Publishes what its hostile servers say."""

    def _payloads(self, server: Server, request: Request, answer: Answer) -> list[bytes]:
        if not isinstance(server, HostileServer) or server.step != answer.action or answer.body is None:
            return super()._payloads(server, request, answer)
        if server.way.startswith("nobody is there"):
            self._connector._send("HPUB", request.reply_to, 16, "16\r\nNATS/1.0 503\r\n\r\n")
        due = Due(request, server.identity, answer.body)
        if server.way == "too late":
            self._at(time.monotonic() + LATE_SECONDS, functools.partial(self._reply, request, due.good))
        return ALL[server.way](due)


@contextlib.contextmanager
def hostile_population(broker: str, servers: list[HostileServer]) -> Iterator[None]:
    """Have hostile servers on a broker."""
    with HostileFleet(broker, servers):
        yield


def hostile_servers(name: str, steps: tuple[str, ...], *, all_steps: bool, **of_each: Any) -> list[HostileServer]:
    """A server for each way and each step, or for each way at one of the steps in turn.

    :param name: begins their identities
    """
    servers: list[HostileServer] = []
    for number, way in enumerate(ALL):
        for step in steps if all_steps else steps[number % len(steps) :][:1]:
            identity = f"{name}-{len(servers)}.example.net"
            servers.append(HostileServer(**{"identity": identity, "site": SITE, "way": way, "step": step, **of_each}))
    return servers


def _nested(depth: int) -> Any:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    return nested
