"""The `run` command as an init script starts it: a real process, a real broker, real signals."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provisioner import __version__
from provisioner.choria.connector import Connector
from provisioner.choria.nats import Message
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS, Eventually, StartBroker, StartFleet
from tests.installation import SITE, Installation


def test_it_provisions_and_leaves_on_sigterm(installation: Installation, start_fleet: StartFleet) -> None:
    fleet = start_fleet(*(Server(identity=f"n{number}.example.net", site=SITE) for number in range(10)))
    process = installation.start("run")
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert int(installation.pid_file.read_text()) == process.pid
    process.send_signal(signal.SIGTERM)

    assert process.wait(PATIENCE_SECONDS) == 0
    assert not installation.pid_file.exists()
    messages = [line["msg"] for line in installation.log()]
    assert sum(message.startswith("provisioned in ") for message in messages) == 10
    assert messages[-1] == "choria-provisioner ended"
    assert process.communicate() == ("", "")


def test_the_status_is_served_to_people_and_machines(
    installation: Installation, start_fleet: StartFleet, eventually: Eventually
) -> None:
    start_fleet(Server(identity="n1.example.net", site=SITE))
    installation.start("run")
    eventually(installation.ready)
    eventually(lambda: json.loads(installation.get("/status.json")[1])["recent"])

    code, page = installation.get("/")
    assert code == 200
    assert "<td>n1.example.net<td>" in page
    document = json.loads(installation.get("/status.json?identity=n1")[1])
    assert (document["identity"], document["site"], document["role"]) == ("prov.example.net", "lab", "alone")
    assert [each["identity"] for each in document["recent"]] == ["n1.example.net"]
    assert not any("s3cret" in text for text in (page, json.dumps(document)))


def test_run_is_the_default_command(installation: Installation, eventually: Eventually) -> None:
    process = installation.start()
    eventually(installation.ready)
    process.send_signal(signal.SIGINT)

    assert process.wait(PATIENCE_SECONDS) == 0


def test_metrics_are_there_at_zero_from_the_start_under_the_names_of_the_original(
    installation: Installation, eventually: Eventually
) -> None:
    installation.start()
    eventually(installation.ready)

    plain = installation.get("/metrics")[1]
    assert 'choria_provisioner_provisioned{site="lab"} 0' in plain
    assert 'choria_provisioner_rpc_errors{rpc="choria_provision#jwt",site="lab"} 0' in plain
    assert 'choria_provisioner_paused{site="lab"} 0' in plain
    negotiated = installation.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")[1]
    for page in (plain, negotiated):
        assert not re.search(r"^choria_\w+_(total|created)", page, re.MULTILINE)


def test_health_is_served_while_the_broker_is_away(
    installation: Installation, broker: NatsServer, eventually: Eventually
) -> None:
    broker.kill()
    process = installation.start()
    eventually(installation.pid_file.exists)
    eventually(lambda: installation.log_file.exists() and "cannot connect" in installation.log_file.read_text())

    assert installation.get("/livez")[0] == 200
    assert installation.get("/readyz") == (503, "broker: not connected\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert not installation.pid_file.exists()


def test_a_host_in_work_is_finished_and_a_second_signal_leaves_at_once(
    installation: Installation, start_fleet: StartFleet
) -> None:
    silent = Server(identity="silent.example.net", site=SITE, misbehaviour=Misbehaviour.SILENT)
    fleet = start_fleet(silent)
    process = installation.start()
    assert fleet.wait(lambda counts: counts.actions["rpcutil#inventory"] == 1, PATIENCE_SECONDS)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)

    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_helper_that_hangs_is_killed_at_the_end_of_the_grace_time(
    installation: Installation, start_fleet: StartFleet, eventually: Eventually
) -> None:
    sleeper = installation.directory / "sleeper"
    (installation.directory / "helper").write_text(f"#!/bin/sh\necho $$ > {sleeper}\nexec sleep 3600\n")
    installation.settings |= {"shutdown_grace": "1s", "helper_timeout": "1h"}
    start_fleet(Server(identity="n1.example.net", site=SITE))
    process = installation.start()
    eventually(lambda: sleeper.exists() and sleeper.read_text().strip())
    process.send_signal(signal.SIGTERM)

    assert process.wait(PATIENCE_SECONDS) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(sleeper.read_text()), 0)


def test_logs_go_to_standard_output_and_a_closed_one_does_no_harm(
    installation: Installation, start_fleet: StartFleet
) -> None:
    del installation.settings["logfile"]
    process = installation.start("run", "--debug")
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert (first["level"], first["component"]) == ("info", "cli.run")
    process.stdout.close()
    fleet = start_fleet(Server(identity="n1.example.net", site=SITE, boots_after=3))

    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_systemd_is_told_that_it_is_ready_even_when_the_broker_is_away(
    installation: Installation, broker: NatsServer
) -> None:
    broker.kill()
    path = installation.directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(path))
        supervisor.settimeout(PATIENCE_SECONDS)
        process = installation.start(env={**os.environ, "NOTIFY_SOCKET": str(path)})
        assert supervisor.recv(100) == b"READY=1"
        process.send_signal(signal.SIGTERM)
        assert supervisor.recv(100) == b"STOPPING=1"
        assert process.wait(PATIENCE_SECONDS) == 0


class TestPassword:
    """broker_provisioning_password, on a broker that insists on it."""

    PASSWORD = "p@ss:w/o%20 #1"

    @pytest.fixture
    def broker(self, start_broker: StartBroker) -> NatsServer:
        return start_broker(
            f"authorization {{ users = [{{user: provisioner, password: {json.dumps(self.PASSWORD)}}},"
            " {user: fleet, password: fleet}] }"
        )

    def test_it_reaches_the_broker_as_it_is(self, installation: Installation, start_fleet: StartFleet) -> None:
        installation.settings["broker_provisioning_password"] = self.PASSWORD
        fleet = start_fleet(Server(identity="n1.example.net", site=SITE), login={"user": "fleet", "pass": "fleet"})
        installation.start()

        assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
        assert self.PASSWORD not in installation.log_file.read_text()

    def test_with_another_one_the_broker_is_not_there(self, installation: Installation, eventually: Eventually) -> None:
        installation.settings["broker_provisioning_password"] = "another"
        installation.start()
        eventually(lambda: installation.log_file.exists() and "cannot connect" in installation.log_file.read_text())

        assert not installation.ready()


def test_ttl_and_discovery_timeout_of_the_choria_configuration_reach_the_requests(
    installation: Installation, start_fleet: StartFleet, connector: Connector, eventually: Eventually
) -> None:
    seen: queue.SimpleQueue[Message] = queue.SimpleQueue()
    connector.subscribe("provisioning.>", callback=seen.put)
    connector.flush()
    start_fleet(Server(identity="silent.example.net", site=SITE, misbehaviour=Misbehaviour.SILENT))
    installation.choria += "ttl = 47\ndiscovery_timeout = 1\n"
    installation.start("run", "--debug")

    def request(subject: str) -> Request:
        while (message := seen.get(timeout=PATIENCE_SECONDS)).subject != subject:
            pass
        return EnvelopesV1().open(message.payload)

    assert request("provisioning.broadcast.agent.discovery").ttl == 47
    assert request("provisioning.node.silent.example.net").ttl == 47
    eventually(lambda: "rpcutil#inventory, try 1: no reply within 3 s" in installation.log_file.read_text())


def test_a_broker_that_comes_back_is_asked_for_servers_at_once(
    installation: Installation, broker: NatsServer, eventually: Eventually
) -> None:
    installation.start()
    eventually(installation.ready)
    eventually(lambda: installation.metric("discover_cycles") >= 1)
    broker.restart()

    eventually(lambda: installation.metric("discover_cycles") >= 2)
    messages = [line["msg"] for line in installation.log()]
    assert "discovering out of turn: the connection to the broker is back" in messages


#: Runs the program after some lines that change it.
CHANGED = """
import sys
from provisioner import config
from provisioner.cli import main
from provisioner.hosts import finisher
{}
sys.exit(main(prog_name="choria-provisioner"))
"""


def test_the_gauge_paused_follows_the_flag(installation: Installation, eventually: Eventually) -> None:
    flipping = """
