"""What a helper may answer: the rules, for both ends of the pipe.

The daemon checks with them what came (:mod:`provisioner.host.answer`), and :mod:`provisioner.helper` what is about to
be sent. The latter is imported at the start of helpers, whose start-up bounds how fast a fleet is provisioned: so this
imports nothing that `json` does not import anyway. An answer is a plain dictionary here for that reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

from provisioner.errors import HostError

# `typing` takes as long to import as all the rest
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _T = TypeVar("_T")

#: The setting that must be off in what the helper returns, or the server starts in provisioning mode again.
PROVISION_KEY = "plugin.choria.server.provision"
#: All that a helper may print.
ANSWER_LIMIT_BYTES = 1024 * 1024
#: Choria stops reading a configuration file at a longer line, and ignores all that follows.
LINE_LIMIT_BYTES = 64 * 1024 - 1
#: The longest file name that the usual file systems take.
FILE_NAME_LIMIT_BYTES = 255
#: Where calendars end: times from here on are none.
YEAR_10000_SECONDS = 253_402_300_800
#: How many problems one error names; a helper can make any number of them.
PROBLEMS_NAMED = 5
#: What a server's JWT may permit.
PERMISSIONS = ("submission", "streams", "governor", "service_host")

NO_CONFIGURATION = "configuration: there is none"

_FALSE = frozenset({"0", "no", "false", "n", "f"})
_LINE_BREAKING = re.compile("[\r\n\0]")
_PLAIN_NAME = re.compile(r"[\w.:/-]{1,80}")
_FILE_STEM = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")
_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class AnswerError(HostError):
    """The helper's answer cannot be used; the text names the key at fault and never shows a value."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the helper's answer is refused: {problem}")


