"""Telling systemd how the daemon is."""

from __future__ import annotations

import logging
import os
import socket

#: How long systemd may take to read what is before our message.
SEND_LIMIT_SECONDS = 1.0

logger = logging.getLogger(__name__)


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
        logger.debug("cannot notify systemd: %s", error)
