"""The machine fails the daemon: its disk, its clock, its limits; and the daemon itself is stopped, frozen, killed."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.simulate.broker import NatsServer
from tests.faults.arrangements import discover_often, one_of, wait_shortly
from tests.faults.conftest import (
    Daemon,
    InstallDaemon,
    Report,
    Scale,
    StartDaemon,
    StartServers,
    assert_configured_again_only_if_unheard,
)

WORKERS = 8

#: Makes the clock of one process another one.
SHIFTED_CLOCK = Path(__file__).with_name("shifted_clock.c")
COMPILER = shutil.which("cc")
HOUR_SECONDS = 3600
CLOCKS_DIFFER = re.compile(r"its clock and the one of this machine differ by (3599|360[012]) s")

#: Nobody else's processes count against the limit of this user.
LONELY_USER = 54321


# --- the log


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(params=["logfile", "stdout"])
def destination(request: pytest.FixtureRequest, scale: Scale) -> str:
    return one_of(request, scale, short="logfile")


def test_disk_of_the_log_is_full_for_a_while(
    destination: str,
    small_disk: Path,
    broker: NatsServer,
    install_daemon: InstallDaemon,
    start_servers: StartServers,
    scale: Scale,
    report: Report,
) -> None:
    daemon = install_daemon(broker.url, workers=WORKERS)
    daemon.log_file = small_disk / "log"
    with log_to(daemon, destination):
        daemon.warm_up(start_servers, broker.url)
        fill(small_disk / "full")
        meanwhile = start_servers(broker.url, scale.servers, over=1.0)
        meanwhile.wait_until_provisioned()
        assert daemon.get("/livez")[0] == 200
        written = daemon.log_file.stat().st_size
        (small_disk / "full").unlink()
        afterwards = start_servers(broker.url, 10, over=0.1)
        afterwards.wait_until_provisioned()

        assert meanwhile.configured_again.total() == 0
        assert daemon.log_file.stat().st_size > written
        (lost,) = re.findall(r"(\d+) log lines were lost: No space left on device", daemon.log_file.read_text())
        daemon.assert_unharmed()
    report(
        f"the disk of the log ({destination}) was full, then had room again",
        f"all were provisioned meanwhile and afterwards; {lost} log lines were lost, and the log said so",
        **daemon.figures(meanwhile, afterwards),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_log_file_may_not_grow(
    broker: NatsServer, start_daemon: StartDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemon = start_daemon(broker.url, workers=WORKERS)
    with limited(daemon, resource.RLIMIT_FSIZE, daemon.log_file.stat().st_size):
        meanwhile = start_servers(broker.url, scale.servers, over=1.0)
        meanwhile.wait_until_provisioned()
    afterwards = start_servers(broker.url, 10, over=0.1)
    afterwards.wait_until_provisioned()

    assert meanwhile.configured_again.total() == 0
    assert daemon.logged("log lines were lost: File too large")
    daemon.assert_unharmed()
    report(
        "the log file was not allowed to grow, then was again (RLIMIT_FSIZE)",
        "all were provisioned meanwhile and afterwards, and the log said that lines were lost",
        **daemon.figures(meanwhile, afterwards),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_log_directory_goes_away_and_comes_back(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemon = install_daemon(broker.url, workers=WORKERS)
    directory = daemon.directory / "log"
    directory.mkdir()
    daemon.log_file = directory / "log"
    daemon.settings["logfile"] = str(daemon.log_file)
    daemon.warm_up(start_servers, broker.url)
    shutil.rmtree(directory)
    directory.touch()
    meanwhile = start_servers(broker.url, scale.servers, over=1.0)
    meanwhile.wait_until_provisioned()
    directory.unlink()
    directory.mkdir()
    afterwards = start_servers(broker.url, 10, over=0.1)
    afterwards.wait_until_provisioned()

    assert meanwhile.configured_again.total() == 0
    daemon.until(lambda: sum(message.startswith("provisioned in ") for message in daemon.messages()) >= 10)
    daemon.assert_unharmed()
    report(
        "the directory of the log was removed, a file took its place, then it was made again",
        "all were provisioned meanwhile and afterwards, the log was begun anew",
        **daemon.figures(meanwhile, afterwards),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_log_is_never_taken(
    destination: str,
    broker: NatsServer,
    install_daemon: InstallDaemon,
    start_servers: StartServers,
    scale: Scale,
    report: Report,
) -> None:
    daemon = install_daemon(broker.url, workers=WORKERS)
    daemon.log_file = Path("/dev/full")
    with log_to(daemon, destination):
        daemon.warm_up(start_servers, broker.url)
        population = start_servers(broker.url, scale.servers, over=0.5)
        population.wait_until_provisioned()

        assert population.configured_again.total() == 0
        daemon.until(daemon.idle)
        assert daemon.settled().descriptors <= daemon.before.descriptors
        assert daemon.stop() == 0
    report(f"the log ({destination}) went to a disk that is always full", "all were provisioned", servers=scale.servers)


@pytest.fixture(params=["stands still", "goes away"])
def reader(request: pytest.FixtureRequest, scale: Scale) -> str:
    return one_of(request, scale, short="stands still")


def test_reader_of_the_output(
    reader: str,
    broker: NatsServer,
    install_daemon: InstallDaemon,
    start_servers: StartServers,
    scale: Scale,
    report: Report,
) -> None:
    daemon = install_daemon(broker.url, workers=WORKERS)
    del daemon.settings["logfile"]
    daemon.warm_up(start_servers, broker.url)
    assert daemon.process.stdout is not None
    if reader == "goes away":
        daemon.process.stdout.close()
    # several times what fits into a pipe
    population = start_servers(broker.url, scale.of(short=150, full=400), over=1.0)
    population.wait_until_provisioned()

    assert population.configured_again.total() == 0
    daemon.until(daemon.idle)
    daemon.after = daemon.settled()
    assert daemon.after.threads <= daemon.before.threads
    assert daemon.stop() == 0
    assert daemon.process.stderr is not None
    assert daemon.process.stderr.read() == ""
    report(
        f"the reader of the output {reader}",
        "all were provisioned, and it left when told to",
        **daemon.figures(population),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_started_without_standard_streams(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemon = install_daemon(broker.url, workers=WORKERS)
    del daemon.settings["logfile"]
    daemon.start("run", preexec_fn=lambda: os.closerange(0, 3), stdin=None, stdout=None, stderr=None)
    population = start_servers(broker.url, scale.servers, over=0.5)
    population.wait_until_provisioned()

    assert population.configured_again.total() == 0
    daemon.until(daemon.idle)
    assert daemon.metric("helper_errors") == 0
    assert daemon.stop() == 0
    report("it was started with its three standard streams closed", "all were provisioned", servers=scale.servers)


# --- the clock


@pytest.fixture(params=["forward", "back"])
def direction(request: pytest.FixtureRequest, scale: Scale) -> str:
    return one_of(request, scale, short="back")


class Clock:
    """The wall clock of a process that is started with :attr:`environment`."""

    def __init__(self, directory: Path) -> None:
        library, self._shift = directory / "shifted_clock.so", directory / "shift"
        command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIFTED_CLOCK)]
        subprocess.run(command, check=True)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)}
        self._shift.write_bytes(bytes(struct.calcsize("l")))

    def set_off_by(self, seconds: int) -> None:
        with self._shift.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("l", seconds))


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler to make a clock for one process with")
def test_clock_is_set_by_an_hour_and_back(
    direction: str,
    tmp_path: Path,
    broker: NatsServer,
    install_daemon: InstallDaemon,
    start_servers: StartServers,
    scale: Scale,
    report: Report,
) -> None:
    """Servers do not answer requests of another hour. Nothing in the daemon may wait for one."""
    clock = Clock(tmp_path)
    daemon = install_daemon(broker.url, workers=WORKERS)
    # no request may be tried twice while the clock is wrong: two silences after a restart mean that it was heard
    wait_shortly(daemon, seconds=5.0)
    discover_often(daemon, seconds=1.0)
    daemon.start("run", "--debug", env=clock.environment)
    daemon.warm_up(start_servers, broker.url)
    population = start_servers(broker.url, scale.servers, over=scale.of(short=1.0, full=10.0))
    population.wait_until(lambda counts: counts.provisioned >= scale.servers // 4)

    clock.set_off_by(HOUR_SECONDS if direction == "forward" else -HOUR_SECONDS)
    wrong = time.monotonic()
    late = start_servers(broker.url, 5, over=0.1)
    population.wait_until(lambda counts: counts.dropped > 0)
    daemon.until(lambda: CLOCKS_DIFFER.search(daemon.log_file.read_text()))
    await_discoveries(daemon, 2)
    assert daemon.get("/livez")[0] == 200
    clock.set_off_by(0)
    wrong = time.monotonic() - wrong
    await_discoveries(daemon, 2)
    assert daemon.get("/livez")[0] == 200
    for servers in (population, late):
        servers.wait_until_provisioned()
        assert_configured_again_only_if_unheard(servers, daemon)

    longest = scale.servers * 60
    assert 0 < daemon.metric("helper_time_sum") < longest
    assert 0 < daemon.metric("choria_provisioner_rpc_time_sum", rpc="rpcutil#inventory") < longest
    daemon.assert_unharmed()
    report(
        f"the daemon's clock was set {direction} by an hour for {wrong:.0f} s, while servers were being provisioned",
        "discoveries went on as usual; the log named the difference; all were provisioned once it was right",
        **daemon.figures(population, late),
    )


def await_discoveries(daemon: Daemon, number: int) -> None:
    """Wait for some discoveries to come."""
    total = daemon.metric("discover_cycles") + number
    daemon.until(lambda: daemon.metric("discover_cycles") >= total)


# --- the limits


def test_no_descriptor_is_left_for_a_while(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemon = install_daemon(broker.url, workers=WORKERS)
    discover_often(daemon, seconds=2.0)
    daemon.warm_up(start_servers, broker.url)
    with limited(daemon, resource.RLIMIT_NOFILE, daemon.before.descriptors):
        population = start_servers(broker.url, scale.servers, over=0.5)
        daemon.until(lambda: daemon.logged("could not be started: Too many open files"))
        # nor can the monitor port answer, unless something was closed a moment ago
        daemon.until(lambda: not answers(daemon))
    population.wait_until_provisioned()

    assert population.configured_again.total() == 0
    daemon.assert_unharmed()
    report(
        "the daemon was allowed no more descriptors than it had open, then more again (RLIMIT_NOFILE)",
        "helpers did not start, and the log said why; all were provisioned in the next cycle",
        **daemon.figures(population),
    )


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="it takes root, and setpriv")
@pytest.mark.usefixtures("full_scale_only")
def test_no_process_and_no_thread_is_left_for_a_while(
    broker: NatsServer, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """The limit of processes does not hold for root, so it runs as a user that has nothing else running."""
    with tempfile.TemporaryDirectory() as directory, LonelyDaemon(Path(directory) / "daemon", broker.url) as daemon:
        Path(directory).chmod(0o755)
        daemon.settings["workers"] = WORKERS
        discover_often(daemon, seconds=2.0)
        daemon.warm_up(start_servers, broker.url)
        with daemon.few_processes(daemon.before.threads):
            population = start_servers(broker.url, scale.servers, over=0.5)
            daemon.until(lambda: daemon.logged("could not be started: Resource temporarily unavailable"))
            assert not answers(daemon)
        population.wait_until_provisioned()

        assert daemon.logged("the monitor port has no thread for a client")
        assert population.configured_again.total() == 0
        daemon.assert_unharmed()
    report(
        "the daemon was allowed no more processes and threads than it had, then more again (RLIMIT_NPROC)",
        "helpers did not start, and the log said why; all were provisioned in the next cycle",
        **daemon.figures(population),
    )


# --- the daemon itself


def test_daemon_frozen_and_resumed(
    broker: NatsServer, start_daemon: StartDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemon = start_daemon(broker.url, workers=WORKERS)
    population = start_servers(broker.url, scale.servers, over=scale.of(short=1.0, full=10.0))
    seconds = scale.of(short=2.0, full=35.0)

    def freeze() -> None:
        daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        daemon.process.send_signal(signal.SIGCONT)

    population.provision_while(freeze)

    assert population.configured_again.total() == 0
    daemon.assert_unharmed()
    report(
        f"the daemon was frozen for {seconds:g} s (SIGSTOP, SIGCONT)",
        "all were provisioned",
        **daemon.figures(population),
    )


def test_daemon_killed_and_started_again(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """Those that were half way are begun anew: nothing but the killed daemon knew how far they were."""
    rounds, workers = scale.of(short=(2, 8), full=(4, 16))
    daemon = install_daemon(broker.url, workers=workers)
    if not scale.full:
        # a daemon that has just started finds servers that are about to leave, and asks for them again and again
        wait_shortly(daemon, seconds=1.0)
    daemon.warm_up(start_servers, broker.url)
    population = start_servers(broker.url, scale.servers, over=scale.of(short=1.0, full=20.0))

    def kill_and_start() -> None:
        daemon.kill()
        assert daemon.pid_file.exists()
        daemon.start("run", "--debug")

    population.provision_while(*[kill_and_start] * rounds)

    assert population.configured_again.total() <= rounds * workers
    assert population.fleet.counts().lock_conflicts == 0
    assert daemon.pid_file.read_text().strip() == str(daemon.process.pid)
    daemon.assert_unharmed()
    report(
        f"the daemon was killed and started again {rounds} times, its pid file was left (SIGKILL)",
        "all were provisioned, none was locked",
        **daemon.figures(population),
    )


def test_daemon_stopped_and_started_again(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    rounds = scale.of(short=2, full=4)
    daemon = install_daemon(broker.url, workers=16)
    if not scale.full:
        # a daemon that has just started finds servers that are about to leave, and asks for them again and again
        wait_shortly(daemon, seconds=1.0)
    daemon.warm_up(start_servers, broker.url)
    # so slow that every worker has a host in work when it is told to leave, and still when it begins to
    population = start_servers(broker.url, scale.servers, over=0.2, fleet={"latency": 0.3})
    took = []

    def stop_and_start() -> None:
        started = time.monotonic()
        assert daemon.stop() == 0
        took.append(time.monotonic() - started)
        assert not daemon.pid_file.exists()
        daemon.start("run", "--debug")

    population.provision_while(*[stop_and_start] * rounds)

    assert population.configured_again.total() == 0
    assert not daemon.logged("the connection was closed")
    daemon.assert_unharmed()
    report(
        f"the daemon was stopped and started again {rounds} times (SIGTERM)",
        f"hosts in work were finished within {max(took):.1f} s at most; all were provisioned, none configured twice",
        **daemon.figures(population),
    )


# --- how it is done


@contextlib.contextmanager
def log_to(daemon: Daemon, destination: str) -> Iterator[None]:
    """Have the daemon's log go to its log file by itself, or by a redirection of its output."""
    if destination == "logfile":
        daemon.settings["logfile"] = str(daemon.log_file)
        yield
        return
    del daemon.settings["logfile"]
    with daemon.log_file.open("ab") as output, Path(os.devnull).open() as nothing:
        process = daemon.start("run", "--debug", stdout=output)
        process.stdout = nothing  # what there is to be read of it for those that expect a pipe
        yield


