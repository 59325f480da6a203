"""The server's side of Choria's wire protocol, whichever version is spoken.

Deliberately shares nothing with the client's side: a simulation built from the client's own parts would agree with
every mistake in them.
"""

from __future__ import annotations

import base64
import binascii
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

_T = TypeVar("_T")

#: Go leaves other alphabets as they are.
encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class DroppedError(Exception):
    """A server stays silent about a request; on a real one the reason is a line in its log and nothing on the wire."""


@attrs.frozen(kw_only=True)
class Request:
    """One request, its envelopes opened and of the right shape; nothing that depends on the server is checked yet."""

    id: str
    sender: str
    caller: str
    collective: str
    agent: str
    #: Seconds.
    ttl: int
    #: Seconds since the epoch by the clock of the caller.
    time: float
    #: The lists ``fact``, ``cf_class``, ``agent``, ``identity`` and ``compound``.
    filter: Mapping[str, Sequence[Any]]
    #: May hold the token, like a request as a whole.
    body: bytes = attrs.field(repr=False)
    reply_to: str
    #: What is wrong with the signature; empty: nothing; None: nobody looked, as on a real server.
    objection: str | None = None


class SignatureCheck(typing.Protocol):
    """Judges a request as the servers of the real network would, in which it counts who has sent it."""

    def __call__(self, signed: bytes, *, signature: str, proof: str, caller: str) -> str:
        """Say what is wrong, nothing when all is right.

        :param signed: the very bytes that the signature is for
        :param signature: base64
        :param proof: certificates or a token of the caller, as it came along
        :param caller: the caller id in the request
        """


class Envelopes(typing.Protocol):
    """One protocol version as servers speak it."""

    def open(self, payload: bytes) -> Request:
        """Open what came from the network.

        :raises DroppedError: when a real server would not even look at it
        """

    def seal(self, request: Request, *, sender: str, body: str, time: float) -> bytes:
        """Give the payload of a reply.

        :param time: seconds since the epoch by the clock of the server
        """


# --- JSON, read as strictly as the schemas of the protocols have it


def document(text: bytes, protocol: str) -> Mapping[str, Any]:
    """Read one envelope."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise DroppedError(f"not JSON where {protocol} is wanted") from None
    if not isinstance(found, dict) or found.get("protocol") != protocol:
        raise DroppedError(f"not {protocol}")
    return found


def decoded(envelope: Mapping[str, Any], key: str) -> bytes:
    """Give a member that is base64."""
    try:
        return base64.b64decode(text(envelope, key), validate=True)
    except (binascii.Error, ValueError):
        raise DroppedError(f"a {key} that is not base64") from None


def filters(envelope: Mapping[str, Any]) -> Mapping[str, list[Any]]:
    """Give the lists of a filter, that on agents may be missing."""
    found = member(envelope, "filter", dict)
    lists = {key: member(found, key, list) for key in ("fact", "cf_class", "identity", "compound")}
    lists["agent"] = member(found, "agent", list) if "agent" in found else []
    for key in ("cf_class", "identity", "agent"):
        if not all(isinstance(name, str) for name in lists[key]):
            raise DroppedError(f"a filter on {key} that is no list of strings")
    if not all(isinstance(fact, dict) for fact in lists["fact"]):
        raise DroppedError("a filter on fact that is no list of objects")
    return lists


def text(envelope: Mapping[str, Any], key: str) -> str:
    """Give a member that is a string and not empty."""
    found = member(envelope, key, str)
    if not found:
        raise DroppedError(f"an empty {key}")
    return found


def integer(envelope: Mapping[str, Any], key: str, *, minimum: int = -(2**63)) -> int:
    """Give a member that is a whole number."""
    found = member(envelope, key, int)
    if isinstance(found, bool) or not -(2**63) <= found < 2**63:
        raise DroppedError(f"a {key} that is no integer of 64 bits")
    if found < minimum:
        raise DroppedError(f"a {key} below {minimum}")
    return found


def member(envelope: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """Give a member of a type."""
    found = envelope.get(key)
    if not isinstance(found, kind):
        raise DroppedError(f"a {key} that is missing or of the wrong type")
    return found
