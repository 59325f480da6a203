"""Builds the real parts, and shows their logs when a test fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.interop.network import Network

SOURCES = Path(__file__).with_name("choria")
#: Ignored by git. Go finds out by itself what of it has to be built anew.
PROGRAM = Path(__file__).parents[2] / "build" / "interop" / "choria"
NO_GO = (
    "there is no go command: the real Choria parts are built with Go 1.25 or newer, "
    "which is Debian's package golang-go or from https://go.dev/dl/"
)

#: What a test made.
NETWORKS = pytest.StashKey[list[Network]]()


@pytest.fixture(scope="session")
def program() -> Path:
    """The real parts, built from source with what go.sum pins."""
    go = shutil.which("go")
    if go is None:
        if os.environ.get("CI") == "true":
            pytest.fail(NO_GO)
        pytest.skip(NO_GO)
    build = (go, "build", "-buildvcs=false", "-o", PROGRAM, ".")
    done = subprocess.run(build, cwd=SOURCES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the real Choria parts cannot be built:\n{done.stderr}"
    return PROGRAM


class MakeNetwork(Protocol):
    def __call__(self, kind: str, *, election_ttl: str = ...) -> Network: ...


@pytest.fixture
def make_network(program: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeNetwork]:
    """Makes a network of one kind; all that is started in it has ended after the test."""
    networks = request.node.stash[NETWORKS] = []
    with contextlib.ExitStack() as stack:

        def make(kind: str, *, election_ttl: str = "0s") -> Network:
            network = Network(program, tmp_path / kind, kind, election_ttl=election_ttl)
            stack.callback(network.close)
            networks.append(network)
            return network

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every log when a test fails."""
    report = yield
    networks = item.stash.get(NETWORKS, []) if report.failed else []
    report.sections += [(str(network.directory / name), text) for network in networks for name, text in network.logs()]
    return report
