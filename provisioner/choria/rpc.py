"""Requests directed at one server, each wanting one reply, from that server.

Other nodes in the provisioning account can see every request and publish replies to it, so a reply must pass every
check there is; one that does not is dropped and the wait goes on, since failing at once would let any token holder
abort every request. Two good but different replies to one request mean two servers with one identity, or a forgery:
that ends the session of this identity before anything further is sent to it.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import attrs

from provisioner.choria.connector import Connector, Expectation
from provisioner.choria.errors import ConnectorError, NoRespondersError, RequestTimeoutError
from provisioner.choria.nats import Message
from provisioner.choria.protocol import Protocol, ProtocolError, Reply, node_subject
from provisioner.errors import ProvisionerError
from provisioner.text import MASK, printable

LOG = logging.getLogger(__name__)

#: How long after the first reply to a request a second, different one is still looked for.
SECOND_REPLY_SECONDS = 60.0
#: How many further replies to one request are opened at most: a flood of them must not occupy the reader. More are as
#: bad a sign as a different one, which they may be meant to hide.
SECOND_REPLIES_EXAMINED = 3
#: How long a server may still reply after the broker said that nobody is there: any node can forge that.
NOBODY_GRACE_SECONDS = 0.25
#: How long the broker may take to prove, after a silence, that the connection is alive.
CONNECTION_PROOF_SECONDS = 2.0
#: Shortest text of a request that is masked in a refusal; ordinary words of a configuration are mostly shorter.
SECRET_CHARACTERS = 8
#: Longest text of a refusal that is searched for such texts; one that is longer is not shown at all.
REFUSAL_CHARACTERS = 16384

STATUS_OK = 0
STATUS_ABORTED = 1

#: Inputs of actions that everybody may know.
_PUBLIC_INPUTS = ("cn", "ssldir", "version")

_LOCKED = "Could not obtain provisioning lock"
#: Beginnings of those refusals with status 1 that the same request will meet again, however often it is sent.
_FINAL_REFUSALS = (
    _LOCKED,
    "Incorrect provision token supplied",
    "Cannot reconfigure a server that is not in provisioning mode",
    "Cannot update a server that is not in provisioning mode",
    "Version updates is not enabled in the configuration",
    "Cannot restart a server that is not in provisioning mode",
    "Cannot shutdown a server that is not in provisioning mode",
    "Did not receive any configuration to write",
    "Could not decode configuration data",
    "Could not save Action Policies",
    "Could not save Open Policy Agent Policies",
)


_BETWEEN_TOKENS = re.compile(r"[ \t\r\n,:]*")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class RPCError(ProvisionerError):
    """One try of a request failed."""

    #: Trying again cannot change it.
    final = False


class SilenceError(RPCError):
    """No good reply came in time, over a connection that was proven to be alive afterwards."""


class NobodyError(RPCError):
    """The broker says that no server with this identity is connected."""


class NoBrokerError(RPCError):
    """No good reply came in time, nor does the broker answer: whether the server was reached is unknown."""


class BadReplyError(RPCError):
    """The right server replied with something that is not a reply of this action."""


class RefusedError(RPCError):
    """The server replied with a status other than OK."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.locked = text.startswith(_LOCKED)
        self.final = status != STATUS_ABORTED or text.startswith(_FINAL_REFUSALS)
        super().__init__(f"refused: {text}" if text else f"refused with status {status}")


class ConflictError(RPCError):
    """Two different replies came to one request of this session."""

    final = True


@attrs.frozen
class RPCReply:
    """A reply with status OK.

    :ivar body: the JSON text of the whole reply body
    :ivar data: its `data` member
    """

    body: str = attrs.field(repr=False)
    data: Mapping[str, Any] = attrs.field(repr=False)

    def data_text(self) -> str:
        """The JSON text of `data` just as the server wrote it: no number loses digits on its way to the helper."""
        return _member_text(self.body, "data")

    def text(self, key: str) -> str:
        """A member of `data` that must be a string.

        :raises BadReplyError: when it is absent or of another type
        """
        value = self.data.get(key)
        if not isinstance(value, str):
            raise BadReplyError(f"the reply lacks a valid {key}")
        return value


