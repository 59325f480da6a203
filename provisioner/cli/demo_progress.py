"""What the demo shows while it runs, and what it sums up at the end."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

import attrs

from provisioner.simulate.counts import Counts

#: Time between two lines where they cannot be drawn over.
PLAIN_SECONDS = 5.0
#: The widest that a display is drawn.
MAX_COLUMNS = 100

_SERIES = re.compile(r"(choria_\w+)(?:\{(.*)\})? (\S+)")
_RPC = re.compile(r'rpc="([^"]*)"')
_BOLD, _GREEN, _YELLOW, _RED, _PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"
_UP, _CLEAR, _HIDE_CURSOR, _SHOW_CURSOR = "\x1b[{}F", "\x1b[K", "\x1b[?25l", "\x1b[?25h"


@attrs.frozen
class Page:
    """The daemon's ``/metrics`` page.

    :ivar text: the page
    """

    text: str = attrs.field(default="", repr=False)
    _values: Mapping[tuple[str, str], float] = attrs.field(init=False, repr=False)

    @_values.default
    def _read(self) -> Mapping[tuple[str, str], float]:
        values = {}
        for line in self.text.splitlines():
            if series := _SERIES.fullmatch(line):
                rpc = _RPC.search(series[2] or "")
                values[series[1], rpc[1] if rpc else ""] = float(series[3])
        return values

    def value(self, name: str, rpc: str = "") -> int:
        """Give a counter or gauge of the provisioner, 0 when the page has none."""
        return int(self._values.get((f"choria_provisioner_{name}", rpc), 0))

    def mean(self, name: str, rpc: str = "") -> float:
        """Give the mean of a summary of the provisioner in seconds, 0 when nothing was observed."""
        total = self._values.get((f"choria_provisioner_{name}_sum", rpc), 0.0)
        count = self._values.get((f"choria_provisioner_{name}_count", rpc), 0.0)
        return total / count if count else 0.0

    def lines(self, names: tuple[str, ...]) -> list[str]:
        """Give the page's own lines of some series, without those that are zero."""
        found = (_SERIES.fullmatch(line) for line in self.text.splitlines())
        wanted = {f"choria_provisioner_{name}" for name in names}
        return [series[0] for series in found if series and series[1] in wanted and float(series[3])]


@attrs.frozen(kw_only=True)
class Progress:
    """One look at the demo.

    :ivar elapsed: seconds since it began
    :ivar counts: what the servers have seen
    :ivar page: what the daemon says about itself
    :ivar deferred: servers that the helper has deferred, each once
    :ivar next_discovery: seconds until the daemon asks the network again; None before the first time
    """

    elapsed: float
    counts: Counts
    page: Page
    deferred: int
    next_discovery: float | None

    @property
    def total(self) -> int:
        return self.counts.servers + self.counts.misbehaving

    @property
    def not_yet(self) -> int:
        """Good servers that are up and wait."""
        return self.counts.booted - self.counts.misbehaving - self.counts.provisioned

    def now(self) -> str:
        """Say in words what is going on."""
        if self.next_discovery is None:
            return "the provisioner is starting"
        seconds = f"next discovery in {self.next_discovery:.0f} s"
        if self.counts.booted < self.total:
            return f"servers are booting; {seconds}"
        if self.counts.complete:
            return "all good servers are provisioned"
        if self.page.value("busy_workers") or self.page.value("work_queue_entries"):
            return f"the last ones are in work; {seconds}"
        return f"{self.not_yet} servers wait to be found again; {seconds}"


