"""Links in the documentation lead somewhere, and the commands in it are ones that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from provisioner import cli
from tests import documents
from tests.documents import ROOT, Page

PAGES = {page.name: page for page in documents.pages()}
MAKEFILE = (ROOT / "Makefile").read_text()
#: What the variables in documented commands stand for.
VARIABLES = {"$O": "--config provisioner.yaml --choria-config choria.cfg", "$NODE": "web1.example.net"}
#: What may stand before a command.
WRAPPERS = re.compile(r"((\w+=\S*|exec|time|sudo|setsid|runuser -u \S+ --) )*")
SEPARATORS = {"|", "||", "&", "&&", ";", ";;", "(", ")", "<", ">", ">>", "2>", "<<"}

every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


@every_page
def test_every_link_leads_somewhere(page: Page) -> None:
    for link in page.links():
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{link}: leads out of the project"
        if anchor:
            assert anchor in documents.load(target).anchors(), f"{link}: there is no such heading"


def test_every_page_and_every_picture_is_linked_to() -> None:
    linked = {(page.path.parent / link).resolve() for page in PAGES.values() for link in _paths(page)}
    files = [*documents.FILES, *(ROOT / "docs" / "pictures").iterdir()]
    lonely = {str(file.relative_to(ROOT)) for file in files if file.resolve() not in linked}
    assert lonely <= {"README.md"}


def test_the_commands_of_every_kind_are_found() -> None:
    """So that the tests below do not pass for want of something to test."""
    commands = {words[0] for page in PAGES.values() for words in _own_commands(page)}
    assert set(cli.main.commands) <= commands
    assert sum(1 for page in PAGES.values() for _ in _makes(page)) > 10


@every_page
def test_every_documented_command_exists_with_its_options(page: Page) -> None:
    for words in _own_commands(page):
        name, *arguments = words
        if name.isupper() or name in {"…", "--help", "--version"}:
            continue
        assert name in cli.main.commands, words
        command = cli.main.commands[name]
        known = {option for each in command.params for option in each.opts} | {"--help"}
        assert {word for word in arguments if word.startswith("--")} <= known, words


@every_page
def test_every_whole_command_is_right_use_of_it(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in page.blocks:
        for line in block.commands():
            for words in _simple_commands(line, "choria-provisioner"):
                if "…" in line or not words or words[0] in {"--help", "--version"}:
                    continue
                name, *arguments = words if not words[0].startswith("-") else ["run", *words]
                for file in filter(re.compile(r"[\w.-]+\.json").fullmatch, arguments):  # that an earlier one has saved
                    Path(file).touch()
                try:
                    with cli.main.commands[name].make_context(name, arguments):
                        pass
                except click.exceptions.Exit:
                    pass
                except click.UsageError as error:
                    pytest.fail(f"{line}: {error.format_message()}")


@every_page
def test_every_make_target_and_variable_exists(page: Page) -> None:
    targets = set(re.findall(r"^([\w-]+)(?: [\w-]+)*:", MAKEFILE, re.MULTILINE))
    targets |= set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    for words in _makes(page):
        for word in words:
            variable, given, _ = word.partition("=")
            if given:
                assert re.search(rf"^{variable} \?=|\$\({variable}\)", MAKEFILE, re.MULTILINE), words
            else:
                assert word in targets, words


@every_page
def test_every_test_that_is_named_exists(page: Page) -> None:
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    every = "\n".join(tests.values())
    for code in page.inline():
        for name in re.findall(r"\btest_\w+\.py\b", code):
            assert any(path.name == name for path in tests), code
        for name in re.findall(r"\b(test_\w+|Test[A-Z]\w+)\b(?!\.py)", code):
            assert re.search(rf"^ *(def|class) {name}\b", every, re.MULTILINE), code


def _paths(page: Page) -> Iterator[Path]:
    for link in page.links():
        path = link.partition("#")[0]
        if path and not re.match(r"\w+:", path):
            yield Path(path)


def _code(page: Page) -> Iterator[str]:
    """All lines of code, in the text and in blocks."""
    yield from page.inline()
    for block in page.blocks:
        yield from block.commands()


def _own_commands(page: Page) -> Iterator[list[str]]:
    """The words after the program's name, in commands that have any; `run` is put in where no command is named."""
    for line in _code(page):
        for program in ("choria-provisioner", "provisioner"):
            for words in _simple_commands(line, program):
                if words:
                    named = not words[0].startswith("-") or words[0] in {"--help", "--version"}
                    yield words if named else ["run", *words]


def _makes(page: Page) -> Iterator[list[str]]:
    for line in _code(page):
        yield from _simple_commands(line, "make")


def _simple_commands(line: str, program: str) -> Iterator[list[str]]:
    """The arguments of a program in a line of shell, without comments, for every time that it is called in it."""
    if program not in line:
        return
    for name, value in VARIABLES.items():
        line = line.replace(name, value)
    command: list[str] = []
    for word in [*_words(line), ";"]:
        if word not in SEPARATORS:
            command.append(word)
            continue
        yield from _arguments(command, program)
        command = []


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line.replace("python -m provisioner", "provisioner"), posix=True, punctuation_chars=True)
    try:
        return list(lexer)
    except ValueError:  # not a line of shell
        return []


def _arguments(command: Sequence[str], program: str) -> Iterator[list[str]]:
    for position, word in enumerate(command):
        if Path(word).name == program:
            if WRAPPERS.fullmatch("".join(f"{before} " for before in command[:position])):
                yield list(command[position + 1 :])
            return
