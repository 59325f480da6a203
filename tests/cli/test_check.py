"""The `check` command: what it finds, in one go, on good and on bad installations."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner.choria import brokers
from provisioner.host import helper_process
from provisioner.monitor.http import MonitorServer
from provisioner.monitor.metrics import Metrics
from provisioner.simulate.networks import NETWORKS
from tests.cli.conftest import Done, Enter, Place, Run
from tests.conftest import PATIENCE_SECONDS
from tests.installation import free_port
from tests.networks import Member
from tests.streams import PASSWORD, SERVERS_LOGIN, Streams

DRIP_SECONDS = 40.0
GOOD_ANSWER = {"configuration": {"plugin.choria.server.provision": "false"}}


def lines(done: Done, level: str) -> list[str]:
    return [line.removeprefix(level).strip() for line in done.out.splitlines() if line.startswith(level)]


def the_line(done: Done, level: str, subject: str) -> str:
    (line,) = (line for line in lines(done, level) if line.startswith(f"{subject}: "))
    return line.removeprefix(f"{subject}: ")


@pytest.mark.parametrize("kind", NETWORKS)
def test_all_is_well_on_a_good_network(kind: str, enter: Enter, run: Run) -> None:
    place = enter(kind)
    place.answer(**GOOD_ANSWER)
    place.fleet(place.server("n1.example.net"), place.server("n2.example.net"))
    done = run("check", *place.files, "--connect")

    assert (done.code, lines(done, "error"), lines(done, "warning")) == (0, [], [])
    assert the_line(done, "ok", "servers") == "2 want to be provisioned"
    encrypted = "in clear text" if kind == "insecure" else "with TLS"
    assert the_line(done, "ok", "broker").startswith(f"connected to {place.broker.url} {encrypted}, ")
    assert "answered the sample input" in the_line(done, "ok", "helper")
    assert done.out.endswith("\n0 errors, 0 warnings\n")
    for secret in (place.network.token, place.network.provisioner.get("broker_provisioning_password")):
        assert not secret or secret not in done.out + done.err


def test_programs_get_the_same_as_json(insecure: Place, run: Run) -> None:
    insecure.answer(**GOOD_ANSWER)
    insecure.settings["worker"] = 4
    report = run("check", *insecure.files, "--json").json

    assert (report["ok"], report["errors"], report["warnings"]) == (False, 1, 0)
    (bad,) = (finding for finding in report["findings"] if finding["level"] == "error")
    assert bad["subject"] == "provisioner.yaml"
    assert bad["text"].endswith("worker: unknown key, ignored; did you mean workers?")
    assert {finding["level"] for finding in report["findings"]} == {"ok", "error"}


def test_everything_that_is_wrong_is_told_in_one_run(
    enter: Enter, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.cli.daemon.ANSWER_SECONDS", 0.2)
    place = enter("x509")
    place.helper("exit 0").chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place.settings |= {
            "worker": 4,
            "monitor_address": "127.0.0.1",
            "monitor_port": taken.getsockname()[1],
            "logfile": str(tmp_path / "missing" / "log"),
        }
        place.client["plugin.security.file.key"] = str(place.network.directory / "ca-key.pem")
        done = run("check", *place.files, "--pid", tmp_path / "nowhere" / "pid", "--connect")

    assert done.code == 1
    subjects = [line.partition(": ")[0] for line in lines(done, "error")]
    assert subjects == ["credentials", "provisioner.yaml", "helper", "logfile", "monitor_port", "broker"]
    assert "not the key of the certificate" in the_line(done, "error", "credentials")
    assert "not executable" in the_line(done, "error", "helper")
    assert "something that is no provisioner" in the_line(done, "error", "monitor_port")
    assert "mend the errors above first" in the_line(done, "error", "broker")
    assert "there is no folder" in the_line(done, "warning", "pid file")


@pytest.mark.parametrize("text", ["", "[", "workers: 4", "helper: {}\n\t", "\xff", "helper: '"])
def test_a_configuration_of_no_use_is_told_in_lines(tmp_path: Path, run: Run, text: str) -> None:
    config = tmp_path / "provisioner.yaml"
    config.write_bytes(text.encode("latin-1"))
    done = run("check", "--config", config, "--choria-config", tmp_path / "choria.cfg", "--connect")

    assert done.code == 1
    assert any(line.startswith("provisioner.yaml: ") for line in lines(done, "error"))
    assert f"{tmp_path}/choria.cfg: No such file or directory" == the_line(done, "error", "choria.cfg")


class TestHelper:
    """Run as the daemon would, with a made-up server."""

    def test_it_gets_a_complete_input(self, enter: Enter, run: Run) -> None:
        for kind in ("x509", "org"):
            place = enter(kind)
            place.helper(f"cat > {place.network.directory}/input; echo '{json.dumps(GOOD_ANSWER)}'")
            assert run("check", *place.files).code == 0
            given = json.loads((place.network.directory / "input").read_text())

            assert given["identity"] == "sample.choria-provisioner.invalid"
            assert json.loads(given["inventory"])["version"]
            assert given["jwt"]["purpose"] == "choria_provisioning"
            assert (given["csr"] is not None, given["ed25519_pubkey"] is not None) == (kind == "x509", kind == "org")

    def test_a_refusal_of_the_made_up_server_is_a_warning_with_its_reason(self, insecure: Place, run: Run) -> None:
        insecure.helper(f"cat >&2; echo 'no such node; token {insecure.network.token}' >&2; exit 3")
        done = run("check", *insecure.files)

        assert done.code == 0
        assert "exited with status 3" in the_line(done, "warning", "helper")
        assert "no such node; token ***" in the_line(done, "warning", "helper")
        assert insecure.network.token not in done.out

    def test_its_answer_is_told_without_secrets(self, insecure: Place, run: Run) -> None:
        insecure.answer(defer=True, msg=f"not with {insecure.network.token}")
        assert the_line(run("check", *insecure.files), "ok", "helper").endswith(": defer: not with ***")

    def test_a_deferral_is_fine(self, insecure: Place, run: Run) -> None:
        insecure.answer(defer=True, msg="not known\x1b[2J")
        done = run("check", *insecure.files)

        assert done.code == 0
        assert the_line(done, "ok", "helper").endswith(": defer: not known [2J")

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("true", "printed nothing"),
            ("echo hello", "it is not one JSON document"),
            ('echo \'{"configuration": {"a": 1}}\'', "configuration.a: a string is wanted"),
            ('echo \'{"configuration": {"a": "1"}}\'', "plugin.choria.server.provision"),
            ("exec sleep 60", "had not finished in the time it is given"),
            ("exec /nowhere/helper", "exited with status 127"),
            ("kill -9 $$", "was killed by SIGKILL"),
        ],
    )
    def test_what_the_daemon_would_refuse_is_an_error(
        self, insecure: Place, run: Run, script: str, reason: str
    ) -> None:
        insecure.helper(script)
        insecure.settings["helper_timeout"] = "300ms" if "sleep" in script else "10s"
        done = run("check", *insecure.files)

        assert done.code == 1
        assert reason in the_line(done, "error", "helper")

    def test_it_is_not_run_on_request(self, insecure: Place, run: Run) -> None:
        insecure.helper("touch ran")
        done = run("check", *insecure.files, "--no-helper")

        assert done.code == 0
        assert the_line(done, "ok", "helper").endswith("is there and executable; it was not run")

    def test_one_that_is_not_there_is_an_error_even_when_it_is_not_run(self, insecure: Place, run: Run) -> None:
        insecure.settings["helper"] = "/nowhere/helper --option"
        done = run("check", *insecure.files, "--no-helper")

        assert done.code == 1
        assert the_line(done, "error", "helper").endswith("could not be started: it does not exist")


class TestCredentials:
    """Of an organization's provisioner."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> tuple[Path, Path]:
        config, client = tmp_path / "provisioner.yaml", tmp_path / "choria.cfg"
        config.touch(0o600)
        config.write_text(json.dumps({"helper": "true", "token": "s3cret"}))
        return config, client

    def check(self, run: Run, files: tuple[Path, Path], **claims: Any) -> Done:
        config, client = files
        member = Member.make(config.parent, issuer=Ed25519PrivateKey.generate(), **claims)
        client.write_text(
            "identity = prov.example.net\nplugin.choria.middleware_hosts = localhost:4222\n"
            "plugin.security.provider = choria\n"
            f"plugin.security.choria.token_file = {member.token}\nplugin.security.choria.seed_file = {member.seed}\n"
        )
        done = run("check", "--config", config, "--choria-config", client, "--no-helper")
        assert member.token.read_text() not in done.out
        assert member.seed.read_text() not in done.out
        return done

    def test_what_the_token_permits_is_told(self, run: Run, files: tuple[Path, Path]) -> None:
        permissions = {"provisioner": True, "org_admin": False, "streams_user": True}
        done = self.check(run, files, permissions=permissions)
        assert done.code == 0
        assert "the token of provisioner_signer fits its seed; it permits: provisioner, streams_user" in done.out
        assert "brokers are not verified" in the_line(done, "warning", "credentials")
        assert the_line(done, "warning", "provisioner.yaml").startswith("features.jwt: is off, ")

    def test_a_token_that_may_not_provision_is_an_error(self, run: Run, files: tuple[Path, Path]) -> None:
        done = self.check(run, files, permissions={"org_admin": True})
        assert done.code == 1
        assert "lacks the permission to provision servers" in the_line(done, "error", "credentials")

    def test_one_that_is_about_to_expire_is_a_warning(self, run: Run, files: tuple[Path, Path]) -> None:
        done = self.check(run, files, exp=int(time.time() + 10.5 * 86400))
        assert done.code == 0
        assert any("the token expires on" in line and "in 10 days" in line for line in lines(done, "warning"))

    def test_one_that_has_expired_is_an_error(self, run: Run, files: tuple[Path, Path]) -> None:
        done = self.check(run, files, exp=int(time.time() - 1))
        assert done.code == 1
        assert "expired since" in the_line(done, "error", "credentials")

    def test_an_organization_is_needed(self, run: Run, files: tuple[Path, Path]) -> None:
        done = self.check(run, files, ou=None)
        assert any("claim ou" in line for line in lines(done, "warning"))


