"""The commands of docs/getting-started.md, run one after the other as they stand there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import documents
from tests.documents import ROOT

PAGE = documents.load(ROOT / "docs" / "getting-started.md")
IDENTITY = "web1.example.net"
NEEDED = ("choria", "unshare", "ip", "openssl", "curl", "git")
#: So long everything may take; most of it is the wait for the broker's election bucket.
TIMEOUT_SECONDS = 400
#: A machine of its own: name, network, /etc. All that is started in it ends with it.
MACHINE = ("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-e")
SETUP = """
set -o pipefail -o history -o histexpand
hostname {identity}
ip link set lo up
mount -t tmpfs tmpfs {overlay} && mkdir {overlay}/upper {overlay}/work
mount -t overlay -o lowerdir=/etc,upperdir={overlay}/upper,workdir={overlay}/work overlay /etc
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clone, and the program made from it as the page says."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"it takes root and the programs {', '.join(NEEDED)}; not there: {', '.join(missing) or 'root'}")
    folder = tmp_path_factory.mktemp("lab")
    files = subprocess.run(("git", "ls-files", "-zco", "--exclude-standard"), cwd=ROOT, capture_output=True, check=True)
    for name in files.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).exists():  # what was removed is listed until that is committed
            (folder / "choria-provisioner" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "choria-provisioner" / name)
    script = [*_commands("The program"), "export -p >environment"]
    _run(folder, ("bash", "-e"), script)
    return folder


@pytest.mark.parametrize(
    ("chapter", "folder", "collectives"),
    [
        ("A network of an organization", "org", ("choria", "web")),
        ("A network with certificates", "x509", ("mcollective", "web")),
    ],
)
def test_a_server_is_provisioned_by_the_commands_alone(
    lab: Path, tmp_path: Path, chapter: str, folder: str, collectives: tuple[str, ...]
) -> None:
    start = [SETUP.format(identity=IDENTITY, overlay=tmp_path), ". ./environment"]
    output = _run(lab, MACHINE, [*start, *_commands(chapter), *_commands("Check, run, see")])
    assert "0 errors, 0 warnings" in output
    assert f"\n{IDENTITY} " in output
    assert "what would be done" in output
    assert "election: ok, leader" in output
    assert "election: ok, candidate" in output

    network = lab / "lab" / folder
    log = [json.loads(line) for line in (network / "provisioner.log").read_text().splitlines()]
    assert [line["identity"] for line in log if line["msg"].startswith("provisioned in")] == [IDENTITY]
    assert not [line for line in log if line["level"] == "error"]
    for collective in collectives:
        assert f"Subscribing node {IDENTITY} to {collective}.node.{IDENTITY}" in (network / "server.log").read_text()
    assert "won the leadership" in (network / "second.log").read_text()


def _commands(chapter: str) -> list[str]:
    """The blocks of commands in a chapter."""
    return [block.text for block in PAGE.blocks if (block.chapter, block.language) == (chapter, "sh")]


def _run(folder: Path, shell: tuple[str, ...], script: list[str]) -> str:
    """Run lines of shell in a folder; all of them have to succeed."""
    done = subprocess.run(
        shell,
        input="\n".join(script),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
