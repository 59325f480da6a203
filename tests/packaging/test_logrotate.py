"""The logs are rotated by the real logrotate, with the file from the package, while the daemon writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from provisioner.simulate.broker import NatsServer
from tests.packaging.conftest import LOG, NAME, PID_FILE, Service
from tests.packaging.machine import Machine

SCRIPT = f"/etc/init.d/{NAME}"
ROTATION = f"/etc/logrotate.d/{NAME}"
CONSOLE = f"/var/log/{NAME}/console.log"


@pytest.fixture
def service(machine: Machine, broker: NatsServer) -> Iterator[Service]:
    """The service, started, with a log file."""
    service = Service(machine, broker)
    service.configure(logfile=LOG)
    machine.run(SCRIPT, "start")
    yield service
    machine.run(SCRIPT, "stop")
    machine.sh(f"rm -rf /var/log/{NAME} {PID_FILE}")


def provision(service: Service, log: str = LOG) -> None:
    """Have a server provisioned, and the log say so."""
    assert service.provisions()
    service.machine.wait(f"grep 'provisioned in' {log}")


def rotate(machine: Machine, rotation: str = ROTATION) -> None:
    machine.run("logrotate", "--force", "--state", "/run/logrotate.state", rotation)


def messages(machine: Machine, path: str) -> list[str]:
    """What is in a log. Every line of it is whole."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in machine.path(path).read_text().splitlines()]
    return [line["msg"] for line in lines]


def of_servers(*logs: list[str]) -> int:
    return sum(message.startswith("provisioned in ") for log in logs for message in log)


def test_the_log_is_moved_away_and_the_daemon_goes_on_in_a_new_one_at_once(service: Service) -> None:
    machine = service.machine
    provision(service)
    pid = service.pid
    rotate(machine)
    # the daemon had nothing to say, and left the old file all the same
    machine.wait(f"[ -e {LOG} ]")
    machine.wait(f"! ls -l /proc/{pid}/fd | grep -q {LOG}.1")
    provision(service)
    rotate(machine)

    assert of_servers(messages(machine, f"{LOG}.1")) == 1
    assert "provisioned in" in machine.sh(f"zcat {LOG}.2.gz")
    machine.wait(f"[ -e {LOG} ]")
    assert machine.sh(f"stat --format '%U %a' {LOG}") == f"{NAME} 640\n"
    assert service.pid == pid


def test_the_log_may_also_be_copied_and_truncated(service: Service) -> None:
    machine = service.machine
    copying = machine.path(ROTATION).read_text().split("}")[0].partition("postrotate")[0]
    machine.path("/run/copying").write_text(copying.replace("nocreate", "copytruncate") + "}\n")
    provision(service)
    inode = machine.sh(f"stat --format %i {LOG}")
    rotate(machine, "/run/copying")
    provision(service)

    assert machine.sh(f"stat --format %i {LOG}") == inode
    assert of_servers(messages(machine, LOG)) == 1
    assert of_servers(messages(machine, f"{LOG}.1")) == 1


def test_the_console_log_is_copied_and_truncated(service: Service) -> None:
    machine = service.machine
    service.configure()
    machine.run(SCRIPT, "restart")
    provision(service, CONSOLE)
    rotate(machine)
    provision(service, CONSOLE)

    assert of_servers(messages(machine, CONSOLE)) == 1
    assert machine.sh(f"zcat {CONSOLE}.1.gz").count("provisioned in") == 1


def test_nothing_is_wrong_where_the_daemon_does_not_run(machine: Machine) -> None:
    machine.sh(f"install -d -m 0750 -o {NAME} -g {NAME} /var/log/{NAME}")
    rotate(machine)
    machine.sh(f"echo x >{LOG} && chown {NAME} {LOG}")
    rotate(machine)
    assert machine.sh(f"cat {LOG}.1") == "x\n"
    machine.sh(f"rm -r /var/log/{NAME}")
