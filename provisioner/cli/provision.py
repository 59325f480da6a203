"""The `provision` command: one server, now, by hand, step by step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import click

from provisioner.cli import assembly, options, rivals
from provisioner.cli.assembly import Setup
from provisioner.cli.helper_view import View
from provisioner.errors import HostError, ProvisionerError
from provisioner.host.host import Host
from provisioner.host.provision import HELPER, Provisioner, Success, secrets
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.text import plain_line, printable

#: What the steps log to.
_STEPS = logging.getLogger(Host.__module__.rpartition(".")[0])

_NEXT = {
    Success.PROVISIONED: ": it restarts within seconds, and leaves this network",
    Success.SHUT_DOWN: "",
    Success.UPGRADING: ": it comes back to be configured",
}


@click.command(
    "provision",
    epilog="""\b
    Example:
      choria-provisioner provision web1.example.net --config /etc/choria-provisioner/provisioner.yaml \\
          --choria-config /etc/choria-provisioner/choria.cfg
    """,
)
@click.argument("identity")
@click.option("--force", is_flag=True, help="Even while another provisioner may be at work, or the server is denied.")
@options.config
@options.choria_config
@options.daemon_pid
@options.debug
def provision_command(
    identity: str, force: bool, config_file: Path, choria_file: Path | None, pid_file: Path | None, debug: bool
) -> None:
    """Provision one server now, and tell every step of it.

    Refused while a provisioner runs on this machine, by its pid file or monitor port, or while another instance leads
    (with leader_election). An instance on another machine that takes part in no election cannot be seen from here.

    Exit code 0: provisioned, shut down or sent to upgrade, as the helper wished; 1: not, and why.
    """
    options.check_identity(identity)
    with options.failures():
        options.log_to_terminal(debug=debug)
        setup = assembly.load(config_file, choria_file)
        with _Narrator() as narrator:
            try:
                _provision(setup, identity, narrator, None if force else pid_file or options.PID_FILE)
            except HostError as error:
                narrator.tell(f"could not provision: {error}")
                sys.exit(options.EXIT_FAILURE)


def _provision(setup: Setup, identity: str, narrator: _Narrator, pid_file: Path | None) -> None:
    """Take the server through its cycle.

    :param pid_file: of a daemon that must not run; None: whatever speaks against it
    """
    metrics, shutdown = Metrics(""), Shutdown(setup.config.shutdown_grace)
    connector = setup.connector(metrics)
    provisioner = setup.provisioner(connector, metrics, shutdown)
    with assembly.connected(connector):
        narrator.tell(f"connected to {connector.connected_url}")
        if pid_file:
            if reason := setup.config.reason_refused(identity):
                raise ProvisionerError(f"{identity} is not to be provisioned here: {reason} (--force does it anyway)")
            rivals.check(setup, connector, pid_file)
            narrator.tell(rivals.looked_at(setup, pid_file))
        _heed_signals(shutdown)
        _take_through(provisioner, Host(identity, on_step=narrator.tell), narrator)


def _take_through(provisioner: Provisioner, host: Host, narrator: _Narrator) -> None:
    """As the daemon does it, with a word on what came out of each part."""
    node = provisioner.node(host)
    facts = provisioner.fetch(node)
    narrator.tell(f"  it runs version {printable(facts.inventory.version) or '?'}")
    host.at(HELPER)
    wanted = provisioner.ask_helper(facts)
    said = View(secrets(provisioner.config, facts)).verdict(wanted)
    narrator.tell(f"  the helper says: {said}")
    success = provisioner.apply(node, facts, wanted)
    narrator.tell(f"{success.value}{_NEXT[success]}")


def _heed_signals(shutdown: Shutdown) -> None:
    """From here on one signal does not leave the server half-way, nor does a terminal that goes away."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as with nohup
            signal.signal(signum, lambda signum, _: _interrupt(shutdown, signum))


def _interrupt(shutdown: Shutdown, signum: int) -> None:
    if not shutdown.requested:
        shutdown.request()
        _tell_at_once(b"interrupted: what is under way is finished, within the grace time; a second signal drops it\n")
    elif signum != signal.SIGHUP:  # both the kernel and the shell send one when a terminal goes away
        shutdown.request()


def _tell_at_once(line: bytes) -> None:
    """Safe in a signal handler: the stream of Python may be in the middle of a line, and the terminal may be gone."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError):
            os.write(2, line)


class _Narrator(logging.Handler):
    """Tells what happens and when; in a ``with`` block what the steps log, too, instead of the log."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()

    def __enter__(self) -> _Narrator:
        _STEPS.addHandler(self)
        _STEPS.propagate = False
        # the tries that fail, and what the helper has to say
        _STEPS.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        _STEPS.removeHandler(self)
        _STEPS.propagate = True

    def tell(self, line: str) -> None:
        """One line, with the time since the beginning."""
        # no server is to be left half-way because nobody reads this any more
        with contextlib.suppress(OSError):
            click.echo(f"{time.monotonic() - self._started:7.2f} s  {plain_line(line)}")

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        request_id = getattr(record, "request_id", "")
        self.tell(f"  {level}{record.getMessage()}{f' (request {request_id})' if request_id else ''}")
