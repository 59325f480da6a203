"""How long to wait before trying again: Choria's tables of growing pauses, each pause randomised by half."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

#: Milliseconds by number of failures, from 0 on; the last one is for all that follow. The Go original's tables.
_FIVE_SECONDS_MS = (500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000)
_TWENTY_SECONDS_MS = (
    *_FIVE_SECONDS_MS,
    *(5500, 5750, 6000, 6500, 7000, 7500, 8000, 8500, 9000, 9500, 10000),
    *(10500, 10750, 11000, 11500, 12000, 12500, 13000, 13500, 14000, 14500, 15000),
    *(15500, 15750, 16000, 16500, 17000, 17500, 18000, 18500, 19000, 19500, 20000),
)


@attrs.frozen
class Backoff:
    """Pauses that grow with the number of failures.

    :ivar steps_ms: milliseconds by number of failures, the last one repeated
    :ivar random: a number in [0, 1), anew at each call
    """

    steps_ms: tuple[float, ...]
    random: Callable[[], float] = random.random

    def delay(self, failures: int) -> float:
        """Seconds to wait after so many failures: uniform over [v/2, 3v/2) of the table's v."""
        step = self.steps_ms[min(failures, len(self.steps_ms) - 1)]
        return step * (0.5 + self.random()) / 1000


#: Between the tries of one request.
RPC_BACKOFF = Backoff(_FIVE_SECONDS_MS)
#: Between the rounds over all brokers, as long as there never was a connection.
FIRST_CONNECT_BACKOFF = Backoff(_FIVE_SECONDS_MS)
#: Between the rounds over all brokers after a connection was lost; the loss itself is the first failure.
RECONNECT_BACKOFF = Backoff(_TWENTY_SECONDS_MS)
#: Between two campaigns in an election, those of a leader being no failures.
CAMPAIGN_BACKOFF = Backoff(_TWENTY_SECONDS_MS)