def test_an_empty_token_is_warned_of(insecure: Place, run: Run) -> None:
    insecure.answer(**GOOD_ANSWER)
    insecure.settings["token"] = ""
    assert the_line(run("check", *insecure.files), "warning", "provisioner.yaml").startswith("token: is empty")


def test_files_that_are_open_to_others_are_warned_of(insecure: Place, run: Run) -> None:
    insecure.answer(**GOOD_ANSWER)
    config = insecure.config
    config.chmod(0o644)
    insecure.settings["helper_timeout"] = "10s"
    try:
        done = run("check", *insecure.files)
    finally:
        config.chmod(0o600)

    assert done.code == 0
    assert the_line(done, "warning", "exposure").startswith(f"{config}: readable by everybody")


def test_a_daemon_that_runs_is_recognised(insecure: Place, run: Run, tmp_path: Path) -> None:
    insecure.answer(**GOOD_ANSWER)
    metrics = Metrics("lab")
    metrics.paused.set(1)
    pid_file = tmp_path / "pid"
    pid_file.write_text("123\n")
    with (
        MonitorServer("127.0.0.1", 0, metrics=metrics.render, liveness={}, readiness={}) as monitor,
        pid_file.open() as held,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        insecure.settings |= {"monitor_address": "127.0.0.1", "monitor_port": monitor.port}
        done = run("check", *insecure.files, "--pid", pid_file)

    assert done.code == 0
    assert the_line(done, "ok", "monitor_port") == f"a provisioner serves port {monitor.port} of 127.0.0.1, paused"
    assert the_line(done, "ok", "pid file") == f"a daemon runs: process 123 holds {pid_file}"


def test_what_listens_there_may_answer_for_ever(insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.cli.daemon.LIMIT_SECONDS", 0.5)
    insecure.answer(**GOOD_ANSWER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_drip, args=(listening,))
        thread.start()
        insecure.settings |= {"monitor_address": "127.0.0.1", "monitor_port": listening.getsockname()[1]}
        before = time.monotonic()
        done = run("check", *insecure.files)
        assert time.monotonic() - before < DRIP_SECONDS / 2
        thread.join()
    assert the_line(done, "error", "monitor_port").endswith("is in use, by something that is no provisioner")


def _drip(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        end = time.monotonic() + DRIP_SECONDS
        while time.monotonic() < end:
            connection.sendall(b"x")
            time.sleep(0.1)


def test_an_address_that_is_not_ours_is_no_port_in_use(insecure: Place, run: Run) -> None:
    insecure.answer(**GOOD_ANSWER)
    insecure.settings |= {"monitor_address": "nowhere.invalid", "monitor_port": 8080}
    done = run("check", *insecure.files)
    assert done.code == 1
    assert the_line(done, "error", "monitor_port").startswith("monitor_port, monitor_address: cannot listen on ")


def test_a_file_that_cannot_be_looked_at_is_no_defect(insecure: Place, run: Run) -> None:
    insecure.answer(**GOOD_ANSWER)
    insecure.settings["logfile"] = f"/{'x' * 300}"
    assert the_line(run("check", *insecure.files), "error", "logfile") == f"/{'x' * 300}: File name too long"


def test_a_port_that_is_free_is_free_afterwards(insecure: Place, run: Run) -> None:
    insecure.answer(**GOOD_ANSWER)
    port = free_port()
    insecure.settings |= {"monitor_address": "127.0.0.1", "monitor_port": port}

    for _ in range(2):
        assert the_line(run("check", *insecure.files), "ok", "monitor_port") == f"port {port} is free"


class TestBroker:
    """With `--connect`."""

    def test_one_that_is_away_is_an_error_and_the_others_are_tried(self, insecure: Place, run: Run) -> None:
        insecure.answer(**GOOD_ANSWER)
        insecure.fleet(insecure.server("n1.example.net"))
        insecure.client["plugin.choria.middleware_hosts"] = f"127.0.0.1:1, {insecure.broker.url}"
        done = run("check", *insecure.files, "--connect")

        assert done.code == 1
        assert the_line(done, "error", "broker").startswith("nats://127.0.0.1:1: ")
        assert insecure.broker.url in the_line(done, "ok", "broker")
        assert the_line(done, "ok", "servers") == "1 wants to be provisioned"

    def test_that_none_is_configured_or_found_is_said_of_the_broker(
        self, insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("provisioner.choria.brokers.LAST_RESORT", brokers.parse(insecure.broker.url))
        monkeypatch.setattr("provisioner.choria.brokers.BrokerList._look_up", lambda _self, _record: ())
        insecure.answer(**GOOD_ANSWER)
        insecure.client |= {"plugin.choria.use_srv": "true", "plugin.choria.srv_domain": "example.net"}
        files = insecure.files
        client = insecure.network.directory / "choria.cfg"
        client.write_text(client.read_text().replace("plugin.choria.middleware_hosts", "#"))
        done = run("check", *files, "--connect")

        assert the_line(done, "warning", "broker").startswith("No broker found in DNS, using ")

    def test_a_password_that_is_wrong_is_named(self, enter: Enter, run: Run) -> None:
        place = enter("org")
        place.answer(**GOOD_ANSWER)
        place.settings["broker_provisioning_password"] = "another one"
        done = run("check", *place.files, "--connect")

        assert done.code == 1
        assert "check broker_provisioning_password" in the_line(done, "error", "broker")
        assert "another one" not in done.out + done.err

    def test_nobody_waits(self, insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("provisioner.choria.discovery.LIMIT_SECONDS", 0.3)
        insecure.answer(**GOOD_ANSWER)
        done = run("check", *insecure.files, "--connect")

        assert done.code == 0
        assert the_line(done, "ok", "servers").startswith("none wants to be provisioned")
        assert the_line(done, "ok", "clock").startswith("not compared")

    def test_servers_with_wrong_clocks_are_named(self, insecure: Place, run: Run) -> None:
        insecure.answer(**GOOD_ANSWER)
        good = insecure.server("n1.example.net")
        ahead = insecure.server("n2.example.net", wall_clock=lambda: time.time() + 40)
        insecure.fleet(good, ahead)
        done = run("check", *insecure.files, "--connect")

        assert done.code == 0
        text = the_line(done, "warning", "clock")
        assert text.startswith("those of 1 of 2 servers differ from ours: n2.example.net (+")

    def test_replies_that_are_refused_are_told_as_warnings(self, insecure: Place, run: Run) -> None:
        insecure.answer(**GOOD_ANSWER)
        insecure.fleet(insecure.server("n1.example.net"), noise=True)
        done = run("check", *insecure.files, "--connect")

        assert the_line(done, "ok", "servers") == "1 wants to be provisioned"
        assert any(line.startswith("servers: refused 1 discovery replies") for line in lines(done, "warning"))
        assert done.err == ""

    def test_those_that_are_denied_are_counted(self, insecure: Place, run: Run) -> None:
        insecure.answer(**GOOD_ANSWER)
        insecure.settings["deny"] = [r"^db"]
        insecure.fleet(insecure.server("db1.example.net"), insecure.server("web1.example.net"))
        done = run("check", *insecure.files, "--connect")

        assert the_line(done, "ok", "servers") == "2 want to be provisioned, 1 of them refused by allow and deny"


class TestElection:
    """On a broker with Choria Streams."""

    @pytest.fixture
    def streams(self, tmp_path: Path) -> Any:
        with Streams(tmp_path / "streams") as streams:
            yield streams

    @pytest.fixture
    def place(self, insecure: Place, streams: Streams) -> Place:
        place = Place(insecure.network, streams.server)
        place.answer(**GOOD_ANSWER)
        place.settings |= {"leader_election": True, "broker_provisioning_password": PASSWORD}
        return place

    def test_without_a_bucket_it_is_an_error(self, place: Place, run: Run) -> None:
        done = run("check", *place.files, "--connect")
        assert done.code == 1
        assert "the broker has no bucket CHORIA_LEADER_ELECTION" in the_line(done, "error", "election")

    def test_the_bucket_the_leader_and_the_clock_of_the_broker_are_told(
        self, place: Place, streams: Streams, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("provisioner.cli.rivals.STILL_SECONDS", 0.0)
        streams.make_bucket()
        fleet = place.fleet(place.server("n1.example.net"), login=SERVERS_LOGIN)
        done = run("check", *place.files, "--connect")
        fleet.stop()

        assert done.code == 0
        assert the_line(done, "ok", "account") == f"provisioning at {place.broker.url}"
        assert the_line(done, "ok", "election").endswith("keeps its key for 60 s; nobody leads at the moment")
        broker, server = (line for line in lines(done, "ok") if line.startswith("clock: "))
        assert broker.startswith("clock: that of the broker is within ")
        assert server.startswith("clock: that of a server is ")

    @pytest.mark.parametrize(("wrong", "word"), [(-7, "ahead of"), (7, "behind")])
    def test_our_clock_is_wrong(
        self, place: Place, streams: Streams, run: Run, monkeypatch: pytest.MonkeyPatch, wrong: float, word: str
    ) -> None:
        monkeypatch.setattr("provisioner.cli.rivals.STILL_SECONDS", 0.0)
        monkeypatch.setattr("provisioner.choria.discovery.LIMIT_SECONDS", 0.3)
        streams.make_bucket()
        real = time.time
        monkeypatch.setattr("provisioner.choria.election_key.time.time", lambda: real() + wrong)
        done = run("check", *place.files, "--connect")

        assert done.code == 0
        assert re.fullmatch(rf"that of the broker is [67]\.\d s {word} ours", the_line(done, "warning", "clock"))


def test_a_defect_in_one_check_does_not_hide_what_the_others_find(
    insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*_: object, **__: object) -> None:
        raise TypeError("s3cret")

    insecure.answer(**GOOD_ANSWER)
    monkeypatch.setattr(helper_process, "run", defective)
    done = run("check", *insecure.files)

    assert done.code == 1
    assert the_line(done, "error", "helper") == "could not be checked, for a defect of this program: TypeError"
    assert "s3cret" not in done.out + done.err
    assert the_line(done, "ok", "monitor_port")


def test_it_works_as_a_program_on_a_terminal_of_few_characters(insecure: Place) -> None:
    insecure.answer(defer=True, msg="n→o")
    command = [sys.executable, "-m", "provisioner", "check", *map(str, insecure.files)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "defer: n\\u2192o" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_reader_that_has_seen_enough_does_no_harm(insecure: Place) -> None:
    insecure.answer(**GOOD_ANSWER)
    command = [sys.executable, "-m", "provisioner", "check", *map(str, insecure.files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        process.wait(PATIENCE_SECONDS)


def test_an_output_that_takes_nothing_is_told_in_a_line(insecure: Place) -> None:
    insecure.answer(**GOOD_ANSWER)
    command = [sys.executable, "-m", "provisioner", "check", *map(str, insecure.files)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert re.fullmatch(r"OSError: No space left on device \(\S+\)\n", done.stderr)


def test_the_user_is_told_who_it_is_not_who_the_environment_says(
    insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    insecure.answer(**GOOD_ANSWER)
    user = the_line(run("check", *insecure.files), "ok", "user")
    assert f"user {pwd.getpwuid(os.geteuid()).pw_name} ({os.geteuid()})" in user
