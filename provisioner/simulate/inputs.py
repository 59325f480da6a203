"""What is in the body of a request, read as strictly, and as laxly, as a real server reads it.

Servers do not apply the limits that the agents' descriptions state, only the types: what they cannot put into a field
of their own they refuse with the words of Go's JSON decoder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs

_ABORTED = 1
_INVALID_DATA = 4

#: The kinds of inputs, as Go names their types.
TEXT, INTEGER, TEXTS = "string", "int", "map[string]string"
_EMPTY: Mapping[str, Any] = {TEXT: "", INTEGER: 0, TEXTS: {}}

#: Go leaves other alphabets as they are.
encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class RefusedError(Exception):
    """A server answers with a status other than OK."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text
        super().__init__(text)


@attrs.frozen
class Call:
    """The body of a request; `data` is whatever JSON was there."""

    action: str
    data: Any = attrs.field(repr=False)


def call(body: bytes) -> Call:
    """Read the body of a request to an agent. The agent that it names is not looked at, the envelope's counts.

    :raises RefusedError: when it is none
    """
    try:
        document = _decode(body.decode(errors="replace"))
        fields = _fields(document, "value of type mcorpc.Request")
        action = _typed(fields.get("action"), "struct field Request.action of type ", TEXT)
    except ValueError as error:
        what = "could not parse incoming message as a MCollective SimpleRPC Request"
        raise RefusedError(_INVALID_DATA, f"Could not process request: {what}: {error}") from None
    return Call(action or "", fields.get("data"))


def read(call: Call, *, agent: str, struct: str, kinds: Mapping[str, str]) -> Mapping[str, Any]:
    """Give the inputs of an action, absent and null ones as empty ones. Unknown ones are ignored.

    :param struct: name of the Go type
    :param kinds: the kind of each input
    :raises RefusedError: when one has the wrong type
    """
    given: dict[str, Any] = dict.fromkeys(kinds)
    try:
        for key, value in _fields(call.data, f"value of type provision.{struct}").items():
            if key in kinds:
                given[key] = _typed(value, f"struct field {struct}.{key} of type ", kinds[key])
    except ValueError as error:
        text = f"Could not parse request data for {agent}#{call.action}: {error}"
        raise RefusedError(_INVALID_DATA, text) from None
    return {key: _EMPTY[kinds[key]] if value is None else value for key, value in given.items()}


def settings(text: str) -> Mapping[str, str]:
    """Read the settings that a server is to write to its configuration file.

    :raises RefusedError: when they are anything but an object of strings; a null counts as an empty string
    """
    try:
        document = _typed(_decode(text), "value of type ", TEXTS)
    except ValueError as error:
        raise RefusedError(_ABORTED, f"Could not decode configuration data: {error}") from None
    return document or {}


def _decode(text: str) -> Any:
    """Decode JSON.

    :raises ValueError: saying why not, in Go's words as far as the most frequent case goes
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("exceeded max depth") from None
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        if not rest:
            raise ValueError("unexpected end of JSON input") from None
        where = "looking for beginning of value" if error.msg == "Expecting value" else "in JSON input"
        raise ValueError(f"invalid character {rest[0]!r} {where}") from None


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError("invalid character in JSON input")


def _fields(document: Any, target: str) -> Mapping[str, Any]:
    """Give the members of an object, of none for null. Go takes names in any letter case; the last one wins.

    :raises ValueError: when it is no object
    """
    if document is not None and not isinstance(document, dict):
        raise ValueError(_mismatch(document, target))
    return {key.lower(): value for key, value in (document or {}).items()}


def _typed(value: Any, field: str, kind: str) -> Any:
    """Give a value of the kind, or None for null.

    :raises ValueError: when it is of another kind
    """
    if value is None:
        return None
    if kind == TEXTS and isinstance(value, dict):
        return {key: _typed(text, field, TEXT) or "" for key, text in value.items()}
    if kind == TEXT and isinstance(value, str):
        return value
    if kind == INTEGER and isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    exactly = f" {value}" if kind == INTEGER and isinstance(value, int | float) and not isinstance(value, bool) else ""
    raise ValueError(_mismatch(value, f"{field}{kind}", exactly))


def _mismatch(value: Any, target: str, exactly: str = "") -> str:
    names = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return f"json: cannot unmarshal {names[type(value)]}{exactly} into Go {target}"
