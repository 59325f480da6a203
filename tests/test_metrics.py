"""The page of metrics is one that dashboards and alerts of the Go original go on working with."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from provisioner import __version__
from provisioner.monitor.metrics import RPCS, ConnectorMetrics, Metrics

FIXTURES = Path(__file__).parent / "fixtures" / "agents"
ORIGINALS = sorted(FIXTURES.glob("metrics-*.txt"))
CARRIED_OVER = ("choria_provisioner_", "choria_connector_")
SERIES = re.compile(r"([a-z0-9_]+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-z0-9_]+)="((?:[^"\\\n]|\\.)*)"(?:,|\Z)')


@attrs.frozen
class Page:
    """A page in the text format, read by other eyes than the client library's, which has its own mind about names."""

    types: dict[str, str]
    helps: dict[str, str]
    labels: dict[str, set[tuple[str, ...]]]
    values: dict[str, float]


def read(text: str) -> Page:
    page = Page({}, {}, {}, {})
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert name not in page.types, f"{name} comes twice"
            page.types[name] = kind
        elif line.startswith("# HELP "):
            name, _, words = line.removeprefix("# HELP ").partition(" ")
            page.helps[name] = words
        else:
            match = SERIES.fullmatch(line)
            assert match, line
            name, labels, value = match.groups(default="")
            assert f"{name}{{{labels}}}" not in page.values, f"{line} comes twice"
            assert sum(len(label[0]) for label in LABEL.finditer(labels)) == len(labels), line
            page.labels.setdefault(name, set()).add(tuple(label[1] for label in LABEL.finditer(labels)))
            page.values[f"{name}{{{labels}}}"] = float(value)
    return page


def rendered(metrics: Metrics) -> Page:
    return read(metrics.render().decode())


@pytest.mark.parametrize("path", ORIGINALS, ids=lambda path: path.stem)
def test_every_series_of_the_original_is_there_with_its_type_and_labels(path: Path) -> None:
    original = read(path.read_text())
    ours = rendered(Metrics("lab"))
    families = {name: kind for name, kind in original.types.items() if name.startswith(CARRIED_OVER)}
    series = {name: labels for name, labels in original.labels.items() if name.startswith(CARRIED_OVER)}
    assert len(families) >= 10
    assert {name: ours.types.get(name) for name in families} == families
    assert {name: ours.labels.get(name) for name in series} == series


def test_what_both_tell_about_the_process_has_the_same_types() -> None:
    original = read(ORIGINALS[0].read_text()).types
    ours = rendered(Metrics("")).types
    shared = [name for name in ours if name.startswith("process_")]
    assert "process_cpu_seconds_total" in shared
    assert {name: ours[name] for name in shared} == {name: original[name] for name in shared}


def test_no_name_of_choria_has_a_suffix_that_the_original_does_not_have() -> None:
    metrics = Metrics("lab")
    metrics.provisioned.inc()
    metrics.helper_time.observe(0.5)
    names = {*(page := rendered(metrics)).types, *page.labels}
    assert not [name for name in names if name.endswith("_created")]
    assert not [name for name in names if name.startswith("choria_") and name.endswith("_total")]


def test_summaries_have_a_sum_and_a_count_and_nothing_else() -> None:
    page = rendered(Metrics("lab"))
    summaries = [name for name, kind in page.types.items() if kind == "summary"]
    assert sorted(summaries) == [
        "choria_connector_initial_connect_time",
        "choria_provisioner_helper_time",
        "choria_provisioner_rpc_time",
    ]
    for name in summaries:
        assert {each for each in page.labels if each.startswith(name)} == {f"{name}_sum", f"{name}_count"}


def test_every_series_exists_from_the_start_at_zero() -> None:
    values = rendered(Metrics("lab")).values
    ours = {name: value for name, value in values.items() if name.startswith(CARRIED_OVER)}
    nonzero = {name: value for name, value in ours.items() if value}
    assert list(nonzero) == [name for name in ours if "_build_info{" in name]
    for rpc in RPCS:
        labels = f'{{rpc="{rpc}",site="lab"}}'
        assert f"choria_provisioner_rpc_errors{labels}" in ours
        assert f"choria_provisioner_rpc_time_count{labels}" in ours
        assert f"choria_provisioner_rpc_time_sum{labels}" in ours
    for name in ("queue_full", "events_dropped", "upgrades", "refused", "troubled_nodes"):
        assert f'choria_provisioner_{name}{{site="lab"}}' in ours


def test_when_credentials_expire_is_asked_for_every_page() -> None:
    metrics = Metrics("lab")
    name = "choria_provisioner_credential_expiry_timestamp_seconds"
    assert not [series for series in rendered(metrics).values if series.startswith(name)]
    expiries = {"token": 1827525547.0}
    metrics.credential_expiries = lambda: expiries
    assert rendered(metrics).values[f'{name}{{credential="token",site="lab"}}'] == 1827525547
    expiries |= {"certificate": 2.0}
    values = rendered(metrics).values
    assert values[f'{name}{{credential="certificate",site="lab"}}'] == 2
    assert rendered(metrics).types[name] == "gauge"


