"""Helpers hang, flood, crash, lie, and leave children behind: see helper_that_fails.sh for what each does."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from provisioner.simulate.broker import NatsServer
from tests.faults.arrangements import (
    discover_often,
    nothing_left_of,
    one_of,
    population,
    processes_of,
    servers_named,
    zombies_of,
)
from tests.faults.conftest import RSS_GROWTH, Daemon, InstallDaemon, Report, Scale, StartServers

HELPER = Path(__file__).with_name("helper_that_fails.sh")

TIMEOUT = "had not finished in the time it is given"

#: What a helper does in its first run for a host, and what the log says about that; empty: it does no harm.
WAYS = {
    "hangs": {
        "hangs": TIMEOUT,
        "hangs-after-its-answer": TIMEOUT,
        "hangs-with-its-output-closed": TIMEOUT,
        "hangs-with-20-children": TIMEOUT,
        "ignores-sigterm": TIMEOUT,
        "stops-itself": TIMEOUT,
    },
    "leaves children": {
        "leaves-a-child": "",
        "leaves-a-child-that-chatters": "",
        "leaves-a-child-in-another-session": "",
        "forks-100-children": "",
    },
    "floods": {
        "floods-its-output": "printed more than 1048576 bytes",
        "floods-its-errors": "",
    },
    "crashes": {
        "crashes": "was killed by SIGSEGV",
        "kills-its-group": "was killed by SIGKILL",
        "exits-1": "exited with status 1",
    },
    "does not read": {
        "never-reads": "",
        "closes-its-input": "",
    },
    "prints nonsense": {
        "prints-nothing": "printed nothing",
        "prints-bytes": "could not provision",
        "prints-half": "could not provision",
        "prints-two": "could not provision",
        "prints-no-strings": "configuration.plugin.choria.server.provision",
        "prints-brackets": "could not provision",
    },
}
EXPECTED = {way: text for group in WAYS.values() for way, text in group.items()}
#: Ways that leave a process running, which is none of our business.
LEFT_RUNNING = ("leaves-a-child", "leaves-a-child-in-another-session")

#: More than fits into a pipe.
FACTS = {"motd": "x" * 200_000}


def test_helper_fails_once_in_every_way(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    """In the first round, the only one at the short scale, it takes more memory than usual, and keeps it."""
    daemon = install_failing(install_daemon, broker, helper_timeout=scale.of(short="4s", full="10s"))
    discover_often(daemon, seconds=4.0)
    rounds, each = scale.of(short=(1, 1), full=(2, 10))
    with nothing_left_of(daemon):
        daemon.warm_up(start_servers, broker.url)
        for number in range(rounds):
            if number:
                daemon.until(daemon.idle)
                daemon.before = daemon.settled()
            named = [f"{way}.{number}.{one}.example.net" for one in range(each) for way in (*EXPECTED, "works")]
            with population(broker.url, servers_named(named, over=1.0, facts=FACTS)) as fleet:
                fleet.wait_until_provisioned()
            assert fleet.configured_again.total() == 0
            assert [why for identity in named if (why := unexpected(daemon, identity))] == []
        left = ["sleep 3600"] * rounds * each * len(LEFT_RUNNING)
        daemon.until(lambda: len(processes_of(daemon)) <= len(left))

        assert list(processes_of(daemon).values()) == left
        assert zombies_of(daemon) == []
        assert daemon.metric("helper_errors") == rounds * each * sum(map(bool, EXPECTED.values()))
        daemon.assert_unharmed(rss_growth=scale.of(short=0.5, full=RSS_GROWTH))
    for group, ways in WAYS.items():
        harm = "each of its servers was provisioned in the next cycle" if any(ways.values()) else "no harm"
        if any(ways.values()) and not all(ways.values()):
            harm += f"; no harm: {', '.join(way for way, text in ways.items() if not text)}"
        report(f"a helper {group} at its first run: {', '.join(ways)}", harm, **daemon.figures(fleet))


@pytest.mark.usefixtures("full_scale_only")
def test_helper_leaves_a_child_or_hangs_in_one_of_ten_runs_each(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, scale: Scale, report: Report
) -> None:
    daemon = install_failing(install_daemon, broker, helper_timeout="10s")
    with nothing_left_of(daemon):
        daemon.warm_up(start_servers, broker.url)
        cycles = daemon.metric("discover_cycles")
        named = [f"{one_in_ten(number)}.{number}.example.net" for number in range(scale.servers)]
        with population(broker.url, servers_named(named, over=0.5)) as fleet:
            fleet.wait_until_provisioned()
        cycles = daemon.metric("discover_cycles") - cycles

        assert cycles <= 2
        assert fleet.configured_again.total() == 0
        assert list(processes_of(daemon).values()) == ["sleep 3600"] * (scale.servers // 10)
        assert zombies_of(daemon) == []
        daemon.assert_unharmed()
    report(
        "one in ten helpers left a child that holds its output, one in ten hung, once for each server",
        f"all were provisioned within {cycles:g} discovery cycles; no helper that hung was left",
        **daemon.figures(fleet),
    )


@pytest.mark.usefixtures("full_scale_only")
def test_helper_is_away_for_a_while(
    broker: NatsServer, install_daemon: InstallDaemon, start_servers: StartServers, report: Report
) -> None:
    daemon = install_failing(install_daemon, broker, helper_timeout="10s")
    discover_often(daemon, seconds=3.0)
    program = daemon.directory / "helper"
    daemon.settings["helper"] = str(program)
    daemon.warm_up(start_servers, broker.url)
    program.rename(program.with_name("away"))
    with population(broker.url, servers_named((f"n{number}.example.org" for number in range(10)), over=0.1)) as fleet:
        daemon.until(lambda: daemon.metric("helper_errors") >= 10)
        program.touch(0o644)
        daemon.until(lambda: daemon.logged("is not executable"))
        program.with_name("away").replace(program)
        fleet.wait_until_provisioned()

    assert daemon.logged("could not be started: it does not exist")
    assert fleet.configured_again.total() == 0
    daemon.assert_unharmed()
    report(
        "the helper's file was away, then there but not executable, then back",
        "all were provisioned in the next cycle, the log said what was wrong with it",
        **daemon.figures(fleet),
    )


@pytest.fixture(params=["hangs-with-20-children", "ignores-sigterm"])
def way(request: pytest.FixtureRequest, scale: Scale) -> str:
    return one_of(request, scale, short="hangs-with-20-children")


def test_helper_that_hangs_does_not_outlive_the_daemon(
    way: str, broker: NatsServer, install_daemon: InstallDaemon, report: Report
) -> None:
    daemon = install_daemon(broker.url, helper_timeout="1h", shutdown_grace="500ms")
    daemon.settings["helper"] = failing_helper(daemon)
    with nothing_left_of(daemon), population(broker.url, servers_named([f"{way}.0.example.net"], over=0.1)) as fleet:
        daemon.start("run", "--debug")
        daemon.until(lambda: processes_of(daemon))

        assert daemon.stop() == 0
        assert processes_of(daemon) == {}
        assert fleet.fleet.counts().actions["choria_provision#configure"] == 0
    daemon.assert_no_defect()
    report(f"SIGTERM while a helper {way.replace('-', ' ')}", "it was killed with its children after the grace time")


def install_failing(install_daemon: InstallDaemon, broker: NatsServer, *, helper_timeout: str) -> Daemon:
    daemon = install_daemon(broker.url, workers=64, helper_timeout=helper_timeout)
    daemon.settings["helper"] = failing_helper(daemon)
    return daemon


def failing_helper(daemon: Daemon) -> str:
    notes = daemon.directory / "notes"
    notes.mkdir()
    return shlex.join([str(HELPER), str(notes)])


def one_in_ten(number: int) -> str:
    return {3: "leaves-a-child", 7: "hangs"}.get(number % 10, "works")


def unexpected(daemon: Daemon, identity: str) -> str:
    """What should not be in the log about a host, or is missing."""
    expected = EXPECTED.get(identity.partition(".")[0], "")
    lines = (line["msg"] for line in daemon.log() if line.get("identity") == identity)
    errors = [line for line in lines if line.startswith("could not provision")]
    if len(errors) == bool(expected) and all(expected in error for error in errors):
        return ""
    return f"{identity}: {errors}, expected {expected!r}"
