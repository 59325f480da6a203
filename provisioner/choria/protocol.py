"""What the rest of the program needs of Choria's wire protocol, whichever version is spoken.

Callers hand in the body of a request and get the bytes to publish; they hand in the bytes of a reply and get its
checked contents. Envelopes, signatures and encodings stay behind this interface.
"""

from __future__ import annotations

import hashlib
import typing
import uuid

import attrs

from provisioner.errors import ProvisionerError

#: The one collective of unprovisioned servers, whatever the client configuration says.
COLLECTIVE = "provisioning"

DISCOVERY_SUBJECT = f"{COLLECTIVE}.broadcast.agent.discovery"


class ProtocolError(ProvisionerError):
    """A payload is not what the protocol says it must be; the text says what is wrong, never what was in it."""


@attrs.frozen(kw_only=True)
class Reply:
    """One reply, its envelopes checked: both protocol names, the types of all fields, the hash.

    Whether it answers a given request, and comes from whom it should, is for the caller to compare.
    """

    request_id: str
    sender: str
    #: The sender as the outermost envelope names it; differs from `sender` only in a forgery.
    transport_sender: str
    agent: str
    #: `pong` for a discovery, else JSON text.
    body: str = attrs.field(repr=False)
    #: When it was made by the sender's clock, in seconds since the epoch; None when it does not say.
    time: float | None = None


class Protocol(typing.Protocol):
    """One protocol version, speaking as one identity. Used from many threads at once."""

    @property
    def identity(self) -> str:
        """The Choria identity that requests are sent as."""

    @property
    def caller(self) -> str:
        """The caller id. With `identity` it is the key of a server's lock, so both last as long as the process."""

    def new_request_id(self) -> str:
        """A fresh request id, usable as a part of a NATS subject."""

    def request(
        self, *, agent: str, target_agent: str, body: str, request_id: str, reply_to: str, connected_url: str
    ) -> bytes:
        """The NATS payload of a request.

        :param agent: the agent that is called
        :param target_agent: servers without this agent stay silent; differs from `agent` in a discovery alone
        :param body: JSON text, or the discovery's body
        :param reply_to: the NATS subject that servers publish their reply on
        :param connected_url: of the broker, for the trace that servers ignore and auditors read
        """

    def reply(self, payload: bytes) -> Reply:
        """Open a reply.

        :raises ProtocolError: on anything else than a well-formed reply of this protocol
        """


def node_subject(identity: str) -> str:
    """The subject of requests to one server; `identity` must be a sane one."""
    return f"{COLLECTIVE}.node.{identity}"


def reply_prefix(caller: str) -> str:
    """What the subjects of all replies to this process begin with; the request id follows.

    Brokers allow what begins with the hash of the caller id. The random part keeps two instances apart that share a
    caller id, as a standby may do with its leader: without it they would receive each other's replies.
    """
    caller_hash = hashlib.md5(caller.encode(), usedforsecurity=False).hexdigest()
    return f"{COLLECTIVE}.reply.{caller_hash}.{uuid.uuid4().hex}"
