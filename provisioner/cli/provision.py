"""The `provision` command: one server, now, by hand, step by step."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import click

from provisioner.cli import assembly, options, rivals
from provisioner.cli.assembly import Setup
from provisioner.cli.helper_view import verdict
from provisioner.errors import HostError, ProvisionerError
from provisioner.host.host import Host
from provisioner.host.provision import HELPER, Outcome, Provisioner
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.text import printable

#: Where the steps are logged.
_STEPS = Host.__module__.rpartition(".")[0]

_NEXT = {
    Outcome.PROVISIONED: ": it restarts within seconds, and leaves this network",
    Outcome.SHUT_DOWN: "",
    Outcome.UPGRADING: ": it comes back to be configured",
}


@click.command(
    epilog="""\b
    Example:
      choria-provisioner provision web1.example.net --config /etc/choria-provisioner/provisioner.yaml \\
          --choria-config /etc/choria-provisioner/choria.cfg
    """
)
@click.argument("identity")
@click.option("--force", is_flag=True, help="Even while another provisioner may be at work, or the server is denied.")
@options.config
@options.choria_config
@options.daemon_pid
@options.debug
def provision(
    identity: str, force: bool, config_file: Path, choria_file: Path | None, pid_file: Path | None, debug: bool
) -> None:
    """Provision one server now, and tell every step of it.

    Refused while a provisioner runs on this machine, by its pid file or monitor port, or while another instance leads
    (with leader_election). An instance on another machine that takes part in no election cannot be seen from here.

    Exit code 0: provisioned, shut down or sent to upgrade, as the helper wished; 1: not, and why.
    """
    options.check_identity(identity)
    with options.failures():
        setup = assembly.load(config_file, choria_file)
        with _Narrator(debug=debug) as narrator:
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
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: _interrupt(shutdown))
        _take_through(provisioner, Host(identity, on_step=narrator.tell), narrator)


def _take_through(provisioner: Provisioner, host: Host, narrator: _Narrator) -> None:
    """As the daemon does it, with a word on what came out of each part."""
    node = provisioner.node(host)
    facts = provisioner.fetch(node)
    narrator.tell(f"  it runs version {printable(facts.inventory.version) or '?'}")
    host.at(HELPER)
    wanted = provisioner.ask_helper(facts)
    narrator.tell(f"  the helper says: {verdict(wanted)}")
    outcome = provisioner.apply(node, facts, wanted)
    narrator.tell(f"{outcome.value}{_NEXT[outcome]}")


def _interrupt(shutdown: Shutdown) -> None:
    if not shutdown.requested:
        # the stream of Python may be in the middle of a line
        os.write(2, b"interrupted: what is under way is finished, within the grace time; a second signal drops it\n")
    shutdown.request()


class _Narrator(logging.Handler):
    """Tells what happens and when; in a ``with`` block what is logged, too.

    :param debug: tell what all parts log, not only the steps
    """

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self._debug = debug
        self._started = time.monotonic()

    def __enter__(self) -> _Narrator:
        logging.getLogger().addHandler(self)
        # the tries that fail, and what the helper has to say
        logging.getLogger("" if self._debug else _STEPS).setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def tell(self, line: str) -> None:
        """One line, with the time since the beginning."""
        shown = "".join(character if character.isprintable() else " " for character in line)
        click.echo(f"{time.monotonic() - self._started:7.2f} s  {shown}")

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        request_id = getattr(record, "request_id", "")
        self.tell(f"  {level}{record.getMessage()}{f' (request {request_id})' if request_id else ''}")
