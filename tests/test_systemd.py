"""The service manager hears of states, and nothing about it can harm the daemon."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from provisioner import systemd


def test_a_state_reaches_the_socket_of_the_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        systemd.notify("READY=1\nSTATUS=waiting for servers")
        assert manager.recv(1000, socket.MSG_DONTWAIT) == b"READY=1\nSTATUS=waiting for servers"


def test_an_abstract_socket_is_written_with_an_at_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"provisioner-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        systemd.notify("STOPPING=1")
        assert manager.recv(1000, socket.MSG_DONTWAIT) == b"STOPPING=1"


def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a socket was opened")

    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setattr(socket, "socket", refuse)
    systemd.notify("READY=1")


@pytest.mark.parametrize("address", ["/nonexistent/notify", "@nobody-listens-here", "x" * 300, "/dev/null", "@"])
def test_a_service_manager_that_cannot_be_reached_is_no_problem(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    systemd.notify("READY=1")


def test_a_service_manager_that_does_not_read_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "SEND_LIMIT_SECONDS", 0.01)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        for _ in range(50):  # far more than such a socket holds
            systemd.notify("WATCHDOG=1")
        assert manager.recv(1000) == b"WATCHDOG=1"