def fill(file: Path) -> None:
    """Write until the disk is full."""
    block = b"x" * 4096
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while filler.write(block):
            pass
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as filler:
        while filler.write(b"x"):
            pass


@contextlib.contextmanager
def limited(daemon: Daemon, what: int, limit: int) -> Iterator[None]:
    """Lower a limit of the running process for a while."""
    pid = daemon.process.pid
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


def answers(daemon: Daemon) -> bool:
    """Whether its monitor port does, within a second."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/livez", timeout=1.0):
            return True
    except OSError:
        return False


class LonelyDaemon(Daemon):
    """It runs as another user, who may do nothing that root may but look into all directories."""

    KEPT = "-all,+dac_override"
    USER = (
        *("setpriv", f"--reuid={LONELY_USER}", f"--regid={LONELY_USER}", "--clear-groups"),
        *(f"--inh-caps={KEPT}", f"--ambient-caps={KEPT}"),
    )

    def command(self, *arguments: str) -> list[str]:
        command = super().command(*arguments)
        for path in (self.directory, *self.directory.iterdir()):
            os.chown(path, LONELY_USER, LONELY_USER)
        return [*self.USER, *command]

    @contextlib.contextmanager
    def few_processes(self, limit: int) -> Iterator[None]:
        """Lower the limit of processes and threads for a while."""
        before, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        self._limit_processes(limit)
        try:
            yield
        finally:
            self._limit_processes(before)

    def _limit_processes(self, limit: int) -> None:
        command = [*self.USER, "prlimit", f"--pid={self.process.pid}", f"--nproc={limit}:"]
        subprocess.run(command, check=True)
