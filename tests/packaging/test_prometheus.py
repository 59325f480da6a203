"""Dashboard and alerts against a real Prometheus that scrapes a real daemon."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.monitor.metrics import Metrics
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests.conftest import Eventually
from tests.installation import SITE, Installation, free_port
from tests.packaging.conftest import need
from tests.packaging.machine import REPOSITORY
from tests.streams import PASSWORD, SERVERS_LOGIN, Streams

ALERTS = REPOSITORY / "etc" / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((REPOSITORY / "etc" / "prometheus" / "dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
#: What a daemon without credentials that expire has no values for.
ABSENT_HERE = "choria_provisioner_credential_"

CONFIGURATION = """
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: ["{alerts}"]
scrape_configs:
  - job_name: choria-provisioner
    static_configs: [{{targets: ["127.0.0.1:{target}"]}}]
"""


class Prometheus:
    """A real one, as its HTTP interface shows it."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **parameters: str) -> Any:
        """What it answers; an answer that is an error is raised."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        assert "warnings" not in answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.get("query", query=expression)["result"]]

    def ready(self) -> bool:
        try:
            return self.values("up") == [1.0]
        except OSError:
            return False


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with Streams(tmp_path / "streams") as streams:
        streams.make_bucket()
        yield streams


@pytest.fixture
def installation(tmp_path: Path, streams: Streams) -> Iterator[Installation]:
    """An instance that takes part in an election."""
    with Installation(tmp_path, streams.server.url) as installation:
        installation.settings |= {"leader_election": True, "broker_provisioning_password": PASSWORD}
        yield installation


@pytest.fixture
def prometheus(tmp_path: Path, installation: Installation) -> Iterator[Prometheus]:
    """One that scrapes the daemon of the installation."""
    need("prometheus")
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(alerts=ALERTS, target=installation.port))
    port = free_port()
    command = ("prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path / 'data'}")
    with (
        (tmp_path / "prometheus.log").open("wb") as log,
        subprocess.Popen((*command, f"--web.listen-address=127.0.0.1:{port}"), stderr=log) as process,
    ):
        yield Prometheus(port)
        process.kill()


def as_grafana_sends_it(expression: str, site: str) -> str:
    return expression.replace("${instance}", site)


def test_every_panel_shows_something_and_every_rule_is_evaluated(
    installation: Installation, prometheus: Prometheus, streams: Streams, eventually: Eventually
) -> None:
    installation.start()
    eventually(prometheus.ready)
    eventually(lambda: prometheus.values("choria_provisioner_leader == 1"))
    servers = [Server(identity=f"n{number}.example.net", site=SITE, boots_after=0.1) for number in range(3)]
    fleet = Fleet(streams.server.url, servers, login=SERVERS_LOGIN)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fleet)
        counted = 'sum(increase(choria_provisioner_provisioned{site=~"lab"}[1m])) > 0'
        eventually(lambda: prometheus.values(counted))

    for site in ("lab", ".*"):
        empty = {
            expression for expression in EXPRESSIONS if not prometheus.values(as_grafana_sends_it(expression, site))
        }
        assert [expression for expression in empty if ABSENT_HERE not in expression] == []
    assert prometheus.get("label/site/values", **{"match[]": "choria_provisioner_discover_cycles"}) == ["lab"]
    eventually(
        lambda: {rule["health"] for group in prometheus.get("rules")["groups"] for rule in group["rules"]} == {"ok"}
    )
    alerts = prometheus.get("alerts")["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []


def test_dashboard_and_alerts_use_series_that_there_are() -> None:
    metrics = Metrics("lab")
    metrics.election("provisioner", "prov.example.net").leader(True)
    metrics.credential_expiries = lambda: {"token": 1.0}
    page = metrics.render().decode()
    series = set(re.findall(r"^([a-z_]+)(?:\{| )", page, re.MULTILINE))
    used = set(re.findall(r"\b(?:choria|process)_[a-z_]+", " ".join(EXPRESSIONS) + ALERTS.read_text()))
    # of the process; and what a text names in passing
    assert used - series == {"choria_provisioner_rpc_time"}


def test_the_dashboard_shows_all_of_ours() -> None:
    page = Metrics("lab").render().decode()
    ours = set(re.findall(r"^# TYPE (choria_provisioner_\w+) ", page, re.MULTILINE))
    assert {name for name in ours if not any(name in expression for expression in EXPRESSIONS)} == set()


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_fires_on_what_it_is_for() -> None:
    need("promtool")
    for command in (
        ("check", "rules", str(ALERTS)),
        ("test", "rules", str(Path(__file__).with_name("alerts_test.yaml"))),
    ):
        done = subprocess.run(("promtool", *command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = Path(__file__).with_name("alerts_test.yaml").read_text()
    for name in names:
        # once silent, once not
        assert len(re.findall(rf"alertname: {name}\b", tested)) == 2
