"""The daemon on this machine, as far as other processes can see it: its pid file, and its monitor port."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import attrs

from provisioner import pidfile
from provisioner.config import Config
from provisioner.contract import YEAR_10000_SECONDS
from provisioner.text import printable

#: How long the monitor port may be silent.
ANSWER_SECONDS = 3.0
#: How long all of its answer may take; what else listens there may never come to an end.
LIMIT_SECONDS = 10.0
#: More than this is not read of an answer; the troubles of a whole fleet are some megabytes.
ANSWER_BYTES = 64 * 1024 * 1024

_PAUSED = re.compile(rb"^choria_provisioner_paused\{[^}\n]*\} ([01])$", re.MULTILINE)


@attrs.frozen
class Monitor:
    """Something listens on the monitor port.

    :ivar provisioner: it is a provisioner, this one or the Go original
    :ivar paused: it provisions nobody at the moment, as a standby does
    """

    where: str
    provisioner: bool
    paused: bool = False

    def __str__(self) -> str:
        if not self.provisioner:
            return f"{self.where} is in use, by something that is no provisioner"
        return f"a provisioner serves {self.where}{', paused' if self.paused else ''}"


def holder(pid_file: Path) -> str:
    """Who holds the pid file, in words; empty when nobody does.

    :raises ProvisionerError: when the file cannot be looked at
    """
    process = pidfile.owner(pid_file)
    return f"process {process} holds {pid_file}" if process else ""


def monitor(conf: Config) -> Monitor | None:
    """Who listens on the monitor port; None when nobody does, or none is configured."""
    if not conf.monitor_port:
        return None
    page = _get(conf, "/metrics")
    if page is None:
        return None
    found = _PAUSED.search(page)
    where = f"port {conf.monitor_port} of {conf.monitor_address or 'this machine'}"
    return Monitor(where, provisioner=found is not None, paused=found is not None and found[1] == b"1")


@attrs.frozen
class Trouble:
    """A node that the daemon could not provision the last time.

    :ivar failures: in a row
    :ivar next_try: when it is tried again, in seconds since the epoch; 0: with the next discovery
    """

    failures: int
    reason: str
    next_try: float = 0.0


def troubles(conf: Config) -> dict[str, Trouble]:
    """What the daemon on this machine could not provision, by identity; nothing when there is no daemon to ask."""
    if not conf.monitor_port:
        return {}
    try:
        document = json.loads(_get(conf, "/status.json") or b"null")
    except (ValueError, RecursionError):
        return {}
    entries = document.get("troubled") if isinstance(document, dict) else None
    found = (_trouble(entry) for entry in (entries if isinstance(entries, list) else ()))
    return dict(each for each in found if each)


def _trouble(entry: Any) -> tuple[str, Trouble] | None:
    if not isinstance(entry, dict):
        return None
    identity, failures, reason = (entry.get(name) for name in ("identity", "failures", "reason"))
    if not isinstance(identity, str) or type(failures) is not int or not isinstance(reason, str):
        return None
    next_try = entry.get("next_try")
    if not isinstance(next_try, int | float) or not 0 < next_try < YEAR_10000_SECONDS:
        next_try = 0.0
    return identity, Trouble(failures, printable(reason), next_try)


def _get(conf: Config, path: str) -> bytes | None:
    """What the monitor port serves; empty when that is nothing of use, None when nobody takes the connection."""
    connection = http.client.HTTPConnection(
        conf.monitor_address or "localhost", conf.monitor_port, timeout=ANSWER_SECONDS
    )
    try:
        connection.connect()
    except (OSError, UnicodeError):  # UnicodeError: an address that cannot be a host name
        return None
    limit = threading.Timer(LIMIT_SECONDS, _shut_down, (connection.sock,))
    limit.start()
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read(ANSWER_BYTES) if response.status == http.HTTPStatus.OK else b""
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        limit.cancel()
        connection.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
