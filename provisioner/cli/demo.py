"""The `demo` command: a broker, a simulated fleet, and the real daemon as a child process that provisions it."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import attrs
import click

from provisioner.cli.demo_progress import (
    MAIN_METRICS,
    Page,
    Progress,
    disagreements,
    display,
    summary,
)
from provisioner.cli.options import EXIT_FAILURE, EXIT_OK
from provisioner.errors import ProvisionerError
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.networks import NETWORKS, Network
from provisioner.simulate.server import Server, Site

#: Of all servers, the part that is up before the provisioner starts.
UP_AT_START = 1 / 5
#: Of all servers, the part that the helper defers.
DEFERRED = 1 / 25
#: Of all servers, the part that fails, and how many do at most: each keeps a worker busy for several seconds.
FAILING = 1 / 50
FAILING_AT_MOST = 20
#: The unusual ones are among so many of those that boot first: they are to be found again by the second discovery.
UNUSUAL_AMONG = 3 / 5
#: Between two discoveries of the daemon: the shortest interval that it takes.
INTERVAL_SECONDS = 60.0
#: How long a server fails: longer than the daemon tries, shorter than it takes until it comes again.
FAILING_SECONDS = 15.0
#: Time for everything but the booting: the second discovery and what it brings to light.
PATIENCE_SECONDS = 80.0
#: How long the metrics may lag behind the servers' own counters at the end.
SETTLE_SECONDS = 10.0
#: How often the display is drawn.
LOOK_SECONDS = 0.25
#: How long the daemon may take to serve its metrics.
START_SECONDS = 20.0
#: How long the daemon may take to leave.
LEAVE_SECONDS = 10.0
METRICS_TIMEOUT_SECONDS = 2.0
WORKERS = 8

ROLES = ("app", "db", "web")

#: What the number of the signal is added to.
EXIT_SIGNAL = 128


class DemoError(ProvisionerError):
    """The demo did not end as it should."""


class Interrupted(Exception):  # noqa: N818 not an error
    """The user does not want to see more."""


@click.command(
    "demo",
    epilog="""Examples:

    choria-provisioner demo

    choria-provisioner demo --network org

    choria-provisioner demo --servers 1000 --seconds-to-boot 30 --keep
    """,
)
@click.option(
    "--network",
    "kind",
    default="insecure",
    show_default=True,
    type=click.Choice(list(NETWORKS)),
    help="insecure: protocol 1, no TLS, nothing signed; x509: mutual TLS, every server gets a certificate; org: "
    "protocol 2, an organization's issuer, every server gets a token.",
)
@click.option("--servers", default=200, show_default=True, type=click.IntRange(5, 5000), help="How many servers.")
@click.option(
    "--seconds-to-boot",
    default=40.0,
    show_default=True,
    type=click.FloatRange(0, 40),
    help="Time over which the servers boot; a few are up before the provisioner starts.",
)
@click.option("--keep", is_flag=True, help="Keep the directory with configuration and logs.")
def demo_command(kind: str, servers: int, seconds_to_boot: float, keep: bool) -> None:
    """See a fleet of simulated servers being provisioned.

    Starts a NATS server, simulated servers that wait to be provisioned, and the provisioner with a sample helper, all
    on this machine and on ports of their own. Some servers are deferred once, some fail once, one misbehaves for ever.
    On a secured network every server verifies what it is given and who asks it. Takes a little more than a minute. The
    exit code is 0 when every good server was provisioned.
    """
    directory = Path(tempfile.mkdtemp(prefix="choria-provisioner-demo-"))
    stop = _StopRequest()
    code = EXIT_FAILURE
    try:
        with stop:
            _run(kind, directory, servers, seconds_to_boot, stop)
        code = EXIT_OK
    except Interrupted:
        code = EXIT_SIGNAL + stop.signum
        click.echo("\nInterrupted: everything was stopped.", err=True)
    except ProvisionerError as error:
        click.echo(f"The demo failed: {error}", err=True)
    finally:
        if keep or code == EXIT_FAILURE:
            click.echo(f"Configuration and logs are kept in {directory}", err=code != EXIT_OK)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(code)


class _StopRequest:
    """Notes the signals that end a program, in a ``with`` block. Nothing is cut short: one looks now and then."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signum = 0

    def __enter__(self) -> None:
        self._before = {each: signal.signal(each, self._note) for each in self.SIGNALS}

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def check(self) -> None:
        """Raise :class:`Interrupted` if a signal came."""
        if self.signum:
            raise Interrupted

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum


