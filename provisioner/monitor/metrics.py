"""The metrics of the daemon, under the names that the Go original gave them.

Dashboards and alerts made for the original must go on working, so its counters have no ``_total`` suffix. The usual
Python client insists on that suffix when it writes a page, hence :meth:`Metrics.render`, a writer of our own. Every
series exists from the start, at zero: a rate over a series that appears with its first event misses that event.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    Summary,
)
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from provisioner import __version__

#: What :meth:`Metrics.render` writes, for the header of a response.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: The values of the label ``rpc``: agent and action of every request made while provisioning a host.
RPCS = (
    "choria_provision#jwt",
    "choria_provision#gen25519",
    "choria_provision#gencsr",
    "choria_provision#configure",
    "choria_provision#restart",
    "choria_provision#shutdown",
    "choria_provision#release_update",
    "rpcutil#inventory",
)

_PREFIX = "choria_"
_LARGEST_EXACT_INTEGER = 2**53
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


class ConnectorMetrics:
    """The series about the broker connection; they carry no labels.

    :param registry: where they are registered; a connector that stands alone needs none
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"choria_connector_{name}", text, registry=registry)

        #: Only the failed ones count, as in the Go original.
        self.initial_connection_attempts = counter(
            "initial_connection_attempts", "Failed attempts before the first connection to a broker"
        )
        self.reconnections = counter("reconnections", "Times the connection to a broker was established anew")
        self.connection_closed = counter("connection_closed", "Times the connection to a broker ended")
        self.errors = counter("errors", "Errors seen on the connection to a broker")
        self.initial_connect_time = Summary(
            "choria_connector_initial_connect_time",
            "Seconds from the first attempt to the first connection to a broker",
            registry=registry,
        )


class ElectionMetrics:
    """The series of the leader election.

    :param identity: of the candidate
    """

    def __init__(self, election: str, identity: str, registry: CollectorRegistry) -> None:
        labels = ["election", "identity"]
        campaigns = Counter(
            "choria_election_campaigns",
            "Campaigns made, by what the candidate was",
            [*labels, "state"],
            registry=registry,
        )
        self.campaigns = {state: campaigns.labels(election, identity, state) for state in ("candidate", "leader")}
        interval = Gauge(
            "choria_election_interval_seconds", "Seconds until the next campaign", labels, registry=registry
        )
        self.interval = interval.labels(election, identity)
        self._leader = Gauge("choria_election_leader", "1 while the key is held, else 0", labels, registry=registry)
        self._labels = (election, identity)
        self._won = False

    def leader(self, holds_key: bool) -> None:
        """Tell whether the key is held. There is no such series before it was for the first time."""
        self._won = self._won or holds_key
        if self._won:
            self._leader.labels(*self._labels).set(holds_key)


