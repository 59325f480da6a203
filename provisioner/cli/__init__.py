"""The command line: one module a command."""

from __future__ import annotations

import io
import itertools
import sys
import traceback
from pathlib import Path
from types import TracebackType

import click

from provisioner import __version__
from provisioner.cli.check import check_command
from provisioner.cli.demo import demo_command
from provisioner.cli.discover import discover_command
from provisioner.cli.helper import helper_command
from provisioner.cli.provision import provision_command
from provisioner.cli.run import run_command


class _RunByDefault(click.Group):
    """Takes options without a command for those of `run`, as init scripts made for the Go original give them.

    There `--debug` may also stand before the command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        debug = list(itertools.takewhile(lambda argument: argument == "--debug", args))
        rest = args[len(debug) :]
        if (debug and not rest) or (rest and rest[0].startswith("-") and rest[0] not in {"--help", "--version"}):
            rest = ["run", *rest]
        if rest and rest[0] == "run":
            rest = ["run", *debug, *rest[1:]]
        return super().parse_args(ctx, rest)


@click.group(
    cls=_RunByDefault,
    epilog="""Without a command, `run` is meant:

    choria-provisioner --config /etc/choria-provisioner/provisioner.yaml
    """,
)
@click.version_option(__version__, prog_name="choria-provisioner")
def main() -> None:
    """Finds unprovisioned Choria servers and brings every one of them into service."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # what servers are called must not end a command on a terminal that knows few characters
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _tell_uncaught


def _tell_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line, until a command has set up its log: a defect, or an output that takes nothing any more."""
    *_, (frame, line) = traceback.walk_tb(trace)
    # the text of others may hold anything
    text = f": {error.strerror}" if isinstance(error, OSError) else ", which is a defect"
    click.echo(f"{kind.__name__}{text} ({Path(frame.f_code.co_filename).name}:{line})", err=True)


for command in (run_command, check_command, discover_command, helper_command, provision_command, demo_command):
    main.add_command(command)