def test_what_is_counted_is_on_the_page() -> None:
    metrics = Metrics("lab")
    metrics.discovered.inc(3)
    metrics.waiting_nodes.set(2)
    metrics.helper_time.observe(0.25)
    metrics.helper_time.observe(0.5)
    metrics.rpc_time["rpcutil#inventory"].observe(1.5)
    metrics.rpc_errors["choria_provision#jwt"].inc()
    metrics.connector.reconnections.inc()
    values = rendered(metrics).values
    assert values['choria_provisioner_discovered{site="lab"}'] == 3
    assert values['choria_provisioner_waiting_nodes{site="lab"}'] == 2
    assert values['choria_provisioner_helper_time_sum{site="lab"}'] == 0.75
    assert values['choria_provisioner_helper_time_count{site="lab"}'] == 2
    assert values['choria_provisioner_rpc_time_sum{rpc="rpcutil#inventory",site="lab"}'] == 1.5
    assert values['choria_provisioner_rpc_errors{rpc="choria_provision#jwt",site="lab"}'] == 1
    assert values["choria_connector_reconnections{}"] == 1


class TestElection:
    """Series that are there when there is an election."""

    LEADER = 'choria_election_leader{election="provisioner",identity="prov1.lab"}'

    def test_without_one_there_are_none(self) -> None:
        assert not [series for series in rendered(Metrics("lab")).values if series.startswith("choria_election_")]

    def test_they_have_the_names_labels_and_types_of_the_original(self) -> None:
        metrics = Metrics("lab")
        metrics.election("provisioner", "prov1.lab").leader(True)
        ours, originals = rendered(metrics), read((FIXTURES / "metrics-leader.txt").read_text())

        names = {name for name in originals.types if name.startswith("choria_election_")}
        assert names == {name for name in ours.types if name.startswith("choria_election_")}
        for name in names:
            assert ours.types[name] == originals.types[name]
            assert ours.labels[name] == originals.labels[name]
        assert {series for series in originals.values if series.startswith("choria_election_")} <= set(ours.values)

    def test_campaigns_are_counted_by_what_the_candidate_was(self) -> None:
        metrics = Metrics("lab")
        election = metrics.election("provisioner", "prov1.lab")
        election.campaigns["candidate"].inc()
        election.campaigns["leader"].inc(5)
        election.interval.set(0.705)

        values = rendered(metrics).values
        labels = 'election="provisioner",identity="prov1.lab"'
        assert values[f'choria_election_campaigns{{{labels},state="candidate"}}'] == 1
        assert values[f'choria_election_campaigns{{{labels},state="leader"}}'] == 5
        assert values[f"choria_election_interval_seconds{{{labels}}}"] == 0.705

    def test_whether_the_key_is_held_is_not_told_before_it_was_for_the_first_time(self) -> None:
        metrics = Metrics("lab")
        election = metrics.election("provisioner", "prov1.lab")
        seen = []
        for holds_key in (False, True, True, False, False, True):
            election.leader(holds_key)
            seen.append(rendered(metrics).values.get(self.LEADER))
        assert seen == [None, 1, 1, 0, 0, 1]


def test_the_build_is_named() -> None:
    line = next(line for line in Metrics("lab").render().decode().splitlines() if "_build_info{" in line)
    assert f'site="lab",version="{__version__}"}} 1' in line


def test_two_sets_of_metrics_live_side_by_side() -> None:
    one, other = Metrics("one"), Metrics("other")
    one.provisioned.inc()
    assert rendered(one).values['choria_provisioner_provisioned{site="one"}'] == 1
    assert rendered(other).values['choria_provisioner_provisioned{site="other"}'] == 0


def test_a_connector_can_count_by_itself() -> None:
    metrics, other = ConnectorMetrics(), ConnectorMetrics()
    metrics.errors.inc()
    assert next(iter(metrics.errors.collect())).samples[0].value == 1
    assert next(iter(other.errors.collect())).samples[0].value == 0


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_site_comes_back_as_it_was_given(site: str) -> None:
    text = Metrics(site).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["choria_provisioner_paused"].samples[0].labels == {"site": site}


def test_a_site_that_cannot_be_encoded_does_not_cost_the_page() -> None:
    assert 'choria_provisioner_paused{site="?"} 0' in Metrics("\ud800").render().decode()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (3.0, "3"),
        (-2.0, "-2"),
        (0.25, "0.25"),
        (1e300, "1e+300"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers_are_written_as_the_format_wants_them(value: float, written: str) -> None:
    metrics = Metrics("lab")
    metrics.busy_workers.set(value)
    assert f'choria_provisioner_busy_workers{{site="lab"}} {written}\n' in metrics.render().decode()


def test_every_series_has_a_help_text() -> None:
    page = rendered(Metrics("lab"))
    assert page.types.keys() == page.helps.keys()
    assert all(page.helps.values())


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not on the path: it comes with Prometheus, `make test` does not install it",
)
def test_promtool_finds_nothing_but_the_missing_suffixes() -> None:
    metrics = Metrics('a "site"\\\nof two lines')
    metrics.helper_time.observe(0.5)
    result = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, timeout=60, check=False
    )
    complaints = [line for line in (result.stdout + result.stderr).decode().splitlines() if line]
    # 1 stands for a page that cannot be read, 3 for remarks on style
    assert result.returncode == 3, complaints
    assert complaints
    assert [line for line in complaints if not line.endswith('counter metrics should have "_total" suffix')] == []
