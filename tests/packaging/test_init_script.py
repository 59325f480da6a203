"""The init script on a machine without systemd, run for real: what it does, and the exit codes of the LSB."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.simulate.broker import NatsServer
from tests.packaging.conftest import CONFIG, LOG, NAME, PID_FILE, Service, need
from tests.packaging.machine import REPOSITORY, Machine

SCRIPT = f"/etc/init.d/{NAME}"
DEFAULTS = f"/etc/default/{NAME}"

RUNNING = 0
DEAD = 1
STOPPED = 3


@pytest.fixture
def service(machine: Machine, broker: NatsServer) -> Iterator[Service]:
    """The service, not started."""
    yield Service(machine, broker)
    machine.run(SCRIPT, "stop")
    machine.sh(f"rm -rf {DEFAULTS} {LOG}* {PID_FILE}")


def call(machine: Machine, action: str) -> int:
    return machine.run(SCRIPT, action, check=False).returncode


def running(machine: Machine) -> list[int]:
    """The daemons there are."""
    commands = machine.path("/proc").glob("[0-9]*/cmdline")
    wanted = f"\0/usr/bin/{NAME}\0run\0"
    return sorted(int(command.parent.name) for command in commands if wanted in command.read_text())


def in_background(machine: Machine, command: str) -> str:
    """Start something that stays; give its number."""
    return machine.sh(f"{command} >/dev/null 2>&1 & echo $!").strip()


def test_it_starts_a_daemon_of_its_own_user_and_stops_it(service: Service) -> None:
    machine = service.machine
    assert call(machine, "status") == STOPPED
    assert call(machine, "start") == 0
    assert call(machine, "status") == RUNNING
    assert running(machine) == [service.pid]
    status = service.status(service.pid)
    assert set(status["Uid"].split()) == {service.user()}
    assert (status["NoNewPrivs"], status["PPid"], status["Umask"]) == ("1", "1", "0027")
    assert service.provisions()

    assert call(machine, "stop") == 0
    assert call(machine, "status") == STOPPED
    assert running(machine) == []
    assert not machine.path(PID_FILE).exists()


def test_a_second_start_and_a_second_stop_change_nothing_and_succeed(service: Service) -> None:
    machine = service.machine
    call(machine, "start")
    first = service.pid
    assert call(machine, "start") == 0
    assert running(machine) == [first]
    assert call(machine, "stop") == 0
    assert call(machine, "stop") == 0


@pytest.mark.parametrize("action", ["restart", "condrestart"])
def test_a_restart_takes_a_new_daemon(service: Service, action: str) -> None:
    machine = service.machine
    call(machine, "start")
    first = service.pid
    assert call(machine, action) == 0
    assert running(machine) == [service.pid]
    assert service.pid != first


def test_a_conditional_restart_of_what_does_not_run_starts_nothing(service: Service) -> None:
    for action in ("condrestart", "try-restart", "force-reload"):
        assert call(service.machine, action) == 0
        assert call(service.machine, "status") == STOPPED


def test_a_reload_opens_the_log_anew_and_nothing_else(service: Service) -> None:
    machine = service.machine
    service.configure(logfile=LOG)
    call(machine, "start")
    pid = service.pid
    machine.run("mv", LOG, f"{LOG}.1")
    assert call(machine, "reload") == 0
    machine.wait(f"grep 'opened the log anew' {LOG}")
    assert running(machine) == [pid]


def test_a_reload_of_what_does_not_run_fails(service: Service) -> None:
    assert call(service.machine, "reload") == 7


def test_a_crash_is_told_and_the_next_start_gets_over_it(service: Service) -> None:
    machine = service.machine
    call(machine, "start")
    crashed = service.pid
    machine.sh(f"kill -KILL {crashed}")
    machine.wait(f"! [ -e /proc/{crashed} ]")
    assert call(machine, "status") == DEAD
    assert call(machine, "condrestart") == 0
    assert call(machine, "status") == DEAD
    assert call(machine, "start") == 0
    assert running(machine) == [service.pid]
    assert service.provisions()


def test_an_update_of_the_package_replaces_the_daemon(service: Service, deb: Path) -> None:
    machine = service.machine
    machine.sh("touch /sbin/init")  # without it Debian takes the machine for a chroot, where nothing is started
    call(machine, "start")
    before = service.pid
    machine.run("dpkg", "--install", f"/mnt/shared/{deb.name}")
    assert running(machine) == [service.pid]
    assert service.pid != before


def test_an_update_of_the_package_starts_no_daemon(service: Service, deb: Path) -> None:
    service.machine.run("dpkg", "--install", f"/mnt/shared/{deb.name}")
    assert call(service.machine, "status") == STOPPED


def test_a_stop_after_a_crash_cleans_up(service: Service) -> None:
    machine = service.machine
    call(machine, "start")
    machine.sh(f"kill -KILL {service.pid}")
    assert call(machine, "stop") == 0
    assert call(machine, "status") == STOPPED


def test_a_stale_pid_file_does_no_harm_to_the_process_that_has_the_number_now(service: Service) -> None:
    machine = service.machine
    bystander = in_background(machine, f"setpriv --reuid={NAME} --clear-groups sleep 1000")
    machine.sh(f"install -d -o {NAME} /run/{NAME}; echo {bystander} >{PID_FILE}")
    assert call(machine, "status") == DEAD
    assert call(machine, "reload") == 7
    assert call(machine, "stop") == 0
    machine.sh(f"echo {bystander} >{PID_FILE}")
    assert call(machine, "start") == 0
    assert running(machine) == [service.pid]
    machine.sh(f"kill {bystander}")


def test_a_pid_file_with_anything_in_it_is_a_stale_one(service: Service) -> None:
    machine = service.machine
    machine.sh(f"install -d -o {NAME} /run/{NAME}")
    for content in ("", "x\n", "-1\n", "0\n", "1\n"):
        machine.path(PID_FILE).write_text(content)
        assert call(machine, "status") == DEAD
    assert call(machine, "restart") == 0
    assert running(machine) == [service.pid]


def test_the_user_of_the_daemon_cannot_have_another_process_signalled(service: Service) -> None:
    machine = service.machine
    # a process of root that holds a lock on a file with its number in it
    machine.sh(f"install -d -o {NAME} /run/{NAME}; touch /run/other.pid")
    bystander = in_background(machine, "flock /run/other.pid sleep 1000")
    machine.wait(f"grep -q FLOCK.*{bystander} /proc/locks")
    for trick in (f"ln -s /run/other.pid {PID_FILE}", f"ln /run/other.pid {PID_FILE}"):
        machine.sh(f"rm -f {PID_FILE}; echo {bystander} >/run/other.pid; {trick}")
        assert call(machine, "reload") == 7
        assert call(machine, "stop") == 0
    machine.sh(f"kill {bystander}")


def test_of_two_starts_at_once_one_starts_it(service: Service) -> None:
    assert at_once(service.machine, "start", "start") == [0, 0]
    assert running(service.machine) == [service.pid]


def test_a_start_and_a_stop_at_once_come_one_after_the_other(service: Service) -> None:
    machine = service.machine
    assert at_once(machine, "start", "stop", "restart", "stop") == [0] * 4
    assert (call(machine, "status"), len(running(machine))) in {(RUNNING, 1), (STOPPED, 0)}


def at_once(machine: Machine, *actions: str) -> list[int]:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda action=action: codes.append(call(machine, action))) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def test_a_daemon_that_does_not_end_is_killed(service: Service) -> None:
    machine = service.machine
    machine.path(DEFAULTS).write_text("STOP_SECONDS=1\n")
    call(machine, "start")
    machine.sh(f"kill -STOP {service.pid}")
    assert call(machine, "stop") == 0
    assert running(machine) == []


def test_a_daemon_that_does_not_start_is_a_failure_with_its_reason(service: Service) -> None:
    service.configure(interval="1H")
    done = service.machine.run(SCRIPT, "start", check=False)
    assert done.returncode == 1
    assert ": interval: " in done.stdout
    assert call(service.machine, "status") == STOPPED


def test_a_daemon_that_ends_right_after_its_start_is_a_failure(service: Service) -> None:
    service.configure(monitor_address="192.0.2.1")
    done = service.machine.run(SCRIPT, "start", check=False)
    assert done.returncode == 1
    assert "monitor_port" in done.stdout


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ("DAEMON=/nonexistent", 5),
        (f"CONFIG={CONFIG}/nonexistent", 6),
        (f"CHORIA_CONFIG={CONFIG}/nonexistent", 6),
        ("RUN_AS=nobodyatall", 6),
    ],
)
def test_what_is_missing_has_an_exit_code_of_its_own(service: Service, settings: str, code: int) -> None:
    service.machine.path(DEFAULTS).write_text(f"{settings}\n")
    assert call(service.machine, "start") == code


@pytest.mark.parametrize("arguments", [(), ("nonsense",)])
def test_wrong_use_is_told(machine: Machine, arguments: tuple[str, ...]) -> None:
    done = machine.run(SCRIPT, *arguments, check=False)
    assert done.returncode == 2
    assert "Usage: " in done.stdout


def test_others_than_root_may_ask_and_no_more(service: Service) -> None:
    machine = service.machine
    for action in ("start", "stop", "restart", "condrestart", "reload", "force-reload"):
        assert machine.run(SCRIPT, action, check=False, user="nobody").returncode == 4
    call(machine, "start")
    assert machine.run(SCRIPT, "status", check=False, user="nobody").returncode == RUNNING


def test_options_and_output_are_as_set(service: Service) -> None:
    machine = service.machine
    machine.path(DEFAULTS).write_text("OPTIONS=--debug\nCONSOLE=/var/log/choria-provisioner/other.log\n")
    call(machine, "start")
    assert service.provisions()
    machine.wait('grep \'"level": "debug"\' /var/log/choria-provisioner/other.log')


def test_the_shell_finds_nothing_wrong_with_it() -> None:
    need("shellcheck")
    scripts = [REPOSITORY / "etc" / "init.d" / NAME, *(REPOSITORY / "etc" / "deb").glob("p*")]
    scripts.append(REPOSITORY / "etc" / "deb" / "build")
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.stdout == ""