class PlainDisplay:
    """A line every few seconds, for pipes and files."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._due = 0.0

    def show(self, progress: Progress) -> None:
        """Write a line if one is due."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + PLAIN_SECONDS
        counts = progress.counts
        parts = (
            f"{progress.elapsed:3.0f} s",
            f"booted {counts.booted}/{progress.total}",
            f"provisioned {counts.provisioned}/{counts.servers}",
            f"deferred {progress.deferred}",
            f"failed {counts.failed}",
            progress.now(),
        )
        self._stream.write("  ".join(parts) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left to do."""


class LiveDisplay:
    """A few lines drawn over and over, for terminals.

    :param color: may be used; drawing in place needs no colour
    """

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self._stream = stream
        self._color = color
        self._full, self._empty = ("█", "░") if _can_show("█░", stream) else ("#", ".")
        self._drawn = 0

    def show(self, progress: Progress) -> None:
        """Draw it."""
        size = shutil.get_terminal_size()
        # a line as wide as the terminal would wrap in some, and then could not be drawn over
        columns = max(10, min(size.columns - 1, MAX_COLUMNS))
        lines = list(self._lines(progress, columns))[: max(1, size.lines - 1)]
        start = _UP.format(self._drawn) if self._drawn else _HIDE_CURSOR
        self._stream.write(start + "".join(f"{line}{_CLEAR}\n" for line in lines))
        self._stream.flush()
        self._drawn = len(lines)

    def close(self) -> None:
        """Leave the last picture on the screen."""
        self._stream.write(_SHOW_CURSOR)
        self._stream.flush()

    def _lines(self, progress: Progress, columns: int) -> Iterator[str]:
        counts, page = progress.counts, progress.page
        yield self._bar(counts.provisioned, counts.servers, columns)
        yield ""
        discovered, by_event = page.value("discovered"), page.value("event_discovered")
        rows = (
            ("booted", f"{counts.booted} of {progress.total}", ""),
            ("found", f"{by_event} by startup event, {discovered} by discovery", ""),
            ("at work", f"{page.value('busy_workers')} workers, {page.value('work_queue_entries')} servers queued", ""),
            ("deferred", f"{progress.deferred} by the helper, each once", _YELLOW if progress.deferred else ""),
            ("failed", f"{counts.failed} with a full disk, for a while", _YELLOW if counts.failed else ""),
            ("misbehaving", f"{counts.misbehaving}, for ever", _RED if counts.misbehaving else ""),
            (f"{progress.elapsed:.0f} s", progress.now(), ""),
        )
        for name, text, color in rows:
            yield self._colored(color, f"  {name:<12}{text}"[:columns])

    def _bar(self, done: int, total: int, columns: int) -> str:
        label = f" {done}/{total} provisioned"
        width = max(0, columns - 2 - len(label))
        full = width * done // total if total else width
        bar = self._colored(_GREEN, self._full * full) + self._empty * (width - full)
        return f"  {bar}{self._colored(_BOLD, label)}" if width else label[:columns]

    def _colored(self, color: str, text: str) -> str:
        return f"{color}{text}{_PLAIN}" if self._color and color else text


def display(stream: TextIO | None = None) -> PlainDisplay | LiveDisplay:
    """Give the display that fits where the output goes to. ``NO_COLOR`` and ``TERM=dumb`` are honoured."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainDisplay(stream)
    return LiveDisplay(stream, color=not os.environ.get("NO_COLOR"))


#: The metrics that the summary ends with.
MAIN_METRICS = (
    "discovered",
    "event_discovered",
    "discover_cycles",
    "provisioned",
    "provision_errors",
    "helper_errors",
    "helper_time_count",
    "rpc_errors",
    "rpc_time_count",
)


def disagreements(progress: Progress, rpcs: tuple[str, ...]) -> list[str]:
    """Compare what the daemon says with what the servers saw; gives one line for each difference."""
    counts, page = progress.counts, progress.page
    pairs = [("servers provisioned", page.value("provisioned"), counts.provisioned)]
    pairs += [(f"{rpc} requests", page.value("rpc_time_count", rpc), counts.actions[rpc]) for rpc in rpcs]
    return [
        f"{what}: {ours} by the provisioner's metrics, {theirs} by the servers' count"
        for what, ours, theirs in pairs
        if ours != theirs
    ]


def summary(progress: Progress, rpcs: tuple[str, ...], proofs: tuple[str, ...] = ()) -> Iterator[str]:
    """Sum a finished demo up, line by line.

    :param proofs: on a secured network what a provisioned server has proved, and what the signature of a request has
    """
    counts, page = progress.counts, progress.page
    rows = (
        ("servers", progress.total, f"of which {counts.misbehaving} cannot be provisioned"),
        ("provisioned", counts.provisioned, "counted alike by the provisioner and by the servers"),
        ("found by event", page.value("event_discovered"), "they announced that they had booted"),
        (
            "by discovery",
            page.value("discovered"),
            f"in {page.value('discover_cycles')} broadcasts, some for the second time",
        ),
        ("deferred once", progress.deferred, "the helper wanted to wait for an approval"),
        ("failed once", counts.failed, "could not write the configuration at first"),
        ("misbehaving", counts.misbehaving, "replies with fields of the wrong types, every time"),
        ("errors", page.value("provision_errors"), _errors(progress, rpcs[0])),
        ("twice configured", counts.duplicate_configures, ""),
    )
    for name, number, text in rows:
        yield f"  {name:<18}{number:>6}  {text}".rstrip()
    for name, number, text in zip(
        ("proved fit", "signed requests"), (counts.provisioned, counts.good_signatures), proofs, strict=False
    ):
        yield f"  {name:<18}{number:>6}  {text}"
    yield ""
    yield f"  {'duration':<18}{progress.elapsed:>6.1f}  seconds"
    yield f"  {'rate':<18}{counts.servers_per_minute:>6.0f}  servers a minute, all waiting included"
    for rpc in rpcs:
        yield _time(rpc.partition("#")[2], page.mean("rpc_time", rpc), f"mean of {counts.actions[rpc]} requests")
    yield _time("helper", page.mean("helper_time"), f"mean of {page.value('helper_time_count')} runs")


def _errors(progress: Progress, first_rpc: str) -> str:
    """Tell whose the errors were. Only the misbehaving servers fail at the very first request."""
    counts, page = progress.counts, progress.page
    misbehaviour = page.value("rpc_errors", first_rpc)
    rest = page.value("provision_errors") - progress.deferred - counts.failed - misbehaviour
    text = f"{progress.deferred} for deferrals, {counts.failed} for failures, {misbehaviour} for misbehaviour"
    return f"{text}, {rest} others" if rest else text


def _time(name: str, seconds: float, text: str) -> str:
    return f"  {name:<18}{seconds * 1000:>6.1f}  ms, {text}"


def _can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
