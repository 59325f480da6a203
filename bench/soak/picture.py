"""A run as a picture, and as a table."""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Callable, Iterator, Sequence

from bench.chart import Chart, Mark, Panel, Series
from bench.soak.run import Run
from bench.soak.watch import Sample
from tests.usage import Usage

#: What a rate is taken over.
RATE_SECONDS = 20.0
#: Of the kinds of lines in the logs, those that came most often are shown.
SHOWN_KINDS = 15
SHOWN_SERVERS = 10

Value = Callable[[Sample], float | None]
Points = list[tuple[float, float | None]]


def chart(run: Run) -> Chart:
    """Draw what was seen over time, and what went wrong meanwhile."""
    marks = [
        Mark(
            each.kind.name,
            (each.start - run.started) / 60,
            (each.end - run.started) / 60,
            f"{each.victim} {each.text}".strip(),
        )
        for each in sorted(run.happened, key=lambda each: (each.kind.lane, each.kind.name))
        if each.end is not None
    ]
    return Chart(title=run.title, note=_note(run), x_title="minutes", panels=list(_panels(run)), marks=marks)


def _note(run: Run) -> str:
    standing, reasons = run.ledger.standing(), [reason for _, reason in run.duplicates()]
    arrived = f"{standing.arrived:,} servers arrived, {standing.provisioned:,} were provisioned"
    return f"{arrived}; {len(reasons)} were configured twice, {reasons.count('')} of them without a reason"


def _panels(run: Run) -> Iterator[Panel]:
    def panel(title: str, unit: str, lines: dict[str, Value]) -> Panel:
        return Panel(title, unit, [Series(name, _points(run.samples, value)) for name, value in lines.items()])

    def rates(title: str, unit: str, lines: dict[str, Value], factor: float) -> Panel:
        return Panel(title, unit, [Series(name, _rates(run.samples, value, factor)) for name, value in lines.items()])

    flow: dict[str, Value] = {
        "arrived": lambda sample: sample.standing.arrived,
        "provisioned": lambda sample: sample.standing.provisioned,
    }
    yield rates("Servers", "a minute", flow, 60)
    yield panel("Servers that wait", "", {"not provisioned": lambda sample: sample.standing.waiting, **_known(run)})
    yield panel("Longest wait of those", "s", {"from boot to restart": lambda sample: sample.standing.oldest})
    yield Panel("Configured twice", "", list(_duplicates(run)))
    if len(run.instances) > 1:
        yield panel("Leads", "", _leads(run))
    yield panel("Resident memory", "MB", _of_processes(run, lambda taken: taken.rss_bytes / 1e6))
    yield panel("Threads", "", _of_daemons(run, lambda taken: taken.threads))
    yield panel("Descriptors", "", _of_daemons(run, lambda taken: taken.descriptors))
    yield rates("CPU", "cores", _cores(run), 1)


def _known(run: Run) -> dict[str, Value]:
    def known(number: int) -> Value:
        return lambda sample: sample.daemons[number].known

    return {f"known to {instance.name}": known(number) for number, instance in enumerate(run.instances)}


def _leads(run: Run) -> dict[str, Value]:
    def leads(number: int) -> Value:
        return lambda sample: sample.daemons[number].leads

    return {instance.name: leads(number) for number, instance in enumerate(run.instances)}


def _of_daemons(run: Run, value: Callable[[Usage], float]) -> dict[str, Value]:
    def of(number: int) -> Value:
        return lambda sample: _value(sample.daemons[number].usage, value)

    return {instance.name: of(number) for number, instance in enumerate(run.instances)}


def _of_processes(run: Run, value: Callable[[Usage], float]) -> dict[str, Value]:
    return {
        **_of_daemons(run, value),
        "simulated servers": lambda sample: _value(sample.own, value),
        "broker": lambda sample: _value(sample.broker, value),
    }


def _cores(run: Run) -> dict[str, Value]:
    """Those of a daemon with those of its helpers; this process has daemons for children."""
    own = _of_processes(run, lambda taken: taken.cpu_seconds)
    return {**own, **_of_daemons(run, lambda taken: taken.cpu_seconds + taken.children_cpu_seconds)}


def _value(taken: Usage | None, value: Callable[[Usage], float]) -> float | None:
    return None if taken is None else value(taken)


def _duplicates(run: Run) -> Iterator[Series]:
    """How many there were up to each moment."""
    found = [(duplicate.second - run.started, reason) for duplicate, reason in run.duplicates()]
    for name, explained in (("with a reason", True), ("without a reason", False)):
        times = sorted(at for at, reason in found if bool(reason) is explained)
        yield Series(name, [(sample.at / 60, bisect.bisect(times, sample.at)) for sample in run.samples])


def _points(samples: Sequence[Sample], value: Value) -> Points:
    return [(sample.at / 60, value(sample)) for sample in samples]


def _rates(samples: Sequence[Sample], value: Value, factor: float) -> Points:
    """By how much something grows in a second, times a factor; unknown where it begins anew, as with a new process."""
    rates: Points = []
    earlier: collections.deque[tuple[float, float]] = collections.deque()
    for sample in samples:
        now = value(sample)
        if now is None or (earlier and now < earlier[-1][1]):
            earlier.clear()
        while len(earlier) > 1 and sample.at - earlier[0][0] > RATE_SECONDS:
            earlier.popleft()
        rate = None
        if now is not None:
            if earlier:
                rate = (now - earlier[0][1]) / (sample.at - earlier[0][0]) * factor
            earlier.append((sample.at, now))
        rates.append((sample.at / 60, rate))
    return rates


def table(run: Run) -> str:
    """What there is to be told in figures."""
    standing, waited = run.ledger.standing(), run.ledger.waited
    rows = {
        "servers arrived": f"{standing.arrived:,}",
        "servers provisioned": f"{standing.provisioned:,}",
        "servers that still wait": ", ".join(run.ledger.waiting()[:SHOWN_SERVERS]) or "none",
        "provisioned a minute": f"{standing.provisioned * 60 / run.loaded:,.0f}",
        "boot to restart": f"half of them within {waited(0.5)} s, 90 % {waited(0.9)} s, 99 % {waited(0.99)} s",
        "longest": f"{standing.longest:.0f} s",
        "refused for a lock": f"{standing.lock_conflicts} times",
        "another daemon at work": f"{standing.handovers} times",
        "CPU, cores": _cpu(run),
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    reasons = collections.Counter(reason or "WITHOUT A REASON" for _, reason in run.duplicates())
    kinds = sum((instance.log_watch.kinds for instance in run.instances), collections.Counter[str]())
    lines += ["", "configured twice", *_counted(reasons.most_common())]
    lines += ["", "faults", *_counted(collections.Counter(each.kind.name for each in run.happened).most_common())]
    lines += ["", "warnings and errors in the logs", *_counted(kinds.most_common(SHOWN_KINDS))]
    return "\n".join(lines)


def _counted(times: Sequence[tuple[str, int]]) -> list[str]:
    return [f"{count:>8} × {what}" for what, count in times] or ["      none"]


def _cpu(run: Run) -> str:
    means = {}
    for name, value in _cores(run).items():
        rates = [rate for _, rate in _rates(run.under_load, value, 1) if rate is not None]
        means[name] = statistics.fmean(rates) if rates else 0.0
    parts = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    return f"{parts}; together {sum(means.values()):.2f}"
