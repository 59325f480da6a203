"""Files that more people may read or write than is good; found at the start, where somebody reads the log."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

import attrs

#: Permissions that a file of keys or tokens must not give.
KEY = 0o077
#: Those of a file with secrets that the group of the service may read.
SECRET = 0o027
#: Those of a file that decides what is done.
TRUSTED = 0o022


@attrs.frozen
class GuardedFile:
    """A file to look at.

    :ivar setting: names it for a person; empty when the path says it all
    :ivar forbidden: the bits of its mode that must not be set: one of the constants here
    """

    setting: str
    path: str
    forbidden: int


def warnings(files: Iterable[GuardedFile]) -> list[str]:
    """One line for each file whose mode gives away too much. What is not there is for others to complain about."""
    lines = []
    for file in files:
        try:
            mode = stat.S_IMODE(Path(file.path).stat().st_mode) if file.path else 0
        except (OSError, ValueError):
            continue
        if excess := mode & file.forbidden:
            what = "writable" if excess & 0o022 else "readable"
            who = "everybody" if excess & 0o007 else "its group"
            setting = f"{file.setting}: " if file.setting else ""
            lines.append(
                f"{setting}{file.path}: {what} by {who} (mode {mode:04o}), wanted at most {mode & ~file.forbidden:04o}"
            )
    return lines
