"""What the daemon tells about itself: a real scheduler on a real broker, with a simulated fleet."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import re2

from provisioner import __version__
from provisioner.host.host import Host
from provisioner.hosts import history
from provisioner.monitor.status import Attempt, Outcome, Reason, Role, Status, reasons
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server
from tests.conftest import Eventually, StartFleet
from tests.installation import SITE
from tests.scheduled import MakeDaemon, ScheduledDaemon, servers

#: Ends when the test makes the file.
WAITING_HELPER = """#!/bin/sh
cat >/dev/null
while [ ! -e {} ]; do sleep 0.02; done
echo '{{"configuration":{{"plugin.choria.server.provision":"0"}}}}'
"""


def attempt(identity: str, outcome: Outcome = Outcome.FAILED, *, step: str = "", reason: str = "") -> Attempt:
    return Attempt(
        identity=identity,
        worker="worker-1",
        ended=time.time(),
        seconds=0.5,
        outcome=outcome,
        step=step,
        reason=reason,
    )


def document(status: Status) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(status.to_json())
    return parsed


class TestRoles:
    """What an instance is to the others."""

    def test_without_an_election_it_is_alone_or_paused(self, daemon: ScheduledDaemon) -> None:
        assert daemon.scheduler.overview.look().role is Role.ALONE
        daemon.config.pause()
        assert daemon.scheduler.overview.look().role is Role.PAUSED

    def test_with_an_election_it_is_the_leader_or_a_standby(self, make_daemon: MakeDaemon) -> None:
        daemon = make_daemon(leader_election=True)
        assert daemon.scheduler.overview.look().role is Role.LEADER
        daemon.config.pause()
        assert daemon.scheduler.overview.look().role is Role.STANDBY


def test_workers_tell_what_they_do_since_when(
    daemon: ScheduledDaemon, start_fleet: StartFleet, tmp_path: Path, eventually: Eventually
) -> None:
    (tmp_path / "helper").write_text(WAITING_HELPER.format(tmp_path / "go"))
    start_fleet(*servers(1))
    before = time.time()
    daemon.start()
    eventually(lambda: any(worker.step == "helper" for worker in daemon.scheduler.overview.look().workers))

    status = daemon.scheduler.overview.look("N0.EXAMPLE")
    [busy] = [worker for worker in status.workers if worker.identity]
    assert busy.identity == "n0.example.net"
    assert before - 1 < busy.since < time.time() + 1
    assert [worker.name for worker in status.workers] == [f"worker-{number}" for number in range(1, 5)]
    assert (status.queue.waiting, status.queue.queued, status.queue.busy) == (1, 0, 1)
    [known] = status.known
    assert (known.identity, known.step, known.worker) == ("n0.example.net", "helper", busy.name)
    assert before - 1 < known.sighted < time.time() + 1

    (tmp_path / "go").touch()
    eventually(lambda: daemon.scheduler.overview.look().recent)
    eventually(lambda: daemon.scheduler.overview.look().queue.busy == 0)
    status = daemon.scheduler.overview.look("n0")
    assert [(each.identity, each.outcome) for each in status.recent] == [("n0.example.net", Outcome.PROVISIONED)]
    # it restarts, and must not be taken for a new one meanwhile
    [known] = status.known
    assert (known.step, known.worker) == ("choria_provision#restart", "")
    assert sum(minute.outcomes.get(Outcome.PROVISIONED, 0) for minute in status.minutes) == 1


@pytest.mark.usefixtures("quick_retries")
def test_the_connection_tells_how_it_is_and_was(
    daemon: ScheduledDaemon, broker: NatsServer, eventually: Eventually
) -> None:
    def connection() -> Any:
        return daemon.scheduler.overview.look().connection

    before = time.time()
    assert not connection().connected
    assert (connection().broker, connection().reconnections, connection().error) == ("", 0, "")
    assert before - 1 < connection().since < time.time() + 1

    daemon.start()
    eventually(lambda: connection().connected)
    assert (connection().broker, connection().reconnections, connection().error) == (broker.url, 0, "")
    assert daemon.scheduler.overview.look().problems == []
    since = connection().since

    broker.kill()
    eventually(lambda: not connection().connected)
    gone = connection()
    assert gone.since > since
    assert gone.broker == broker.url
    assert gone.error
    assert "broker: not connected" in daemon.scheduler.overview.look().problems

    broker.start()
    eventually(lambda: connection().connected)
    assert connection().reconnections == 1
    assert connection().since > gone.since
    assert connection().error, "what was the matter the last time"


def test_a_thread_that_is_in_trouble_is_told_of(daemon: ScheduledDaemon) -> None:
    daemon.scheduler._turned -= 1000

    assert [problem.partition(":")[0] for problem in daemon.scheduler.overview.look().problems] == ["main", "broker"]


def test_a_search_tells_about_those_hosts_alone(daemon: ScheduledDaemon) -> None:
    for identity in ("web1.example.net", "web2.example.net", "db1.example.net"):
        daemon.scheduler.history.record(attempt(identity, reason="it is broken"))
        daemon.scheduler._registry.add(Host(identity))

    everything, found = daemon.scheduler.overview.look(), daemon.scheduler.overview.look("Web")
    assert [each.identity for each in found.recent] == ["web2.example.net", "web1.example.net"]
    assert {each.identity for each in found.troubled} == {"web1.example.net", "web2.example.net"}
    assert [each.identity for each in found.known] == ["web1.example.net", "web2.example.net"]
    assert len(everything.recent) == len(everything.troubled) == 3
    assert everything.known == ()
    assert everything.queue == found.queue
    assert found.troubled_count == 3


def test_as_many_are_listed_as_are_wanted_and_all_are_counted(
    daemon: ScheduledDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "COPIED_HOSTS", 10)
    for number in range(50):
        daemon.scheduler._registry.add(Host(f"n{number}"))
        for _ in range(number % 7):
            daemon.scheduler.history.record(attempt(f"n{number}"))

    status = daemon.scheduler.overview.look("n", 5)
    assert len(status.known) == 5
    assert [trouble.failures for trouble in status.troubled] == [6] * 5
    assert status.troubled_count == 42
    everybody = daemon.scheduler.overview.look().troubled
    assert len({trouble.identity for trouble in everybody}) == 42
    assert [trouble.failures for trouble in everybody] == sorted((n % 7 for n in range(50) if n % 7), reverse=True)


def test_one_that_is_refused_here_is_told_of(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(deny=(re2.compile("^db"),))

    assert "deny" in daemon.scheduler.overview.look("db1.example.net").refused
    assert daemon.scheduler.overview.look("web1.example.net").refused == ""
    assert daemon.scheduler.overview.look().refused == ""


def test_the_document_has_what_machines_look_for_and_no_secret(
    daemon: ScheduledDaemon, start_fleet: StartFleet, eventually: Eventually
) -> None:
    bad = Server(identity="bad.example.net", site=SITE, misbehaviour=Misbehaviour.ERROR_STATUS)
    start_fleet(*servers(2), bad)
    daemon.metrics.credential_expiries = lambda: {"token": 1_900_000_000.0}
    daemon.start()
    eventually(lambda: len(daemon.scheduler.overview.look().recent) == 3)

    status = daemon.scheduler.overview.look()
    found = document(status)
    assert found == json.loads(json.dumps(attrs.asdict(status)))
    assert (found["identity"], found["version"], found["role"]) == ("prov.example.net", __version__, "alone")
    assert found["expiries"] == {"token": 1_900_000_000.0}
    [trouble] = found["troubled"]
    assert trouble["identity"] == "bad.example.net"
    assert set(trouble) == {"identity", "failures", "since", "last", "step", "reason", "next_try"}
    assert trouble["step"] == "rpcutil#inventory"
    assert {each["outcome"] for each in found["recent"]} == {"provisioned", "failed"}
    assert len(found["minutes"]) == 60
    assert b"s3cret" not in status.to_json()


def test_texts_of_any_kind_are_in_the_document_as_they_are() -> None:
    strange = attempt("\u202e<script>é\U0001f600", reason='"\\\x00\n')
    parsed = json.loads(json.dumps(attrs.asdict(strange)))

    assert (parsed["identity"], parsed["reason"]) == (strange.identity, strange.reason)


class TestReasons:
    """How attempts that did not succeed are counted."""

    def test_those_that_differ_in_identities_and_numbers_are_one(self) -> None:
        found = reasons(
            attempt(f"n{number}", step="helper", reason=f"no group for n{number}, asked {number} times")
            for number in range(20)
        )

        assert [(each.count, each.reason) for each in found] == [(20, "no group for n0, asked 0 times")]

    def test_the_most_frequent_comes_first_with_its_latest_text_and_time(self) -> None:
        newest = attempt("n1", step="a", reason="waited 3 s")
        older = attrs.evolve(newest, identity="n2", reason="waited 2 s", ended=newest.ended - 5)
        other = attempt("n3", step="b", reason="waited 2 s")

        assert reasons([other, newest, older]) == [
            Reason(outcome=Outcome.FAILED, step="a", reason="waited 3 s", count=2, last=newest.ended),
            Reason(outcome=Outcome.FAILED, step="b", reason="waited 2 s", count=1, last=other.ended),
        ]

    @pytest.mark.parametrize("outcome", [Outcome.PROVISIONED, Outcome.SHUT_DOWN, Outcome.UPGRADING])
    def test_those_that_succeeded_have_none(self, outcome: Outcome) -> None:
        assert reasons([attempt("n1", outcome)]) == []

    def test_outcomes_are_told_apart(self) -> None:
        found = reasons([attempt("n1", Outcome.DEFERRED, reason="x"), attempt("n1", Outcome.LEFT_ALONE, reason="x")])

        assert [each.outcome for each in found] == [Outcome.DEFERRED, Outcome.LEFT_ALONE]
