"""The manual page and the shell completions, made from the commands and read by the programs that they are for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from provisioner.cli import main
from tests.conftest import PATIENCE_SECONDS
from tests.packaging.conftest import NAME, need
from tests.packaging.machine import REPOSITORY

PROGRAMS = Path(sys.prefix) / "bin"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all of them."""
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, REPOSITORY / "etc" / "generate.py", folder], check=True)
    return folder


def output(*command: str, **variables: str) -> str:
    """What a command prints that has the program in its path."""
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "HOME": "/nonexistent", **variables}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_manual_has_every_command_and_option(generated: Path) -> None:
    need("mandoc")
    page = output("mandoc", "-T", "ascii", str(generated / f"{NAME}.8"))
    page = " ".join(re.sub(r".\x08", "", page).split())
    for name, command in main.commands.items():
        assert f"{NAME} {name}" in page
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[0] in page


def test_the_manual_is_well_formed(generated: Path) -> None:
    need("mandoc")
    assert output("mandoc", "-T", "lint", "-W", "warning", str(generated / f"{NAME}.8")) == ""


def test_it_is_the_same_whenever_it_is_made(generated: Path, tmp_path: Path) -> None:
    output(sys.executable, str(REPOSITORY / "etc" / "generate.py"), str(tmp_path))
    for file in generated.iterdir():
        assert file.read_text() == (tmp_path / file.name).read_text()


class TestCompletion:
    """Each shell completes commands, options and values by asking the program."""

    @pytest.mark.parametrize(
        ("words", "expected"), [("ru", "run"), ("run --conf", "--config"), ("demo --network o", "org")]
    )
    def test_in_bash(self, generated: Path, words: str, expected: str) -> None:
        need("bash")
        count = len(words.split())
        script = f"""
            source {generated / NAME}
            COMP_WORDS=({NAME} {words}) COMP_CWORD={count}
            _choria_provisioner_completion {NAME}
            echo "${{COMPREPLY[@]}}"
        """
        assert expected in output("bash", "--norc", "-c", script).split()

    @pytest.mark.parametrize(
        ("words", "expected"), [("ru", "run"), ("run --conf", "--config"), ("demo --network o", "org")]
    )
    def test_in_fish(self, generated: Path, words: str, expected: str, tmp_path: Path) -> None:
        need("fish")
        script = f"source {generated / NAME}.fish; complete --do-complete '{NAME} {words}'"
        printed = output("fish", "--no-config", "-c", script, HOME=str(tmp_path))
        assert expected in [line.split("\t")[0] for line in printed.splitlines()]

    @pytest.mark.parametrize(
        ("words", "expected"), [("ru", "run"), ("run --conf", "--config"), ("demo --network o", "org")]
    )
    def test_in_zsh(self, generated: Path, words: str, expected: str, tmp_path: Path) -> None:
        need("zsh")
        # the completion itself needs a terminal; what it would offer does not
        script = f"""
            fpath=({generated} $fpath)
            autoload -Uz compinit && compinit -u -d {tmp_path}/zcompdump
            [[ ${{_comps[{NAME}]}} == _{NAME} ]] || exit 3
            compadd() {{ print -rl -- $completions }}
            _describe() {{ print -rl -- $completions_with_descriptions }}
            words=({NAME} {words}) CURRENT={len(words.split()) + 1}
            _{NAME}
        """
        printed = output("zsh", "-f", "-c", script, HOME=str(tmp_path))
        assert expected in [line.split(":")[0] for line in printed.splitlines()]
