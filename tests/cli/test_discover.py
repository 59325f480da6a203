"""The `discover` command: who waits, on every kind of network, however many they are and however they behave."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from provisioner import lifetimes
from provisioner.choria import discovery, survey
from provisioner.monitor.status import Trouble
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.networks import NETWORKS
from tests.cli.conftest import Done, Enter, Place, Run
from tests.waiting import PATIENCE_SECONDS


def rows(done: Done) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in done.out.splitlines()]


def entries(done: Done) -> dict[str, dict[str, Any]]:
    documents = [json.loads(line) for line in done.out.splitlines()]
    return {document["identity"]: document for document in documents}


@pytest.mark.parametrize("kind", NETWORKS)
def test_who_waits_is_listed_by_name_with_version_and_time(kind: str, enter: Enter, run: Run) -> None:
    place = enter(kind)
    names = ["web10.example.net", "app.example.net", "web1.example.net"]
    fleet = place.fleet(*map(place.server, names))
    done = run("discover", *place.files)

    assert done.code == 0
    head, *found = rows(done)
    assert head == ["IDENTITY", "VERSION", "UP", "FOR  NOTES"]
    assert [row[0] for row in found] == sorted(names)
    assert {row[1] for row in found} == {"0.30.0"}
    assert all(row[2].endswith("s") for row in found)
    assert done.err == "3 servers want to be provisioned\n"
    assert set(fleet.counts().actions) == {"discovery", "rpcutil#daemon_stats"}


def test_what_servers_call_themselves_does_nothing_to_the_terminal(insecure: Place, run: Run) -> None:
    insecure.fleet(insecure.server("n\u202e1.example.net", site={"version": "1\x07[2J"}))
    (row,) = rows(run("discover", *insecure.files))[1:]
    assert row[:3] == ["n", "1.example.net", "1"]


def test_programs_get_a_line_of_json_for_each(insecure: Place, run: Run) -> None:
    insecure.fleet(insecure.server("n2.example.net"), insecure.server("n1.example.net"))
    done = run("discover", *insecure.files, "--json")

    assert (done.code, done.err) == (0, "")
    assert list(entries(done)) == ["n1.example.net", "n2.example.net"]
    entry = entries(done)["n1.example.net"]
    assert abs(entry.pop("clock_ahead_seconds")) < 2
    assert entry.pop("up_since").startswith("20")
    assert entry == {
        "identity": "n1.example.net",
        "version": "0.30.0",
        "refused": None,
        "failures": 0,
        "last_failure": None,
        "next_try": None,
    }


def test_nobody_waits(insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.choria.discovery.LIMIT_SECONDS", 0.3)
    done = run("discover", *insecure.files)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("no server wants to be provisioned (one whose clock is off by 60 s")
    assert run("discover", *insecure.files, "--json") == Done(0, "", "")


def test_those_that_do_not_say_more_are_listed_all_the_same(
    insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "SLIDE_SECONDS", 0.3)
    names = {way: f"{way.value}.example.net" for way in Misbehaviour}
    servers = [insecure.server(name, misbehaviour=way) for way, name in names.items()]
    insecure.fleet(insecure.server("good.example.net"), *servers, noise=True)
    done = run("discover", *insecure.files)

    versions = {row[0]: row[1] for row in rows(done)[1:]}
    assert set(versions) == {"good.example.net", *names.values()}
    honest = {"good.example.net", names[Misbehaviour.TWICE], names[Misbehaviour.TWICE_DIFFERENT]}
    assert {name for name, version in versions.items() if version == "0.30.0"} == honest
    assert "did not say more in time" in done.err
    assert "refused 1 discovery replies" in done.err


def test_a_clock_that_is_wrong_is_noted_and_accounted_for(insecure: Place, run: Run) -> None:
    insecure.fleet(insecure.server("n1.example.net", wall_clock=lambda: time.time() - 50))
    done = run("discover", *insecure.files)

    (row,) = rows(done)[1:]
    # and by the time that the reply took, and a second: it is told in whole ones
    assert re.fullmatch("its clock is 5[0-9] s behind", row[3])
    assert int(row[2].removesuffix("s")) < 40, "not the time that its clock is off"


def test_those_that_are_denied_are_noted(insecure: Place, run: Run) -> None:
    insecure.settings |= {"allow": ["^web"], "deny": ["9"]}
    insecure.fleet(*(insecure.server(f"{name}.example.net") for name in ("db1", "web1", "web9")))

    found = entries(run("discover", *insecure.files, "--json"))
    assert {name: bool(entry["refused"]) for name, entry in found.items()} == {
        "db1.example.net": True,
        "web1.example.net": False,
        "web9.example.net": True,
    }
    assert "left alone: " in run("discover", *insecure.files).out


class Status(http.server.BaseHTTPRequestHandler):
    """The status that a daemon on this machine serves."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/status.json" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def status(insecure: Place) -> Iterator[type[Status]]:
    """Have something serve a status on the monitor port."""
    served = type("Served", (Status,), {})
    with http.server.HTTPServer(("127.0.0.1", 0), served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        insecure.settings |= {"monitor_address": "127.0.0.1", "monitor_port": server.server_port}
        yield served
        server.shutdown()
        thread.join()


def trouble(identity: str, failures: int, next_try: float) -> dict[str, Any]:
    """As the daemon has it in its status."""
    reason = "the helper exited\nwith status 1"
    return attrs.asdict(
        Trouble(identity=identity, failures=failures, since=1, last=2, step="helper", reason=reason, next_try=next_try)
    )


def test_what_the_daemon_could_not_provision_is_noted(insecure: Place, run: Run, status: type[Status]) -> None:
    later = time.time() + 3600
    troubled = [trouble("n1.example.net", 3, later), trouble("n2.example.net", 1, 0), trouble("gone.example.net", 9, 0)]
    status.body = json.dumps({"troubled": troubled}).encode()
    insecure.fleet(*(insecure.server(f"n{number}.example.net") for number in (1, 2, 3)))

    first, second, third = rows(run("discover", *insecure.files))[1:]
    assert re.fullmatch(r"failed 3 times, tried again in 59m\d\ds: the helper exited with status 1", first[3])
    assert second[3] == "failed once: the helper exited with status 1"
    assert len(third) == 3
    entry = entries(run("discover", *insecure.files, "--json"))["n1.example.net"]
    assert (entry["failures"], entry["last_failure"]) == (3, "the helper exited with status 1")
    assert entry["next_try"] == lifetimes.date(later)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"troubled": 1}',
        b'{"troubled": [1, {}, {"identity": 1}]}',
        b'{"troubled": [{"identity": "n1.example.net", "failures": 1, "reason": "", "next_try": Infinity}]}',
        b"[" * 100_000,
    ],
)
def test_a_status_of_no_use_does_no_harm(insecure: Place, run: Run, status: type[Status], body: bytes) -> None:
    status.body = body
    insecure.fleet(insecure.server("n1.example.net"))
    assert [row[0] for row in rows(run("discover", *insecure.files))[1:]] == ["n1.example.net"]


