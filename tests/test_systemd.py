"""The service manager hears of states, and nothing about it can harm the daemon."""

from __future__ import annotations

import os
import socket
import types
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


class Clock:
    """Time that passes when told."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(systemd, "time", clock)
    return clock


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is sent to the service manager, which gives this process up after eight seconds without a sign of life."""
    sent: list[str] = []
    monkeypatch.setattr(systemd, "notify", sent.append)
    monkeypatch.setattr(systemd, "faulthandler", types.SimpleNamespace(enable=lambda: None))
    monkeypatch.setenv("WATCHDOG_USEC", "8000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    return sent


def test_signs_of_life_come_several_times_in_the_time_allowed(sent: list[str], clock: Clock) -> None:
    watchdog = systemd.Watchdog(lambda: [], lambda: "fine")
    for _ in range(81):
        watchdog.feed()
        clock.now += 0.1
    assert sent == ["WATCHDOG=1\nSTATUS=fine"] * 5


def test_there_is_none_while_something_is_wrong(
    sent: list[str], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    problems = ["worker-3: the thread has died"]
    watchdog = systemd.Watchdog(lambda: problems, lambda: "fine")
    watchdog.feed()
    assert sent == ["STATUS=worker-3: the thread has died"]
    assert caplog.messages == ["no sign of life to systemd: worker-3: the thread has died"]
    problems.clear()
    clock.now += 2
    watchdog.feed()
    assert sent[1:] == ["WATCHDOG=1\nSTATUS=fine"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("WATCHDOG_USEC", None), ("WATCHDOG_USEC", "x"), ("WATCHDOG_USEC", "0"), ("WATCHDOG_PID", "1")],
)
def test_a_process_that_nobody_watches_gives_none(
    sent: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    systemd.Watchdog(lambda: pytest.fail("nobody asked"), lambda: "").feed()
    assert sent == []
