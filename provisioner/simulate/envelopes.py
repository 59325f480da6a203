"""The server's side of Choria's wire protocol, whichever version is spoken.

Deliberately shares nothing with the client's side: a simulation built from the client's own parts would agree with
every mistake in them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import attrs


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
