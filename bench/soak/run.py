"""A run that is over: what was done, and what was seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from bench.soak.faults import Happened
from bench.soak.instance import Instance
from bench.soak.nodes import Duplicate, Ledger
from bench.soak.watch import Sample


@attrs.frozen(kw_only=True)
class Run:
    """Everything that is to be judged and shown. Moments are of the monotonic clock.

    :ivar title: what was run
    :ivar loaded: seconds from the start until no server was to arrive any more, nor anything to go wrong
    :ivar reason: which faults can have lost what a daemon and a server had under way at a moment; empty: none can
    """

    title: str
    started: float
    loaded: float
    samples: Sequence[Sample]
    instances: Sequence[Instance]
    ledger: Ledger
    happened: Sequence[Happened]
    reason: Callable[[float, str], str]

    @property
    def under_load(self) -> Sequence[Sample]:
        """What was seen while servers arrived and things went wrong."""
        return [sample for sample in self.samples if sample.at <= self.loaded]

    def duplicates(self) -> list[tuple[Duplicate, str]]:
        """The servers that were configured once more, each with what explains it; empty: nothing does.

        A server that was configured is told to restart at once. What explains that it was not is therefore something
        that went on when it was configured before, not something that came later.
        """
        return [(each, self.reason(each.first, each.first_by)) for each in self.ledger.duplicates()]
