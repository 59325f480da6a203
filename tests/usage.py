"""What a process takes up, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@attrs.frozen
class Usage:
    """What a process takes up.

    :ivar cpu_seconds: used since its start
    :ivar children_cpu_seconds: used by those of its children that have ended
    """

    rss_bytes: int
    peak_rss_bytes: int
    threads: int
    descriptors: int
    cpu_seconds: float
    children_cpu_seconds: float


def usage(pid: int) -> Usage | None:
    """What a process takes up now; None when it is gone."""
    directory = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":", 1) for line in directory.joinpath("status").read_text().splitlines())
        # the name of the program, in parentheses, may hold anything
        user, system, *children = map(int, directory.joinpath("stat").read_text().rpartition(")")[2].split()[11:15])
        return Usage(
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
            peak_rss_bytes=int(status["VmHWM"].split()[0]) * 1024,
            threads=int(status["Threads"]),
            descriptors=sum(1 for _ in directory.joinpath("fd").iterdir()),
            cpu_seconds=(user + system) / _TICKS_PER_SECOND,
            children_cpu_seconds=sum(children) / _TICKS_PER_SECOND,
        )
    except (OSError, KeyError):  # a process that has ended and was not waited for has no memory
        return None
