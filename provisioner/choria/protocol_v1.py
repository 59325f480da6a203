"""Choria's protocol version 1: x509 and insecure networks.

Four envelopes of JSON, from the outside: transport (base64 of the next), secure request or reply (signature or hash,
and the next as a string), request or reply (who, when, to whom, and the body as a string), body.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from provisioner.choria.protocol import COLLECTIVE, ProtocolError, Reply

TRANSPORT = "choria:transport:1"
SECURE_REQUEST = "choria:secure:request:1"
SECURE_REPLY = "choria:secure:reply:1"
REQUEST = "choria:request:1"
REPLY = "choria:reply:1"

_T = TypeVar("_T")
_encode = json.JSONEncoder(separators=(",", ":")).encode

#: Signs the bytes of a request, gives the texts of the members `signature` and `pubcert`.
Signer = Callable[[bytes], tuple[str, str]]


def unsigned(_request: bytes) -> tuple[str, str]:
    """The signer of insecure networks: both members are required to be there, and nobody looks at them."""
    return "insecure", "insecure"


@attrs.frozen(kw_only=True)
class ProtocolV1:
    """Protocol version 1 as spoken by one client. :class:`provisioner.choria.protocol.Protocol` has the contract."""

    identity: str
    caller: str
    #: Seconds that a request stays valid; servers compare it with the age by their own clock.
    ttl: int
    sign: Signer = unsigned
    clock: Callable[[], float] = time.time

    def new_request_id(self) -> str:
        """32 hexadecimal digits: servers drop a request whose id has another length."""
        return uuid.uuid4().hex

    def request(
        self, *, agent: str, target_agent: str, body: str, request_id: str, reply_to: str, connected_url: str
    ) -> bytes:
        filters = {"fact": [], "cf_class": [], "agent": [target_agent], "identity": [], "compound": []}
        envelope = {
            "requestid": request_id,
            "senderid": self.identity,
            "callerid": self.caller,
            "collective": COLLECTIVE,
            "agent": agent,
            "ttl": self.ttl,
            "time": int(self.clock()),
            "filter": filters,
        }
        # what is signed is the very text that is sent: it is serialised once
        message = _encode({"protocol": REQUEST, "message": body, "envelope": envelope})
        signature, certificate = self.sign(message.encode())
        secure = {"protocol": SECURE_REQUEST, "message": message, "signature": signature, "pubcert": certificate}
        hop = [connected_url, self.identity, connected_url]
        headers = {"reply-to": reply_to, "mc_sender": self.identity, "seen-by": [hop]}
        data = base64.b64encode(_encode(secure).encode()).decode()
        return _encode({"protocol": TRANSPORT, "data": data, "headers": headers}).encode()

    def reply(self, payload: bytes) -> Reply:
        transport = _document(payload, "transport", TRANSPORT)
        headers = _member(transport, "transport", "headers", dict)
        secure = _document(_decoded(_member(transport, "transport", "data", str)), "secure reply", SECURE_REPLY)
        message = _member(secure, "secure reply", "message", str)
        reply = _document(message, "reply", REPLY)
        if _member(secure, "secure reply", "hash", str) != _hash(message):
            raise ProtocolError("the hash of the reply does not match its contents")
        envelope = _member(reply, "reply", "envelope", dict)
        return Reply(
            request_id=_member(envelope, "envelope", "requestid", str),
            sender=_member(envelope, "envelope", "senderid", str),
            transport_sender=_member(headers, "headers", "mc_sender", str),
            agent=_member(envelope, "envelope", "agent", str),
            body=_member(reply, "reply", "message", str),
        )


def _hash(message: str) -> str:
    # a lone surrogate cannot be encoded, and so cannot have been hashed by anybody either
    return base64.b64encode(hashlib.sha256(message.encode(errors="replace")).digest()).decode()


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("the data of the transport is not base64") from None


def _document(text: bytes | str, what: str, protocol: str) -> dict[str, Any]:
    try:
        document = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        raise ProtocolError(f"the {what} is not JSON") from None
    if not isinstance(document, dict):
        raise ProtocolError(f"the {what} is not an object")
    if document.get("protocol") != protocol:
        raise ProtocolError(f"the {what} is not of protocol {protocol}")
    return document


def _member(document: dict[str, Any], what: str, key: str, kind: type[_T]) -> _T:
    value = document.get(key)
    if not isinstance(value, kind):
        raise ProtocolError(f"the {what} lacks a valid {key}")
    return value
