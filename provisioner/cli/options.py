"""What the commands have in common on the command line: their options, their exit codes, how they fail."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from provisioner import logs
from provisioner.choria.connector import Connector
from provisioner.choria.identity import reason_insane
from provisioner.errors import ConfigurationError, ProvisionerError
from provisioner.text import printable

EXIT_OK = 0
EXIT_FAILURE = 1
#: A thread died, was stuck or could not be ended: a new process is the cure.
EXIT_DEFECT = os.EX_SOFTWARE

#: Where the packaged service has its pid file.
PID_FILE = Path("/run/choria-provisioner/provisioner.pid")

# what cannot be read is no wrong use of the command
_FILE = click.Path(path_type=Path, readable=False)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def config(command: _Command) -> _Command:
    """The option that every command but `demo` needs."""
    return click.option("--config", "config_file", required=True, type=_FILE, help="The file provisioner.yaml.")(
        command
    )


def choria_config(command: _Command) -> _Command:
    """The option of the commands that connect to a broker."""
    return click.option(
        "--choria-config",
        "choria_file",
        type=_FILE,
        help="Choria client configuration; without it the user's, then the system's default file.",
    )(command)


def daemon_pid(command: _Command) -> _Command:
    """The option of the commands that look for a daemon on this machine."""
    return click.option(
        "--pid",
        "pid_file",
        type=_FILE,
        help=f"The pid file of the daemon on this machine; {PID_FILE} without it.",
    )(command)


def as_json(command: _Command) -> _Command:
    """The option of the commands that can be read by programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


def debug(command: _Command) -> _Command:
    """The option of the commands that a person watches."""
    return click.option("--debug", is_flag=True, help="Tell on standard error what is going on in detail.")(command)


def check_identity(identity: str | None) -> None:
    """Refuse what can be the identity of no server.

    :raises click.BadParameter: saying why
    """
    if identity is not None and (reason := reason_insane(identity)):
        raise click.BadParameter(f"{printable(identity)!r} {reason}.", param_hint="IDENTITY")


def log_to_terminal(*, debug: bool) -> None:
    """Have warnings, or with `debug` all there is, written to standard error."""
    logs.setup(destination="stderr", level="warn", log_format="text", debug=debug)
    if not debug:
        # a broker that cannot be connected to is the end of the command, which tells why
        logging.getLogger(Connector.__module__).setLevel(logging.ERROR)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Ends the process with one line a problem where an expected failure comes out of the block."""
    try:
        yield
    except ProvisionerError as error:
        for problem in error.problems if isinstance(error, ConfigurationError) else [str(error)]:
            click.echo(problem, err=True)
        sys.exit(EXIT_FAILURE)
