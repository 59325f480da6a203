"""Protocol version 1 as unprovisioned servers speak it: signatures are there but nobody looks at them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from provisioner.simulate.envelopes import DroppedError, Request

#: The schema of a request knows no other length of its id.
REQUEST_ID_CHARACTERS = 32
#: The schema of a request knows no shorter life.
MINIMUM_TTL_SECONDS = 30

_T = TypeVar("_T")
#: Go leaves other alphabets as they are.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@attrs.frozen
class EnvelopesV1:
    """See :class:`provisioner.simulate.envelopes.Envelopes`."""

    def open(self, payload: bytes) -> Request:
        transport = _document(payload, "choria:transport:1")
        headers = _member(transport, "headers", dict)
        _text(headers, "mc_sender")
        secure = _document(_base64(_text(transport, "data")), "choria:secure:request:1")
        for key in ("signature", "pubcert"):
            _text(secure, key)
        request = _document(_text(secure, "message").encode(errors="replace"), "choria:request:1")
        envelope = _member(request, "envelope", dict)
        return Request(
            id=_request_id(envelope),
            sender=_text(envelope, "senderid"),
            caller=_text(envelope, "callerid"),
            collective=_text(envelope, "collective"),
            agent=_text(envelope, "agent"),
            ttl=_ttl(envelope),
            time=_integer(envelope, "time"),
            filter=_filter(envelope),
            body=_body(_text(request, "message")),
            reply_to=_text(headers, "reply-to"),
        )

    def seal(self, request: Request, *, sender: str, body: str, time: float) -> bytes:
        envelope = {"requestid": request.id, "senderid": sender, "agent": request.agent, "time": int(time)}
        reply = _encode({"protocol": "choria:reply:1", "message": body, "envelope": envelope})
        # a lone surrogate, which no encoding has, becomes the same question mark in the reply and in its hash
        digest = base64.b64encode(hashlib.sha256(reply.encode(errors="replace")).digest()).decode()
        secure = _encode({"protocol": "choria:secure:reply:1", "message": reply, "hash": digest})
        data = base64.b64encode(secure.encode(errors="replace")).decode()
        transport = _encode({"protocol": "choria:transport:1", "data": data, "headers": {"mc_sender": sender}})
        return transport.encode(errors="replace")


def _document(text: bytes, protocol: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise DroppedError(f"not JSON where {protocol} is wanted") from None
    if not isinstance(document, dict) or document.get("protocol") != protocol:
        raise DroppedError(f"not {protocol}")
    return document


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DroppedError("the data of the transport is not base64") from None


def _body(message: str) -> bytes:
    """Servers try base64 first and fall back to the text itself, which is how a bare ``ping`` gets lost."""
    try:
        return base64.b64decode(message, validate=True)
    except (binascii.Error, ValueError):
        return message.encode(errors="replace")


def _request_id(envelope: Mapping[str, Any]) -> str:
    request_id = _text(envelope, "requestid")
    if len(request_id) != REQUEST_ID_CHARACTERS:
        raise DroppedError(f"a request id of other than {REQUEST_ID_CHARACTERS} characters")
    return request_id


def _ttl(envelope: Mapping[str, Any]) -> int:
    ttl = _integer(envelope, "ttl")
    if ttl < MINIMUM_TTL_SECONDS:
        raise DroppedError(f"a ttl below {MINIMUM_TTL_SECONDS}")
    return ttl


def _filter(envelope: Mapping[str, Any]) -> Mapping[str, list[Any]]:
    filters = _member(envelope, "filter", dict)
    lists = {key: _member(filters, key, list) for key in ("fact", "cf_class", "identity", "compound")}
    lists["agent"] = _member(filters, "agent", list) if "agent" in filters else []
    for key in ("cf_class", "identity", "agent"):
        if not all(isinstance(name, str) for name in lists[key]):
            raise DroppedError(f"a filter on {key} that is no list of strings")
    if not all(isinstance(fact, dict) for fact in lists["fact"]):
        raise DroppedError("a filter on fact that is no list of objects")
    return lists


def _text(document: Mapping[str, Any], key: str) -> str:
    text = _member(document, key, str)
    if not text:
        raise DroppedError(f"an empty {key}")
    return text


def _integer(document: Mapping[str, Any], key: str) -> int:
    value = _member(document, key, int)
    if isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise DroppedError(f"a {key} that is no integer of 64 bits")
    return value


def _member(document: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = document.get(key)
    if not isinstance(value, kind):
        raise DroppedError(f"a {key} that is missing or of the wrong type")
    return value
