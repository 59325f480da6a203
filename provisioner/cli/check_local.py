"""What `check` can see on this machine."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from pathlib import Path

from provisioner import exposure, lifetimes, logs
from provisioner.choria import brokers
from provisioner.choria.settings import Settings
from provisioner.cli import daemon, sample_input
from provisioner.cli.assembly import Area, Reading, expiries, guarded_files
from provisioner.cli.findings import Report
from provisioner.cli.helper_view import View
from provisioner.cli.options import PID_FILE
from provisioner.config import Config
from provisioner.errors import ProvisionerError
from provisioner.host import answer, helper_process
from provisioner.host.helper_process import ExitError
from provisioner.host.provision import check, secrets
from provisioner.monitor.http import MonitorServer

#: Exit codes of a shell that could not run what it was to run.
_NOT_RUN = (126, 127)
_DAY_SECONDS = 86400


def configuration(report: Report, reading: Reading) -> None:
    """Both files."""
    conf, choria = reading.config, reading.choria
    for area, problem in reading.problems:
        report.error(area, problem)
    if conf:
        with report.part(Area.CONFIGURATION):
            for line in conf.warnings:
                tell = report.error if line in conf.unknown_keys else report.warning
                tell(Area.CONFIGURATION, line)
            report.ok(Area.CONFIGURATION, f"{conf.path}: {_outline(conf)}")
            if not conf.token:
                report.warning(Area.CONFIGURATION, "token: is empty, which is not what servers expect")
            if not (conf.features.jwt or conf.choria_insecure):
                report.warning(Area.CONFIGURATION, "features.jwt: is off, so servers need not prove that they are ours")
    if choria:
        with report.part(Area.CLIENT):
            for line in choria.warnings:
                report.warning(Area.CLIENT, line)
            report.ok(Area.CLIENT, f"{choria.path}: {_client_outline(choria)}")


def _outline(conf: Config) -> str:
    features = [name for name in ("pki", "jwt", "ed25519", "upgrades") if getattr(conf.features, name)]
    return (
        f"{conf.workers} workers, an interval of {conf.interval:g} s, features: {', '.join(features) or 'none'}"
        f"{', with a leader election' if conf.leader_election else ''}"
    )


def _client_outline(choria: Settings) -> str:
    if choria.middleware_hosts:
        hosts = ", ".join(map(brokers.without_credentials, choria.middleware_hosts))
    else:
        hosts = "those that DNS names" if choria.use_srv else f"{brokers.LAST_RESORT}, since none is named"
    return f"identity {choria.identity}, brokers: {hosts}"


def credentials(report: Report, reading: Reading) -> None:
    """Keys, certificates and tokens."""
    with report.part(Area.CREDENTIALS):
        if reading.network:
            for line in reading.network.warnings:
                report.warning(Area.CREDENTIALS, line)
            report.ok(Area.CREDENTIALS, reading.network.summary)
        if reading.verifier:
            report.ok(Area.CREDENTIALS, "provisioning JWTs can be verified with the key of jwt_verify_cert")
        if reading.issuer and not reading.issuer.problems():
            report.ok(Area.CREDENTIALS, "JWTs for servers can be signed with jwt_signing_key")
        now = time.time()
        for name, expiry in expiries(reading.network, reading.issuer).items():
            tell = report.ok if expiry - now > lifetimes.WARNING_SECONDS else report.warning
            days = (expiry - now) / _DAY_SECONDS
            tell(
                Area.CREDENTIALS,
                f"the {name.replace('_', ' ')} expires on {lifetimes.date(expiry)}, in {days:.0f} days",
            )


def exposed_files(report: Report, conf: Config, choria: Settings) -> None:
    """Files that more people may read or write than is good."""
    with report.part("exposure"):
        files = [file for file in guarded_files(conf, choria) if file.path]
        lines = exposure.warnings(files)
        for line in lines:
            report.warning("exposure", line)
        if not lines:
            report.ok("exposure", f"none of {len(files)} files with secrets or settings is open to others")


def user(report: Report) -> None:
    """Who has looked at all that: another user may not be able to."""
    with report.part("user"):
        try:
            name = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            name = "without a name"
        report.ok("user", f"checked as user {name} ({os.geteuid()}); the daemon should run as the same")


def helper_program(report: Report, conf: Config, *, run: bool) -> None:
    """The helper: found, executable, and what it says about a made-up server."""
    with report.part("helper"):
        program = conf.helper[0]
        if shutil.which(program) is None:
            # in the words in which the daemon would say it
            helper_process.run(conf.helper, b"{}", timeout=conf.helper_timeout, cancelled=lambda: False)
        if not run:
            report.ok("helper", f"{program}: is there and executable; it was not run")
            return
        try:
            _run_helper(report, conf)
        except ExitError as error:
            if error.code in _NOT_RUN:
                raise
            report.warning("helper", f"it refuses the made-up server {sample_input.IDENTITY}, maybe rightly: {error}")


def _run_helper(report: Report, conf: Config) -> None:
    facts = sample_input.facts(conf.features)
    hidden = secrets(conf, facts)
    started = time.monotonic()
    output = helper_process.run(
        conf.helper, facts.document(), timeout=conf.helper_timeout, cancelled=lambda: False, secrets=hidden
    )
    seconds = time.monotonic() - started
    wanted = answer.parse(output.stdout)
    for line in check(facts, wanted, upgrades=conf.features.upgrades):
        report.warning("helper", line)
    report.ok(
        "helper", f"{conf.helper[0]}: answered the sample input in {seconds:.2f} s: {View(hidden).verdict(wanted)}"
    )


def surroundings(report: Report, conf: Config, pid_file: Path | None) -> None:
    """What the daemon needs of the machine: log file, monitor port, pid file.

    :param pid_file: None: the usual one, which need not be there
    """
    with report.part("logfile"):
        _log_file(report, conf)
    with report.part("monitor_port"):
        _monitor_port(report, conf)
    with report.part("pid file"):
        if pid_file or PID_FILE.parent.is_dir():
            _pid_file(report, pid_file or PID_FILE)


def _log_file(report: Report, conf: Config) -> None:
    path = logs.file(conf.logfile)
    if path is None:
        report.ok("logfile", conf.logfile)
        return
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        report.error("logfile", f"{path}: cannot be written")
    else:
        report.ok("logfile", f"{path}: can be written")


def _monitor_port(report: Report, conf: Config) -> None:
    if not conf.monitor_port:
        report.ok("monitor_port", "off: no metrics, no health")
        return
    found = daemon.monitor(conf)
    if found:
        tell = report.ok if found.provisioner else report.error
        tell("monitor_port", str(found))
        return
    with MonitorServer(conf.monitor_address, conf.monitor_port, metrics=bytes, liveness={}, readiness={}):
        pass
    report.ok("monitor_port", f"port {conf.monitor_port} is free")


def _pid_file(report: Report, pid_file: Path) -> None:
    holder = daemon.holder(pid_file)
    if holder:
        report.ok("pid file", f"a daemon runs: {holder}")
    elif not pid_file.parent.is_dir():
        report.warning("pid file", f"{pid_file}: there is no folder {pid_file.parent}")
    elif not os.access(pid_file.parent, os.W_OK):
        raise ProvisionerError(f"{pid_file}: the folder {pid_file.parent} cannot be written to")
    else:
        report.ok("pid file", f"{pid_file}: held by nobody")