def document(stdout: bytes) -> object:
    """Read one JSON document, strictly; when a key comes twice the last one wins.

    :raises AnswerError: it is none
    """
    if stdout.startswith(b"\xef\xbb\xbf"):
        raise AnswerError("a byte order mark stands before the JSON document")
    try:
        return _DECODER.decode(stdout.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise AnswerError(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        what = error.msg.partition(":")[0].lower()
        raise AnswerError(f"it is not one JSON document: {what}, line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise AnswerError("a number in it has too many digits") from None
    except RecursionError:
        raise AnswerError("lists and objects in it are nested too deeply") from None


def read(answer: object) -> dict[str, Any]:
    """Give all members of an answer, by their name in lower case; empty stands for what it does not say.

    Names match in any letter case, as in the Go original, and unknown ones are ignored. `null` counts as absent.

    :raises AnswerError: it is no object, or a value in it is of the wrong type
    """
    members = _members(answer)
    return {
        "defer": _boolean(members, "defer"),
        "shutdown": _boolean(members, "shutdown"),
        "msg": _text(members, "msg"),
        "key": _text(members, "key"),
        "certificate": _text(members, "certificate"),
        "ca": _text(members, "ca"),
        "ssldir": _text(members, "ssldir"),
        "configuration": _texts_by_name(members, "configuration"),
        "action_policies": _texts_by_name(members, "action_policies"),
        "opa_policies": _texts_by_name(members, "opa_policies"),
        "server_claims": _server_claims(members),
        "upgrade": _text(members, "upgrade"),
    }


def check(
    answer: Mapping[str, Any],
    *,
    identity: str,
    csr_ssldir: str | None,
    provision_default: bool | None,
    upgrades: bool = False,
) -> list[str]:
    """Check for what would make the server fail half-way, or be lost, before anything is sent to it.

    Nothing is checked when the helper defers or wants a shutdown, for then nothing else it says is sent. An answer that
    names a version to upgrade to may come without a configuration.

    :param answer: its members, as :func:`read` gives them
    :param identity: of the node
    :param csr_ssldir: the directory that the node named with its CSR, if it was asked for one
    :param provision_default: whether the node enters provisioning mode when its configuration does not say, which is
        claim `chpd` of its JWT; None when that is not known
    :param upgrades: whether a version to upgrade to is heeded
    :returns: warnings, one line each
    :raises AnswerError: names what is wrong, up to `PROBLEMS_NAMED` of it
    """
    if answer["defer"] or answer["shutdown"]:
        return []
    configuration: Mapping[str, str] = answer["configuration"]
    may_be_empty = upgrades and answer["upgrade"]
    problems = [
        *([] if configuration or may_be_empty else [NO_CONFIGURATION]),
        *_configuration_problems(configuration),
        *_provision_problems(configuration, provision_default),
        *_policy_problems("action_policies", answer["action_policies"], ".policy"),
        *_policy_problems("opa_policies", answer["opa_policies"], ".rego"),
        *_certificate_problems(answer, csr_ssldir),
    ]
    if len(problems) > PROBLEMS_NAMED:
        problems[PROBLEMS_NAMED:] = [f"and {len(problems) - PROBLEMS_NAMED} more"]
    if problems:
        raise AnswerError("; ".join(problems))
    configured = configuration.get("identity", "").strip()
    if configured and configured != identity:
        return ["configuration.identity in the helper's answer is not the identity of this node"]
    return []


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys stand in the order of their last appearance, which decides between spellings of one."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        members.pop(name, None)
        members[name] = value
    return members


def _number(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise AnswerError("a number in it is too large")
    return number


def _constant(name: str) -> None:
    raise AnswerError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_constant)


def _server_claims(answer: Mapping[str, Any]) -> dict[str, Any]:
    claims = _members(answer.get("server_claims", {}), "server_claims.")
    permissions = _members(claims.get("server_claims.permissions", {}), "server_claims.permissions.")
    return {
        "ou": _text(claims, "server_claims.ou"),
        "exp": _expiry(claims, "server_claims.exp"),
        "collectives": _texts(claims, "server_claims.collectives"),
        "pub_subjects": _texts(claims, "server_claims.pub_subjects"),
        "permissions": {
            name: _boolean(permissions, f"server_claims.permissions.{name}")
            for name in PERMISSIONS
            if f"server_claims.permissions.{name}" in permissions
        },
    }


def _members(value: object, path: str = "") -> dict[str, Any]:
    """What an object holds, by the path from the top of the answer, all in lower case."""
    members = _typed(path.rstrip(".") or "the document", value, dict)
    return {path + name.lower(): member for name, member in members.items() if member is not None}


def _boolean(members: Mapping[str, Any], name: str) -> bool:
    return _typed(name, members.get(name, False), bool)


def _text(members: Mapping[str, Any], name: str) -> str:
    return _unicode(name, members.get(name, ""))


def _texts(members: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = _typed(name, members.get(name, []), list)
    return tuple(_unicode(f"{name}[{place}]", text) for place, text in enumerate(texts))


def _texts_by_name(members: Mapping[str, Any], name: str) -> dict[str, str]:
    texts = _typed(name, members.get(name, {}), dict)
    return {
        _unicode(f"a key of {name}", key): _unicode(_path(name, key), text)
        for key, text in texts.items()
        if text is not None
    }


def _expiry(members: Mapping[str, Any], name: str) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerError(f"{name}: seconds since the epoch are wanted, {_kind(value)} came")
    if value >= YEAR_10000_SECONDS:
        raise AnswerError(f"{name}: seconds since the epoch are wanted, a time after the year 9999 came")
    return int(value)


def _unicode(name: str, value: object) -> str:
    text = _typed(name, value, str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise AnswerError(f"{name}: half of a surrogate pair, which is no text") from None
    return text


def _typed(name: str, value: object, wanted: type[_T]) -> _T:
    if not isinstance(value, wanted):
        raise AnswerError(f"{name}: {_KINDS[wanted]} is wanted, {_kind(value)} came")
    return value


def _kind(value: object) -> str:
    # others than JSON's are in answers that are not JSON yet
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _path(name: str, key: str) -> str:
    """Names a member for a person; the key is the helper's, and may be anything."""
    return f"{name}.{key}" if _PLAIN_NAME.fullmatch(key) else f"{name}.{key[:80]!a}"


def _configuration_problems(configuration: Mapping[str, str]) -> Iterator[str]:
    """The server writes a line `key=value` for each setting, and reads them back line by line."""
    for key, value in configuration.items():
        path = _path("configuration", key)
        if not key or key != key.strip() or key.startswith("#") or "=" in key:
            yield f"{path}: no name of a setting: it is empty, starts with # or holds = or outer white space"
        if _LINE_BREAKING.search(key + value):
            yield f"{path}: a line break or NUL in the key or the value"
        if len(f"{key}={value}".encode()) > LINE_LIMIT_BYTES:
            yield f"{path}: too long: the server reads lines of up to {LINE_LIMIT_BYTES} bytes"


def _provision_problems(configuration: Mapping[str, str], provision_default: bool | None) -> Iterator[str]:
    value = configuration.get(PROVISION_KEY, "").strip().lower()
    if not configuration or value in _FALSE:
        return
    if value:
        yield f"configuration.{PROVISION_KEY}: must be a false of Choria's: 0, no, false, n or f"
    elif provision_default is None:
        yield f"configuration.{PROVISION_KEY}: must be set to false: the node's JWT, which may turn it on, is not known"
    elif provision_default:
        yield f"configuration.{PROVISION_KEY}: must be set to false: the node's JWT turns it on"


def _policy_problems(name: str, policies: Mapping[str, str], suffix: str) -> Iterator[str]:
    """The server checks no more of a name than its end, and that after it has written the configuration."""
    for file_name in policies:
        stem = file_name.removesuffix(suffix)
        plain = _FILE_STEM.fullmatch(stem) and len(file_name.encode()) <= FILE_NAME_LIMIT_BYTES
        if stem == file_name or not plain:
            yield f"{_path(name, file_name)}: a plain file name that ends in {suffix} is wanted"


def _certificate_problems(answer: Mapping[str, Any], csr_ssldir: str | None) -> Iterator[str]:
    """The server ignores all TLS material, without an error, unless it gets certificate, CA and directory."""
    certificate, ca = answer["certificate"], answer["ca"]
    if bool(certificate) != bool(ca):
        given, missing = ("certificate", "ca") if certificate else ("ca", "certificate")
        yield f"{given}: useless without {missing}"
    elif certificate and not (csr_ssldir or answer["ssldir"]):
        yield "ssldir: needed with a certificate"
    if answer["key"] and not certificate:
        yield "key: useless without certificate"
