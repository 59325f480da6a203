"""The layers of an envelope: objects in JSON, each naming its protocol, one inside the other as text or base64."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any, TypeVar

from provisioner.choria.protocol import ProtocolError
from provisioner.contract import YEAR_10000_SECONDS

_T = TypeVar("_T")

encode = json.JSONEncoder(separators=(",", ":")).encode


def document(text: bytes | str, what: str, protocol: str) -> dict[str, Any]:
    """The object that a layer is.

    :raises ProtocolError: it is none, or of another protocol
    """
    try:
        layer = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        raise ProtocolError(f"the {what} is not JSON") from None
    if not isinstance(layer, dict):
        raise ProtocolError(f"the {what} is not an object")
    if layer.get("protocol") != protocol:
        raise ProtocolError(f"the {what} is not of protocol {protocol}")
    return layer


def member(layer: dict[str, Any], what: str, key: str, kind: type[_T]) -> _T:
    """A member that has to be there.

    :raises ProtocolError: it is not, or is of another type
    """
    value = layer.get(key)
    if not isinstance(value, kind):
        raise ProtocolError(f"the {what} lacks a valid {key}")
    return value


def moment(layer: dict[str, Any], key: str, *, per_second: int = 1) -> float | None:
    """A time in seconds since the epoch; None when there is none, which is no reason to refuse a layer.

    :param per_second: how many of the units that it is written in make a second
    """
    value = layer.get(key)
    if type(value) is not int or not 0 <= value < YEAR_10000_SECONDS * per_second:
        return None
    return value / per_second


def decoded(layer: dict[str, Any], what: str, key: str) -> bytes:
    """What a member holds in base64.

    :raises ProtocolError: it holds none
    """
    try:
        return base64.b64decode(member(layer, what, key, str), validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError(f"the {key} of the {what} is not base64") from None


def digest(data: bytes) -> str:
    """The hash of a reply, as its envelope carries it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
