"""The `run` command: puts the daemon together from its configuration and keeps it running."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from pathlib import Path

import click

from provisioner import __version__, config, logs, systemd
from provisioner.choria import settings, tls
from provisioner.choria.brokers import BrokerList
from provisioner.choria.connector import Connector
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import Client
from provisioner.choria.settings import Settings
from provisioner.config import Config
from provisioner.errors import ConfigurationError, ProvisionerError
from provisioner.host.provision import Provisioner
from provisioner.host.provisioning_jwt import Verifier
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
    conf, choria = _load(config_file, choria_file)
    logs.setup(destination=conf.logfile, level=conf.loglevel, log_format=conf.log_format, debug=debug)
    for warning in (*conf.warnings, *choria.warnings):
        LOG.warning("%s", warning)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)

    shutdown = Shutdown(conf.shutdown_grace)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: shutdown.request())

    metrics = Metrics(conf.site)
    metrics.paused.set_function(lambda: int(conf.paused))
    scheduler = _assemble(conf, choria, metrics, shutdown)

    with contextlib.ExitStack() as stack:
        if pid_file:
            stack.enter_context(PidFile(pid_file))
        if conf.monitor_port:
            stack.enter_context(_monitor(conf, metrics, scheduler))
        LOG.info("choria-provisioner %s started with %d workers, as %s", __version__, conf.workers, choria.identity)
        systemd.notify("READY=1")
        healthy = scheduler.run()
        LOG.info("choria-provisioner ended")
    return EXIT_OK if healthy else EXIT_FAILURE


def _load(config_file: Path, choria_file: Path | None) -> tuple[Config, Settings]:
    """Both configuration files.

    :raises ConfigurationError: with the problems of both
    """
    problems: list[str] = []
    conf = choria = None
    try:
        conf = config.load(config_file)
        problems += _unavailable(conf)
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
    if problems or conf is None or choria is None:
        raise ConfigurationError(problems)
    return conf, choria


def _unavailable(conf: Config) -> list[str]:
    """What the configuration asks for and this version cannot do yet."""
    wanted = {
        "leader_election": conf.leader_election,
        "features.pki": conf.features.pki,
        "features.ed25519": conf.features.ed25519,
        "features.upgrades": conf.features.upgrades,
        "choria_insecure: false, a secured network,": not conf.choria_insecure,
    }
    return [f"{conf.path}: {what} is not available yet" for what, is_wanted in wanted.items() if is_wanted]


def _monitor(conf: Config, metrics: Metrics, scheduler: Scheduler) -> MonitorServer:
    return MonitorServer(
        conf.monitor_address,
        conf.monitor_port,
        metrics=metrics.render,
        liveness=scheduler.liveness(),
        readiness=scheduler.readiness(),
    )


def _assemble(conf: Config, choria: Settings, metrics: Metrics, shutdown: Shutdown) -> Scheduler:
    protocol = ProtocolV1(identity=choria.identity, caller=choria.caller, ttl=choria.ttl)
    credentials = {"user": choria.nats_user, "pass": choria.nats_pass} if choria.nats_user and choria.nats_pass else {}
    connector = Connector(
        BrokerList(choria.middleware_hosts, use_srv=choria.use_srv, srv_domain=choria.srv_domain),
        name=choria.identity,
        reply_prefix=reply_prefix(choria.caller),
        authenticate=lambda _info: credentials,
        tls_context=tls.system_trust_context,
        connect_timeout=choria.connect_timeout,
        metrics=metrics.connector,
    )
    provisioner = Provisioner(
        config=conf,
        client=Client(connector, protocol),
        metrics=metrics,
        shutdown=shutdown,
        verifier=Verifier(conf.jwt_verify_cert) if conf.features.jwt else None,
        discovery_timeout=choria.discovery_timeout,
    )
    return Scheduler(provisioner)
