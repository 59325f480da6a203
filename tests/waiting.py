"""Waiting for what is sure to come, with an end for when it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

#: For everything that is awaited; no test waits that long unless it fails. Longer than the interval between two
#: discoveries, of which a busy machine may miss one.
PATIENCE_SECONDS = 90.0
#: How often is looked.
POLL_SECONDS = 0.005


def wait_until(
    condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, every: float = POLL_SECONDS
) -> None:
    """Wait until a condition holds.

    :param seconds: after which it is taken for one that never will
    :param every: seconds between two looks
    """
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(every)
