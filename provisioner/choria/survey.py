"""Asks all servers at once, in one broadcast, which version they run and since when."""

from __future__ import annotations

import json
from collections.abc import Collection

import attrs

from provisioner.choria.connector import Connector
from provisioner.choria.nats import Message
from provisioner.choria.protocol import COLLECTIVE, Protocol, ProtocolError
from provisioner.choria.rpc import RPCError, opened
from provisioner.choria.window import Window

#: How long the first reply may take.
FIRST_REPLY_SECONDS = 4.0
#: Once replies have begun, it ends when none came for this long.
SLIDE_SECONDS = 1.0
#: It never takes longer than this.
LIMIT_SECONDS = 20.0

AGENT, ACTION = "rpcutil", "daemon_stats"


@attrs.frozen
class Stats:
    """What a server says about itself.

    :ivar version: any text; empty when it does not say
    :ivar started: when its process started by its own clock, in seconds since the epoch; None when it does not say
    """

    version: str
    started: float | None


def survey(
    connector: Connector, protocol: Protocol, identities: Collection[str], *, target_agent: str
) -> dict[str, Stats]:
    """Ask all servers that run `target_agent`, and collect what some of them say, until the last of these has answered.

    :param identities: of those whose answers are wanted; those that do not answer in time are missing in the result
    :raises ConnectorError: when there is no connection, or it is lost
    """
    missing, found = set(identities), dict[str, Stats]()
    request_id = protocol.new_request_id()
    with connector.expect(request_id) as replies:
        payload = protocol.request(
            agent=AGENT,
            target_agent=target_agent,
            body=json.dumps({"agent": AGENT, "action": ACTION, "data": {}}),
            request_id=request_id,
            reply_to=replies.subject,
            connected_url=connector.connected_url,
        )
        connector.publish(f"{COLLECTIVE}.broadcast.agent.{AGENT}", payload=payload)
        window = Window(replies, first=FIRST_REPLY_SECONDS, slide=SLIDE_SECONDS, limit=LIMIT_SECONDS)
        while missing and not window.closed:
            message = window.take()
            answer = message and _answer(message, protocol, request_id)
            if message and answer and answer[0] in missing:
                missing.remove(answer[0])
                found[answer[0]] = answer[1]
                window.extend(message)
    return found


def _answer(message: Message, protocol: Protocol, request_id: str) -> tuple[str, Stats] | None:
    """The sender of a good reply, and what it says; None for any other reply."""
    try:
        reply = protocol.reply(message.payload)
        if (reply.request_id, reply.agent, reply.sender) != (request_id, AGENT, reply.transport_sender):
            return None
        data = opened(reply.body, {}).data
    except (ProtocolError, RPCError):
        return None
    version, started = data.get("version"), data.get("starttime")
    return reply.sender, Stats(
        version=version if isinstance(version, str) else "",
        started=float(started) if type(started) is int and 0 < started < 2**40 else None,
    )
