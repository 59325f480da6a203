"""Protocol version 1 as unprovisioned servers speak it: signatures are there but nobody looks at them."""

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

#: The schema of a request knows no other length of its id.
REQUEST_ID_CHARACTERS = 32
#: The schema of a request knows no shorter life.
MINIMUM_TTL_SECONDS = 30


@attrs.frozen
class EnvelopesV1:
    """See :class:`provisioner.simulate.envelopes.Envelopes`.

    :ivar check: looks at signatures all the same; what it finds goes into the request, nothing is dropped for it
    """

    check: SignatureCheck | None = None

    def open(self, payload: bytes) -> Request:
        transport = document(payload, "choria:transport:1")
        headers = member(transport, "headers", dict)
        text(headers, "mc_sender")
        secure = document(decoded(transport, "data"), "choria:secure:request:1")
        signature, certificate = text(secure, "signature"), text(secure, "pubcert")
        signed = text(secure, "message").encode(errors="replace")
        request = document(signed, "choria:request:1")
        envelope = member(request, "envelope", dict)
        caller = text(envelope, "callerid")
        objection = self.check(signed, signature=signature, proof=certificate, caller=caller) if self.check else None
        return Request(
            id=_request_id(envelope),
            sender=text(envelope, "senderid"),
            caller=caller,
            collective=text(envelope, "collective"),
            agent=text(envelope, "agent"),
            ttl=integer(envelope, "ttl", minimum=MINIMUM_TTL_SECONDS),
            time=integer(envelope, "time"),
            filter=filters(envelope),
            body=_body(text(request, "message")),
            reply_to=text(headers, "reply-to"),
            objection=objection,
        )

    def seal(self, request: Request, *, sender: str, body: str, time: float) -> bytes:
        envelope = {"requestid": request.id, "senderid": sender, "agent": request.agent, "time": int(time)}
        reply = encode({"protocol": "choria:reply:1", "message": body, "envelope": envelope})
        # a lone surrogate, which no encoding has, becomes the same question mark in the reply and in its hash
        digest = base64.b64encode(hashlib.sha256(reply.encode(errors="replace")).digest()).decode()
        secure = encode({"protocol": "choria:secure:reply:1", "message": reply, "hash": digest})
        data = base64.b64encode(secure.encode(errors="replace")).decode()
        transport = encode({"protocol": "choria:transport:1", "data": data, "headers": {"mc_sender": sender}})
        return transport.encode(errors="replace")


def _body(message: str) -> bytes:
    """Servers try base64 first and fall back to the text itself, which is how a bare ``ping`` gets lost."""
    try:
        return base64.b64decode(message, validate=True)
    except (binascii.Error, ValueError):
        return message.encode(errors="replace")


def _request_id(envelope: Mapping[str, Any]) -> str:
    request_id = text(envelope, "requestid")
    if len(request_id) != REQUEST_ID_CHARACTERS:
        raise DroppedError(f"a request id of other than {REQUEST_ID_CHARACTERS} characters")
    return request_id