def _run(kind: str, directory: Path, servers: int, seconds_to_boot: float, stop: _StopRequest) -> None:
    """Set everything up, watch, tear it down and sum it up.

    :raises ProvisionerError: when it does not go as it should
    """
    started = time.monotonic()
    click.echo(_introduction(kind, directory, servers, seconds_to_boot))
    network = NETWORKS[kind](directory)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(NatsServer(network.broker))
        stop.check()
        fleet = network.fleet(broker.url, _servers(servers, seconds_to_boot, network.site(broker.url)))
        stack.enter_context(fleet)
        stop.check()
        daemon = _Daemon(network)
        daemon.configure(broker.url)
        stack.callback(daemon.stop)
        daemon.start()
        patience = PATIENCE_SECONDS + seconds_to_boot + servers * network.helper_seconds
        watch = _Watch(network, fleet, daemon, started, limit=started + patience)
        final = _show(watch, stop)
        if code := daemon.stop():
            raise DemoError(f"the provisioner left with exit code {code}")
    _sum_up(final, network)


def _introduction(kind: str, directory: Path, servers: int, seconds_to_boot: float) -> str:
    deferred, failing = _unusual(servers)
    text = (
        f"Network: {kind}. {servers} simulated servers boot within {seconds_to_boot:.0f} s and want to be provisioned. "
        f"The helper will defer {deferred} of them once, {failing} will fail once, one misbehaves for ever. Broker, "
        "provisioner and helper are real. What was deferred or failed comes back with the next discovery, a minute "
        "after the first one."
    )
    width = min(80, shutil.get_terminal_size().columns)
    where = f"Configuration and logs (gone at the end, unless --keep is given):\n{directory}"
    return f"\n{click.wrap_text(text, width)}\n\n{where}\n"


def _show(watch: _Watch, stop: _StopRequest) -> Progress:
    """Show how it goes until it is over.

    :raises DemoError: when it does not end well
    """
    with contextlib.closing(display()) as shown:
        while True:
            stop.check()
            progress = watch.look()
            shown.show(progress)
            if watch.over(progress):
                return progress
            time.sleep(LOOK_SECONDS)


def _sum_up(final: Progress, network: Network) -> None:
    click.echo(f"\nAll {final.counts.servers} good servers are provisioned.\n")
    for line in summary(final, network.rpcs, network.proofs):
        click.echo(line)
    click.echo("\nThe main lines of the provisioner's metrics:\n")
    for line in final.page.lines(MAIN_METRICS):
        click.echo(f"  {line}")
    click.echo()


@attrs.define
class _Watch:
    """Puts together what the servers, the daemon and the helper know, and sees when it is over.

    :ivar limit: when it is too late, on the monotonic clock like all times here
    """

    network: Network
    fleet: Fleet
    daemon: _Daemon
    started: float
    limit: float
    _page: Page = attrs.field(factory=Page)
    _first_discovery: float | None = None
    _settled_by: float | None = None

    def look(self) -> Progress:
        """Raise :class:`DemoError` when the daemon is gone."""
        self.daemon.check()
        self._page = self.daemon.page() or self._page
        now = time.monotonic()
        next_discovery = None
        if self._page.value("discover_cycles"):
            self._first_discovery = self._first_discovery or now
            next_discovery = INTERVAL_SECONDS - (now - self._first_discovery) % INTERVAL_SECONDS
        return Progress(
            elapsed=now - self.started,
            counts=self.fleet.counts(),
            page=self._page,
            deferred=sum(1 for _ in self.network.notes.iterdir()),
            next_discovery=next_discovery,
        )

    def over(self, progress: Progress) -> bool:
        """Whether all good servers are provisioned, and both sides have counted the same.

        :raises DemoError: when that cannot be any more
        """
        counts, page, now = progress.counts, progress.page, time.monotonic()
        if counts.unfit or counts.bad_signatures:
            reasons = "; ".join(f"{reason} ({times} times)" for reason, times in counts.objections.items())
            raise DemoError(f"what the provisioner has sent would not do on a real network: {reasons}")
        if counts.complete and not page.value("busy_workers") and not page.value("work_queue_entries"):
            different = disagreements(progress, self.network.rpcs)
            if not different:
                return True
            self._settled_by = self._settled_by or now + SETTLE_SECONDS
            if now > self._settled_by:
                raise DemoError("; ".join(different))
        if now > self.limit:
            missing = f"{counts.provisioned} of {counts.servers} good servers are provisioned"
            raise DemoError(f"{missing} after {progress.elapsed:.0f} s, and that is too long")
        return False


