"""The `provision` command: one server by hand, on every kind of network, unless somebody else is at work."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.choria import retry
from provisioner.choria.election_key import UNREACHABLE_SEQUENCE, Key
from provisioner.cli import rivals
from provisioner.host import node
from provisioner.monitor.http import MonitorServer
from provisioner.monitor.metrics import Metrics
from provisioner.simulate.networks import NETWORKS
from tests.cli.conftest import Done, Enter, Place, Run
from tests.conftest import PATIENCE_SECONDS, Eventually
from tests.streams import LOGIN, PASSWORD, SERVERS_LOGIN, Streams, connector

NAME = "n1.example.net"
STEPS = {
    "insecure": ["choria_provision#jwt", "rpcutil#inventory"],
    "x509": ["choria_provision#jwt", "rpcutil#inventory", "choria_provision#gencsr"],
    "org": ["choria_provision#jwt", "choria_provision#gen25519", "rpcutil#inventory"],
}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RPC_BACKOFF", retry.Backoff((10,)))


def told(done: Done) -> list[str]:
    """What was told, without the times."""
    return [re.sub(r"^ *\d+\.\d\d s  ", "", line) for line in done.out.splitlines()]


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_server_is_provisioned_step_by_step(kind: str, enter: Enter, run: Run) -> None:
    place = enter(kind)
    fleet = place.fleet(place.server(NAME), place.server("n2.example.net"))
    done = run("provision", NAME, *place.files)

    assert (done.code, done.err) == (0, "")
    steps = [*STEPS[kind], "helper", "choria_provision#configure", "choria_provision#restart"]
    assert [line for line in told(done) if line in steps] == steps
    assert "  it runs version 0.30.0" in told(done)
    assert any(line.startswith("  the helper says: configure with ") for line in told(done))
    assert told(done)[-1] == "provisioned: it restarts within seconds, and leaves this network"
    counts = fleet.counts()
    assert (counts.provisioned, counts.unfit, counts.bad_signatures) == (1, 0, 0)
    assert place.network.token not in done.out


def test_tries_that_fail_are_told(insecure: Place, run: Run) -> None:
    insecure.fleet(insecure.server(NAME, fails=True, fails_seconds=0))
    done = run("provision", NAME, *insecure.files)

    assert done.code == 0
    assert any("choria_provision#configure, try 1: refused: Could not write config" in line for line in told(done))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo \'{"defer": true, "msg": "no owner"}\'', "configuration deferred: no owner"),
        ("echo '{}'", "configuration: there is none"),
        ("echo oops >&2; exit 1", "its standard error: oops"),
    ],
)
def test_a_server_that_is_not_provisioned_is_a_failure(insecure: Place, run: Run, script: str, reason: str) -> None:
    insecure.helper(script)
    server = insecure.server(NAME)
    insecure.fleet(server)
    done = run("provision", NAME, *insecure.files)

    assert done.code == 1
    assert told(done)[-1].startswith("could not provision: ")
    assert reason in told(done)[-1]
    assert server.config is None


def test_what_the_helper_complains_of_is_told_although_it_succeeds(insecure: Place, run: Run) -> None:
    insecure.helper("echo hm >&2; echo '{\"shutdown\": true}'")
    insecure.fleet(insecure.server(NAME))
    done = run("provision", NAME, *insecure.files)

    assert done.code == 0
    assert "  helper: hm" in told(done)
    assert told(done)[-1] == "shut down, as the helper wished"


def test_a_server_that_is_not_there(insecure: Place, run: Run) -> None:
    done = run("provision", "nobody.example.net", *insecure.files)
    assert done.code == 1
    assert told(done)[-1].endswith("choria_provision#jwt: no server of this identity is connected")


def test_a_server_that_is_denied_is_left_alone_unless_forced(insecure: Place, run: Run) -> None:
    insecure.settings["deny"] = ["^n1"]
    fleet = insecure.fleet(insecure.server(NAME))
    done = run("provision", NAME, *insecure.files)

    assert done.code == 1
    assert done.err.startswith(f"{NAME} is not to be provisioned here: '^n1' in deny is found in it")
    assert not fleet.counts().actions
    assert run("provision", NAME, *insecure.files, "--force").code == 0


def test_by_default_there_is_a_word_on_what_cannot_be_seen(insecure: Place, run: Run, tmp_path: Path) -> None:
    insecure.fleet(insecure.server(NAME))
    done = run("provision", NAME, *insecure.files, "--pid", tmp_path / "pid")
    assert (
        f"no other provisioner is seen: nobody holds {tmp_path}/pid; monitor_port is off; "
        "leader_election is off, so other machines cannot be seen"
    ) in told(done)


class TestADaemonOnThisMachine:
    """Nothing is done while it runs."""

    def refused(self, place: Place, run: Run, *arguments: object) -> str:
        fleet = place.fleet(place.server(NAME))
        done = run("provision", NAME, *place.files, *arguments)
        assert done.code == 1
        assert not fleet.counts().actions
        assert done.err.endswith(" stop it first, or use --force\n")
        assert run("provision", NAME, *place.files, *arguments, "--force").code == 0
        assert fleet.wait(lambda counts: counts.provisioned == 1, PATIENCE_SECONDS)
        return done.err

    def test_by_its_pid_file(self, insecure: Place, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        file.write_text("123\n")
        with file.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert f"process 123 holds {file}" in self.refused(insecure, run, "--pid", file)

    def test_by_its_monitor_port(self, insecure: Place, run: Run) -> None:
        page = Metrics("lab").render
        with MonitorServer("127.0.0.1", 0, metrics=page, liveness={}, readiness={}) as monitor:
            insecure.settings |= {"monitor_address": "127.0.0.1", "monitor_port": monitor.port}
            assert f"a provisioner serves port {monitor.port}" in self.refused(insecure, run)

    def test_a_stale_pid_file_is_none(self, insecure: Place, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        file.write_text("123\n")
        insecure.fleet(insecure.server(NAME))
        assert run("provision", NAME, *insecure.files, "--pid", file).code == 0


class TestElection:
    """Another instance, anywhere, that takes part in the election."""

    @pytest.fixture
    def streams(self, tmp_path: Path) -> Iterator[Streams]:
        with Streams(tmp_path / "streams") as streams:
            streams.make_bucket()
            yield streams

    @pytest.fixture
    def place(self, insecure: Place, streams: Streams) -> Iterator[Place]:
        place = Place(insecure.network, streams.server)
        place.settings |= {"leader_election": True, "broker_provisioning_password": PASSWORD}
        place.fleet(place.server(NAME), login=SERVERS_LOGIN)
        yield place
        place.close()

    def test_a_leader_at_work(self, place: Place, streams: Streams, run: Run) -> None:
        with _leading(streams):
            done = run("provision", NAME, *place.files)
            assert (done.code, done.err.partition(",")[0]) == (1, "another instance leads")
            assert run("provision", NAME, *place.files, "--force").code == 0

    def test_a_leader_that_is_gone(
        self, place: Place, streams: Streams, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rivals, "STILL_SECONDS", 0.5)
        sequence = streams.write()
        done = run("provision", NAME, *place.files)
        assert done.code == 0
        assert any(line.endswith("nobody leads") for line in told(done))
        assert streams.sequence() == sequence, "looking has not changed it"

    def test_there_never_was_a_leader(self, place: Place, streams: Streams, run: Run) -> None:
        assert run("provision", NAME, *place.files).code == 0
        assert streams.sequence() == 0

    def test_when_it_cannot_be_known_nothing_is_done(self, place: Place, streams: Streams, run: Run) -> None:
        streams.delete_bucket()
        done = run("provision", NAME, *place.files)
        assert done.code == 1
        assert "the broker has no bucket CHORIA_LEADER_ELECTION" in done.err

    def test_a_leader_is_not_disturbed_by_being_looked_for(self, streams: Streams) -> None:
        own, other = (connector(streams.server, LOGIN) for _ in range(2))
        try:
            leader, curious = Key(own, "leader"), Key(other, "curious")
            sequence = leader.write(0)
            for _ in range(20):
                assert curious.sequence() == sequence
                sequence = leader.write(sequence)
            assert sequence < UNREACHABLE_SEQUENCE
        finally:
            own.close()
            other.close()


class _leading:  # noqa: N801 - used like a function
    """An instance renews its leadership, from the beginning of a ``with`` block to its end."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew)

    def __enter__(self) -> None:
        self._streams.write()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._over.wait(0.1):
            self._streams.write()


