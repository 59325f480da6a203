"""The provisioner's own configuration file, ``provisioner.yaml``."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import re2
import yaml

from provisioner import durations
from provisioner.errors import ConfigurationError

#: Certificate names no node may get when ``cert_deny_list`` names none: those of people and of privileged people.
DEFAULT_DENY_LIST = (r"\.privileged.mcollective$", r"\.privileged.choria$", r"\.mcollective$", r"\.choria$")
#: The shortest time between two discoveries.
MIN_INTERVAL_SECONDS = 60.0

#: The component whose startup events are listened for.
DEFAULT_COMPONENT = "provision_mode_server"

_TAG = "tag:yaml.org,2002:"
_BOOLEAN_TAG = f"{_TAG}bool"
_INTEGER_TAG = f"{_TAG}int"
_NULL_TAG = f"{_TAG}null"
_MERGE_TAG = f"{_TAG}merge"
_NUMBER_TAGS = (_INTEGER_TAG, f"{_TAG}float")
# a date and a lone = are texts to the Go original
_STRING_TAGS = (f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value")
_KINDS = dict.fromkeys(_NUMBER_TAGS, "number") | dict.fromkeys(_STRING_TAGS, "string") | {_BOOLEAN_TAG: "boolean"}

# what YAML 1.1 takes for a boolean, as the Go original does
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "y"), True) | dict.fromkeys(("false", "no", "off", "n"), False)
_DECIMAL = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")
_SUBJECT_TOKEN = re.compile(r"[^\s\x00-\x1f\x7f-\x9f.*>]+")
_PLAIN = re.compile(r"[A-Za-z0-9_.:+-]{1,60}")
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")


class Pattern(Protocol):
    """A compiled RE2 pattern."""

    @property
    def pattern(self) -> str:
        """The text it was compiled from."""

    def search(self, text: str) -> object | None:
        """Look for the pattern anywhere in a text; None when it is not there."""


@attrs.frozen(kw_only=True)
class Features:
    """What the provisioner does to a node beyond configuring it."""

    pki: bool = False
    jwt: bool = False
    ed25519: bool = False
    upgrades: bool = False


@attrs.define(kw_only=True, eq=False, on_setattr=attrs.setters.frozen)
class Config:
    """What ``provisioner.yaml`` says, defaults filled in, and whether provisioning is paused right now.

    All but the pause flag stays as it was loaded. Times are in seconds.

    :ivar logfile: a path, or ``stdout``, ``/dev/stdout``, ``stderr`` or ``discard`` in any case
    :ivar helper: the command and its arguments
    :ivar cert_deny_list: a certificate name that any of them is found in is refused
    :ivar allow: empty: hosts of any identity
    :ivar retry_backoff: whether a host that keeps failing is left alone for pauses that grow
    :ivar jwt_verify_cert: an existing file or 64 hex digits
    :ivar monitor_address: empty: all addresses
    :ivar log_format: ``json``, ``text`` or None: as fits the destination
    :ivar warnings: one line each, what the operator should know although it stops nothing
    :ivar unknown_keys: those of the warnings that are about unknown keys
    """

    path: Path
    warnings: tuple[str, ...] = ()
    unknown_keys: frozenset[str] = frozenset()
    workers: int
    interval: float
    logfile: str
    loglevel: str
    helper: tuple[str, ...]
    token: str = attrs.field(repr=False)
    lifecycle_component: str
    choria_insecure: bool
    site: str
    monitor_port: int
    broker_provisioning_password: str = attrs.field(repr=False)
    cert_deny_list: tuple[Pattern, ...]
    jwt_verify_cert: str
    jwt_signing_key: str
    jwt_signing_token: str
    server_jwt_validity: float
    rego_policy: str
    leader_election: bool
    upgrades_repository: str
    upgrades_optional: bool
    features: Features
    helper_timeout: float
    shutdown_grace: float
    monitor_address: str
    log_format: str | None
    retry_backoff: bool
    allow: tuple[Pattern, ...]
    deny: tuple[Pattern, ...]

    # by the monotonic clock, when provisioning has to pause; -inf: it has
    _running_until: float = attrs.field(default=math.inf, init=False, repr=False, on_setattr=attrs.setters.NO_OP)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    @property
    def paused(self) -> bool:
        """Whether nothing is to be provisioned at the moment."""
        with self._lock:
            return time.monotonic() >= self._running_until

    def pause(self) -> None:
        """Provision nothing until further notice."""
        with self._lock:
            self._running_until = -math.inf

    def resume(self, *, until: float = math.inf) -> None:
        """Provision, again or still.

        :param until: when to pause without further notice, by the monotonic clock
        """
        with self._lock:
            self._running_until = until

    def flip(self) -> None:
        """Pause when running, resume when paused."""
        with self._lock:
            self._running_until = math.inf if time.monotonic() >= self._running_until else -math.inf

    def reason_refused(self, identity: str) -> str | None:
        """Why a host is not to be provisioned here, by :attr:`deny` and then :attr:`allow`; None when it may be."""
        for pattern in self.deny:
            if pattern.search(identity):
                return f"{pattern.pattern!r} in deny is found in it"
        if self.allow and not any(pattern.search(identity) for pattern in self.allow):
            return "no pattern in allow is found in it"
        return None


def load(path: Path) -> Config:
    """Read and check a configuration file.

    What the Go original runs with is taken; where it guesses or fails later, this refuses now.

    :raises ConfigurationError: with every problem, and the warnings among them, one line each: file, line, key, what
        was given, what is wanted. The values of ``token`` and ``broker_provisioning_password`` are never in it.
    """
    reading = _Reading(path)
    values = reading.mapping(_document(path), _SCHEMA)
    _check_together(values, reading)
    if reading.problems:
        # the warnings too: a key that is missing may be there under another name
        raise ConfigurationError(_lines(path, reading.problems + reading.warnings))
    values["workers"] = values["workers"] or os.cpu_count() or 1
    values["features"] = Features(**values["features"])
    del values["broker_port"]
    unknown_keys = frozenset(_lines(path, reading.unknown))
    return Config(path=path, warnings=_lines(path, reading.warnings), unknown_keys=unknown_keys, **values)


class _UnfitError(Exception):
    """A value is not what its key takes; the text says what would be."""


@attrs.frozen
class _Key:
    """One row of the schema.

    :ivar read: turns a node into the value, or raises :class:`_UnfitError`
    :ivar default: the value without the key, or with a key that has none
    :ivar many: the value is a list, ``read`` takes one element, and an empty list means the default
    :ivar nullable: whether the key may be there without a value
    :ivar secret: whether its value must not be shown
    :ivar caution: says what is surprising about a right value, if anything
    """

    read: Callable[[yaml.Node], Any]
    default: Any
    many: bool = False
    nullable: bool = True
    secret: bool = False
    caution: Callable[[yaml.Node], str] = lambda _: ""


def _string(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _UnfitError("a string")
    if node.tag not in _STRING_TAGS:
        raise _UnfitError("a string: put it in quotes")
    text: str = node.value
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _UnfitError("text of valid characters")
    return text


def _string_or(default: str) -> Callable[[yaml.Node], str]:
    return lambda node: _string(node) or default


def _boolean(node: yaml.Node) -> bool:
    if not isinstance(node, yaml.ScalarNode) or node.tag != _BOOLEAN_TAG or node.value.lower() not in _BOOLEANS:
        raise _UnfitError("true or false, without quotes")
    return _BOOLEANS[node.value.lower()]


def _integer(minimum: int, maximum: int = 10**18) -> Callable[[yaml.Node], int]:
    wanted = f"a whole number from {minimum}" + (f" to {maximum}" if maximum < 10**18 else "") + ", without quotes"

    def read(node: yaml.Node) -> int:
        if not isinstance(node, yaml.ScalarNode) or node.tag != _INTEGER_TAG or not _DECIMAL.fullmatch(node.value):
            raise _UnfitError(wanted)
        if not minimum <= int(node.value) <= maximum:
            raise _UnfitError(wanted)
        return int(node.value)

    return read


def _duration(default: float, fits: Callable[[float], bool], wanted: str, *, nullable: bool = True) -> _Key:
    def read(node: yaml.Node) -> float:
        # a number is a text without a unit, so that the message can be about that
        bare = isinstance(node, yaml.ScalarNode) and node.tag in (*_NUMBER_TAGS, _NULL_TAG)
        try:
            seconds = durations.parse(node.value if bare else _string(node))
        except durations.DurationError as error:
            raise _UnfitError(str(error)) from error
        if not fits(seconds):
            raise _UnfitError(wanted)
        return seconds

    return _Key(read, default, nullable=nullable, caution=_month)


def _month(node: yaml.Node) -> str:
    return "is a month of 30 days; a minute is 1m" if durations.is_month(node.value) else ""


def _one_of(*names: str, default: str = "") -> Callable[[yaml.Node], str]:
    def read(node: yaml.Node) -> str:
        if (name := _string(node) or default) not in names:
            raise _UnfitError(f"one of {', '.join(names)}")
        return name

    return read


def _command(node: yaml.Node) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(_string(node)))
    except ValueError as error:
        raise _UnfitError("a command line as in a shell, its quotes closed") from error


def _component(node: yaml.Node) -> str:
    name = _string(node) or DEFAULT_COMPONENT
    if not _SUBJECT_TOKEN.fullmatch(name):
        raise _UnfitError("one part of a subject: no dots, no > and *, no white space")
    return name


def _pattern(node: yaml.Node) -> Pattern:
    text = _string(node)
    text = text.strip("/") if len(text) > 2 and text[0] == text[-1] == "/" else text
    if not text:
        raise _UnfitError("a pattern (an empty one is in every name)")
    try:
        return _compile(text)
    except re2.error as error:
        # the rest of the reason repeats a part of the pattern
        reason = error.args[0].decode(errors="replace").partition(":")[0]
        raise _UnfitError(f"an RE2 pattern ({reason})") from error


def _compile(text: str) -> Pattern:
    options = re2.Options()
    options.log_errors = False
    pattern: Pattern = re2.compile(text, options)
    return pattern


def _url(node: yaml.Node) -> str:
    text = _string(node)
    try:
        url = urllib.parse.urlsplit(text)
    except ValueError as error:
        raise _UnfitError("a URL that starts with https:// or http://") from error
    if text and not (url.scheme in ("http", "https") and url.netloc):
        raise _UnfitError("a URL that starts with https:// or http://")
    return text


_FEATURES = {name: _Key(_boolean, False) for name in ("pki", "jwt", "ed25519", "upgrades")}

_SCHEMA: dict[str, _Key | dict[str, _Key]] = {
    "workers": _Key(_integer(0), 0),
    "interval": _duration(60.0, lambda seconds: seconds >= MIN_INTERVAL_SECONDS, "1m or more", nullable=False),
    "logfile": _Key(_string_or("stdout"), "stdout"),
    "loglevel": _Key(_one_of("debug", "info", "warn", "error", "fatal", default="info"), "info"),
    "helper": _Key(_command, (), secret=True),
    "token": _Key(_string, "", secret=True),
    "lifecycle_component": _Key(_component, DEFAULT_COMPONENT),
    "choria_insecure": _Key(_boolean, False),
    "site": _Key(_string, ""),
    "monitor_port": _Key(_integer(0, 65535), 0),
    "broker_provisioning_password": _Key(_string, "", secret=True),
    "cert_deny_list": _Key(_pattern, tuple(_compile(text) for text in DEFAULT_DENY_LIST), many=True),
    "jwt_verify_cert": _Key(_string, ""),
    "jwt_signing_key": _Key(_string, ""),
    "jwt_signing_token": _Key(_string, ""),
    "server_jwt_validity": _duration(365 * 86400.0, lambda seconds: seconds > 0, "more than 0"),
    "rego_policy": _Key(_string, ""),
    "leader_election": _Key(_boolean, False),
    "upgrades_repository": _Key(_url, ""),
    "upgrades_optional": _Key(_boolean, False),
    "features": _FEATURES,
    "helper_timeout": _duration(10.0, lambda seconds: seconds > 0, "more than 0"),
    "shutdown_grace": _duration(20.0, lambda seconds: seconds >= 0, "0s or more"),
    "monitor_address": _Key(_string, ""),
    "log_format": _Key(_one_of("json", "text"), None),
    "retry_backoff": _Key(_boolean, True),
    "allow": _Key(_pattern, (), many=True),
    "deny": _Key(_pattern, (), many=True),
    # a leftover of old versions
    "broker_port": _Key(lambda _: None, None),
}


@attrs.define
class _Reading:
    """What was found in the file so far; a line of 0 is one that is not known.

    :ivar unknown: those of the warnings that are about unknown keys
    :ivar found: the keys that are in the file, with their lines
    :ivar failed: those of them whose value is not used
    """

    path: Path
    problems: list[tuple[int, str]] = attrs.field(factory=list)
    warnings: list[tuple[int, str]] = attrs.field(factory=list)
    unknown: list[tuple[int, str]] = attrs.field(factory=list)
    found: dict[str, int] = attrs.field(factory=dict)
    failed: set[str] = attrs.field(factory=set)

    def mapping(
        self, node: yaml.MappingNode, schema: Mapping[str, _Key | dict[str, _Key]], prefix: str = ""
    ) -> dict[str, Any]:
        """Read a mapping by its schema; keys that are missing or wrong get their defaults."""
        values = {name: self._default(row) for name, row in schema.items()}
        for name, value in self._pairs(node, schema, prefix):
            row = schema[name]
            self.found[prefix + name] = _line(value)
            values[name] = (
                self._nested(name, row, value) if isinstance(row, dict) else self._value(prefix + name, row, value)
            )
        return values

    def problem(self, key: str, given: str, wanted: str, *, because: str = "") -> None:
        """Note a problem with a key, at its line or, when it is missing, at that of the key that wants it."""
        self.failed.add(key)
        line = self.found.get(key) or self.found.get(because, 0)
        self.problems.append((line, f"{key}: given {given}, wanted {wanted}"))

    def _default(self, row: _Key | dict[str, _Key]) -> Any:
        return {name: key.default for name, key in row.items()} if isinstance(row, dict) else row.default

    def _pairs(
        self, node: yaml.MappingNode, schema: Mapping[str, object], prefix: str
    ) -> Iterator[tuple[str, yaml.Node]]:
        """Give the known keys of a mapping with their values, each once; say what is wrong with the others."""
        first: dict[str, int] = {}
        for key, value in node.value:
            line = _line(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                self.problems.append((line, f"given a key that is no name, wanted one like {next(iter(schema))}"))
                continue
            # the Go original takes keys in any letter case
            name = key.value if key.value in schema else key.value.lower()
            shown = prefix + _shown_key(key.value)
            if name in first:
                self.problems.append((line, f"{shown}: given twice, first in line {first[name]}, wanted once"))
                continue
            first[name] = line
            if name not in schema:
                self.unknown.append((line, f"{shown}: unknown key, ignored{_suggestion(name, prefix)}"))
                self.warnings.append(self.unknown[-1])
                continue
            if name != key.value:
                self.warnings.append((line, f"{shown}: read as {prefix}{name}, which is how to write it"))
            yield name, value

    def _nested(self, name: str, schema: dict[str, _Key], node: yaml.Node) -> dict[str, Any]:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, schema, prefix=f"{name}.")
        if node.tag != _NULL_TAG:
            self.problem(name, _given(node), f"a mapping, as in {name}: {{{next(iter(schema))}: true}}")
        return dict(self._default(schema))

    def _value(self, key: str, row: _Key, node: yaml.Node) -> Any:
        if node.tag == _NULL_TAG and row.nullable:
            return row.default
        if not row.many:
            return self._one(key, row, node)
        if not isinstance(node, yaml.SequenceNode):
            self.problem(key, _given(node), "a list")
            return row.default
        return tuple(self._one(key, row, element) for element in node.value) or row.default

    def _one(self, key: str, row: _Key, node: yaml.Node) -> Any:
        self.found[key] = _line(node)
        try:
            value = row.read(node)
        except _UnfitError as error:
            self.problem(key, _given(node, secret=row.secret), str(error))
            return row.default
        if caution := row.caution(node):
            self.warnings.append((_line(node), f"{key}: given {_given(node)}, which {caution}"))
        return value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _given(node: yaml.Node, *, secret: bool = False) -> str:
    """Describe a node in a few words of one line."""
    if not isinstance(node, yaml.ScalarNode):
        return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
    if node.tag == _NULL_TAG:
        return "nothing"
    kind = _KINDS.get(node.tag, "tagged value")
    if secret:
        return f"a {kind} (not shown)"
    plain = kind != "string" and _PLAIN.fullmatch(node.value)
    return f"the {kind} {node.value if plain else _shown(node.value)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _shown_key(text: str) -> str:
    """Show a key, but not what follows a colon in it: that was to be a value, maybe a secret one."""
    name, colon, _ = text.partition(":")
    return (name if _PLAIN.fullmatch(name) else _shown(name)) + ("..." if colon else "")


def _suggestion(name: str, prefix: str) -> str:
    full_names = {key: key for key in _SCHEMA} | {key: f"features.{key}" for key in _FEATURES}
    near = difflib.get_close_matches(name, _FEATURES if prefix else full_names, n=1)
    return f"; did you mean {full_names[near[0]]}?" if near else ""


def _check_together(values: dict[str, Any], reading: _Reading) -> None:
    """Apply the rules between keys; a value that is wrong by itself is not complained about again."""
    features = values["features"]
    switch = "features.ed25519" if features["ed25519"] else "features.jwt"
    features["jwt"] = features["jwt"] or features["ed25519"]
    if features["pki"] and features["ed25519"]:
        reading.problem("features.pki", "true together with features.ed25519", "only one of them")
    needed = [("helper", "the command line of the helper", "")]
    if features["jwt"]:
        needed.append(("jwt_verify_cert", f"a file or 64 hex digits for {switch}", switch))
    if features["ed25519"]:
        needed.append(("jwt_signing_key", f"a file for {switch}", switch))
    if features["upgrades"] and not values["upgrades_optional"]:
        wanted = "a URL for features.upgrades, or upgrades_optional: true"
        needed.append(("upgrades_repository", wanted, "features.upgrades"))
    for key, wanted, because in needed:
        if not values[key] and key not in reading.failed:
            reading.problem(key, "nothing", wanted, because=because)
    certificate = values["jwt_verify_cert"]
    if features["jwt"] and certificate and not (_HEX_KEY.fullmatch(certificate) or _is_file(certificate)):
        reading.problem("jwt_verify_cert", f"{_shown(certificate)}, which is no file", "a file or 64 hex digits")


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _document(path: Path) -> yaml.MappingNode:
    """Read a file down to the nodes of its one YAML mapping; values stay the texts they are."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError([f"{path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError([f"{path}:{line}: given bytes that are not UTF-8, wanted UTF-8"]) from error
    try:
        node = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        # not "from error": that one quotes the line, which may be a secret's
        raise ConfigurationError(_lines(path, [_syntax_problem(error, text)])) from None
    except RecursionError as error:
        raise ConfigurationError([f"{path}: given brackets in brackets without end, wanted a mapping"]) from error
    if node is None:
        raise ConfigurationError([f"{path}: given an empty file, wanted at least the key helper"])
    if not isinstance(node, yaml.MappingNode):
        given = _given(node, secret=True)
        raise ConfigurationError([f"{path}:{_line(node)}: given {given}, wanted keys, as in helper: /path"])
    return node


class _Loader(yaml.SafeLoader):
    """The loader of PyYAML, with the booleans ``y`` and ``n`` that YAML 1.1 and the Go original have."""


_Loader.add_implicit_resolver(_BOOLEAN_TAG, re.compile("[yYnN]$"), list("yYnN"))

#: What PyYAML says about common slips, and how to say it to an operator. Some of its own texts quote the file.
_SYNTAX = {
    r"'\t'": "given a tab, wanted spaces",
    "cannot start any token": "given text that starts with a special character, wanted it in quotes",
    "undefined alias": "given text that starts with *, wanted it in quotes",
    "mapping values are not allowed": "given a colon where none can be, wanted text with a colon in quotes",
    "found unexpected end of stream": "given a quote that is never closed, wanted it closed",
    "another document": "given a second document after ---, wanted one",
}


def _syntax_problem(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1, "given a control character, wanted text"
    if not isinstance(error, yaml.MarkedYAMLError):
        return 0, "not YAML"
    problem = error.problem or ""
    # for what the end of the file cuts off, the place where it began is the better one
    mark = error.context_mark if "end" in problem and error.context_mark else error.problem_mark
    line = mark.line + 1 if mark else 0
    for part, explanation in _SYNTAX.items():
        if part in problem:
            return line, explanation
    return line, "not YAML: " + re.sub(r"'([^']*)'", _without_quotation, problem)


def _without_quotation(match: re.Match[str]) -> str:
    """Leave out a quoted text, unless it is a single character or a token like <stream end>."""
    return match[0] if len(match[1]) <= 1 or match[1].startswith("<") else "..."


def _lines(path: Path, findings: list[tuple[int, str]]) -> tuple[str, ...]:
    """Make the lines of a report, in the order of the file."""
    return tuple(
        f"{path}:{line}: {text}" if line else f"{path}: {text}"
        for line, text in sorted(findings, key=lambda finding: finding[0] or sys.maxsize)
    )