class Metrics:
    """All series of one daemon, in a registry of its own so that several can live in one process.

    The attributes are the series themselves, labelled already; ``rpc_time`` and ``rpc_errors`` are looked up by one of
    :data:`RPCS`.

    :param site: value of the label ``site``, may be empty
    :ivar credential_expiries: asked for every page: when credentials expire, by their kind, in seconds since the epoch
    """

    def __init__(self, site: str) -> None:
        self.credential_expiries: Callable[[], Mapping[str, float]] = dict
        self._registry = registry = CollectorRegistry()
        registry.register(_Expiries(self, site))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"choria_provisioner_{name}", text, ["site"], registry=registry).labels(site)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"choria_provisioner_{name}", text, ["site"], registry=registry).labels(site)

        self.discovered = counter("discovered", "Nodes found by asking the network")
        self.event_discovered = counter("event_discovered", "Nodes found by an event they sent")
        self.discover_cycles = counter("discover_cycles", "Times the network was asked for nodes")
        self.discovery_errors = counter("discovery_errors", "Times asking the network for nodes failed")
        self.provisioned = counter("provisioned", "Nodes configured and restarted")
        self.provision_errors = counter("provision_errors", "Nodes that could not be provisioned in a cycle")
        self.helper_errors = counter("helper_errors", "Runs of the helper that failed")
        self.helper_shutdown_requests = counter("helper_shutdown_requests", "Nodes shut down on the helper's wish")
        self.queue_full = counter("queue_full", "Nodes turned away because the work queue was full")
        self.events_dropped = counter("events_dropped", "Lifecycle events dropped because too many came at once")
        self.upgrades = counter("upgrades", "Nodes sent to another version")
        self.refused = counter("refused", "Times a node was seen that allow or deny in the configuration keep out")

        self.busy_workers = gauge("busy_workers", "Workers at work on a node")
        self.work_queue_entries = gauge("work_queue_entries", "Nodes on the work queue")
        self.waiting_nodes = gauge("waiting_nodes", "Nodes known and not finished with")
        self.troubled_nodes = gauge("troubled_nodes", "Nodes whose last attempt failed")
        self.paused = gauge("paused", "1 while provisioning is paused, else 0")
        self.leader = gauge("leader", "1 while this instance is the one that provisions, else 0")

        self.helper_time = Summary(
            "choria_provisioner_helper_time", "Seconds a run of the helper took", ["site"], registry=registry
        ).labels(site)

        labels = ["rpc", "site"]
        times = Summary("choria_provisioner_rpc_time", "Seconds a try of a request took", labels, registry=registry)
        errors = Counter(
            "choria_provisioner_rpc_errors",
            "Requests given up, after all tries or a final refusal",
            labels,
            registry=registry,
        )
        self.rpc_time: Mapping[str, Summary] = {rpc: times.labels(rpc, site) for rpc in RPCS}
        self.rpc_errors: Mapping[str, Counter] = {rpc: errors.labels(rpc, site) for rpc in RPCS}

        self.connector = ConnectorMetrics(registry)

        labels = ["python", "site", "version"]
        build = Gauge("choria_provisioner_build_info", "Always 1; what is running", labels, registry=registry)
        build.labels(platform.python_version(), site, __version__).set(1)

    def election(self, election: str, identity: str) -> ElectionMetrics:
        """Add the series of an election to the page."""
        return ElectionMetrics(election, identity, self._registry)

    def render(self) -> bytes:
        """Give all series in the Prometheus text format 0.0.4, ordered by name; see :data:`CONTENT_TYPE`."""
        families = sorted(self._registry.collect(), key=lambda family: family.name)
        # A site may hold a lone surrogate, which no encoding has: the page is worth more than that character.
        return "".join(line for family in families for line in _family(family)).encode("utf-8", "replace")


class _Expiries(Collector):
    """When credentials expire; what there is to tell is asked anew for every page."""

    def __init__(self, metrics: Metrics, site: str) -> None:
        self._metrics = metrics
        self._site = site

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "choria_provisioner_credential_expiry_timestamp_seconds",
            "When a credential of this provisioner expires, in seconds since the epoch",
            labels=["credential", "site"],
        )
        for credential, expiry in self._metrics.credential_expiries().items():
            family.add_metric([credential, self._site], expiry)
        yield family


def _family(family: Metric) -> Iterator[str]:
    name = _written_name(family)
    yield f"# HELP {name} {family.documentation.translate(_HELP_ESCAPES)}\n"
    yield f"# TYPE {name} {family.type}\n"
    yield from _samples(name, family)


def _written_name(family: Metric) -> str:
    """Give the name of a family on the page: the client library took ``_total`` off its own counters, put it back."""
    if family.type == "counter" and not family.name.startswith(_PREFIX):
        return f"{family.name}_total"
    return family.name


def _samples(name: str, family: Metric) -> Iterable[str]:
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        written = name if family.type == "counter" else sample.name
        yield f"{written}{_labels(sample)} {_number(sample.value)}\n"


def _labels(sample: Sample) -> str:
    if not sample.labels:
        return ""
    pairs = (f'{label}="{value.translate(_LABEL_ESCAPES)}"' for label, value in sorted(sample.labels.items()))
    return "{" + ",".join(pairs) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < _LARGEST_EXACT_INTEGER:
        return str(int(value))
    return repr(float(value))
