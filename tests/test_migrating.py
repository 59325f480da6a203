"""docs/migrating.md names all keys and metrics that are new, and no others."""

from __future__ import annotations

import re

from provisioner import config
from provisioner.monitor.metrics import Metrics
from tests.documents import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text()
#: The keys that the Go original knows.
ORIGINAL_KEYS = {
    "workers",
    "interval",
    "logfile",
    "loglevel",
    "helper",
    "token",
    "lifecycle_component",
    "choria_insecure",
    "site",
    "monitor_port",
    "broker_provisioning_password",
    "cert_deny_list",
    "jwt_verify_cert",
    "jwt_signing_key",
    "jwt_signing_token",
    "server_jwt_validity",
    "rego_policy",
    "leader_election",
    "upgrades_repository",
    "upgrades_optional",
    "features",
    "broker_port",
}
#: The series of its own that the Go original has, without their common beginning.
ORIGINAL_SERIES = {
    "discovered",
    "event_discovered",
    "discover_cycles",
    "discovery_errors",
    "provision_errors",
    "provisioned",
    "helper_errors",
    "helper_shutdown_requests",
    "rpc_errors",
    "busy_workers",
    "work_queue_entries",
    "waiting_nodes",
    "paused",
    "rpc_time",
    "helper_time",
}


def named(row: str) -> set[str]:
    """The code in the row of a table that begins with this."""
    (found,) = re.findall(rf"^\| {row} \|(.*)\|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", found))


def test_new_keys() -> None:
    assert named("new keys") == set(config._SCHEMA) - ORIGINAL_KEYS
    assert set(config._SCHEMA) >= ORIGINAL_KEYS


def test_new_series() -> None:
    page = Metrics("").render().decode()
    series = set(re.findall(r"^# TYPE choria_provisioner_(\S+)", page, re.MULTILINE))
    assert series >= ORIGINAL_SERIES
    assert named("new") == {f"choria_provisioner_{name}" for name in series - ORIGINAL_SERIES}
