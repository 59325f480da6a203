"""Telling systemd how the daemon is."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

#: How long systemd may take to read what is before our message.
SEND_LIMIT_SECONDS = 1.0
#: Of the time after which systemd gives the daemon up, the part that passes between two signs of life.
WATCHDOG_SHARE = 0.25

LOG = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send a state, as ``READY=1``, to the service manager; does nothing when there is none, and never raises.

    :param state: assignments as sd_notify(3) has them, one a line
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # the notation for a name outside of the file system
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_LIMIT_SECONDS)
            sender.sendto(state.encode(), address)
    except OSError as error:
        LOG.debug("cannot notify systemd: %s", error)


class Watchdog:
    """Keeps systemd from replacing the daemon as long as it is well; does nothing where systemd does not watch it.

    :param problems: says what is wrong with the daemon, one line each
    :param status: says on one line what it is at
    """

    def __init__(self, problems: Callable[[], Sequence[str]], status: Callable[[], str]) -> None:
        self._problems = problems
        self._status = status
        self._pause = _watchdog_seconds() * WATCHDOG_SHARE
        self._next = 0.0
        if self._pause:
            # systemd ends a daemon that is stuck with SIGABRT: then the journal gets to know where it was
            faulthandler.enable()

    def feed(self) -> None:
        """Give a sign of life if one is due. Called by the main loop alone, whose end is to be noticed, too."""
        now = time.monotonic()
        if not self._pause or now < self._next:
            return
        self._next = now + self._pause
        if problems := self._problems():
            told = "; ".join(problems)
            LOG.error("no sign of life to systemd: %s", told)
            notify(f"STATUS={told}")
        else:
            notify(f"WATCHDOG=1\nSTATUS={self._status()}")


def _watchdog_seconds() -> float:
    """After how many seconds without a sign of life systemd gives this process up; 0: never."""
    try:
        watched = int(os.environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 1_000_000 if watched else 0.0
    except ValueError:
        return 0.0
