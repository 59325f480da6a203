"""The unit under a real systemd: the daemon from the package, as systemd starts, watches, replaces and confines it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.simulate.broker import NatsServer
from tests.packaging.conftest import LOG, NAME, PID_FILE, Service
from tests.packaging.machine import Machine
from tests.waiting import wait_until

SYSTEMD = True
UNIT = f"{NAME}.service"
DROP_INS = f"/run/systemd/system/{UNIT}.d"
#: 0.0 is perfectly safe, 10.0 is no safety at all; in tenths.
EXPOSURE_LIMIT = "20"


@pytest.fixture
def service(machine: Machine, broker: NatsServer) -> Iterator[Service]:
    """The service, not started; a crash is mended at once."""
    service = Service(machine, broker)
    drop_in(machine, "RestartSec=100ms")
    yield service
    machine.sh(f"systemctl stop {UNIT}; systemctl reset-failed {UNIT}; rm -rf {LOG}* {DROP_INS}")


def drop_in(machine: Machine, *settings: str) -> None:
    """Change settings of the unit's section Service, instead of what an earlier call changed."""
    machine.path(DROP_INS).mkdir(exist_ok=True)
    machine.path(f"{DROP_INS}/test.conf").write_text("\n".join(("[Service]", *settings)))
    machine.run("systemctl", "daemon-reload")


def shown(machine: Machine, name: str) -> str:
    return machine.sh(f"systemctl show --property={name} --value {UNIT}").strip()


def journal(machine: Machine) -> list[dict[str, str]]:
    """What the journal has of this run of the unit's daemon and its predecessors, oldest first."""
    lines = machine.sh(f"journalctl --sync && journalctl --output=json --unit={UNIT}").splitlines()
    return [json.loads(line) for line in lines]


def test_it_is_neither_enabled_nor_started_by_the_installation(machine: Machine) -> None:
    assert machine.run("systemctl", "is-enabled", UNIT, check=False).stdout.strip() == "disabled"
    assert machine.run("systemctl", "is-active", UNIT, check=False).stdout.strip() == "inactive"


def test_systemd_finds_nothing_wrong_with_it(machine: Machine) -> None:
    assert machine.run("systemd-analyze", "verify", "--man=no", UNIT).stdout == ""


def test_what_it_may_do_is_little(machine: Machine) -> None:
    machine.run("systemd-analyze", "security", "--no-pager", f"--threshold={EXPOSURE_LIMIT}", UNIT)


def test_it_provisions_with_no_privileges_and_ends_in_order(service: Service) -> None:
    machine = service.machine
    machine.run("systemctl", "start", UNIT)
    assert service.provisions()
    assert shown(machine, "MainPID") == str(service.pid)
    with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/") as page:
        assert b"</html>" in page.read()
    assert "0 in trouble" in shown(machine, "StatusText")
    status = service.status(service.pid)
    assert set(status["Uid"].split()) == {service.user()}
    assert (status["NoNewPrivs"], int(status["CapBnd"], 16), status["Seccomp"]) == ("1", 0, "2")

    machine.run("systemctl", "stop", UNIT)
    assert (shown(machine, "ActiveState"), shown(machine, "Result")) == ("inactive", "success")
    assert not machine.path(PID_FILE).exists()


def test_what_it_says_is_fit_for_the_journal(service: Service) -> None:
    service.machine.run("systemctl", "start", UNIT)
    entries = [entry for entry in journal(service.machine) if "started with" in entry["MESSAGE"]]
    assert entries[-1]["MESSAGE"].startswith(f"cli.run: {NAME} ")
    assert entries[-1]["PRIORITY"] == "6"


def test_a_reload_opens_the_log_anew_and_nothing_else(service: Service) -> None:
    machine = service.machine
    service.configure(logfile=LOG)
    machine.run("systemctl", "start", UNIT)
    pid = service.pid
    machine.run("mv", LOG, f"{LOG}.1")
    machine.run("systemctl", "reload", UNIT)
    machine.wait(f"grep 'opened the log anew' {LOG}")
    # the same, as logrotate does it here
    machine.run("logrotate", "--force", "--state", "/run/logrotate.state", f"/etc/logrotate.d/{NAME}")
    machine.wait(f"grep 'opened the log anew' {LOG}")
    assert service.pid == pid
    assert service.provisions()
    assert machine.sh(f"stat --format '%U %a' {LOG}") == f"{NAME} 640\n"


