"""How the soak judges: what it takes for a leak, for a reason, for two leaders, and what its faults are."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from bench.soak import faults, nodes
from bench.soak.faults import KINDS, RESTARTS_UNTIL, UNDER_WAY_SECONDS, Happened, plan
from bench.soak.instance import LogWatch
from bench.soak.nodes import LEAST_TERM_SECONDS, SITE, Ledger, Node
from bench.soak.verdicts import WARM_UP_SECONDS, first_and_last_quarter
from provisioner.simulate import inputs
from provisioner.simulate.envelopes import Request

HOUR = 3600.0


class TestPlan:
    def test_a_seed_stands_for_one_plan(self) -> None:
        assert plan(7, HOUR, daemons=2) == plan(7, HOUR, daemons=2)
        assert plan(7, HOUR, daemons=2) != plan(8, HOUR, daemons=2)

    def test_in_an_hour_every_kind_comes_several_times(self) -> None:
        times = collections.Counter(fault.kind.name for fault in plan(7, HOUR, daemons=2))
        assert min(times[kind.name] for kind in KINDS) >= 3

    def test_faults_of_one_lane_come_one_after_the_other_and_end_in_time(self) -> None:
        for lane in faults.LANES:
            ends = 0.0
            for fault in plan(7, HOUR, daemons=2):
                if fault.kind.lane == lane:
                    assert fault.at > ends
                    ends = fault.at + fault.seconds
            assert ends <= HOUR

    @pytest.mark.parametrize("daemons", [1, 2])
    def test_one_process_lives_through_most_of_the_run(self, daemons: int) -> None:
        late = [fault for fault in plan(7, HOUR, daemons=daemons) if fault.at > HOUR * RESTARTS_UNTIL]
        restarts = [fault for fault in late if fault.kind.restarts]
        assert all(fault.spares_first for fault in restarts)
        assert bool(restarts) is (daemons > 1)


class TestReasons:
    CUT = next(kind for kind in KINDS if kind.name == "link cut")
    KILLED = next(kind for kind in KINDS if kind.name == "broker killed")
    STORM = next(kind for kind in KINDS if kind.name == "event storm")

    def test_what_went_on_at_that_moment_is_one(self) -> None:
        killed = Happened(self.KILLED, 100.0, end=110.0)
        assert killed.explains(105.0, "alpha", now=500.0)
        assert killed.explains(100.0 - UNDER_WAY_SECONDS / 2, "alpha", now=500.0)
        assert not killed.explains(90.0, "alpha", now=500.0)
        assert not killed.explains(120.0, "alpha", now=500.0)

    def test_a_fault_that_lasts_is_one_up_to_now(self) -> None:
        assert Happened(self.KILLED, 100.0).explains(130.0, "alpha", now=131.0)

    def test_what_struck_another_daemon_is_none(self) -> None:
        cut = Happened(self.CUT, 100.0, victim="beta", end=100.0)
        assert cut.explains(100.0, "beta", now=500.0)
        assert not cut.explains(100.0, "alpha", now=500.0)

    def test_what_loses_nothing_is_none(self) -> None:
        assert not Happened(self.STORM, 100.0, end=101.0).explains(100.5, "alpha", now=500.0)


class TestTrend:
    def test_what_comes_after_the_warm_up_is_compared(self) -> None:
        points = [(float(at), 1.0 if at < WARM_UP_SECONDS else 5.0) for at in range(0, 1000, 3)]
        assert first_and_last_quarter(points) == (5.0, 5.0)

    def test_a_leak_shows(self) -> None:
        medians = first_and_last_quarter([(float(at), float(at)) for at in range(0, 2000, 3)])
        assert medians is not None
        assert medians[1] - medians[0] == pytest.approx((2000 - 200) * 3 / 4, rel=0.01)

    @pytest.mark.parametrize("seconds", [0, 100, 170])
    def test_too_short_a_life_is_not_judged(self, seconds: int) -> None:
        assert first_and_last_quarter([(float(at), 1.0) for at in range(0, seconds, 3)]) is None


class TestLedger:
    def request(self, node: Node, action: str, *, sender: str = "alpha.example.net", **data: object) -> None:
        agent, _, name = action.partition("#")
        body = inputs.encode({"agent": agent, "action": name, "data": {"token": SITE.token, **data}})
        node.answer(
            Request(
                id="1",
                sender=sender,
                caller="choria=provisioner",
                collective="provisioning",
                agent=agent,
                ttl=60,
                time=node.wall_clock(),
                filter={key: [] for key in ("fact", "cf_class", "agent", "identity", "compound")},
                body=body.encode(),
                reply_to="provisioning.reply.1",
            )
        )

    def configure(self, node: Node, *, sender: str = "alpha.example.net") -> None:
        config = inputs.encode({"plugin.choria.server.provision": "false"})
        self.request(node, "choria_provision#configure", sender=sender, config=config)

    def test_a_server_is_in_it_from_its_boot_to_its_restart(self) -> None:
        ledger = Ledger()
        node = Node(identity="n1.example.net", site=SITE, ledger=ledger)
        node.boot()
        assert (ledger.standing().waiting, ledger.waiting()) == (1, ("n1.example.net",))
        self.configure(node)
        self.request(node, "choria_provision#restart", splay=1)

        standing = ledger.standing()
        assert (standing.arrived, standing.provisioned, standing.waiting, standing.duplicates) == (1, 1, 0, 0)
        assert ledger.waited(1.0) == 1

    def test_a_server_that_is_configured_again_is_a_duplicate_with_both_moments_and_daemons(self) -> None:
        ledger = Ledger()
        now = [1000.0]
        node = Node(identity="n1.example.net", site=SITE, ledger=ledger, clock=lambda: now[0])
        node.boot()
        self.configure(node)
        assert not ledger.duplicates()
        self.configure(node, sender="beta.example.net")
        assert not ledger.duplicates()
        assert ledger.standing().lock_conflicts == 1
        now[0] += 121
        self.configure(node, sender="beta.example.net")

        (duplicate,) = ledger.duplicates()
        assert (duplicate.first_by, duplicate.second_by) == ("alpha", "beta")
        assert duplicate.first < duplicate.second

    def test_a_misbehaving_server_is_not_in_it(self) -> None:
        ledger = Ledger()
        Node(identity="n1.example.net", site=SITE, ledger=ledger, misbehaviour=nodes.BAD[0]).boot()
        assert ledger.standing().arrived == 0

    def test_daemons_that_take_turns_too_fast_are_two_leaders(self) -> None:
        ledger = Ledger()
        for daemon, sent in (("alpha", 1000), ("alpha", 1030), ("beta", 1031), ("alpha", 1032)):
            ledger.worked(daemon, sent)
        assert (ledger.standing().handovers, ledger.standing().overlaps) == (2, 1)

    def test_a_hand_over_and_a_request_that_comes_late_are_none(self) -> None:
        ledger = Ledger()
        for daemon, sent in (("alpha", 1000), ("beta", 1030), ("alpha", 1014), ("alpha", 1031 + LEAST_TERM_SECONDS)):
            ledger.worked(daemon, sent)
        assert (ledger.standing().handovers, ledger.standing().overlaps) == (2, 0)


class TestLogWatch:
    def line(self, level: str, text: str) -> str:
        return f'{{"level": "{level}", "msg": "{text}"}}\n'

    def test_lines_that_tell_of_a_defect_are_kept_and_warnings_counted(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        watch = LogWatch(log, tmp_path / "kept.gz")
        watch.look()
        log.write_text(self.line("info", "all is well") + self.line("error", "bug in thread finisher")[:20])
        watch.look()
        assert not watch.defects
        with log.open("a") as more:
            more.write(self.line("error", "bug in thread finisher")[20:])
            more.write(self.line("warning", "took 3.5 s") + self.line("warning", "took 12 s"))
            more.write(self.line("fatal", "thread worker-1 died: leaving"))
        watch.look()

        assert [line.count("bug") for line in watch.defects] == [1, 0]
        assert watch.kinds["warning: took N s"] == 2

    def test_a_long_log_is_begun_anew_without_losing_a_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bench.soak.instance.LOG_BYTES", 100)
        log = tmp_path / "log"
        watch = LogWatch(log, tmp_path / "kept.gz")
        log.write_text(self.line("warning", "one") * 5)
        with log.open("a") as still_open:
            watch.look()
            assert not log.exists()
            still_open.write(self.line("warning", "one"))
        log.write_text(self.line("warning", "one") * 2)
        watch.look()

        assert watch.kinds["warning: one"] == 8
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["kept.gz", "log"]
