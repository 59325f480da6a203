"""The servers that want to be provisioned now, as `check` and `discover` ask for them."""

from __future__ import annotations

from provisioner.choria import discovery
from provisioner.choria.connector import Connector
from provisioner.choria.discovery import Sighting
from provisioner.cli.assembly import Setup
from provisioner.host.node import PROVISIONING_AGENT

#: A difference between two clocks that is worth telling: a broker takes no token that is a second early.
CLOCK_TOLERANCE_SECONDS = 3.0


def sightings(setup: Setup, connector: Connector) -> list[Sighting]:
    """Those that answer a broadcast, which is the one that the daemon finds servers with.

    :raises ConnectorError: when there is no connection, or it is lost
    """
    return discovery.discover(
        connector,
        setup.network.protocol,
        target_agent=PROVISIONING_AGENT,
        first_reply=setup.choria.discovery_timeout,
        interrupted=lambda: False,
    )


def caution(setup: Setup) -> str:
    """What to think of where nobody answers."""
    return f"one whose clock is off by {setup.choria.ttl} s would not answer"