def test_a_helper_at_work_may_finish_when_it_is_stopped(service: Service) -> None:
    machine = service.machine
    service.helper('cat >/dev/null; touch "$STATE_DIRECTORY/begun"; sleep 1')
    machine.run("systemctl", "start", UNIT)
    with ThreadPoolExecutor() as pool:
        provisioned = pool.submit(service.provisions)
        machine.wait(f"[ -e /var/lib/{NAME}/begun ]")
        machine.run("systemctl", "stop", UNIT)
        assert provisioned.result()


def test_an_update_of_the_package_replaces_the_daemon(service: Service, deb: Path) -> None:
    machine = service.machine
    machine.run("systemctl", "start", UNIT)
    before = service.pid
    machine.run("dpkg", "--install", f"/mnt/shared/{deb.name}")
    machine.wait(f"systemctl is-active {UNIT}")
    assert service.pid != before
    assert service.provisions()


def test_a_crash_is_survived(service: Service) -> None:
    machine = service.machine
    machine.run("systemctl", "start", UNIT)
    crashed = service.pid
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", UNIT)
    machine.wait(f'[ "$(systemctl show --property=NRestarts --value {UNIT})" -ge 1 ] && systemctl is-active {UNIT}')
    assert service.pid != crashed
    assert service.provisions()


@pytest.mark.parametrize(("code", "again"), [(1, True), (2, False), (70, True)])
def test_it_is_started_again_unless_its_exit_code_says_that_this_is_of_no_use(
    service: Service, code: int, again: bool
) -> None:
    machine = service.machine
    drop_in(machine, "RestartSec=100ms", "ExecStart=", f"ExecStart=/bin/sh -c 'exit {code}'")
    assert machine.run("systemctl", "start", UNIT, check=False).returncode == 1
    if again:
        machine.wait(f'[ "$(systemctl show --property=NRestarts --value {UNIT})" -ge 1 ]')
    else:
        assert (shown(machine, "ActiveState"), shown(machine, "NRestarts")) == ("failed", "0")


def test_a_daemon_that_stands_still_is_replaced_and_the_journal_says_where_it_stood(service: Service) -> None:
    machine = service.machine
    # a discovery takes two seconds, in which no sign of life is given
    drop_in(machine, "RestartSec=100ms", "WatchdogSec=6s")
    machine.run("systemctl", "start", UNIT)
    over = int(shown(machine, "ExecMainStartTimestampMonotonic")) + 6_000_000
    machine.wait(f'[ "$(systemctl show --property=WatchdogTimestampMonotonic --value {UNIT})" -gt {over} ]')
    assert shown(machine, "NRestarts") == "0"

    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGSTOP", UNIT)
    machine.wait(f'[ "$(systemctl show --property=NRestarts --value {UNIT})" -ge 1 ] && systemctl is-active {UNIT}')
    assert any(entry["MESSAGE"] == "Fatal Python error: Aborted" for entry in journal(machine))
    # the journal may still have to read the rest
    wait_until(lambda: any("scheduler.py" in entry["MESSAGE"] for entry in journal(machine)))
    assert service.provisions()


def test_a_daemon_that_cannot_start_says_why(service: Service) -> None:
    machine = service.machine
    service.configure(interval="1H")
    assert machine.run("systemctl", "start", UNIT, check=False).returncode == 1
    machine.run("systemctl", "stop", UNIT)
    assert any(": interval: " in entry["MESSAGE"] for entry in journal(machine))


def test_a_helper_writes_to_its_state_and_nowhere_else(service: Service) -> None:
    machine = service.machine
    machine.sh("install -d -m 1777 /srv/open")
    service.helper(
        'cat >/dev/null; echo yes >"$STATE_DIRECTORY/written"\n'
        f'for path in /etc/{NAME}/x /usr/x /home/x /srv/open/x; do (echo no >"$path") 2>/dev/null && exit 1; done'
    )
    machine.run("systemctl", "start", UNIT)
    assert service.provisions()
    assert machine.sh(f"cat /var/lib/{NAME}/written") == "yes\n"
