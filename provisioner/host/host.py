"""A host on its way through the provisioner."""

from __future__ import annotations

import time

import attrs


@attrs.define(eq=False)
class Host:
    """One sighting of an unprovisioned server, used once: a later sighting of the same server is another Host.

    :ivar identity: a sane identity, checked before
    :ivar discovered: when its reply or event arrived, by the monotonic clock
    :ivar let_go: set by any thread: whoever has it in work is to stop, for it may be in other hands by now
    """

    identity: str
    discovered: float = attrs.field(factory=time.monotonic)
    let_go: bool = attrs.field(default=False, init=False)