class TestSignals:
    """As a process of its own."""

    def start(self, place: Place) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "provisioner", "provision", NAME, *map(str, place.files)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_what_is_under_way_is_finished_after_the_first(
        self, insecure: Place, tmp_path: Path, eventually: Eventually
    ) -> None:
        answer = '{"configuration":{"plugin.choria.server.provision":"0"}}'
        insecure.helper(f"touch {tmp_path}/runs; while [ -e {tmp_path}/runs ]; do sleep 0.05; done; echo '{answer}'")
        insecure.fleet(insecure.server(NAME))
        with self.start(insecure) as process:
            eventually((tmp_path / "runs").exists)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("interrupted: ")
            (tmp_path / "runs").unlink()
            assert process.wait(PATIENCE_SECONDS) == 0

    def test_a_terminal_that_goes_away_drops_nothing(
        self, insecure: Place, tmp_path: Path, eventually: Eventually
    ) -> None:
        answer = '{"configuration":{"plugin.choria.server.provision":"0"}}'
        insecure.helper(f"touch {tmp_path}/runs; while [ -e {tmp_path}/runs ]; do sleep 0.05; done; echo '{answer}'")
        fleet = insecure.fleet(insecure.server(NAME))
        with self.start(insecure) as process:
            eventually((tmp_path / "runs").exists)
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            process.send_signal(signal.SIGHUP)
            assert process.stderr.readline().startswith("interrupted: ")
            process.stderr.close()
            process.send_signal(signal.SIGHUP)
            (tmp_path / "runs").unlink()
            assert process.wait(PATIENCE_SECONDS) == 0
        assert fleet.counts().provisioned == 1, "nobody reads any more, and still it is not left half-way"

    def test_it_is_dropped_after_the_second(self, insecure: Place, tmp_path: Path, eventually: Eventually) -> None:
        insecure.helper(f"echo $$ > {tmp_path}/pid; exec sleep 60")
        server = insecure.server(NAME)
        insecure.fleet(server)
        insecure.settings["helper_timeout"] = "1h"
        with self.start(insecure) as process:
            eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert any(line.startswith("interrupted: ") for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 1
            assert "the helper was killed" in process.communicate()[0]
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
        assert server.config is None


def test_what_the_helper_says_is_told_without_secrets(insecure: Place, run: Run) -> None:
    insecure.helper(f"""echo '{{"defer": true, "msg": "no owner of {insecure.network.token}"}}'""")
    insecure.fleet(insecure.server(NAME))
    done = run("provision", NAME, *insecure.files, "--debug")

    assert done.code == 1
    assert "  the helper says: defer: no owner of ***" in told(done)
    assert told(done)[-1] == "could not provision: configuration deferred: no owner of ***"
    assert insecure.network.token not in done.out + done.err


def test_an_identity_that_is_none_is_wrong_use(run: Run) -> None:
    done = run("provision", "a.*", "--config", "provisioner.yaml")
    assert done.code == 2
    assert "'a.*' holds * or >" in done.err


def test_a_server_that_does_not_tell_its_version(insecure: Place, run: Run) -> None:
    insecure.fleet(insecure.server(NAME, site={"version": ""}))
    assert "  it runs version ?" in told(run("provision", NAME, *insecure.files))


def test_details_go_to_standard_error(insecure: Place, run: Run) -> None:
    insecure.fleet(insecure.server(NAME))
    done = run("provision", NAME, *insecure.files, "--debug")
    assert "connector: " in done.err
    assert "choria_provision#configure" in told(done)
    assert "configure" not in done.err, "nothing is told twice"
