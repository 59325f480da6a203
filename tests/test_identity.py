"""Identities: which ones may become a part of a subject, and what this machine is called by default."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import identity
from provisioner.choria.identity import reason_insane


@pytest.mark.parametrize(
    "name",
    ["a", "node1.example.net", "NODE-1_x", "köln.example.net", "a" * 255, "ä" * 127, "$x", "a@b", "192.0.2.1", "::1"],
)
def test_a_plain_name_is_sane(name: str) -> None:
    assert reason_insane(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is empty"),
        ("a" * 256, "is longer than 255 bytes"),
        ("ä" * 128, "is longer than 255 bytes"),
        ("a b", "holds white space or control characters"),
        ("a\u00a0b", "holds white space or control characters"),
        ("a\u2028b", "holds white space or control characters"),
        ("a\r\nPUB x 0\r\n\r\n", "holds white space or control characters"),
        ("a\tb", "holds white space or control characters"),
        ("a\x00b", "holds white space or control characters"),
        ("a\x7f", "holds white space or control characters"),
        ("a\x9b", "holds white space or control characters"),
        ("a.*", "holds * or >"),
        ("a.>", "holds * or >"),
        ("a*b", "holds * or >"),
        (".", "has an empty part (a leading, trailing or double dot)"),
        (".a", "has an empty part (a leading, trailing or double dot)"),
        ("a.", "has an empty part (a leading, trailing or double dot)"),
        ("a..b", "has an empty part (a leading, trailing or double dot)"),
        ("a\ud800", "is not valid Unicode"),
    ],
)
def test_a_name_that_would_break_a_subject_is_refused_with_a_reason(name: str, reason: str) -> None:
    assert reason_insane(name) == reason


@given(st.text(st.characters(codec=None)))
def test_a_sane_identity_is_exactly_one_run_of_subject_tokens(name: str) -> None:
    if reason_insane(name) is None:
        assert 1 <= len(name.encode()) <= identity.MAX_IDENTITY_BYTES
        assert name.split() == [name]
        assert all(name.split("."))
        assert not {"*", ">"} & set(name)


def resolved(*addresses: str) -> Any:
    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror("unknown name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    return getaddrinfo


def reverse(**names: str) -> Any:
    def gethostbyaddr(address: str) -> tuple[str, list[str], list[str]]:
        try:
            return names["ip_" + address.replace(".", "_")], [], [address]
        except KeyError:
            raise socket.herror("unknown address") from None

    return gethostbyaddr


def test_a_host_name_with_two_dots_is_the_identity() -> None:
    found = identity.own_identity(
        gethostname=lambda: "n1.example.net",
        getaddrinfo=resolved(),
        gethostbyaddr=reverse(),
        fact=lambda _: "facter.example.net",
    )
    assert found == "n1.example.net"


def test_a_short_host_name_is_completed_by_the_reverse_look_up_of_its_first_address() -> None:
    found = identity.own_identity(
        gethostname=lambda: "n1",
        getaddrinfo=resolved("192.0.2.1", "192.0.2.2"),
        gethostbyaddr=reverse(ip_192_0_2_1="n1.example.net.", ip_192_0_2_2="other.example.net"),
        fact=lambda _: "facter.example.net",
    )
    assert found == "n1.example.net"


@pytest.mark.parametrize(
    ("getaddrinfo", "gethostbyaddr"),
    [
        (resolved(), reverse()),
        (resolved("192.0.2.1"), reverse()),
        (resolved("127.0.0.1"), reverse(ip_127_0_0_1="localhost")),
        (lambda *_, **__: [], reverse()),
    ],
)
def test_without_a_usable_reverse_look_up_facter_is_asked(getaddrinfo: Any, gethostbyaddr: Any) -> None:
    found = identity.own_identity(
        gethostname=lambda: "n1",
        getaddrinfo=getaddrinfo,
        gethostbyaddr=gethostbyaddr,
        fact={"networking.fqdn": "facter.example.net"}.__getitem__,
    )
    assert found == "facter.example.net"


def test_without_facter_the_short_host_name_is_the_identity() -> None:
    found = identity.own_identity(
        gethostname=lambda: "n1", getaddrinfo=resolved(), gethostbyaddr=reverse(), fact=lambda _: ""
    )
    assert found == "n1"


@pytest.fixture
def path_with_facter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for PATH in which a test may place a program called facter."""
    monkeypatch.setattr(identity, "FACTER_DIRECTORY", str(tmp_path / "absent"))
    return tmp_path


def write_facter(directory: Path, script: str) -> dict[str, str]:
    program = directory / "facter"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    return {"PATH": str(directory)}


def test_facter_gives_the_fact_that_is_asked_for(path_with_facter: Path) -> None:
    environ = write_facter(path_with_facter, 'echo "$1.example.net"\n')
    assert identity.fact("networking.fqdn", environ) == "networking.fqdn.example.net"


def test_a_missing_facter_gives_nothing(path_with_facter: Path) -> None:
    assert identity.fact("networking.fqdn", {"PATH": str(path_with_facter)}) == ""
    assert identity.fact("networking.fqdn", {}) == ""


def test_a_failing_facter_gives_nothing(path_with_facter: Path) -> None:
    environ = write_facter(path_with_facter, "echo half.an.answer; exit 1\n")
    assert identity.fact("networking.fqdn", environ) == ""


def test_a_facter_that_cannot_be_run_gives_nothing(path_with_facter: Path) -> None:
    environ = write_facter(path_with_facter, "")
    (path_with_facter / "facter").write_text("#!/nonexistent/interpreter\n")
    assert identity.fact("networking.fqdn", environ) == ""


def test_a_hanging_facter_is_given_up(path_with_facter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "FACTER_TIMEOUT_SECONDS", 0.05)
    environ = write_facter(path_with_facter, "exec sleep 600\n") | {
        "PATH": os.pathsep.join([str(path_with_facter), "/bin"])
    }
    assert identity.fact("networking.fqdn", environ) == ""
