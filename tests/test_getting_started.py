"""What docs/getting-started.md has the reader write is right, and what it changes in the samples is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from provisioner import config
from provisioner.choria import settings
from tests import documents
from tests.documents import ROOT

PAGE = documents.load(ROOT / "docs" / "getting-started.md")
NETWORKS = ("A network of an organization", "A network with certificates")


def commands(chapter: str) -> str:
    return "".join(block.text for block in PAGE.blocks if (block.chapter, block.language) == (chapter, "sh"))


def written(chapter: str, name: str, folder: Path) -> Path:
    """A file as the commands of a chapter write it."""
    (text,) = re.findall(rf"^cat >{re.escape(name)} <<EOF\n(.*?)^EOF$", commands(chapter), re.MULTILINE | re.DOTALL)
    for file in re.findall(r"\$PWD/([\w.-]+)", text):
        (folder / file).touch()
    (folder / name).write_text(text.replace("$PWD", str(folder)).replace("$(cat issuer.public)", "5a" * 32))
    return folder / name


@pytest.mark.parametrize("chapter", NETWORKS)
def test_the_provisioners_two_files_are_right(chapter: str, tmp_path: Path) -> None:
    conf = config.load(written(chapter, "provisioner.yaml", tmp_path))
    assert conf.warnings == ()
    choria = settings.load(
        written(chapter, "choria.cfg", tmp_path),
        environ={},
        cwd=tmp_path,
        provisioning_password=conf.broker_provisioning_password,
    )
    assert choria.warnings == ()


def test_an_interactive_shell_takes_the_commands_for_what_they_are() -> None:
    """One with a history replaces what follows a ``!``, unless it stands in single quotes."""
    for block in PAGE.blocks:
        if block.language == "sh":
            assert not re.search(r"![^\s=(]", re.sub(r"'[^']*'", "", block.text)), block.text


@pytest.mark.parametrize("chapter", NETWORKS)
def test_the_broker_and_the_provisioner_agree(chapter: str, tmp_path: Path) -> None:
    conf = config.load(written(chapter, "provisioner.yaml", tmp_path))
    broker = written(chapter, "broker.cfg", tmp_path).read_text()
    assert f"provisioning.client_password = {conf.broker_provisioning_password}\n" in broker
    assert f"--token {conf.token} " in commands(chapter)


@pytest.mark.parametrize("chapter", NETWORKS)
def test_what_is_changed_in_the_sample_helper_is_there(chapter: str) -> None:
    (script,) = re.findall(r"^sed (.*?) >helper$", commands(chapter), re.MULTILINE | re.DOTALL)
    (name,) = re.findall(r"\$SAMPLES/(\S+)", script)
    sample = (ROOT / "etc" / "helpers" / name).read_text()
    patterns = re.findall(r"s\|(\^[^|]+)\|", script)
    assert len(patterns) > 2
    for pattern in patterns:
        assert len(re.findall(pattern, sample, re.MULTILINE)) == 1, pattern
