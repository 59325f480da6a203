"""What a faulty or hostile server puts on the network in place of the reply that is due."""

from __future__ import annotations

import enum
import json

import attrs

from provisioner.simulate.envelopes import Envelopes, Request

#: Characters in the data of a huge reply; with its envelopes it just fits into a message of NATS.
HUGE_CHARACTERS = 400_000

#: Names that no server may have.
INSANE_IDENTITIES = ("", "a b.example.net", "a.*", ">", "a..b", ".a", "a.", "n" * 300, "a\r\nPUB x 0\r\n")


class Misbehaviour(enum.Enum):
    """The ways, all of which concern the replies to directed requests."""

    SILENT = "silent"
    GARBAGE = "garbage"
    #: The only one that is harmless: the first reply counts.
    TWICE = "twice"
    TWICE_DIFFERENT = "twice-different"
    FOREIGN_SENDER = "foreign-sender"
    FOREIGN_REQUEST = "foreign-request"
    ERROR_STATUS = "error-status"
    WRONG_TYPES = "wrong-types"
    HUGE = "huge"


def payloads(
    way: Misbehaviour, envelopes: Envelopes, request: Request, *, sender: str, body: str, time: float
) -> list[bytes]:
    """Give what is published instead of one reply with this body."""

    def seal(text: str, *, request: Request = request, sender: str = sender) -> bytes:
        return envelopes.seal(request, sender=sender, body=text, time=time)

    match way:
        case Misbehaviour.SILENT:
            return []
        case Misbehaviour.GARBAGE:
            return [b'{"protocol":"choria:transport:1","data":"!!"}', b"null", b"\xff\xfe", b"[" * 100_000]
        case Misbehaviour.TWICE:
            return [seal(body)] * 2
        case Misbehaviour.TWICE_DIFFERENT:
            return [seal(body), seal(_other(body))]
        case Misbehaviour.FOREIGN_SENDER:
            return [seal(body, sender="intruder.example.net")]
        case Misbehaviour.FOREIGN_REQUEST:
            return [seal(body, request=attrs.evolve(request, id="0" * len(request.id)))]
        case Misbehaviour.ERROR_STATUS:
            return [seal(json.dumps({"action": "", "statuscode": 5, "statusmsg": "simulated failure", "data": None}))]
        case Misbehaviour.WRONG_TYPES:
            return [seal(json.dumps({"action": 7, "statuscode": 0, "statusmsg": None, "data": _WRONG}))]
        case Misbehaviour.HUGE:
            huge = {"action": "", "statuscode": 0, "statusmsg": "OK", "data": "y" * HUGE_CHARACTERS}
            return [seal(json.dumps(huge))]


def discovery_noise(envelopes: Envelopes, request: Request, *, time: float) -> list[bytes]:
    """Give what a hostile node may publish in answer to a discovery."""
    pongs = [envelopes.seal(request, sender=identity, body="pong", time=time) for identity in INSANE_IDENTITIES]
    return [*pongs, envelopes.seal(request, sender="nonsense.example.net", body="not a pong", time=time), b"null"]


_WRONG = {
    "jwt": 1,
    "ecdh_public": [],
    "public_key": "09",
    "signature": True,
    "directory": None,
    "csr": "x",
    "version": 3,
    "upgradable": "yes",
    "facts": "none",
    "message": None,
}


def _other(body: str) -> str:
    document = json.loads(body)
    document["statusmsg"] += ", too"
    return json.dumps(document)
