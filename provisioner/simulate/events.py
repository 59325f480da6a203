"""Lifecycle events as servers publish them: wrapped in a CloudEvent, unlike the provisioner's own."""

from __future__ import annotations

import json
import time
import uuid

#: The component of servers that wait to be provisioned.
COMPONENT = "provision_mode_server"


def subject(event: str) -> str:
    """The subject that an event of this type is published on."""
    return f"choria.lifecycle.event.{event}.{COMPONENT}"


def payload(event: str, *, identity: str, version: str, now: float, new_version: str = "") -> bytes:
    """Give an event of type ``startup``, ``provisioned``, ``upgraded`` or ``shutdown``.

    :param now: seconds since the epoch
    :param new_version: what the server was upgraded to
    """
    protocol, unique = f"io.choria.lifecycle.v1.{event}", str(uuid.uuid4())
    data = {
        "protocol": protocol,
        "id": unique,
        "identity": identity,
        "component": COMPONENT,
        "timestamp": int(now),
    }
    if event in ("startup", "upgraded"):
        data["version"] = version
    if event == "upgraded":
        data["new_version"] = new_version
    wrapper = {
        "specversion": "1.0",
        "id": unique,
        "source": "io.choria.lifecycle",
        "type": protocol,
        "subject": identity,
        "datacontenttype": "application/json",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "data": data,
    }
    return json.dumps(wrapper, separators=(",", ":")).encode()
