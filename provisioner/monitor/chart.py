"""The chart of the last hour, as figures for the SVG of the status page: bars by minute, stacked by kind of outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from provisioner.monitor.status import Minute, Outcome

#: Of the drawing.
HEIGHT = 100
#: Of the highest bar; what is left holds kinds of which there are too few to be seen otherwise.
BAR_HEIGHT = 94
SMALLEST_HEIGHT = 2
#: From one minute to the next, and of its bar.
MINUTE_WIDTH = 4
BAR_WIDTH = 3
#: The scale does not end below that, or a single node would look like a wave of them.
SMALLEST_TOP = 5
#: What a round number begins with.
ROUND_DIGITS = (1, 2, 3, 4, 5, 6, 8, 10)

#: The kinds of outcomes from the bottom to the top, by their class in the style.
KINDS: Mapping[str, Sequence[Outcome]] = {
    "good": (Outcome.PROVISIONED,),
    "away": (Outcome.SHUT_DOWN, Outcome.UPGRADING),
    "later": (Outcome.DEFERRED, Outcome.LEFT_ALONE),
    "failed": (Outcome.FAILED,),
}
#: The kind of each outcome.
KIND_OF = {outcome: kind for kind, outcomes in KINDS.items() for outcome in outcomes}


@attrs.frozen(kw_only=True)
class Total:
    """How many attempts ended so in the whole hour."""

    outcome: Outcome
    kind: str
    count: int


@attrs.frozen(kw_only=True)
class Chart:
    """What to draw.

    :ivar top: attempts in a minute that a bar of :data:`BAR_HEIGHT` stands for
    :ivar paths: of the bars, by kind; those without any are missing
    :ivar hints: where a minute begins, when that was (seconds since the epoch), what to say about it
    """

    minutes: Sequence[Minute]
    top: int
    paths: Mapping[str, str]
    hints: Sequence[tuple[int, float, str]]
    totals: Sequence[Total]

    @property
    def width(self) -> int:
        """Of the drawing."""
        return MINUTE_WIDTH * len(self.minutes)


def chart(minutes: Sequence[Minute]) -> Chart:
    """Draw the outcomes of some minutes, oldest first."""
    top = _top(max((sum(minute.outcomes.values()) for minute in minutes), default=0))
    paths: dict[str, str] = dict.fromkeys(KINDS, "")
    for number, minute in enumerate(minutes):
        for kind, path in _bars(number * MINUTE_WIDTH, minute, top):
            paths[kind] += path
    totals = {outcome: sum(minute.outcomes.get(outcome, 0) for minute in minutes) for outcome in Outcome}
    return Chart(
        minutes=minutes,
        top=top,
        paths={kind: path for kind, path in paths.items() if path},
        hints=[
            (number * MINUTE_WIDTH, minute.start, _told(minute))
            for number, minute in enumerate(minutes)
            if any(minute.outcomes.values())
        ],
        totals=[
            Total(outcome=outcome, kind=KIND_OF[outcome], count=count)
            for outcome, count in totals.items()
            if count or outcome in (Outcome.PROVISIONED, Outcome.FAILED)
        ],
    )


def _top(most: int) -> int:
    """The smallest round number that is enough."""
    power: int = 10 ** (len(str(most)) - 1)
    return max(SMALLEST_TOP, next(digit * power for digit in ROUND_DIGITS if digit * power >= most))


def _bars(x: int, minute: Minute, top: int) -> Iterator[tuple[str, str]]:
    y = HEIGHT
    for kind, outcomes in KINDS.items():
        count = sum(minute.outcomes.get(outcome, 0) for outcome in outcomes)
        if count:
            height = max(SMALLEST_HEIGHT, round(BAR_HEIGHT * count / top))
            yield kind, f"M{x} {y}v-{height}h{BAR_WIDTH}v{height}z"
            y -= height


def _told(minute: Minute) -> str:
    return ", ".join(f"{minute.outcomes[outcome]} {outcome}" for outcome in Outcome if minute.outcomes.get(outcome))
