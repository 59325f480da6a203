"""How long the replies to a broadcast are awaited."""

from __future__ import annotations

import math
import time

from provisioner.choria.connector import Expectation
from provisioner.choria.errors import NoRespondersError, RequestTimeoutError
from provisioner.choria.nats import Message


class Window:
    """The time in which replies count: it begins now, and ends when none came for a while.

    :param first: seconds that the first reply may take
    :param slide: seconds without a reply after which it ends, once replies have begun
    :param limit: seconds that it lasts at most
    :ivar closed: it has ended, and all that came within it was taken
    """

    def __init__(self, replies: Expectation, *, first: float, slide: float, limit: float) -> None:
        self.closed = False
        self._replies = replies
        self._slide = slide
        now = time.monotonic()
        self._limit = now + limit
        self._end = min(self._limit, now + first)

    def take(self, wait: float = math.inf) -> Message | None:
        """The next message that came within the window; None when it has ended, or after `wait` seconds.

        :raises ConnectorError: when the connection is lost
        """
        remaining = self._end - time.monotonic()
        try:
            message = self._replies.get(min(wait, max(0.0, remaining)))
        except (RequestTimeoutError, NoRespondersError):
            # that nobody is there is said to requests with a reply subject only: it is somebody's forgery
            self.closed = remaining <= 0
            return None
        if message.received > self._end:  # a flood must not keep us here for ever
            self.closed = True
            return None
        return message

    def extend(self, reply: Message) -> None:
        """Wait for another one after this."""
        self._end = min(self._limit, reply.received + self._slide)
