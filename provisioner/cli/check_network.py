"""What `check` can see over a connection to the broker."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence

from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.discovery import Sighting
from provisioner.choria.election_key import BUCKET, ElectionError, Key
from provisioner.cli import rivals, waiting
from provisioner.cli.assembly import Setup, connected
from provisioner.cli.findings import Report
from provisioner.cli.waiting import CLOCK_TOLERANCE_SECONDS
from provisioner.monitor.metrics import Metrics

#: How many servers with a wrong clock are named.
SERVERS_NAMED = 5


def network(report: Report, setup: Setup) -> None:
    """The brokers, and what can be reached through one of them."""
    with contextlib.ExitStack() as stack:
        connectors = _connect(report, setup, stack)
        if not connectors:
            return
        connector = connectors[0]
        with report.part("account"):
            account = connector.server_info.get("remote_account")
            report.ok("account", f"{account or 'the only one'} at {connector.connected_url}")
        with report.part("election"):
            _election(report, setup, connector)
        sightings: list[Sighting] = []
        with report.part("servers"):
            sightings = _servers(report, setup, connector)
        with report.part("clock"):
            _clocks(report, setup, connector, sightings)


def _connect(report: Report, setup: Setup, stack: contextlib.ExitStack) -> list[Connector]:
    """Connections to those brokers that take us; each is tried."""
    connectors: list[Connector] = []
    brokers: Sequence[Broker] = ()
    with report.part("broker"):
        brokers = setup.brokers()()
    for broker in brokers:
        with report.part("broker"):
            connector = setup.connector(Metrics(""), functools.partial(_only, broker))
            stack.enter_context(connected(connector))
            info = connector.server_info
            encrypted = "with TLS" if setup.network.tls_always or info.get("tls_required") else "in clear text"
            report.ok("broker", f"connected to {broker} {encrypted}, which is a NATS server {info.get('version', '?')}")
            connectors.append(connector)
    return connectors


def _only(broker: Broker) -> list[Broker]:
    return [broker]


def _election(report: Report, setup: Setup, connector: Connector) -> None:
    if not setup.config.leader_election:
        return
    lifetime = Key(connector, setup.choria.identity).lifetime()
    leader = "an instance leads" if rivals.leads(connector, setup.choria.identity) else "nobody leads"
    report.ok("election", f"the bucket {BUCKET} is there and keeps its key for {lifetime:g} s; {leader} at the moment")


def _servers(report: Report, setup: Setup, connector: Connector) -> list[Sighting]:
    sightings = waiting.sightings(setup, connector)
    refused = sum(setup.config.reason_refused(sighting.identity) is not None for sighting in sightings)
    if refused:
        report.ok("servers", f"{len(sightings)} want to be provisioned, {refused} of them refused by allow and deny")
    elif sightings:
        report.ok("servers", f"{len(sightings)} want{'s' * (len(sightings) == 1)} to be provisioned")
    else:
        report.ok("servers", f"none wants to be provisioned ({waiting.caution(setup)})")
    return sightings


def _clocks(report: Report, setup: Setup, connector: Connector, sightings: Sequence[Sighting]) -> None:
    try:
        ahead = Key(connector, setup.choria.identity).clock_ahead()
    except ElectionError:  # which is no error where there is no election
        ahead = None
    if ahead is not None:
        tell = report.ok if abs(ahead) <= CLOCK_TOLERANCE_SECONDS else report.warning
        tell("clock", f"that of the broker is {_difference(ahead, 0.1)}")
    told = {sighting.identity: sighting.ahead for sighting in sightings if sighting.ahead is not None}
    wrong = sorted(identity for identity, ahead in told.items() if abs(ahead) > CLOCK_TOLERANCE_SECONDS)
    if wrong:
        named = ", ".join(f"{identity} ({told[identity]:+.0f} s)" for identity in wrong[:SERVERS_NAMED])
        more = f" and {len(wrong) - SERVERS_NAMED} more" if len(wrong) > SERVERS_NAMED else ""
        report.warning("clock", f"those of {len(wrong)} of {len(told)} servers differ from ours: {named}{more}")
    elif told:
        report.ok("clock", f"that of a server is {_difference(statistics.median(told.values()), 1.0)} (the median)")
    elif ahead is None:
        report.ok("clock", "not compared: no server answered, and the broker tells its time with Choria Streams only")


def _difference(ahead: float, resolution: float) -> str:
    if abs(ahead) < resolution:
        return f"within {resolution:g} s of ours"
    return f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} ours"