class Client:
    """Requests over one connection, for any number of servers and threads."""

    def __init__(self, connector: Connector, protocol: Protocol) -> None:
        self.connector = connector
        self.protocol = protocol
        self._lock = threading.Lock()
        self._answered: dict[str, _Answered] = {}
        self._expiries: collections.deque[tuple[float, str]] = collections.deque()
        connector.on_unclaimed = self._examine_late

    def session(self, identity: str) -> Session:
        """The conversation with one server, for the length of one provisioning cycle."""
        return Session(identity, self)

    def _remember(self, request_id: str, answered: _Answered) -> None:
        now = time.monotonic()
        with self._lock:
            while self._expiries and self._expiries[0][0] <= now:
                self._answered.pop(self._expiries.popleft()[1], None)
            self._answered[request_id] = answered
            self._expiries.append((now + SECOND_REPLY_SECONDS, request_id))

    def _examine_late(self, message: Message) -> None:
        """Compare a further reply to an answered request with the first one. Mostly runs in the reader thread."""
        request_id = message.subject.rpartition(".")[2]
        with self._lock:
            answered = self._answered.get(request_id)
            if answered is None or answered.examined > SECOND_REPLIES_EXAMINED:
                return
            answered.examined += 1
        session = answered.session
        extra = {"identity": session.identity, "request_id": request_id}
        if answered.examined > SECOND_REPLIES_EXAMINED:
            session.conflict = True
            LOG.warning(
                "more than %d further replies to one %s request: somebody floods it, maybe to hide a forged one",
                SECOND_REPLIES_EXAMINED,
                answered.agent,
                extra=extra,
            )
            return
        try:
            reply = session.checked(message, request_id, answered.agent)
        except ProtocolError as error:
            LOG.debug("ignored a further reply: %s", error, extra=extra)
            return
        digest = _digest(reply)
        if digest != answered.digest:
            session.conflict = True
            LOG.warning(
                "two different replies to one %s request, of digests %s and %s: two servers share this identity, "
                "or one of the replies is forged",
                answered.agent,
                answered.digest.hex(),
                digest.hex(),
                extra=extra,
            )


@attrs.define(eq=False)
class Session:
    """The conversation with one server. Used by one worker; the reader thread may set `conflict`.

    :ivar request_id: of the last request, as the server logs it; empty before the first
    """

    identity: str
    _client: Client
    conflict: bool = False
    request_id: str = ""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._client.connector.connected

    def call(
        self, agent: str, action: str, data: Mapping[str, Any], *, timeout: float, despite_conflict: bool = False
    ) -> RPCReply:
        """Send one request and wait for its reply.

        :param timeout: seconds for the whole of it
        :param despite_conflict: also when earlier replies in this session contradict each other
        :raises RPCError: for every way in which the server does not say OK
        :raises ConnectorError: when the connection is not there, or is lost before the reply
        """
        if self.conflict and not despite_conflict:
            raise ConflictError("different replies came to one request, so nothing further is sent")
        connector, protocol = self._client.connector, self._client.protocol
        deadline = time.monotonic() + timeout
        self.request_id = request_id = protocol.new_request_id()
        with connector.expect(request_id) as replies:
            payload = protocol.request(
                agent=agent,
                target_agent=agent,
                body=json.dumps({"agent": agent, "action": action, "data": data}),
                request_id=request_id,
                reply_to=replies.subject,
                connected_url=connector.connected_url,
            )
            connector.publish(node_subject(self.identity), payload=payload, reply=replies.subject)
            reply = self._first_good(replies, request_id, agent, deadline, timeout)
            self._client._remember(request_id, _Answered(self, agent, _digest(reply)))
        for message in replies.drain():
            self._client._examine_late(message)
        return opened(reply.body, data)

    def checked(self, message: Message, request_id: str, agent: str) -> Reply:
        """A reply that answers this request and comes from this server.

        :raises ProtocolError: saying what speaks against it
        """
        reply = self._client.protocol.reply(message.payload)
        if reply.request_id != request_id:
            raise ProtocolError("it names another request")
        if reply.agent != agent:
            raise ProtocolError("it names another agent")
        if reply.sender != self.identity or reply.transport_sender != self.identity:
            raise ProtocolError("it comes from another sender")
        return reply

    def _first_good(self, replies: Expectation, request_id: str, agent: str, deadline: float, timeout: float) -> Reply:
        dropped: collections.Counter[str] = collections.Counter()
        nobody = silent = False
        while True:
            try:
                message = replies.get(max(0.0, deadline - time.monotonic()))
                if message.received > deadline:  # a flood must not keep us here for ever
                    raise RequestTimeoutError("it came too late")
            except RequestTimeoutError:
                if nobody:
                    raise NobodyError("no server of this identity is connected") from None
                reasons = "".join(f"; dropped {count}, since {why}" for why, count in dropped.items())
                what = f"no reply within {timeout:g} s{reasons}"
                if silent:
                    raise SilenceError(what) from None
                # if this process stood still until now, the reply is there and was not read yet
                self._read_out(what)
                silent, deadline = True, time.monotonic()
                continue
            except NoRespondersError:
                if nobody and time.monotonic() > deadline:
                    raise NobodyError("no server of this identity is connected") from None
                nobody = True
                deadline = min(deadline, time.monotonic() + NOBODY_GRACE_SECONDS)
                continue
            try:
                return self.checked(message, request_id, agent)
            except ProtocolError as error:
                if str(error) not in dropped:
                    extra = {"identity": self.identity, "request_id": request_id}
                    LOG.warning("dropped a reply to %s: %s", agent, error, extra=extra)
                dropped[str(error)] += 1

    def _read_out(self, what: str) -> None:
        """Have all delivered that the broker has for us.

        :raises NoBrokerError: when it does not answer: the silence of a server whose broker is frozen says nothing
        """
        try:
            self._client.connector.flush(CONNECTION_PROOF_SECONDS)
        except ConnectorError:
            raise NoBrokerError(f"{what}, and the broker does not answer either") from None


