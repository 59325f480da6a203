"""The rules that must hold, and whether they did."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence

import attrs

from bench.soak.instance import Instance
from bench.soak.run import Run
from bench.soak.watch import Sample
from tests.usage import Usage

#: A process has warmed up after this part of its life at work, and not before so many seconds: what is provisioned
#: stays known for a minute, and what that takes comes to its full size only with the next discovery after it.
WARM_UP_PART, WARM_UP_SECONDS = 0.1, 150.0
#: How much more memory the last quarter of a life may take than the first one, and how many more descriptors.
RSS_GROWTH = 0.15
DESCRIPTORS_GROWTH = 2
#: The same for the memory of the simulated servers, which take what the longest queue of them took so far.
OWN_RSS_GROWTH = 0.5
#: A quarter with fewer samples says nothing.
LEAST_SAMPLES = 5

#: What a process took up, with the second of the run.
Life = Sequence[tuple[float, Usage]]


@attrs.frozen
class Verdict:
    """Whether a rule holds; None: the run was too short to say."""

    rule: str
    holds: bool | None
    figures: str

    def __str__(self) -> str:
        word = {True: "holds", False: "BROKEN", None: "not judged"}[self.holds]
        return f"{word:<10}  {self.rule}: {self.figures}"


def verdicts(run: Run) -> list[Verdict]:
    """Judge a run by every rule."""
    return list(_verdicts(run))


def _verdicts(run: Run) -> Iterator[Verdict]:
    yield _all_provisioned(run)
    yield _none_twice(run)
    if len(run.instances) > 1:
        yield _one_leader(run)
    for number, instance in enumerate(run.instances):
        life = _longest_life(run.under_load, number)
        yield _memory(instance.name, life, RSS_GROWTH)
        yield _trend("threads", instance.name, life, lambda taken: taken.threads, lambda first: first)
        yield _trend(
            "descriptors",
            instance.name,
            life,
            lambda taken: taken.descriptors,
            lambda first: first + DESCRIPTORS_GROWTH,
        )
        yield _no_defect(instance)
        yield _exits(instance)
    own = [(sample.at, sample.own) for sample in run.under_load if sample.own]
    yield _memory("the simulated servers", own, OWN_RSS_GROWTH)


def _all_provisioned(run: Run) -> Verdict:
    standing = run.ledger.standing()
    holds = standing.provisioned == standing.arrived > 0
    return Verdict("every good server is provisioned", holds, f"{standing.provisioned:,} of {standing.arrived:,}")


def _none_twice(run: Run) -> Verdict:
    reasons = [reason for _, reason in run.duplicates()]
    without = reasons.count("")
    figures = f"{len(reasons)} were configured twice, {without} of them without a reason"
    return Verdict("none is configured twice without a reason", not without, figures)


def _one_leader(run: Run) -> Verdict:
    standing = run.ledger.standing()
    figures = f"{standing.handovers} times another one than before, {standing.overlaps} of them too soon"
    return Verdict("one daemon at a time begins to work on servers", not standing.overlaps, figures)


def _memory(name: str, life: Life, growth: float) -> Verdict:
    return _trend("MB", name, life, lambda taken: taken.rss_bytes / 1e6, lambda first: first * (1 + growth))


def _trend(
    what: str, name: str, life: Life, value: Callable[[Usage], float], allowed: Callable[[float], float]
) -> Verdict:
    rule = f"{what} of {name} stay flat"
    medians = first_and_last_quarter([(at, value(taken)) for at, taken in life])
    if medians is None:
        return Verdict(rule, None, "no process lived long enough")
    first, last = medians
    minutes = (life[-1][0] - life[0][0]) / 60
    figures = f"{first:.4g} → {last:.4g} within {minutes:.1f} min of work of one process"
    return Verdict(rule, last <= allowed(first), figures)


def first_and_last_quarter(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Give the medians of both, of what comes after the warm-up; None when there is too little of it.

    :param points: pairs of a second and a value, in order
    """
    if not points:
        return None
    begin, end = points[0][0], points[-1][0]
    begin += max(WARM_UP_SECONDS, (end - begin) * WARM_UP_PART)
    quarter = max(0.0, end - begin) / 4
    first = [value for at, value in points if begin <= at <= begin + quarter]
    last = [value for at, value in points if at >= max(begin, end - quarter)]
    if min(len(first), len(last)) < LEAST_SAMPLES:
        return None
    return statistics.median(first), statistics.median(last)


def _longest_life(samples: Sequence[Sample], number: int) -> Life:
    """What the process of a daemon took up that led longest, as long as it led; the seconds are those of its lead."""
    lives = [_lead(list(life), number) for _, life in itertools.groupby(samples, lambda each: each.daemons[number].pid)]
    return max(lives, key=lambda life: life[-1][0] if life else 0.0, default=[])


def _lead(samples: Sequence[Sample], number: int) -> Life:
    lead, seconds = [], 0.0
    for before, sample in itertools.pairwise(samples):
        daemon = sample.daemons[number]
        if daemon.leads and daemon.usage:
            seconds += sample.at - before.at
            lead.append((seconds, daemon.usage))
    return lead


def _no_defect(instance: Instance) -> Verdict:
    lines, output = len(instance.log_watch.defects), instance.said().strip()
    figures = f"{lines} lines" + (f"; printed: {output[-300:]}" if output else "")
    return Verdict(f"{instance.name} logs no defect and prints nothing", not lines and not output, figures)


def _exits(instance: Instance) -> Verdict:
    codes = collections.Counter("none, killed" if code is None else str(code) for code in instance.exit_codes)
    told = ", ".join(f"{code} ({times} times)" for code, times in codes.items())
    by_itself = ", ".join(map(str, instance.crashes)) or "never"
    return Verdict(
        f"{instance.name} leaves with 0 when it is told to, and only then",
        set(codes) <= {"0"} and not instance.crashes,
        f"exit codes {told}; by itself {by_itself}",
    )
