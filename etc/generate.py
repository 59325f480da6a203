"""Writes the manual page and the shell completions, from the commands as they are: ``python generate.py FOLDER``."""

from __future__ import annotations

import datetime
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from provisioner import __version__
from provisioner.cli import main as program

NAME = "choria-provisioner"
COMPLETIONS = {"bash": NAME, "zsh": f"_{NAME}", "fish": f"{NAME}.fish"}

SIGNALS = {
    "SIGTERM, SIGINT": "Finish the servers in work, within shutdown_grace, and leave. A second one: leave at once.",
    "SIGHUP": "Open the log file anew, and nothing else.",
}
EXIT_STATUS = {
    "0": "Success; for run: it was told to leave.",
    "1": "It failed, and says why on standard error; for check: there is an error.",
    "2": "Wrong use of the command line.",
    "70": "The daemon ended itself: a thread of it died or was stuck. A restart is the cure.",
}
FILES = {
    f"/etc/{NAME}/provisioner.yaml": "Its own configuration. It holds secrets.",
    f"/etc/{NAME}/choria.cfg": "How it connects to the broker: a Choria client configuration.",
    f"/run/{NAME}/provisioner.pid": "The process id, under the service manager or the init script.",
    f"/var/lib/{NAME}": "For what the helper keeps.",
    f"/var/log/{NAME}": "For the log file, if the setting logfile names one.",
}


def write(folder: Path) -> None:
    """Write all files into a folder, which exists."""
    (folder / f"{NAME}.8").write_text(manual())
    for shell, name in COMPLETIONS.items():
        (folder / name).write_text(completion(shell))


def completion(shell: str) -> str:
    """What a shell has to read so that it completes our command line: it asks the program itself each time."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no {shell}"
    return kind(program, {}, NAME, f"_{NAME.upper().replace('-', '_')}_COMPLETE").source()


def manual() -> str:
    """The manual page, as roff."""
    context = click.Context(program, info_name=NAME)
    # reproducible builds set the time of the sources
    date = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.UTC)
    summary = _text(program.get_short_help_str(200).rstrip("."))
    lines = [
        f'.TH {NAME.upper()} 8 "{date:%Y-%m-%d}" "{NAME} {__version__}" "System Administration"',
        f".SH NAME\n{_text(NAME)} \\- {summary[:1].lower()}{summary[1:]}",
        ".SH SYNOPSIS",
        "\n.br\n".join(f".B {_text(_synopsis(command, inner))}" for command, inner in _commands(context)),
        ".SH DESCRIPTION",
        _paragraphs(program.help, program.epilog),
        ".SH COMMANDS",
        *(line for command, inner in _commands(context) for line in _command(command, inner)),
    ]
    for title, entries in (("SIGNALS", SIGNALS), ("EXIT STATUS", EXIT_STATUS), ("FILES", FILES)):
        lines += [f".SH {title}", *(f".TP\n.B {_text(name)}\n{_text(text)}" for name, text in entries.items())]
    return "\n".join(lines) + "\n"


def _commands(context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        if command is not None and not command.hidden:
            yield command, click.Context(command, info_name=name, parent=context)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f".SS {_text(_synopsis(command, context))}"
    yield _paragraphs(command.help)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            yield f".TP\n.B {_text(record[0])}\n{_text(record[1])}"
    if command.epilog:
        yield f".PP\n{_paragraphs(command.epilog)}"


def _synopsis(command: click.Command, context: click.Context) -> str:
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def _paragraphs(*texts: str | None) -> str:
    """The paragraphs of help texts; those that are marked or indented keep their lines."""
    written = []
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(inspect.cleandoc(text) for text in texts if text)):
        lines = paragraph.removeprefix("\b\n")
        if lines != paragraph or lines.startswith(" "):
            written.append(f".nf\n{_text(lines, joined=False)}\n.fi")
        else:
            written.append(_text(lines))
    return "\n.PP\n".join(written)


def _text(text: str, *, joined: bool = True) -> str:
    """Text as roff has it: no character of it is a command."""
    lines = [" ".join(text.split())] if joined else text.split("\n")
    escaped = [line.replace("\\", "\\e").replace("-", "\\-") for line in lines]
    return "\n".join(f"\\&{line}" if line[:1] in {".", "'"} else line for line in escaped)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
