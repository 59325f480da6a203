"""Choria's protocol version 2: organizations, whose members prove with JWTs and Ed25519 signatures who they are.

Four layers, each in base64 within the next: transport (where to reply to), secure request or reply (signature and the
caller's JWT, or a hash), request or reply (who, when, to whom), body.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable

import attrs

from provisioner.choria.layers import decoded, digest, document, encode, member, moment
from provisioner.choria.protocol import COLLECTIVE, ProtocolError, Reply

TRANSPORT = "io.choria.protocol.v2.transport"
SECURE_REQUEST = "io.choria.protocol.v2.secure_request"
SECURE_REPLY = "io.choria.protocol.v2.secure_reply"
REQUEST = "io.choria.protocol.v2.request"
REPLY = "io.choria.protocol.v2.reply"

#: In a second; the unit of all times in version 2.
NANOSECONDS = 10**9


@attrs.frozen(kw_only=True)
class ProtocolV2:
    """Protocol version 2 as spoken by one client. :class:`provisioner.choria.protocol.Protocol` has the contract."""

    identity: str
    #: As the claim `callerid` of the JWT has it.
    caller: str
    #: Seconds that a request stays valid; servers compare it with the age by their own clock.
    ttl: int
    #: Signs the bytes of a request, gives the signature in base64 and the JWT of the key that made it.
    sign: Callable[[bytes], tuple[str, str]]
    clock_ns: Callable[[], int] = time.time_ns

    def new_request_id(self) -> str:
        """Any text will do."""
        return uuid.uuid4().hex

    def request(
        self, *, agent: str, target_agent: str, body: str, request_id: str, reply_to: str, connected_url: str
    ) -> bytes:
        request = {
            "protocol": REQUEST,
            "message": _base64(body.encode()),
            "id": request_id,
            "sender": self.identity,
            "caller": self.caller,
            "collective": COLLECTIVE,
            "agent": agent,
            "ttl": self.ttl,
            "time": self.clock_ns(),
            "filter": {"fact": [], "cf_class": [], "agent": [target_agent], "identity": [], "compound": []},
        }
        # what is signed are the very bytes that are sent: they are made once
        signed = encode(request).encode()
        signature, token = self.sign(signed)
        secure = {"protocol": SECURE_REQUEST, "request": _base64(signed), "signature": signature, "caller": token}
        headers = {
            "reply": reply_to,
            "sender": self.identity,
            "trace": [[connected_url, self.identity, connected_url]],
        }
        transport = {"protocol": TRANSPORT, "data": _base64(encode(secure).encode()), "headers": headers}
        return encode(transport).encode()

    def reply(self, payload: bytes) -> Reply:
        transport = document(payload, "transport", TRANSPORT)
        headers = member(transport, "transport", "headers", dict)
        secure = document(decoded(transport, "transport", "data"), "secure reply", SECURE_REPLY)
        hashed = decoded(secure, "secure reply", "reply")
        if member(secure, "secure reply", "hash", str) != digest(hashed):
            raise ProtocolError("the hash of the reply does not match its contents")
        reply = document(hashed, "reply", REPLY)
        try:
            body = decoded(reply, "reply", "message").decode()
        except UnicodeDecodeError:
            raise ProtocolError("the message of the reply is not UTF-8") from None
        return Reply(
            request_id=member(reply, "reply", "request", str),
            sender=member(reply, "reply", "sender", str),
            transport_sender=member(headers, "headers", "sender", str),
            agent=member(reply, "reply", "agent", str),
            body=body,
            time=moment(reply, "time", per_second=NANOSECONDS),
        )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
