"""Who else may be provisioning servers at this moment, as far as that can be seen from here."""

from __future__ import annotations

import time
from pathlib import Path

from provisioner.choria.connector import Connector
from provisioner.choria.election_key import Key
from provisioner.cli import daemon
from provisioner.cli.assembly import Setup
from provisioner.errors import ProvisionerError

#: A key that stands still for so long is renewed by nobody: a leader writes it at least every 0.75 s, and 5.75 s after
#: a write that hangs.
STILL_SECONDS = 6.5
#: How often the key is looked at meanwhile.
LOOK_SECONDS = 0.4


class RivalError(ProvisionerError):
    """Another provisioner is at work, or may be."""


def on_this_machine(setup: Setup, pid_file: Path) -> str:
    """Which daemon runs on this machine, in words; empty when none does, as far as its pid file and port tell."""
    found = daemon.monitor(setup.config)
    return daemon.holder(pid_file) or (str(found) if found and found.provisioner else "")


def check(setup: Setup, connector: Connector, pid_file: Path) -> None:
    """Make sure that nobody else provisions servers now, as far as that can be seen.

    :raises RivalError: somebody does
    """
    if rival := on_this_machine(setup, pid_file):
        raise RivalError(f"{rival}, and may be at work on the server: stop it first, or use --force")
    if setup.config.leader_election and leads(connector, setup.choria.identity):
        raise RivalError("another instance leads, and may be at work on the server: stop it first, or use --force")


def looked_at(setup: Setup, pid_file: Path) -> str:
    """Says that :func:`check` has found nobody, and where it has looked."""
    conf = setup.config
    port = f"none serves port {conf.monitor_port}" if conf.monitor_port else "monitor_port is off"
    elsewhere = "nobody leads" if conf.leader_election else "leader_election is off, so other machines cannot be seen"
    return f"no other provisioner is seen: nobody holds {pid_file}; {port}; {elsewhere}"


def leads(connector: Connector, identity: str) -> bool:
    """Whether one of the instances that take part in the election leads; takes :data:`STILL_SECONDS` to say no.

    The key cannot be read. But the refusal of a write that is always refused tells its sequence, which moves as long
    as somebody leads.

    :raises ElectionError: when that cannot be known
    """
    key = Key(connector, identity)
    key.lifetime()  # says what is wrong with the bucket, if anything is
    end = time.monotonic() + STILL_SECONDS
    first = now = key.sequence()
    while now and now == first:
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_SECONDS)
        now = key.sequence()
    return now > 0
