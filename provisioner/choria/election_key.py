"""The key of the leader election, in the key-value bucket that Choria's broker keeps for elections.

From the provisioning account the key can be written, but neither read nor watched nor deleted, so all that is known of
it is what a write is answered. Every write names the sequence that the key must have had until then, and so of several
candidates one wins. The Go original's candidates write the same.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import Any

from provisioner.choria.connector import Connector
from provisioner.choria.errors import ConnectorError, NoRespondersError
from provisioner.errors import ProvisionerError
from provisioner.text import printable

BUCKET = "CHORIA_LEADER_ELECTION"
#: The name of the election, and of the key.
ELECTION = "provisioner"
#: How long the broker may take to answer.
CALL_SECONDS = 5.0
#: What the Go original takes for the lifetime of the key, which is how long an election outlives its leader.
LIFETIME_SECONDS = (4.0, 3600.0)

#: No key ever has this sequence: 200 million years of campaigns would not reach it. Exact in every JSON.
UNREACHABLE_SEQUENCE = 2**53 - 1

_STREAM = f"KV_{BUCKET}"
_INFO_SUBJECT = f"choria.streams.STREAM.INFO.{_STREAM}"
_KEY_SUBJECT = f"choria.streams.$KV.{BUCKET}.{ELECTION}"

_STREAMS_SETTING = "plugin.choria.network.stream.store"
_LIFETIME_SETTING = "plugin.choria.network.stream.leader_election_ttl"

_STREAM_NOT_FOUND = 10059
_WRONG_LAST_SEQUENCE = 10071
#: The same while another write is under way, which a bucket in several copies takes a while for.
_WRITE_UNDER_WAY = 10164
_SEQUENCE = re.compile(r"wrong last sequence: ([0-9]{1,19})")
_NANOSECONDS = 1e9
#: The broker counts in 64 bits.
_LARGEST_NUMBER = 2**63 - 1


class ElectionError(ProvisionerError):
    """A call failed; a write may or may not have been made."""


class UndecidedError(ProvisionerError):
    """A write was refused, since another one was under way; what became of that is not known."""


class TakenError(ProvisionerError):
    """A write was refused, since the key has another sequence than expected.

    :ivar sequence: the one that it has; 0 when there is no key
    """

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        super().__init__(f"the key has the sequence {sequence}")


class Key:
    """The key, as one candidate writes it. Every call takes up to :data:`CALL_SECONDS`.

    :param identity: what the key is set to
    """

    def __init__(self, connector: Connector, identity: str) -> None:
        self._connector = connector
        self._value = identity.encode()

    def lifetime(self) -> float:
        """Seconds after its last write at which the broker removes the key.

        :raises ElectionError: when that is unknown, or the bucket is none that an election can be held in
        """
        reply = self._call(_INFO_SUBJECT)
        if _error_code(reply) == _STREAM_NOT_FOUND:
            raise ElectionError(
                f"the broker has no bucket {BUCKET}: it makes it within two minutes of its start if {_STREAMS_SETTING} "
                "is set in its configuration"
            )
        config = reply.get("config")
        if not isinstance(config, dict):
            raise _unexpected(reply)
        history, lifetime = config.get("max_msgs_per_subject"), config.get("max_age")
        if type(history) is not int or type(lifetime) is not int or abs(lifetime) > _LARGEST_NUMBER:
            raise _unexpected(reply)
        if history < 1:
            raise ElectionError(f"the bucket {BUCKET} of the broker keeps no keys")
        seconds = lifetime / _NANOSECONDS
        shortest, longest = LIFETIME_SECONDS
        if not shortest <= seconds <= longest:
            raise ElectionError(
                f"the bucket {BUCKET} of the broker keeps keys for {seconds:g} s, wanted {shortest:g} s to "
                f"{longest:g} s: {_LIFETIME_SETTING} in its configuration"
            )
        return seconds

    def clock_ahead(self) -> float | None:
        """Seconds by which the broker's clock is ahead of ours; None when that cannot be known.

        :raises ElectionError: when the broker does not answer
        """
        before = time.time()
        reply = self._call(_INFO_SUBJECT)
        after = time.time()
        try:
            told = datetime.fromisoformat(str(reply.get("ts")))
        except ValueError:
            return None
        return told.timestamp() - (before + after) / 2 if told.tzinfo else None

    def sequence(self) -> int:
        """The sequence that the key has; 0: there is no key. Changes nothing.

        It cannot be read, but the refusal of a write tells it, and this write is always refused.

        :raises ElectionError: when it cannot be known
        """
        try:
            self.write(UNREACHABLE_SEQUENCE)
        except TakenError as refusal:
            return refusal.sequence
        raise ElectionError(f"the broker has taken a write that it had to refuse, of the key {ELECTION}")

    def write(self, expected: int) -> int:
        """Set the key, if its sequence is as expected.

        :param expected: its sequence; 0: there is no key
        :return: its new sequence
        :raises TakenError: when it has another one
        :raises UndecidedError: when it may get another one
        :raises ElectionError: when it is unknown whether it was set
        """
        headers = {"Nats-Expected-Last-Subject-Sequence": str(expected)}
        reply = self._call(_KEY_SUBJECT, payload=self._value, headers=headers)
        code = _error_code(reply)
        if code == _WRITE_UNDER_WAY:
            raise UndecidedError("another write is under way")
        if code == _WRONG_LAST_SEQUENCE:
            match = _SEQUENCE.fullmatch(str(reply["error"].get("description")))
            if match is None:
                raise _unexpected(reply)
            raise TakenError(int(match[1]))
        sequence = reply.get("seq")
        if "error" in reply or type(sequence) is not int or sequence < 1 or reply.get("stream") != _STREAM:
            raise _unexpected(reply)
        return sequence

    def reconnect(self) -> None:
        """Have the next write go over another connection."""
        self._connector.reconnect()

    def _call(self, subject: str, **message: Any) -> dict[str, Any]:
        try:
            payload = self._connector.request(subject, timeout=CALL_SECONDS, **message).payload
        except NoRespondersError:
            raise ElectionError(
                f"no Choria Streams here: {_STREAMS_SETTING} must be set in the configuration of the broker, and we be "
                "in its provisioning account (broker_provisioning_password)"
            ) from None
        except ConnectorError as error:
            raise ElectionError(str(error)) from error
        try:
            reply = json.loads(payload)
        except (ValueError, RecursionError):
            raise ElectionError("the broker replied with something that is not JSON") from None
        if not isinstance(reply, dict):
            raise ElectionError("the broker replied with something that is not an object")
        return reply


def _error_code(reply: dict[str, Any]) -> object:
    error = reply.get("error")
    return error.get("err_code") if isinstance(error, dict) else None


def _unexpected(reply: dict[str, Any]) -> ElectionError:
    error = reply.get("error")
    text = error.get("description") if isinstance(error, dict) else None
    return ElectionError(f"the broker replied: {printable(text)}" if isinstance(text, str) else "a reply of no use")
