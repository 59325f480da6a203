"""Choria's lifecycle events: the parsing of those that servers publish, the making of our own.

Servers wrap an event in a CloudEvent; older ones, and this program itself, publish it bare. The rules of what is an
event are those of Choria's own parser: field names match in any letter case, the inner protocol alone decides the
type, the wrapper's type and subject are not looked at.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
import uuid
from typing import Any

import attrs

from provisioner.errors import ProvisionerError

SUBJECT = "choria.lifecycle.event"
STARTUP = "startup"

_PROTOCOL = "io.choria.lifecycle.v1."
_PROTOCOL_FAMILY = "io.choria.lifecycle"
_TYPES = frozenset({STARTUP, "shutdown", "provisioned", "alive", "governor", "upgraded"})
_MAX_WRAPPERS = 10
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


class EventError(ProvisionerError):
    """A payload is not a lifecycle event."""


@attrs.frozen(kw_only=True)
class Event:
    """One lifecycle event.

    :ivar type: one of the known event types, such as ``startup``
    :ivar identity: of the sender, as it claims; empty when the event names none. Nothing proves it.
    :ivar timestamp: by the clock of the sender, in seconds since the epoch; None when the event has none
    """

    type: str
    identity: str
    timestamp: int | None = None


def parse(payload: bytes) -> Event:
    """Parse what was received on an event subject.

    :raises EventError: when it is none of Choria's lifecycle events
    """
    try:
        document = json.loads(payload.decode())
    except (ValueError, RecursionError):
        raise EventError("not JSON") from None
    return _event(document, wrappers=0)


def startup_subject(component: str) -> str:
    """The subject on which servers of a component announce that they have started."""
    return f"{SUBJECT}.{STARTUP}.{component}"


def startup(*, identity: str, component: str, version: str) -> bytes:
    """Our own startup event, in the bare form that the Go original publishes."""
    event = {
        "protocol": _PROTOCOL + STARTUP,
        "id": str(uuid.uuid4()),
        "identity": identity,
        "component": component,
        "timestamp": int(time.time()),
        "version": version,
    }
    return json.dumps(event).encode()


def _event(document: object, wrappers: int) -> Event:
    if not isinstance(document, dict):
        raise EventError("not an object")
    fields = {key.lower(): value for key, value in document.items()}
    protocol = fields.get("protocol")
    if isinstance(protocol, str) and protocol.startswith(_PROTOCOL_FAMILY):
        return _bare(fields, protocol)
    if fields.get("specversion") == "1.0" and fields.get("source") == "io.choria.lifecycle":
        if wrappers == _MAX_WRAPPERS:
            raise EventError("too many wrappers")
        if not _is_time(fields.get("time")):
            raise EventError("the time of the wrapper is not in RFC 3339")
        return _event(_wrapped(fields), wrappers + 1)
    raise EventError("unsupported event format")


def _bare(fields: dict[str, Any], protocol: str) -> Event:
    event_type = protocol.removeprefix(_PROTOCOL)
    if event_type not in _TYPES:
        raise EventError("unknown protocol")
    timestamp = fields.get("timestamp")
    if timestamp is not None and (not isinstance(timestamp, int) or isinstance(timestamp, bool)):
        raise EventError("the timestamp is not an integer")
    for key in ("identity", "component", "id", "version"):
        if not isinstance(fields.get(key), str | None):
            raise EventError(f"the {key} is not a string")
    return Event(type=event_type, identity=fields.get("identity") or "", timestamp=timestamp)


def _wrapped(fields: dict[str, Any]) -> object:
    encoded = fields.get("data_base64")
    if "data" in fields or not isinstance(encoded, str):
        return fields.get("data")
    try:
        return json.loads(base64.b64decode(encoded, validate=True).decode())
    except (binascii.Error, ValueError, RecursionError):
        raise EventError("the wrapped data is not JSON in base64") from None


def _is_time(value: object) -> bool:
    return value is None or (isinstance(value, str) and _RFC3339.fullmatch(value) is not None)
