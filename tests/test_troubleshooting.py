"""Every line that docs/troubleshooting.md quotes is one that the code can write, at the level that it names."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests import documents
from tests.documents import ROOT

PAGE = documents.load(ROOT / "docs" / "troubleshooting.md")
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "fatal",
}
#: What servers, brokers, OpenSSL and the system say.
FOREIGN = {
    "Authorization Violation",
    "unable to get local issuer certificate",
    "Hostname mismatch, certificate is not valid for 'broker.example.net'",
    "certificate has expired",
    "connection refused",
    "No such file or directory",
    "No space left on device",
    "Permission denied",
    "Address already in use",
    "no such host",
    "expecting value",
    "there is no /etc/choria-provisioner/nodes/web2.example.net",
    "'web 1'",
    "RS256, RS384, RS512",
}
#: What text of our own is put together with.
JOINTS = ("; ", ": ", ", ", " and ", " (")
#: Texts with fewer letters of their own would fit anything.
LETTERS = 3

_CONVERSION = re.compile(r"%[-+0 #]*\d*(?:\.\d+)?[sdrfg]")
_ATOM = re.compile(r"\S+|[-+]?[\d.]+ s|")
_QUOTED_LEVEL = re.compile(r"(debug|info|warning|error|fatal) +")


@attrs.frozen
class Text:
    """A text in the code.

    :ivar parts: what stands between its variable parts
    :ivar levels: at which it is logged; empty when it is not, or not as it stands
    """

    parts: tuple[str, ...]
    levels: frozenset[str] = frozenset()


def quotes(language: str) -> Iterator[str]:
    for block in PAGE.blocks:
        if block.language == language:
            yield from block.lines


@pytest.mark.parametrize("line", [*quotes("log"), *quotes("check")])
def test_a_quoted_line_is_one_of_ours(line: str) -> None:
    level = _QUOTED_LEVEL.match(line)
    message = line[level.end() :] if level else line
    assert _is_ours(message)


@pytest.mark.parametrize("line", [line for line in quotes("log") if _QUOTED_LEVEL.match(line)])
def test_it_is_logged_at_this_level(line: str) -> None:
    level = _QUOTED_LEVEL.match(line)
    assert level
    message = line[level.end() :]
    logged = [text for text in texts() if text.levels and _holes(text.parts, message)]
    # a warning about the configuration is logged as the text that it is
    assert any(level[1] in text.levels for text in logged) or (level[1] == "warning" and _is_ours(message))


def test_the_lines_to_be_alerted_of_hold_what_is_logged() -> None:
    """Those in docs/operating.md are parts of lines."""
    page = documents.load(ROOT / "docs" / "operating.md")
    table = page.prose[page.prose.index("Lines worth an alert:") + 4 :]
    lines = [code for row in table[: table.index("")] for code in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(lines) > 5
    known = ["…".join(text.parts) for text in texts()]
    for part in (part for line in lines for part in re.split(r"…|: |\d+", line)):
        assert any(part.strip() in each for each in known), part


def test_the_page_quotes_something() -> None:
    assert len(list(quotes("log"))) > 40
    assert len(list(quotes("check"))) > 1


@pytest.mark.parametrize(
    "line",
    [
        "discovered nobody at all",
        "could not provision after 0.01 s: because of the weather",
        "cannot connect, trying again in 1.4 s: nats://x:4222: the broker is on holiday; check the calendar",
    ],
)
def test_an_invented_line_is_not_ours(line: str) -> None:
    assert not _is_ours(line)


@functools.cache
def _is_ours(text: str) -> bool:
    """Whether a text is one of the code's, each of its variable parts a word or such a text again."""
    if _ATOM.fullmatch(text) or text in FOREIGN:
        return True
    for known in texts():
        for holes in _holes(known.parts, text):
            if all(map(_is_ours, holes)):
                return True
    return any(
        _is_ours(before) and _is_ours(after.removesuffix(")") if joint == " (" else after)
        for joint in JOINTS
        for before, after in _splits(text, joint)
    )


def _splits(text: str, joint: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(re.escape(joint), text):
        yield text[: match.start()], text[match.end() :]


def _holes(parts: tuple[str, ...], text: str) -> list[tuple[str, ...]]:
    """What the variable parts of a text may be, in all ways in which it fits."""
    first, *rest = parts
    if not text.startswith(first):
        return []
    text = text[len(first) :]
    if not rest:
        return [()] if not text else []
    if rest == [""]:
        return [(text,)]
    following = rest[0]
    starts = (
        range(len(text) + 1) if not following else [match.start() for match in re.finditer(re.escape(following), text)]
    )
    return [(text[:start], *others) for start in starts for others in _holes((following, *rest[1:]), text[start:])]


@functools.cache
def texts() -> tuple[Text, ...]:
    """All texts in the code that are no documentation of it."""
    found: set[Text] = set()
    for file in (ROOT / "provisioner").rglob("*.py"):
        if "simulate" not in file.parts:
            found |= set(_texts(file))
    return tuple(text for text in found if sum(map(str.isalpha, "".join(text.parts))) >= LETTERS)


def _texts(file: Path) -> Iterator[Text]:
    tree = ast.parse(file.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    levels = dict(_logged(tree))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in documentation | inside:
            continue
        if isinstance(node, ast.JoinedStr):
            yield Text(_parts(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = tuple(part.replace("%%", "%") for part in _CONVERSION.split(node.value))
            yield Text(parts, levels.get(id(node), frozenset()))


def _logged(tree: ast.AST) -> Iterator[tuple[int, frozenset[str]]]:
    """The texts that are logged, with the levels."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        name = call.func.attr
        if name in LEVELS:
            yield id(call.args[0]), frozenset({LEVELS[name]})
        elif name == "log" and len(call.args) > 1:
            named = {node.attr.lower() for node in ast.walk(call.args[0]) if isinstance(node, ast.Attribute)}
            yield id(call.args[1]), frozenset(LEVELS[each] for each in named & set(LEVELS))


def _parts(joined: ast.JoinedStr) -> tuple[str, ...]:
    parts = [""]
    for value in joined.values:
        if isinstance(value, ast.Constant):
            parts[-1] += str(value.value)
        else:
            parts.append("")
    return tuple(parts)