def test_a_large_fleet_is_listed_completely(insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LIMIT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(discovery, "SLIDE_SECONDS", 3.0)
    for limit in ("FIRST_REPLY_SECONDS", "SLIDE_SECONDS", "LIMIT_SECONDS"):
        monkeypatch.setattr(survey, limit, PATIENCE_SECONDS)
    insecure.client["discovery_timeout"] = str(int(PATIENCE_SECONDS))
    names = [f"n{number:04}.example.net" for number in range(2000)]
    insecure.fleet(*map(insecure.server, reversed(names)))
    done = run("discover", *insecure.files)

    assert [row[0] for row in rows(done)[1:]] == names
    assert {row[1] for row in rows(done)[1:]} == {"0.30.0"}
    assert done.err == "2000 servers want to be provisioned\n"


@pytest.mark.parametrize("hosts", ["127.0.0.1:1", "127.0.0.1:1, 127.0.0.1:2"])
def test_without_a_broker_it_says_why(insecure: Place, run: Run, hosts: str) -> None:
    insecure.client["plugin.choria.middleware_hosts"] = hosts
    done = run("discover", *insecure.files)

    assert (done.code, done.out) == (1, "")
    (line,) = done.err.splitlines()
    assert "nats://127.0.0.1:1: connection refused" in line


def test_problems_of_both_files_are_told_at_once(insecure: Place, run: Run) -> None:
    insecure.settings["workers"] = "4"
    insecure.client["plugin.choria.middleware_hosts"] = "broker"
    done = run("discover", *insecure.files)

    assert done.code == 1
    assert len(done.err.splitlines()) == 2
