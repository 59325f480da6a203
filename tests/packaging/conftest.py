"""The packages, built once for all tests, and a service to try them with."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server, Site
from tests.conftest import PATIENCE_SECONDS
from tests.installation import free_port
from tests.packaging.machine import REPOSITORY, SYSTEM_PYTHON, Machine, alone, missing

SITE = Site(token="s3cret")
NAME = "choria-provisioner"
CONFIG = f"/etc/{NAME}"
PID_FILE = f"/run/{NAME}/provisioner.pid"
LOG = f"/var/log/{NAME}/provisioner.log"

#: How long `make` may take: it fetches and compiles.
BUILD_SECONDS = 300


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where everything has to be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def need(*tools: str) -> None:
    """Skip the test, or fail it, unless all these programs are installed."""
    absent = [tool for tool in tools if not shutil.which(tool)]
    if absent:
        unavailable(f"not installed: {', '.join(absent)}")


def make(*arguments: str) -> None:
    """Run make with the environment that runs the tests, which it leaves as it is.

    :raises AssertionError: with its output, when it fails
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment["DPKG_DEB_COMPRESSOR_LEVEL"] = "1"  # the package is to be there soon, not to be small
    ready = f"{sys.prefix}/pyvenv.cfg"
    command = ["make", *arguments, f"READY={ready}", f"--old-file={ready}", f"BIN={sys.prefix}/bin"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder that the first of the processes of this run fills, and all of them read.

    What fills it may call :func:`make`, of which only one at a time can install.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    finished = folder.with_suffix(".finished")
    with alone("install"):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            finished.touch()
    return folder


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that can be made here."""

    def fill(folder: Path) -> None:
        wanted = [kind for kind, tool in (("deb", "dpkg-deb"), ("rpm", "rpmbuild")) if shutil.which(tool)]
        if wanted and SYSTEM_PYTHON.exists():
            work = tmp_path_factory.mktemp("work")
            maintainer = "MAINTAINER=Choria Provisioner <packages@choria-provisioner.net>"
            make(*wanted, f"WORK={work}", f"DIST={folder}", maintainer)
            shutil.rmtree(work)

    return once(tmp_path_factory, "packages", fill)


@pytest.fixture(scope="session")
def deb(packages: Path) -> Path:
    """The Debian package."""
    need("dpkg-deb", str(SYSTEM_PYTHON))
    (package,) = packages.glob("*.deb")
    return package


@pytest.fixture(scope="session")
def rpm(packages: Path) -> Path:
    """The RPM package."""
    need("rpmbuild", "rpm2archive", str(SYSTEM_PYTHON))
    (package,) = packages.rglob("*.rpm")
    return package


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest, deb: Path) -> Iterator[Machine]:
    """A machine with the Debian package. A module that sets `SYSTEMD` gets one that is run by systemd."""
    if reason := missing():
        unavailable(reason)
    with Machine(deb.parent, systemd=getattr(request.module, "SYSTEMD", False)) as machine:
        machine.run("dpkg", "--install", f"/mnt/shared/{deb.name}")
        yield machine


class Service:
    """The daemon of a machine, with a broker and simulated servers outside of it."""

    def __init__(self, machine: Machine, broker: NatsServer) -> None:
        self.machine = machine
        self._broker = broker
        self._numbers = iter(range(1, 1000))
        self.helper("cat >/dev/null")
        self.port = free_port()
        self.configure()

    def configure(self, **settings: object) -> None:
        """Write both files, as an operator would: the owner and the mode of the files stay."""
        document = {
            "helper": f"{CONFIG}/helper",
            "token": SITE.token,
            "choria_insecure": True,
            "monitor_port": self.port,
            "monitor_address": "127.0.0.1",
            **settings,
        }
        self.machine.path(f"{CONFIG}/provisioner.yaml").write_text(json.dumps(document))
        self.machine.path(f"{CONFIG}/choria.cfg").write_text(
            f"identity = prov.example.net\nplugin.choria.middleware_hosts = {self._broker.address}\n"
        )

    def helper(self, script: str) -> None:
        """Have the helper run a script before it answers."""
        path = self.machine.path(f"{CONFIG}/helper")
        path.write_text(
            f'#!/bin/sh\n{script}\necho \'{{"configuration": {{"plugin.choria.server.provision": "0"}}}}\'\n'
        )
        path.chmod(0o755)

    def provisions(self) -> bool:
        """Whether a server that boots now is provisioned."""
        identity = f"n{next(self._numbers)}.example.net"
        fleet = Fleet(self._broker.url, [Server(identity=identity, site=SITE, boots_after=0.01)])
        with contextlib.closing(_Stopping(fleet)):
            fleet.start()
            return fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)

    @property
    def pid(self) -> int:
        """What the pid file says."""
        return int(self.machine.path(PID_FILE).read_text())

    def status(self, pid: int) -> dict[str, str]:
        """What the kernel says of a process of the machine."""
        lines = self.machine.path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def user(self, name: str = NAME) -> str:
        """The number of a user of the machine."""
        return self.machine.sh(f"id -u {name}").strip()


class _Stopping:
    def __init__(self, fleet: Fleet) -> None:
        self.close = fleet.stop