class _Daemon:
    """The provisioner as a process of its own, in a directory that has all its files."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._directory = network.directory
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._answered = False

    def configure(self, broker: str) -> None:
        """Write its configuration files."""
        self._network.configure(
            broker,
            workers=WORKERS,
            interval=f"{INTERVAL_SECONDS:.0f}s",
            logfile=str(self._directory / "provisioner.log"),
            loglevel="info",
            site="demo",
            monitor_port=self._port,
            monitor_address="127.0.0.1",
            shutdown_grace="2s",
        )

    def start(self) -> None:
        """Start it, out of reach of the terminal's Ctrl-C and of what its environment and directory may hold."""
        command = [sys.executable, "-m", "provisioner", "run", "--config", "provisioner.yaml"]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("MCOLLECTIVE_", "CHORIA_"))
        }
        with (self._directory / "provisioner.out").open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--choria-config", "choria.cfg"],
                cwd=self._directory,
                env={**inherited, **self._network.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = time.monotonic()

    def check(self) -> None:
        """Raise :class:`DemoError` when it ended, or does not get going."""
        if self._process and (code := self._process.poll()) is not None:
            said = (self._directory / "provisioner.out").read_text(errors="replace").strip().splitlines()
            raise DemoError(f"the provisioner ended with exit code {code}: {' / '.join(said[-5:])}")
        if not self._answered and time.monotonic() > self._started + START_SECONDS:
            raise DemoError(f"the provisioner does not serve its metrics within {START_SECONDS:.0f} s")

    def page(self) -> Page | None:
        """Give its metrics, None while it does not serve them."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=METRICS_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        self._answered = self._answered or response.status == http.HTTPStatus.OK
        return Page(text) if response.status == http.HTTPStatus.OK else None

    def stop(self) -> int:
        """Have it leave, by force if it does not, and give its exit code; may be called again."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()


def _servers(count: int, seconds: float, site: Site) -> list[Server]:
    deferred, failing = _unusual(count)
    picked = iter(random.Random(count).sample(range(int(count * UNUSUAL_AMONG)), deferred + failing + 1))
    misbehaving = next(picked)
    defers = {next(picked) for _ in range(deferred)}
    fails = set(picked)
    at_start = int(count * UP_AT_START)
    return [
        Server(
            identity=f"{ROLES[number % len(ROLES)]}{number:04}.example.net",
            site=site,
            facts={
                "role": ROLES[number % len(ROLES)],
                "approval": "pending" if number in defers else "granted",
                "memory": 2 ** (10 + number % 5),
            },
            fails=number in fails,
            fails_seconds=FAILING_SECONDS,
            misbehaviour=Misbehaviour.WRONG_TYPES if number == misbehaving else None,
            boots_after=max(0, number - at_start + 1) * seconds / (count - at_start),
        )
        for number in range(count)
    ]


def _unusual(count: int) -> tuple[int, int]:
    """How many servers are deferred, and how many fail."""
    return max(1, int(count * DEFERRED)), min(FAILING_AT_MOST, max(1, int(count * FAILING)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
