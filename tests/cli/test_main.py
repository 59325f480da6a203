"""All commands: their help, their hints, and that they are documented."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from provisioner import cli
from tests.cli.conftest import Run

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "commands.md"
COMMANDS = sorted(cli.main.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    _, _, examples = done.out.partition("Example")
    assert f"choria-provisioner {command} " in examples or f"choria-provisioner {command}\n" in examples
    assert max(map(len, done.out.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_use_of_every_command_is_refused_with_a_hint(run: Run, command: str) -> None:
    done = run(command, "--nonsense")
    assert done.code == 2
    assert f"Try 'choria-provisioner {command} --help'" in done.err
    assert "--nonsense" in done.err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
def test_every_command_but_the_demo_needs_a_configuration(run: Run, command: str) -> None:
    parameters = cli.main.commands[command].params
    arguments = [each.name for each in parameters if isinstance(each, click.Argument) and each.required]
    done = run(command, *arguments)
    assert done.code == 2
    assert "Missing option '--config'" in done.err


def test_a_command_that_does_not_exist(run: Run) -> None:
    done = run("chek")
    assert done.code == 2
    assert "chek" in done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_option_is_documented(command: str) -> None:
    text = DOCUMENTATION.read_text()
    _, _, rest = text.partition(f"\n## {command}\n")
    assert rest, f"there is no chapter on {command}"
    chapter = rest.partition("\n## ")[0]
    options = [option for each in cli.main.commands[command].params for option in each.opts if option.startswith("-")]
    common = text.partition("\n## ")[0]
    for option in options:
        assert re.search(rf"`{option}\b", chapter + common), f"{option} is not documented"


def test_no_option_is_documented_that_does_not_exist() -> None:
    known = {option for command in cli.main.commands.values() for each in command.params for option in each.opts}
    known |= {"--help", "--version"}
    assert set(re.findall(r"`(--[a-z-]+)", DOCUMENTATION.read_text())) <= known


def test_these_are_all_commands() -> None:
    assert COMMANDS == ["check", "demo", "discover", "helper", "provision", "run"]
