"""The `check` command: everything that can be known without provisioning anything."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from provisioner.cli import assembly, check_local, check_network, options
from provisioner.cli.assembly import Reading
from provisioner.cli.findings import Finding, Level, Report

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


@click.command(
    "check",
    epilog="""\b
    Examples:
      choria-provisioner check --config /etc/choria-provisioner/provisioner.yaml \\
          --choria-config /etc/choria-provisioner/choria.cfg --connect
      choria-provisioner check --config provisioner.yaml --json | jq -r '.findings[] | select(.level == "error").text'
    """,
)
@options.config
@options.choria_config
@options.daemon_pid
@click.option("--connect", is_flag=True, help="Look at the brokers and the servers, too.")
@click.option("--no-helper", is_flag=True, help="Do not run the helper.")
@options.as_json
def check_command(
    config_file: Path, choria_file: Path | None, pid_file: Path | None, connect: bool, no_helper: bool, as_json: bool
) -> None:
    """Tell what would keep the provisioner from its work.

    Looks at both files, keys, certificates and tokens, at the helper, the log file, the monitor port and the pid file.
    With --connect also at the brokers, the election, the clocks, and at how many servers wait.

    The helper is run once, with the made-up server sample.choria-provisioner.invalid, unless --no-helper is given. One
    that does not want it is a warning. Nothing else is changed anywhere.

    Exit code 0: there may be warnings; 1: there are errors.
    """
    with Report(_quiet if as_json else _show) as report, report.part("check"):
        _check(report, config_file, choria_file, pid_file, connect=connect, run_helper=not no_helper)
    errors, warnings = report.count(Level.ERROR), report.count(Level.WARNING)
    if as_json:
        click.echo(report.as_json())
    else:
        click.echo(f"\n{_counted(errors, 'error')}, {_counted(warnings, 'warning')}")
    sys.exit(options.EXIT_FAILURE if errors else options.EXIT_OK)


def _check(
    report: Report,
    config_file: Path,
    choria_file: Path | None,
    pid_file: Path | None,
    *,
    connect: bool,
    run_helper: bool,
) -> None:
    reading = Reading()
    with report.part("configuration"):
        reading = assembly.read(config_file, choria_file)
    check_local.configuration(report, reading)
    check_local.credentials(report, reading)
    check_local.user(report)
    if reading.config and reading.choria:
        check_local.exposed_files(report, reading.config, reading.choria)
    if reading.config:
        check_local.helper_program(report, reading.config, run=run_helper)
        check_local.surroundings(report, reading.config, pid_file)
    if connect and (setup := reading.connectable()):
        check_network.network(report, setup)
    elif connect:
        report.error("broker", "not connected to: mend the errors above first")


def _show(finding: Finding) -> None:
    level = click.style(f"{finding.level:<7}", fg=_COLOURS[finding.level])
    click.echo(f"{level}  {finding.subject}: {finding.text}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _quiet(_finding: Finding) -> None:
    pass
