"""Choria's protocol version 1: x509 and insecure networks.

Four envelopes of JSON, from the outside: transport (base64 of the next), secure request or reply (signature or hash,
and the next as a string), request or reply (who, when, to whom, and the body as a string), body.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable

import attrs

from provisioner.choria.layers import decoded, digest, document, encode, member, moment
from provisioner.choria.protocol import COLLECTIVE, ProtocolError, Reply

TRANSPORT = "choria:transport:1"
SECURE_REQUEST = "choria:secure:request:1"
SECURE_REPLY = "choria:secure:reply:1"
REQUEST = "choria:request:1"
REPLY = "choria:reply:1"

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
        message = encode({"protocol": REQUEST, "message": body, "envelope": envelope})
        signature, certificate = self.sign(message.encode())
        secure = {"protocol": SECURE_REQUEST, "message": message, "signature": signature, "pubcert": certificate}
        hop = [connected_url, self.identity, connected_url]
        headers = {"reply-to": reply_to, "mc_sender": self.identity, "seen-by": [hop]}
        data = base64.b64encode(encode(secure).encode()).decode()
        return encode({"protocol": TRANSPORT, "data": data, "headers": headers}).encode()

    def reply(self, payload: bytes) -> Reply:
        transport = document(payload, "transport", TRANSPORT)
        headers = member(transport, "transport", "headers", dict)
        secure = document(decoded(transport, "transport", "data"), "secure reply", SECURE_REPLY)
        message = member(secure, "secure reply", "message", str)
        reply = document(message, "reply", REPLY)
        # a lone surrogate cannot be encoded, and so cannot have been hashed by anybody either
        if member(secure, "secure reply", "hash", str) != digest(message.encode(errors="replace")):
            raise ProtocolError("the hash of the reply does not match its contents")
        envelope = member(reply, "reply", "envelope", dict)
        return Reply(
            request_id=member(envelope, "envelope", "requestid", str),
            sender=member(envelope, "envelope", "senderid", str),
            transport_sender=member(headers, "headers", "mc_sender", str),
            agent=member(envelope, "envelope", "agent", str),
            body=member(reply, "reply", "message", str),
            time=moment(envelope, "time"),
        )
