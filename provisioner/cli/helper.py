"""The `helper` command: what the helper says about a server, and what would come of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import attrs
import click
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from provisioner.cli import assembly, options, rivals
from provisioner.cli.helper_view import View, certificate_problems
from provisioner.config import Config
from provisioner.errors import ConfigurationError, ProvisionerError
from provisioner.host import answer, helper_process, provision
from provisioner.host.answer import Answer
from provisioner.host.facts import Facts, FactsError, parse
from provisioner.host.host import Host
from provisioner.host.node import Token
from provisioner.host.server_jwt import Issuer
from provisioner.host.upgrades import UpgradeError
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown

#: A saved input holds what the server's token says, the secret of the site included.
INPUT_MODE = 0o600


@click.command(
    "helper",
    epilog="""\b
    Examples:
      choria-provisioner helper web1.example.net --save web1.json --config provisioner.yaml --choria-config choria.cfg
      choria-provisioner helper --input web1.json --config provisioner.yaml
    """,
)
@click.argument("identity", required=False, metavar="[IDENTITY]")
@click.option("--input", "source", type=click.File("rb"), help="A saved input, in place of a server; - for stdin.")
@click.option("--save", "target", type=click.Path(path_type=Path), help="Save the input here; it holds secrets.")
@click.option("--force", is_flag=True, help="Even while another provisioner may be at work on the server.")
@options.config
@options.choria_config
@options.daemon_pid
@options.debug
def helper_command(
    identity: str | None,
    source: BinaryIO | None,
    target: Path | None,
    force: bool,
    config_file: Path,
    choria_file: Path | None,
    pid_file: Path | None,
    debug: bool,
) -> None:
    """Ask the helper about a server, as the daemon would, and show what it says and what would be sent to the server.

    Nobody is configured, restarted or shut down. But a server that is asked makes new keys, as for the daemon (features
    ed25519 and pki), and answers no other provisioner for two minutes. With --input no network is needed.

    Exit code 0: the answer is one that the daemon would act on, which may be to wait; 1: it is not.
    """
    if (identity is None) == (source is None):
        raise click.UsageError("Give either the IDENTITY of a server that waits, or --input FILE.")
    if source and target:
        raise click.UsageError("--save is for the input from a server, so it needs an IDENTITY.")
    options.check_identity(identity)
    with options.failures():
        options.log_to_terminal(debug=debug)
        if source:
            run = _offline(config_file, source.read())
        else:
            assert identity is not None
            run = _ask(identity, config_file, choria_file, None if force else pid_file or options.PID_FILE)
        if target:
            _save(target, run.document)
        _show(run)


@attrs.frozen(kw_only=True)
class _Run:
    """All that it takes to run the helper.

    :ivar document: its standard input
    :ivar issuer: of server JWTs; None without the feature, or without its keys
    :ivar notes: one line each, what could not be done as on a real server
    """

    config: Config
    facts: Facts
    document: bytes = attrs.field(repr=False)
    issuer: Issuer | None
    notes: tuple[str, ...] = ()


def _ask(identity: str, config_file: Path, choria_file: Path | None, pid_file: Path | None) -> _Run:
    """Have a server tell all that the helper needs.

    :param pid_file: of a daemon that must not run; None: whatever else may be at work
    """
    setup = assembly.load(config_file, choria_file)
    metrics = Metrics("")
    connector = setup.connector(metrics)
    provisioner = setup.provisioner(connector, metrics, Shutdown(setup.config.shutdown_grace))
    with assembly.connected(connector):
        # new keys in the middle of somebody else's provisioning would leave the server with a token for the old ones
        if pid_file and (setup.config.features.ed25519 or setup.config.features.pki):
            rivals.check(setup, connector, pid_file)
        facts = provisioner.fetch(provisioner.node(Host(identity)))
    return _Run(config=setup.config, facts=facts, document=facts.document(), issuer=setup.issuer)


def _offline(config_file: Path, document: bytes) -> _Run:
    reading = assembly.read_own(config_file)
    if reading.config is None:
        raise ConfigurationError(problem for _, problem in reading.problems)
    try:
        facts = parse(document)
    except FactsError as error:
        raise ProvisionerError(f"--input: {error}") from error
    if reading.config.features.jwt:
        # a private key is encrypted for this one, to see whether it could be
        public = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
        facts = attrs.evolve(facts, token=Token("", public))
    problems = tuple(problem for _, problem in reading.problems)
    issuer = None if problems else reading.issuer
    return _Run(config=reading.config, facts=facts, document=document, issuer=issuer, notes=problems)


def _save(target: Path, document: bytes) -> None:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, INPUT_MODE)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, INPUT_MODE)
            file.write(document)
    except OSError as error:
        raise ProvisionerError(f"--save: {target}: {error.strerror}") from error
    click.echo(f"saved the input to {target}\n")


def _show(run: _Run) -> None:
    """Run the helper and show everything.

    :raises ProvisionerError: the daemon would not act on its answer
    """
    conf, facts = run.config, run.facts
    secrets = provision.secrets(conf, facts)
    view = View(secrets)
    _section("input", view.facts(facts))
    started = time.monotonic()
    output = helper_process.run(
        conf.helper, run.document, timeout=conf.helper_timeout, cancelled=lambda: False, secrets=secrets
    )
    seconds = time.monotonic() - started
    stderr = f"standard error: {view.text(output.stderr)}" if output.stderr else "nothing on standard error"
    _section("helper", [f"  {view.text(conf.helper[0])}: {seconds:.2f} s, {len(output.stdout)} bytes, {stderr}"])
    wanted = answer.parse(output.stdout)
    _section("answer", view.answer(wanted))
    _section("what would be done", _consequences(run, wanted, view))


def _consequences(run: _Run, wanted: Answer, view: View) -> Iterable[str]:
    if wanted.defer:
        return ["  nothing: the server is looked at again with the next discovery"]
    if wanted.shutdown:
        return ["  choria_provision#shutdown"]
    facts = run.facts
    warnings = [*provision.check(facts, wanted, upgrades=run.config.features.upgrades), *run.notes]
    warnings += certificate_problems(wanted, facts)
    inputs = provision.inputs(facts, wanted, run.issuer)
    upgrade, problem = _upgrade(run.config, facts, wanted.upgrade)
    lines = [f"  warning: {view.text(line)}" for line in (*warnings, *problem)]
    if upgrade:
        return [*lines, f"  choria_provision#release_update to {view.text(wanted.upgrade)}; it comes back for the rest"]
    provision.check_configured(wanted)
    return [
        *lines,
        "  choria_provision#configure with",
        *("  " + line for line in view.sent(inputs)),
        "  choria_provision#restart",
    ]


def _upgrade(conf: Config, facts: Facts, target: str) -> tuple[bool, list[str]]:
    """Whether the server would be sent to another version first, and a warning if it should be and cannot."""
    try:
        return provision.upgrade_due(conf, facts, target), []
    except UpgradeError as error:
        if not conf.upgrades_optional:
            raise
        return False, [f"configured without an upgrade: {error}"]


def _section(title: str, lines: Iterable[str]) -> None:
    click.echo(click.style(title, bold=True))
    for line in lines:
        click.echo(line)
    click.echo()
