"""How many servers a minute the daemon provisions, from the first request to the last restart.

    python -m bench.bench_flow [--quick] [--servers N] [--seconds S] [--picture FILE]

Broker, daemon and helpers are real; the servers are simulated in this process. So that figures of machines and days can
be compared, each comes with a limit that was measured a moment before:

* "bare" is how often as many threads start the same helper, and do nothing else.
* "at most" also knows of the latency: it is what as many threads provision that only wait for the replies and start the
  helper, and never more than "bare".
* A request is compared with one of as many threads to a peer that replies at once; the latency is taken off.

CPU time is what a provisioned server costs: in the daemon, in its helper, in the broker with the simulated servers.
"cores" is how many of the machine's cores that keeps busy: when it is all of them, the machine is the limit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from bench import bench_connector, daemon
from bench.chart import Chart, Panel, Series
from bench.daemon import HELPERS, Daemon
from bench.table import Table
from provisioner.cli.run import SWITCH_INTERVAL_SECONDS
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.networks import NETWORKS, Network
from provisioner.simulate.server import Server

WORKERS = (1, 4, 16, 64)
#: What every simulated server takes to reply.
LATENCIES_MS = (0, 20, 100)
KINDS = ("insecure", "org")
#: How long a cell is to take, and the part of "bare" that is expected of the daemon for it.
CELL_SECONDS = 5.0
EXPECTED_RATIO = {"insecure": 0.4, "org": 0.2}
#: A cell has no fewer servers than this, nor than two for every worker.
LEAST_SERVERS = 20
#: How long each limit is measured.
LIMIT_SECONDS = 1.2
PATIENCE_SECONDS = 300.0
FACTS = {"blob": "x" * 2048}

COLUMNS = (
    *("latency ms", "servers", "servers/min", "bare/min", "ratio", "at most/min", "ratio"),
    *(
        "CPU ms: daemon",
        "helper",
        "broker, servers",
        "cores",
        "request ms",
        "bare ms",
        "ratio",
        "95 % of cycles s",
        "peak MB",
    ),
)


@attrs.frozen(kw_only=True)
class Cell:
    """One combination of what is varied.

    :ivar kind: of the network, one of :data:`NETWORKS`
    :ivar helper: one of :data:`HELPERS`
    """

    kind: str
    helper: str
    workers: int
    latency_ms: int


@attrs.frozen(kw_only=True)
class Limits:
    """What bounds a cell.

    :ivar bare: helper starts a minute
    :ivar at_most: servers a minute
    :ivar request_seconds: a bare round trip
    """

    bare: float
    at_most: float
    request_seconds: float


@attrs.frozen(kw_only=True)
class Flow:
    """What a cell has shown.

    :ivar rate: servers a minute
    :ivar cpu_ms: for each server, of the daemon, of its helpers, and of broker and simulation
    :ivar request_ms: mean round trip by the daemon's own metrics
    :ivar cycle_seconds: within which 95 % of the cycles have ended, by the daemon's log
    """

    servers: int
    rate: float
    cpu_ms: Sequence[float]
    request_ms: float
    cycle_seconds: float
    peak_megabytes: float


def matrix(*, quick: bool) -> list[Cell]:
    """All combinations; those of a table follow each other."""
    helpers, latencies = (("sh",), (0,)) if quick else (tuple(HELPERS), LATENCIES_MS)
    return [
        Cell(kind=kind, helper=helper, workers=workers, latency_ms=latency)
        for kind, helper, workers, latency in itertools.product(KINDS, helpers, WORKERS, latencies)
    ]


def report(cells: Iterable[Cell], *, servers: int | None, seconds: float) -> dict[Cell, tuple[Limits, Flow]]:
    """Measure cells and print a table for each network and helper.

    :param servers: of each cell; None: so many that it takes about `seconds`
    """
    cells = list(cells)
    round_trips = dict(bare_round_trips(sorted({cell.workers for cell in cells}), min(seconds, LIMIT_SECONDS)))
    results = {}
    for (kind, helper), group in itertools.groupby(cells, lambda cell: (cell.kind, cell.helper)):
        print(f"\nNetwork `{kind}`, helper `{helper}`:")
        table = Table("workers", *COLUMNS)
        with tempfile.TemporaryDirectory() as directory:
            network = NETWORKS[kind](Path(directory))
            alone = bare_starts(network, helper, 1, min(seconds, LIMIT_SECONDS))
            for cell in group:
                limits = measure_limits(cell, network, alone, round_trips[cell.workers], min(seconds, LIMIT_SECONDS))
                count = servers or servers_for(cell, limits, seconds)
                flow = provision(cell, network, Path(directory), count)
                results[cell] = limits, flow
                table.row(*figures(cell, limits, flow))
    return results


def servers_for(cell: Cell, limits: Limits, seconds: float) -> int:
    """How many servers a cell needs to take about so long."""
    expected = min(limits.at_most, limits.bare * EXPECTED_RATIO[cell.kind]) * seconds / 60
    return max(LEAST_SERVERS, 2 * cell.workers, int(round(expected, -1 if expected < 1000 else -2)))


def figures(cell: Cell, limits: Limits, flow: Flow) -> Iterator[str]:
    yield str(cell.workers)
    yield str(cell.latency_ms)
    yield f"{flow.servers:,}"
    yield f"{flow.rate:,.0f}"
    yield f"{limits.bare:,.0f}"
    yield f"{flow.rate / limits.bare:.2f}"
    yield f"{limits.at_most:,.0f}"
    yield f"{flow.rate / limits.at_most:.2f}"
    yield from (f"{cpu:.1f}" for cpu in flow.cpu_ms)
    yield f"{sum(flow.cpu_ms) / 1e3 * flow.rate / 60:.1f}"
    yield f"{flow.request_ms:.2f}"
    yield f"{limits.request_seconds * 1e3:.2f}"
    yield f"{flow.request_ms / limits.request_seconds / 1e3:.1f}"
    yield f"{flow.cycle_seconds:.2f}"
    yield f"{flow.peak_megabytes:.0f}"


# --- the limits


def bare_round_trips(threads: Sequence[int], seconds: float) -> Iterator[tuple[int, float]]:
    """Seconds that a request takes with so many threads that make them, on a connection without TLS."""
    with bench_connector.peer_running() as port:
        for count in threads:
            run = functools.partial(bench_connector.requests, port, count, seconds)
            yield count, count / bench_connector.measured(run)[0]


def bare_starts(network: Network, helper: str, threads: int, seconds: float) -> float:
    file = network.directory / "bare-helper"
    file.write_text(daemon.helper_script(helper, network))
    file.chmod(0o755)
    return daemon.bare_starts_per_minute(file, threads, seconds)


def measure_limits(cell: Cell, network: Network, alone: float, request_seconds: float, seconds: float) -> Limits:
    """What bounds a cell.

    :param alone: starts of its helper a minute, one after the other
    """
    bare = bare_starts(network, cell.helper, cell.workers, seconds)
    cycle_seconds = len(network.rpcs) * cell.latency_ms / 1e3 + 60 / alone
    at_most = min(bare, cell.workers * 60 / cycle_seconds)
    return Limits(bare=bare, at_most=at_most, request_seconds=request_seconds)


# --- the daemon


def provision(cell: Cell, network: Network, directory: Path, count: int) -> Flow:
    """Have a daemon provision so many servers."""
    with NatsServer(network.broker) as broker:
        site = network.site(broker.url)
        servers = [Server(identity=f"n{number}.example.net", site=site, facts=FACTS) for number in range(count)]
        # as on real servers, none of which verifies a request
        envelopes = attrs.evolve(network.envelopes, check=None)
        with network.fleet(broker.url, servers, envelopes=envelopes, latency=cell.latency_ms / 1e3) as fleet:
            with Daemon(directory / "daemon", broker.url, network, workers=cell.workers) as program:
                program.log_file.unlink(missing_ok=True)
                program.helper(daemon.helper_script(cell.helper, network))
                program.begin()
                before, others = program.taken(), _cpu_seconds(broker)
                if not fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS):
                    sys.exit(f"not all servers were provisioned: {fleet.counts()}")
                after, others = program.taken(), _cpu_seconds(broker) - others
                mean = request_ms(program, network.rpcs)
            cpu = (after.cpu_seconds - before.cpu_seconds, after.children_cpu_seconds, others)
            return Flow(
                servers=count,
                rate=fleet.counts().servers_per_minute,
                cpu_ms=tuple(seconds / count * 1e3 for seconds in cpu),
                request_ms=mean - cell.latency_ms,
                cycle_seconds=cycle_seconds(program.messages()),
                peak_megabytes=after.peak_rss_bytes / 1e6,
            )


def _cpu_seconds(broker: NatsServer) -> float:
    """Of the broker and of the servers, which is to say of this process."""
    return daemon.cpu_seconds(broker.pid) + daemon.cpu_seconds(os.getpid())


def request_ms(program: Daemon, rpcs: Sequence[str]) -> float:
    """Mean time of the requests that a provisioning takes."""
    page = program.page()
    return sum(page.mean("rpc_time", rpc) for rpc in rpcs) / len(rpcs) * 1e3


def cycle_seconds(messages: Iterable[str]) -> float:
    """Within which 95 % of the cycles ended."""
    times = sorted(float(text.split()[2]) for text in messages if text.startswith("provisioned in "))
    return times[math.ceil(len(times) * 0.95) - 1]


# --- the picture


def chart(results: Mapping[Cell, tuple[Limits, Flow]], helper: str = "sh") -> Chart:
    """Draw how the rate grows with the workers."""
    panels, workers = [], sorted({cell.workers for cell in results})
    for kind in dict.fromkeys(cell.kind for cell in results):
        cells = [cell for cell in results if (cell.kind, cell.helper) == (kind, helper)]
        lines = []
        for latency in dict.fromkeys(cell.latency_ms for cell in cells):
            rates = [
                (workers.index(cell.workers), results[cell][1].rate) for cell in cells if cell.latency_ms == latency
            ]
            lines.append(Series(f"latency {latency} ms", rates))
        panels.append(Panel(f"Network {kind}", "servers a minute", lines))
    return Chart(
        title="Servers a minute by the number of workers",
        note=f"helper: {helper}; {os.cpu_count()} cores, which daemon, helpers, broker and simulated servers share",
        x_title="workers",
        x_names=dict(enumerate(map(str, workers))),
        panels=panels,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no latency, and one helper")
    parser.add_argument("--servers", type=int, help="of each cell")
    parser.add_argument("--seconds", type=float, default=CELL_SECONDS, help="about what a cell takes without --servers")
    parser.add_argument("--picture", type=Path, help="where the scaling curve is to be drawn")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    results = report(matrix(quick=options.quick), servers=options.servers, seconds=options.seconds)
    if options.picture:
        options.picture.write_text(chart(results).svg())


if __name__ == "__main__":
    main()
