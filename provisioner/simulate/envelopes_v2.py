"""Protocol version 2 as unprovisioned servers speak it: signed requests that nobody verifies, and unsigned replies."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

import attrs

from provisioner.simulate.envelopes import (
    DroppedError,
    Request,
    SignatureCheck,
    decoded,
    document,
    encode,
    filters,
    integer,
    member,
    text,
)

_PROTOCOL = "io.choria.protocol.v2."
_NANOSECONDS = 10**9


@attrs.frozen
class EnvelopesV2:
    """See :class:`provisioner.simulate.envelopes.Envelopes`.

    :ivar check: looks at signatures all the same; what it finds goes into the request, nothing is dropped for it
    """

    check: SignatureCheck | None = None

    def open(self, payload: bytes) -> Request:
        transport = document(payload, f"{_PROTOCOL}transport")
        headers = member(transport, "headers", dict)
        if "sender" in headers:
            text(headers, "sender")
        secure = document(decoded(transport, "data"), f"{_PROTOCOL}secure_request")
        signature, token = text(secure, "signature"), text(secure, "caller")
        decoded(secure, "signature")
        signed = decoded(secure, "request")
        request = document(signed, f"{_PROTOCOL}request")
        agent, caller = text(request, "agent"), text(request, "caller")
        message = decoded(request, "message")
        objection = self.check(signed, signature=signature, proof=token, caller=caller) if self.check else None
        return Request(
            id=text(request, "id"),
            sender=text(request, "sender"),
            caller=caller,
            collective=text(request, "collective"),
            agent=agent,
            ttl=integer(request, "ttl", minimum=1),
            time=integer(request, "time", minimum=1) / _NANOSECONDS,
            filter=filters(request if "filter" in request else _UNFILTERED),
            body=_discovery(message) if agent == "discovery" else message,
            reply_to=text(headers, "reply"),
            objection=objection,
        )

    def seal(self, request: Request, *, sender: str, body: str, time: float) -> bytes:
        reply = {
            "protocol": f"{_PROTOCOL}reply",
            "message": _base64(body.encode(errors="replace")),
            "request": request.id,
            "sender": sender,
            "agent": request.agent,
            "time": int(time * _NANOSECONDS),
        }
        # a lone surrogate, which no encoding has, becomes a question mark
        sealed = encode(reply).encode(errors="replace")
        digest = _base64(hashlib.sha256(sealed).digest())
        secure = encode({"protocol": f"{_PROTOCOL}secure_reply", "reply": _base64(sealed), "hash": digest})
        transport = {
            "protocol": f"{_PROTOCOL}transport",
            "data": _base64(secure.encode()),
            "headers": {"sender": sender},
        }
        return encode(transport).encode(errors="replace")


_UNFILTERED: Mapping[str, Any] = {"filter": {"fact": [], "cf_class": [], "agent": [], "identity": [], "compound": []}}


def _discovery(message: bytes) -> bytes:
    """The discovery agent wants one more layer of base64 than all others."""
    try:
        return base64.b64decode(message, validate=True)
    except (binascii.Error, ValueError):
        raise DroppedError("a discovery whose body is not base64") from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
