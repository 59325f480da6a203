"""Broadcast discovery: which servers are there that want to be provisioned."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable

import attrs

from provisioner.choria.connector import Connector
from provisioner.choria.identity import reason_insane
from provisioner.choria.nats import Message
from provisioner.choria.protocol import DISCOVERY_SUBJECT, Protocol, ProtocolError, Reply
from provisioner.choria.window import Window
from provisioner.text import printable

LOG = logging.getLogger(__name__)

#: A discovery never takes longer than this, as in the Go original.
LIMIT_SECONDS = 2.0
#: Once replies have begun, it ends when none came for this long.
SLIDE_SECONDS = 0.3
#: How often a wait looks whether the discovery is still wanted.
CHECK_SECONDS = 0.1

#: Choria's discovery agent expects the word `ping` in base64; the word itself happens to be valid base64 of something.
_PING = "cGluZw=="


@attrs.frozen
class Sighting:
    """A server that answered.

    :ivar received: when its reply arrived, by the monotonic clock
    :ivar ahead: seconds by which its clock is ahead of ours, less what its reply took; None when it did not say
    """

    identity: str
    received: float
    ahead: float | None = attrs.field(default=None, eq=False)


def discover(
    connector: Connector,
    protocol: Protocol,
    *,
    target_agent: str,
    first_reply: float,
    interrupted: Callable[[], bool],
) -> list[Sighting]:
    """Ask all servers that run `target_agent` to answer, and collect those that do, each once.

    :param first_reply: seconds to wait for the first reply; :data:`LIMIT_SECONDS` at most
    :param interrupted: asked often; true ends the discovery with nothing found
    :raises ConnectorError: when there is no connection, or it is lost
    """
    request_id = protocol.new_request_id()
    with connector.expect(request_id) as replies:
        payload = protocol.request(
            agent="discovery",
            target_agent=target_agent,
            body=_PING,
            request_id=request_id,
            reply_to=replies.subject,
            connected_url=connector.connected_url,
        )
        # no NATS reply subject: a broker that knows of nobody yet must not end the window
        connector.publish(DISCOVERY_SUBJECT, payload=payload)
        window = Window(replies, first=first_reply, slide=SLIDE_SECONDS, limit=LIMIT_SECONDS)
        messages: list[Message] = []
        # Replies are only put aside until the window closes: parsing thousands of them within it would delay the
        # stamping of those that follow, and so cut them off.
        while not window.closed:
            if interrupted():
                return []
            message = window.take(CHECK_SECONDS)
            if message is not None:
                messages.append(message)
                window.extend(message)
        return _sightings(messages, protocol, request_id)


def _sightings(messages: list[Message], protocol: Protocol, request_id: str) -> list[Sighting]:
    offset = time.time() - time.monotonic()
    sightings: dict[str, Sighting] = {}
    refused: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    for message in messages:
        sender = ""
        try:
            reply = _checked(message, protocol, request_id)
            sender = reply.sender
            if reason := reason_insane(sender):
                raise ProtocolError(f"their identity {reason}")
        except ProtocolError as error:
            refused[str(error)] += 1
            examples.setdefault(str(error), sender)
        else:
            ahead = None if reply.time is None else reply.time - (message.received + offset)
            sightings.setdefault(sender, Sighting(sender, message.received, ahead))
    for reason, count in refused.items():
        LOG.warning("refused %d discovery replies, one from %r: %s", count, printable(examples[reason]), reason)
    return list(sightings.values())


def _checked(message: Message, protocol: Protocol, request_id: str) -> Reply:
    reply = protocol.reply(message.payload)
    if reply.request_id != request_id:
        raise ProtocolError("they name another request")
    if reply.agent != "discovery" or reply.body != "pong":
        raise ProtocolError("they answer something else than a discovery")
    if reply.sender != reply.transport_sender:
        raise ProtocolError("their envelopes name different senders")
    return reply
