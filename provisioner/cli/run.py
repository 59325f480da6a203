"""The `run` command: puts the daemon together from its configuration and keeps it running."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import click

from provisioner import __version__, config, exposure, logs, systemd
from provisioner.choria import security, settings
from provisioner.choria.brokers import BrokerList
from provisioner.choria.connector import Connector
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.rpc import Client
from provisioner.choria.security import ExpiryReminder, Security
from provisioner.choria.settings import CHORIA_KEY, FILE_KEY, SEED_FILE, TOKEN_FILE, Settings
from provisioner.config import Config
from provisioner.errors import ConfigurationError, ProvisionerError
from provisioner.host.provision import Provisioner
from provisioner.host.provisioning_jwt import Verifier
from provisioner.host.server_jwt import Issuer
from provisioner.hosts.scheduler import Scheduler
from provisioner.monitor.http import MonitorServer
from provisioner.monitor.metrics import Metrics
from provisioner.pidfile import PidFile
from provisioner.shutdown import Shutdown

LOG = logging.getLogger(__name__)

#: A worker that waits for a reply is woken within this time while others compute; Python's default of 5 ms would
#: dominate the time of an RPC.
SWITCH_INTERVAL_SECONDS = 0.0002

EXIT_OK = 0
EXIT_FAILURE = 1
#: A thread died, was stuck or could not be ended: a new process is the cure.
EXIT_DEFECT = os.EX_SOFTWARE


@click.command(
    epilog="""Example:

    choria-provisioner run --config /etc/choria-provisioner/provisioner.yaml --pid /run/choria-provisioner.pid
    """
)
@click.option("--config", "config_file", required=True, type=click.Path(path_type=Path), help="provisioner.yaml")
@click.option(
    "--choria-config",
    "choria_file",
    type=click.Path(path_type=Path),
    help="Choria client configuration; without it the user's, then the system's default file.",
)
@click.option("--pid", "pid_file", type=click.Path(path_type=Path), help="File to write the process id to.")
@click.option("--debug", is_flag=True, help="Log at level debug, whatever the configuration says.")
def run(config_file: Path, choria_file: Path | None, pid_file: Path | None, debug: bool) -> None:
    """Run the provisioner until it is told to stop.

    SIGTERM or SIGINT let hosts in work finish within the grace time; a second one leaves at once.
    """
    try:
        sys.exit(_run(config_file, choria_file, pid_file, debug))
    except ConfigurationError as error:
        for problem in error.problems:
            click.echo(problem, err=True)
    except ProvisionerError as error:
        click.echo(str(error), err=True)
    sys.exit(EXIT_FAILURE)


def _run(config_file: Path, choria_file: Path | None, pid_file: Path | None, debug: bool) -> int:
    # no secret of ours gets into a core file; helpers inherit the limit, and cannot raise it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    conf, choria, network = _load(config_file, choria_file)
    logs.setup(destination=conf.logfile, level=conf.loglevel, log_format=conf.log_format, debug=debug)
    exposed = exposure.warnings(_watched(conf, choria))
    for warning in (*conf.warnings, *choria.warnings, *network.warnings, *exposed):
        LOG.warning("%s", warning)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)

    shutdown = Shutdown(conf.shutdown_grace)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: shutdown.request())

    metrics = Metrics(conf.site)
    metrics.paused.set_function(lambda: int(conf.paused))
    metrics.leader.set_function(lambda: int(not conf.paused))
    scheduler = _assemble(conf, choria, network, metrics, shutdown)

    with contextlib.ExitStack() as stack:
        if pid_file:
            stack.enter_context(PidFile(pid_file))
        if conf.monitor_port:
            stack.enter_context(_monitor(conf, metrics, scheduler))
        LOG.info("choria-provisioner %s started with %d workers, as %s", __version__, conf.workers, choria.identity)
        systemd.notify("READY=1")
        healthy = scheduler.run()
        LOG.info("choria-provisioner ended")
    # nothing is left that one more could cut short, but the exit code
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    return EXIT_OK if healthy else EXIT_DEFECT


def _load(config_file: Path, choria_file: Path | None) -> tuple[Config, Settings, Security]:
    """Both configuration files, and the credentials that they name.

    :raises ConfigurationError: with the problems of all
    """
    problems: list[str] = []
    conf = choria = network = None
    try:
        conf = config.load(config_file)
        if conf.features.ed25519:
            problems += [f"{conf.path}: {problem}" for problem in Issuer(conf).problems()]
    except ConfigurationError as error:
        problems += error.problems
    try:
        # what insecure networks need is always checked, the rest once it is known that the network is another
        choria = settings.load(
            choria_file,
            insecure=conf is None or conf.choria_insecure,
            provisioning_password=conf.broker_provisioning_password if conf else "",
        )
    except ConfigurationError as error:
        problems += error.problems
    if conf and choria:
        try:
            network = security.choose(choria, insecure=conf.choria_insecure)
        except ConfigurationError as error:
            problems += error.problems
    if problems or conf is None or choria is None or network is None:
        raise ConfigurationError(problems)
    return conf, choria, network


def _watched(conf: Config, choria: Settings) -> list[exposure.Watched]:
    """The files that hold secrets, or decide what is done, in this configuration."""
    files = [
        exposure.Watched("", str(conf.path), exposure.SECRET),
        exposure.Watched("", str(choria.path), exposure.TRUSTED),
        exposure.Watched("helper", shutil.which(conf.helper[0]) or "", exposure.TRUSTED),
    ]
    if conf.features.ed25519:
        files.append(exposure.Watched("jwt_signing_key", conf.jwt_signing_key, exposure.KEY))
        files.append(exposure.Watched("jwt_signing_token", conf.jwt_signing_token, exposure.KEY))
    if conf.choria_insecure:
        return files
    if choria.provider == "choria":
        files.append(exposure.Watched(SEED_FILE, choria.choria_seed_file, exposure.KEY))
        files.append(exposure.Watched(TOKEN_FILE, choria.choria_token_file, exposure.KEY))
        files.append(exposure.Watched(CHORIA_KEY, choria.choria_key, exposure.KEY))
    else:
        # Puppet shares its keys with its group
        limit = exposure.SECRET if choria.provider == "puppet" else exposure.KEY
        files.append(exposure.Watched(FILE_KEY, choria.file_key, limit))
    return files


def _monitor(conf: Config, metrics: Metrics, scheduler: Scheduler) -> MonitorServer:
    return MonitorServer(
        conf.monitor_address,
        conf.monitor_port,
        metrics=metrics.render,
        liveness=scheduler.liveness(),
        readiness=scheduler.readiness(),
    )


def _assemble(conf: Config, choria: Settings, network: Security, metrics: Metrics, shutdown: Shutdown) -> Scheduler:
    connector = Connector(
        BrokerList(choria.middleware_hosts, use_srv=choria.use_srv, srv_domain=choria.srv_domain),
        name=choria.identity,
        reply_prefix=reply_prefix(network.protocol.caller),
        authenticate=network.authenticate,
        tls_context=network.tls_context,
        tls_always=network.tls_always,
        account=network.account,
        advise=functools.partial(security.advice, network),
        connect_timeout=choria.connect_timeout,
        metrics=metrics.connector,
    )
    issuer = Issuer(conf) if conf.features.ed25519 else None

    def expiries() -> dict[str, float]:
        return {**network.expiries(), **(issuer.expiries() if issuer else {})}

    metrics.credential_expiries = expiries
    provisioner = Provisioner(
        config=conf,
        client=Client(connector, network.protocol),
        metrics=metrics,
        shutdown=shutdown,
        verifier=Verifier(conf.jwt_verify_cert) if conf.features.jwt else None,
        issuer=issuer,
        discovery_timeout=choria.discovery_timeout,
    )
    return Scheduler(provisioner, each_turn=ExpiryReminder(expiries))