@attrs.define(eq=False)
class _Answered:
    """A request that has its reply; kept for a while to notice a second one."""

    session: Session
    agent: str
    digest: bytes
    examined: int = 0


def _digest(reply: Reply) -> bytes:
    return hashlib.sha256(reply.body.encode(errors="replace")).digest()


def opened(body: str, sent: Mapping[str, Any]) -> RPCReply:
    """The contents of a reply body.

    :param sent: the data of the request; nothing of it gets into an error's text
    :raises RefusedError: when its status is another than OK
    :raises BadReplyError: when it is no reply body
    """
    try:
        document = _DECODER.decode(body)
    except (ValueError, RecursionError):
        raise BadReplyError("the body of the reply is not JSON") from None
    if not isinstance(document, dict):
        raise BadReplyError("the body of the reply is not an object")
    status, text, data = document.get("statuscode"), document.get("statusmsg"), document.get("data")
    if not isinstance(status, int) or isinstance(status, bool):
        raise BadReplyError("the reply lacks a valid statuscode")
    if status != STATUS_OK:
        raise RefusedError(status, _shown(text, sent) if isinstance(text, str) else "")
    if not isinstance(data, dict):
        raise BadReplyError("the reply lacks a valid data")
    return RPCReply(body, data)


def _shown(text: str, sent: Mapping[str, Any]) -> str:
    if len(text) > REFUSAL_CHARACTERS:
        return f"a text of {len(text)} characters, too long to be shown"
    return printable(_masked(text, sent))


def _masked(text: str, sent: Mapping[str, Any]) -> str:
    """The text of a refusal without the secrets that were sent: a server may quote the request that it refuses.

    It may do so as JSON within JSON within JSON, so backslashes do not count.
    """
    secrets = {secret for secret in _texts(sent) if len(secret) >= SECRET_CHARACTERS or secret == sent.get("token")}
    secrets -= {"", *(sent.get(key) for key in _PUBLIC_INPUTS)}
    forms = {form.replace("\\", "") for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
    plain = text.replace("\\", "")
    masked = plain
    for form in sorted(forms, key=len, reverse=True):
        masked = masked.replace(form, MASK)
    return text if masked == plain else masked


def _texts(value: object) -> set[str]:
    """All texts in a document, those in a text that holds a document itself included."""
    if isinstance(value, Mapping):
        return set().union(*map(_texts, value.values()))
    if not isinstance(value, str):
        return set()
    if value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return {value} | _texts(json.loads(value))
    return {value}


def _member_text(body: str, name: str) -> str:
    """The text of one member of a JSON object that is known to be well-formed; the last of that name, as in parsing."""
    found, position = "", body.index("{") + 1
    while body[position := _past(body, position)] != "}":
        key, position = _DECODER.raw_decode(body, position)
        start = _past(body, position)
        _, position = _DECODER.raw_decode(body, start)
        if key == name:
            found = body[start:position]
    return found


def _past(body: str, position: int) -> int:
    match = _BETWEEN_TOKENS.match(body, position)
    return match.end() if match else position