import signal
load = config.load
def load_and_flip_on_request(path):
    loaded = load(path)
    signal.signal(signal.SIGUSR2, lambda *_: loaded.flip())
    return loaded
config.load = load_and_flip_on_request
"""
    installation.program = ("-c", CHANGED.format(flipping))
    process = installation.start()
    eventually(installation.ready)
    assert installation.metric("paused") == 0
    process.send_signal(signal.SIGUSR2)
    eventually(lambda: installation.metric("paused") == 1)
    process.send_signal(signal.SIGUSR2)
    eventually(lambda: installation.metric("paused") == 0)


def test_a_thread_that_dies_again_and_again_ends_it_with_exit_code_70(installation: Installation) -> None:
    installation.program = ("-c", CHANGED.format("finisher.Finisher.turn = lambda _: sys.exit()"))
    process = installation.start()

    assert process.wait(PATIENCE_SECONDS) == 70
    assert not installation.pid_file.exists()
    messages = [line["msg"] for line in installation.log()]
    assert messages.count("thread finisher: the thread has died: another thread takes over") == 3
    assert "thread finisher: the thread has died: leaving" in messages
    assert messages[-1] == "choria-provisioner ended"


@pytest.mark.parametrize("arguments", [("--debug", "run"), ("--debug",), ("run", "--debug")])
def test_debug_is_understood_before_and_after_the_command(
    installation: Installation, eventually: Eventually, arguments: tuple[str, ...]
) -> None:
    installation.settings["loglevel"] = "error"
    installation.start(*arguments)
    eventually(installation.ready)

    eventually(lambda: "debug" in {line["level"] for line in installation.log()})


class TestThatItDoesNotStart:
    """One clear line for each problem, exit code 1, never a traceback."""

    def lines(self, installation: Installation) -> list[str]:
        process = installation.start()
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        assert output == ""
        assert "Traceback" not in errors
        assert not installation.pid_file.exists()
        return errors.splitlines()

    def test_all_problems_of_both_files_are_told_at_once(self, installation: Installation) -> None:
        installation.settings |= {"interval": "1H", "workers": "4"}
        installation.choria = "identity = a b\nplugin.choria.middleware_hosts = broker\n"

        lines = self.lines(installation)
        assert len(lines) == 4
        for key in ("interval", "workers", "identity", "plugin.choria.middleware_hosts"):
            assert sum(f": {key}: " in line for line in lines) == 1

    def test_a_monitor_port_that_is_taken(self, installation: Installation) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            installation.settings["monitor_port"] = taken.getsockname()[1]
            (line,) = self.lines(installation)
        assert "monitor_port" in line
        assert "in use" in line

    def test_a_log_file_that_cannot_be_opened(self, installation: Installation) -> None:
        installation.settings["logfile"] = str(installation.directory / "missing" / "log")

        (line,) = self.lines(installation)
        assert "logfile" in line

    def test_a_choria_configuration_that_is_missing(self, installation: Installation) -> None:
        command = installation.command()
        (installation.directory / "choria.cfg").unlink()
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)

        assert done.returncode == 1
        assert re.fullmatch(r"\S*choria\.cfg: No such file or directory\n", done.stderr)

    def test_another_instance_with_the_same_pid_file(self, installation: Installation, eventually: Eventually) -> None:
        installation.start()
        eventually(installation.ready)
        installation.settings["monitor_port"] = 0
        second = installation.start()

        _, errors = second.communicate(timeout=PATIENCE_SECONDS)
        assert second.returncode == 1
        assert str(installation.pid_file) in errors
        assert installation.pid_file.exists()


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "provisioner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


def test_the_version_is_told() -> None:
    done = cli("--version")
    assert done.returncode == 0
    assert __version__ in done.stdout


@pytest.mark.parametrize("arguments", [(), ("run",), ("demo",)])
def test_help_has_an_example(arguments: tuple[str, ...]) -> None:
    done = cli(*arguments, "--help")
    assert done.returncode == 0
    assert "choria-provisioner " in done.stdout


@pytest.mark.parametrize("arguments", [("nonsense",), ("run",), ("run", "--nonsense"), ("--debug",)])
def test_wrong_use_exits_2_with_a_hint(arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--help" in done.stderr


def test_it_is_idle_while_there_is_nothing_to_do(installation: Installation, eventually: Eventually) -> None:
    process = installation.start()
    eventually(installation.ready)
    time.sleep(2.5)  # the first discovery
    before = _cpu_seconds(process.pid)
    time.sleep(2)
    assert _cpu_seconds(process.pid) - before < 0.5


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
