"""The pauses between two tries are those of Choria's tables."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria.retry import FIRST_CONNECT_BACKOFF, RECONNECT_BACKOFF, RPC_BACKOFF, Backoff

BACKOFFS = st.sampled_from((FIRST_CONNECT_BACKOFF, RECONNECT_BACKOFF, RPC_BACKOFF))


def middle(backoff: Backoff, failures: int) -> float:
    """Milliseconds, without the randomness."""
    return Backoff(backoff.steps_ms, random=lambda: 0.5).delay(failures) * 1000


def test_requests_are_repeated_after_pauses_that_grow_to_five_seconds() -> None:
    assert [middle(RPC_BACKOFF, tries) for tries in range(1, 13)] == [
        *(750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000),
        *(5000, 5000),
    ]


def test_the_first_connection_is_tried_after_the_same_pauses() -> None:
    assert FIRST_CONNECT_BACKOFF.steps_ms == RPC_BACKOFF.steps_ms


def test_a_lost_connection_is_tried_after_pauses_that_grow_to_twenty_seconds() -> None:
    steps = [middle(RECONNECT_BACKOFF, failures) for failures in range(1, 46)]
    assert steps[:4] == [750, 1000, 1500, 2000]
    assert steps[-4:] == [19500, 20000, 20000, 20000]
    assert {round(after - before) for before, after in itertools.pairwise(steps)} == {0, 250, 500}


@given(BACKOFFS, st.integers(0, 10**6))
def test_a_pause_is_randomised_by_half(backoff: Backoff, failures: int) -> None:
    step = middle(backoff, failures) / 1000
    assert Backoff(backoff.steps_ms, random=lambda: 0.0).delay(failures) == step / 2
    assert step / 2 <= backoff.delay(failures) < step * 3 / 2
