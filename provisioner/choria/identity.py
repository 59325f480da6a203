"""Identities: which ones may be used at all, and which one this machine has by default.

An identity becomes a part of NATS subjects, and it comes from the network: a reply or a lifecycle event may hold any
text.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

#: The longest identity, in bytes of UTF-8.
MAX_IDENTITY_BYTES = 255
#: How long Facter may take; it is a Ruby program that asks around.
FACTER_TIMEOUT_SECONDS = 10.0
#: Where Puppet's own packages put Facter; Choria looks there before it looks in PATH.
FACTER_DIRECTORY = "/opt/puppetlabs/bin"

_BLANK_OR_CONTROL = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")


def reason_insane(identity: str) -> str | None:
    """Say why an identity may not be used, as a clause fit for "identity ... <clause>"; None when it is sane.

    Sane is: 1 to 255 bytes of UTF-8, no white space, no control characters, no ``*`` and ``>``, and no empty part
    between dots. A line break in a subject would be a second protocol line to the broker, a wildcard would reach other
    nodes.
    """
    try:
        size = len(identity.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size == 0:
        return "is empty"
    if size > MAX_IDENTITY_BYTES:
        return f"is longer than {MAX_IDENTITY_BYTES} bytes"
    if _BLANK_OR_CONTROL.search(identity):
        return "holds white space or control characters"
    if "*" in identity or ">" in identity:
        return "holds * or >"
    if "" in identity.split("."):
        return "has an empty part (a leading, trailing or double dot)"
    return None


def fact(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Ask Facter for one fact, like ``networking.fqdn``; empty when there is no Facter or it does not know."""
    # an empty entry would mean the current directory
    directories = [FACTER_DIRECTORY, *filter(None, environ.get("PATH", "").split(os.pathsep))]
    command = shutil.which("facter", path=os.pathsep.join(directories))
    if command is None:
        return ""
    try:
        result = subprocess.run(
            [command, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FACTER_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode(errors="replace").strip() if result.returncode == 0 else ""


def own_identity(
    *,
    gethostname: Callable[[], str] = socket.gethostname,
    getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo,
    gethostbyaddr: Callable[[str], tuple[str, list[str], list[str]]] = socket.gethostbyaddr,
    fact: Callable[[str], str] = fact,
) -> str:
    """Find the identity of a machine whose configuration names none, in the order Choria does.

    A host name with two or more dots; else what the reverse look-up of the host name's first IPv4 address gives; else
    Facter's ``networking.fqdn``; else the short host name. The result may be insane, check it.
    """
    hostname = gethostname()
    if hostname.count(".") > 1:
        return hostname
    found = _reverse_lookup(hostname, getaddrinfo, gethostbyaddr)
    if found not in ("", "localhost"):
        return found
    return fact("networking.fqdn") or hostname


def _reverse_lookup(
    hostname: str,
    getaddrinfo: Callable[..., list[Any]],
    gethostbyaddr: Callable[[str], tuple[str, list[str], list[str]]],
) -> str:
    try:
        addresses = getaddrinfo(hostname, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        return gethostbyaddr(addresses[0][4][0])[0].removesuffix(".") if addresses else ""
    except (OSError, UnicodeError):  # UnicodeError: a host name that cannot be an IDNA name
        return ""
