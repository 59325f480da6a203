"""The `discover` command: who wants to be provisioned now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import click

from provisioner import lifetimes
from provisioner.choria.connector import Connector
from provisioner.choria.discovery import Sighting
from provisioner.choria.survey import Stats, survey
from provisioner.cli import assembly, daemon, options, waiting
from provisioner.cli.assembly import Setup
from provisioner.cli.daemon import Trouble
from provisioner.cli.waiting import CLOCK_TOLERANCE_SECONDS
from provisioner.durations import span
from provisioner.host.node import PROVISIONING_AGENT
from provisioner.monitor.metrics import Metrics
from provisioner.text import printable


@attrs.frozen(kw_only=True)
class _Server:
    """A server that waits.

    :ivar stats: what it says about itself; None when it did not answer in time
    :ivar trouble: that the daemon on this machine had with it; None when it had none
    """

    sighting: Sighting
    stats: Stats | None
    refused: str | None
    trouble: Trouble | None

    @property
    def started(self) -> float | None:
        """Since when it is up by our clock, in seconds since the epoch."""
        if self.stats is None or self.stats.started is None:
            return None
        return self.stats.started - self._ahead

    def notes(self) -> Iterator[str]:
        """What is unusual about it."""
        if self._ahead:
            yield f"its clock is {abs(self._ahead):.0f} s {'ahead' if self._ahead > 0 else 'behind'}"
        if self.refused:
            yield f"left alone: {self.refused}"
        if self.trouble:
            times = f"{self.trouble.failures} times" if self.trouble.failures > 1 else "once"
            wait = self.trouble.next_try - time.time()
            again = f", tried again in {span(wait)}" if wait > 0 else ""
            yield f"failed {times}{again}: {self.trouble.reason}"

    @property
    def _ahead(self) -> float:
        """Seconds by which its clock is ahead; 0 as long as nobody would call it wrong."""
        ahead = self.sighting.ahead or 0.0
        return ahead if abs(ahead) > CLOCK_TOLERANCE_SECONDS else 0.0

    def as_json(self) -> str:
        return json.dumps(
            {
                "identity": self.sighting.identity,
                "version": self.stats.version if self.stats else None,
                "up_since": None if self.started is None else lifetimes.date(self.started),
                "clock_ahead_seconds": None if self.sighting.ahead is None else round(self.sighting.ahead, 3),
                "refused": self.refused,
                "failures": self.trouble.failures if self.trouble else 0,
                "last_failure": self.trouble.reason if self.trouble else None,
                "next_try": lifetimes.date(self.trouble.next_try) if self.trouble and self.trouble.next_try else None,
            }
        )


@click.command(
    "discover",
    epilog="""\b
    Examples:
      choria-provisioner discover --config /etc/choria-provisioner/provisioner.yaml \\
          --choria-config /etc/choria-provisioner/choria.cfg
      choria-provisioner discover --config provisioner.yaml --json | jq -r 'select(.failures > 2).identity'
    """,
)
@options.config
@options.choria_config
@options.as_json
@options.debug
def discover_command(config_file: Path, choria_file: Path | None, as_json: bool, debug: bool) -> None:
    """List the servers that want to be provisioned now.

    Two broadcasts are made: the first is the one that the daemon finds servers with, the second asks for version and
    start time. What the daemon on this machine could not provision lately is told, too, if it has a monitor port.

    With --json every server is one line. Nothing is changed anywhere.
    """
    with options.failures():
        options.log_to_terminal(debug=debug)
        setup = assembly.load(config_file, choria_file)
        with assembly.connected(setup.connector(Metrics(""))) as connector:
            servers = _discover(setup, connector)
    lines = (server.as_json() for server in servers) if as_json else _table(servers)
    for line in lines:
        click.echo(line)
    if not as_json:
        click.echo(_summary(setup, servers), err=True)


def _discover(setup: Setup, connector: Connector) -> list[_Server]:
    sightings = waiting.sightings(setup, connector)
    identities = [each.identity for each in sightings]
    stats = survey(connector, setup.network.protocol, identities, target_agent=PROVISIONING_AGENT)
    troubles = daemon.troubles(setup.config)
    return [
        _Server(
            sighting=sighting,
            stats=stats.get(sighting.identity),
            refused=setup.config.reason_refused(sighting.identity),
            trouble=troubles.get(sighting.identity),
        )
        for sighting in sorted(sightings, key=lambda each: each.identity)
    ]


def _table(servers: Iterable[_Server]) -> Iterator[str]:
    rows = [("IDENTITY", "VERSION", "UP FOR", "NOTES"), *map(_row, servers)]
    if len(rows) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, last in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join((*padded, last)).rstrip()


def _row(server: _Server) -> tuple[str, str, str, str]:
    version = printable(server.stats.version) if server.stats and server.stats.version else "?"
    up = "?" if server.started is None else span(time.time() - server.started)
    return printable(server.sighting.identity), version, up, "; ".join(server.notes())


def _summary(setup: Setup, servers: list[_Server]) -> str:
    if not servers:
        return f"no server wants to be provisioned ({waiting.caution(setup)})"
    silent = sum(server.stats is None for server in servers)
    note = f"; {silent} of them did not say more in time" if silent else ""
    return f"{len(servers)} {'server wants' if len(servers) == 1 else 'servers want'} to be provisioned{note}"
