"""The `run` command: puts the daemon together from its configuration and keeps it running."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from pathlib import Path

import click

from provisioner import __version__, lifetimes, logs, systemd
from provisioner.cli import assembly, options
from provisioner.cli.assembly import Setup
from provisioner.config import Config
from provisioner.hosts.scheduler import Scheduler
from provisioner.monitor.http import MonitorServer
from provisioner.monitor.metrics import Metrics
from provisioner.pidfile import PidFile
from provisioner.shutdown import Shutdown

LOG = logging.getLogger(__name__)

#: A worker that waits for a reply is woken within this time while others compute; with Python's default of 5 ms that
#: would be most of the time of an RPC. With less, the threads take the processor from each other too often.
SWITCH_INTERVAL_SECONDS = 0.001


@click.command(
    "run",
    epilog="""\b
    Example:
      choria-provisioner run --config /etc/choria-provisioner/provisioner.yaml \\
          --choria-config /etc/choria-provisioner/choria.cfg \\
          --pid /run/choria-provisioner/provisioner.pid
    """,
)
@options.config
@options.choria_config
@click.option("--pid", "pid_file", type=click.Path(path_type=Path), help="File to write the process id to.")
@click.option("--debug", is_flag=True, help="Log at level debug, whatever the configuration says.")
def run_command(config_file: Path, choria_file: Path | None, pid_file: Path | None, debug: bool) -> None:
    """Run the provisioner until it is told to stop.

    SIGTERM or SIGINT let hosts in work finish within the grace time; a second one leaves at once. SIGHUP opens the log
    file anew.
    """
    with options.failures():
        sys.exit(_run(config_file, choria_file, pid_file, debug))


def _run(config_file: Path, choria_file: Path | None, pid_file: Path | None, debug: bool) -> int:
    setup = assembly.load(config_file, choria_file)
    conf = setup.config
    logs.setup(destination=conf.logfile, level=conf.loglevel, log_format=conf.log_format, debug=debug)
    for warning in setup.warnings:
        LOG.warning("%s", warning)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)

    metrics, shutdown, reopening = Metrics(conf.site), Shutdown(conf.shutdown_grace), logs.Reopening()
    _heed_signals(shutdown, reopening)
    scheduler = _assemble(setup, metrics, shutdown, reopening)

    with contextlib.ExitStack() as stack:
        if pid_file:
            stack.enter_context(PidFile(pid_file))
        if conf.monitor_port:
            stack.enter_context(_monitor(conf, metrics, scheduler))
        LOG.info(
            "choria-provisioner %s started with %d workers, as %s", __version__, conf.workers, setup.choria.identity
        )
        systemd.notify("READY=1")
        healthy = scheduler.run()
        LOG.info("choria-provisioner ended")
    # nothing is left that one more could cut short, but the exit code
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    return options.EXIT_OK if healthy else options.EXIT_DEFECT


def _heed_signals(shutdown: Shutdown, reopening: logs.Reopening) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: shutdown.request())
    signal.signal(signal.SIGHUP, lambda *_: reopening.request())


def _assemble(setup: Setup, metrics: Metrics, shutdown: Shutdown, reopening: logs.Reopening) -> Scheduler:
    remind = lifetimes.Reminder(setup.expiries)

    def each_turn() -> None:
        remind()
        reopening()

    return Scheduler(setup.provisioner(setup.connector(metrics), metrics, shutdown), each_turn=each_turn)


def _monitor(conf: Config, metrics: Metrics, scheduler: Scheduler) -> MonitorServer:
    return MonitorServer(
        conf.monitor_address,
        conf.monitor_port,
        metrics=metrics.render,
        liveness=scheduler.liveness,
        readiness=scheduler.readiness,
        status=scheduler.overview.look,
    )
