"""A host on its way through the provisioner."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs


@attrs.define(eq=False)
class Host:
    """An unprovisioned server, from its sighting to the end of one cycle; it comes back as another Host.

    :ivar identity: a sane identity, checked before
    :ivar discovered: when its last reply or event arrived, by the monotonic clock
    :ivar let_go: set by any thread: whoever has it in work is to stop, for it may be in other hands by now
    :ivar step: what is being done to it, such as ``rpcutil#inventory`` or ``helper``; empty before the first step.
        Written by the worker that has it, read by any thread.
    :ivar on_step: called with each step as it begins
    """

    identity: str = attrs.field(on_setattr=attrs.setters.frozen)
    discovered: float = attrs.field(factory=time.monotonic)
    let_go: bool = attrs.field(default=False, init=False)
    step: str = attrs.field(default="", init=False)
    on_step: Callable[[str], None] | None = attrs.field(default=None, repr=False)

    def at(self, step: str) -> None:
        """A step begins."""
        self.step = step
        if self.on_step:
            self.on_step(step)
