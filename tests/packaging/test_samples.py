"""The sample configurations are what the program reads, and the services fit its time limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from provisioner import config
from provisioner.choria import security, settings
from provisioner.errors import ConfigurationError
from provisioner.hosts.loop import TURN_LIMIT_SECONDS
from provisioner.hosts.scheduler import LEAVE_SECONDS
from provisioner.systemd import WATCHDOG_SHARE
from tests.packaging.machine import REPOSITORY

ETC = REPOSITORY / "etc"
#: A line that is commented out, and would be a setting without the mark.
COMMENTED = re.compile(r"^#(?=[a-z_]+:( |$)|  - |plugin\.|identity |ttl |discovery_timeout )", re.MULTILINE)


def test_the_provisioner_configuration_is_good_as_it_is() -> None:
    assert config.load(ETC / "provisioner.yaml").warnings == ()


def test_the_choria_configuration_lacks_only_the_credentials() -> None:
    loaded = settings.load(ETC / "choria.cfg", insecure=False, provisioning_password="")
    assert loaded.warnings == ()
    with pytest.raises(ConfigurationError) as caught:
        security.choose(loaded, insecure=False)
    missing = {"certificate", "key", "ca"}
    assert {problem.split(": ")[1].rpartition(".")[2] for problem in caught.value.problems} == missing
    assert all("No such file or directory" in problem for problem in caught.value.problems)


def test_no_sample_is_unsafe_as_it_is() -> None:
    loaded = config.load(ETC / "provisioner.yaml")
    assert not loaded.choria_insecure
    assert loaded.token == ""
    assert loaded.broker_provisioning_password == ""


def test_what_is_commented_out_is_good_as_well(tmp_path: Path) -> None:
    sample, count = COMMENTED.subn("", (ETC / "provisioner.yaml").read_text())
    assert count > 20
    file = tmp_path / "provisioner.yaml"
    file.write_text(sample)
    assert config.load(file).warnings == ()


def test_the_time_limits_of_the_services_leave_the_daemon_its_own() -> None:
    unit = (ETC / "systemd" / "choria-provisioner.service").read_text()
    limits = {name: int(value) for name, value in re.findall(r"^(\w+Sec)=(\d+)s$", unit, re.MULTILINE)}
    script = (ETC / "init.d" / "choria-provisioner").read_text()
    (stop,) = re.findall(r"^STOP_SECONDS=(\d+)$", script, re.MULTILINE)
    # the connection is drained, then the threads are waited for
    to_leave = config.load(ETC / "provisioner.yaml").shutdown_grace + 2 * LEAVE_SECONDS
    assert min(limits["TimeoutStopSec"], int(stop)) > to_leave
    # before systemd gives it up, a thread that is stuck is replaced, or the daemon leaves by itself
    assert limits["WatchdogSec"] * (1 - WATCHDOG_SHARE) > TURN_LIMIT_SECONDS
