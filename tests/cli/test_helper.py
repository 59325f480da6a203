"""The `helper` command: a dry run for helper authors, with a server or with what was saved of one."""

from __future__ import annotations

import fcntl
import json
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from provisioner.choria import retry
from provisioner.cli.helper_view import View
from provisioner.host import node
from provisioner.simulate import csr
from provisioner.simulate.networks import NETWORKS
from tests.certificates import Authority
from tests.cli.conftest import Done, Enter, Place, Run
from tests.conftest import PATIENCE_SECONDS

NAME = "n1.example.net"
CONFIGURATION = {"plugin.choria.server.provision": "false", "identity": NAME}
#: What is done to a server that is only looked at.
LOOKING = {
    "insecure": {"choria_provision#jwt", "rpcutil#inventory"},
    "x509": {"choria_provision#jwt", "rpcutil#inventory", "choria_provision#gencsr"},
    "org": {"choria_provision#jwt", "rpcutil#inventory", "choria_provision#gen25519"},
}


def section(done: Done, title: str) -> list[str]:
    """The lines below a title."""
    _, _, rest = done.out.partition(f"{title}\n")
    return [line.strip() for line in rest.partition("\n\n")[0].splitlines()]


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_waiting_server_is_asked_and_nothing_is_done_to_it(kind: str, enter: Enter, run: Run) -> None:
    place = enter(kind)
    server = place.server(NAME)
    fleet = place.fleet(server)
    done = run("helper", NAME, *place.files)

    assert done.code == 0, done.err
    assert f"identity         {NAME}" in section(done, "input")
    assert "inventory        version 0.30.0, 2 facts" in section(done, "input")
    assert ["plugin.choria.server.provision", "false"] in [line.split() for line in section(done, "answer")]
    sent = section(done, "what would be done")
    assert sent[0] == "choria_provision#configure with"
    assert sent[-1] == "choria_provision#restart"
    assert any(line.startswith("server_jwt ") for line in sent) == (kind == "org")
    assert any(line.startswith("certificate ") for line in sent) == (kind == "x509")
    assert not any("warning" in line for line in sent)
    assert set(fleet.counts().actions) == LOOKING[kind]
    assert server.config is None
    assert place.network.token not in done.out + done.err


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_saved_input_gives_the_same_without_a_network(kind: str, enter: Enter, run: Run, tmp_path: Path) -> None:
    place = enter(kind)
    place.helper(f"cat > {tmp_path}/given; echo '{json.dumps({'configuration': CONFIGURATION})}'")
    fleet = place.fleet(place.server(NAME))
    saved = tmp_path / "saved.json"
    saved.touch(0o644)
    live = run("helper", NAME, "--save", saved, *place.files)
    given = (tmp_path / "given").read_bytes()
    fleet.stop()

    assert saved.read_bytes() == given
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    (place.network.directory / "choria.cfg").unlink()
    again = run("helper", "--input", saved, "--config", place.config)
    assert (live.code, again.code) == (0, 0)
    assert (tmp_path / "given").read_bytes() == given
    for title in ("input", "answer", "what would be done"):
        assert section(live, title) == section(again, title)


@pytest.fixture
def offline(insecure: Place, run: Run, tmp_path: Path) -> Any:
    """Runs the helper with an input like that of a server."""

    def start(**changes: Any) -> Done:
        document = {
            "identity": NAME,
            "csr": None,
            "ed25519_pubkey": None,
            "inventory": '{"version":"0.30.0","upgradable":true,"facts":{}}',
            "jwt": {"purpose": "choria_provisioning", "chpd": True, "cht": "the-secret-of-the-site"},
        }
        file = tmp_path / "input.json"
        file.write_text(json.dumps(document | changes))
        return run("helper", "--input", file, "--config", insecure.config)

    return start


def test_secrets_are_masked_wherever_they_stand(insecure: Place, offline: Any) -> None:
    insecure.settings["broker_provisioning_password"] = "br0ker"
    configuration = {
        **CONFIGURATION,
        "plugin.choria.network.client_password": "hunter2",
        "plugin.nats.pass": "/hunter3",
        "plugin.login.aaasvc.token": "hunter4",
        "plugin.security.file.key": "/etc/choria/ssl/key.pem",
        "plugin.choria.middleware_hosts": "nats://user:hunter5@broker:4222",
        "plugin.other": f"x the-secret-of-the-site br0ker {insecure.network.token}",
        "plugin.jwt": "eyJhbGciOiJFZERTQSJ9.hunter6.hunter7",
        "plugin.escape": "\x1b[2Jhello",
    }
    (insecure.network.directory / "answer").write_text(json.dumps({"configuration": configuration}))
    insecure.helper(f"cat >/dev/null; echo the-secret-of-the-site >&2; cat {insecure.network.directory}/answer")
    done = offline()

    assert done.code == 0, done.err
    answer = dict(line.split(maxsplit=1) for line in section(done, "answer")[1:])
    assert answer["plugin.choria.network.client_password"] == "***"
    assert answer["plugin.login.aaasvc.token"] == "***"
    assert answer["plugin.security.file.key"] == "/etc/choria/ssl/key.pem"
    assert answer["plugin.choria.middleware_hosts"] == "nats://***@broker:4222"
    assert answer["plugin.other"] == "x *** *** ***"
    assert answer["plugin.escape"] == "[2Jhello"
    assert "hunter" not in done.out + done.err
    assert "secret-of" not in done.out + done.err
    assert "standard error: ***" in done.out


@pytest.mark.parametrize(
    ("members", "consequence"),
    [
        ({"defer": True, "msg": "no owner yet"}, "nothing: the server is looked at again with the next discovery"),
        ({"shutdown": True, "msg": "scrapped"}, "choria_provision#shutdown"),
    ],
)
def test_a_helper_may_want_to_wait_or_to_end_it(
    insecure: Place, offline: Any, members: dict[str, Any], consequence: str
) -> None:
    insecure.answer(**members)
    done = offline()
    assert done.code == 0
    assert section(done, "what would be done") == [consequence]
    assert members["msg"] in done.out


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"configuration": {}}, "configuration: there is none"),
        ({"configuration": {"a": 1}}, "configuration.a: a string is wanted, an integer came"),
        ({"configuration": {"a": "b"}}, "plugin.choria.server.provision: must be set to false"),
        ({"configuration": CONFIGURATION, "certificate": "x"}, "certificate: useless without ca"),
        ({"configuration": CONFIGURATION, "action_policies": {"../x.policy": ""}}, "a plain file name"),
        ({"configuration": CONFIGURATION, "key": "x", "certificate": "x", "ca": "x", "ssldir": "/x"}, "private key"),
    ],
)
def test_an_answer_that_the_daemon_would_refuse_is_a_failure(
    insecure: Place, offline: Any, answer: dict[str, Any], reason: str
) -> None:
    insecure.answer(**answer)
    done = offline()
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert reason in line


def test_a_helper_that_fails_is_told_with_what_it_had_to_say(insecure: Place, offline: Any) -> None:
    insecure.helper("echo 'KeyError: role' >&2; exit 1")
    done = offline()
    assert (done.code, done.err) == (1, "the helper exited with status 1; its standard error: KeyError: role\n")


def test_a_private_key_is_tried_without_a_server(insecure: Place, offline: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue(NAME, hosts=(NAME,))
    other = ec.generate_private_key(ec.SECP256R1())
    answer = {
        "configuration": CONFIGURATION,
        "certificate": files.certificate.read_text(),
        "ca": authority.certificate.read_text(),
        "key": files.key.read_text(),
        "ssldir": "/etc/choria/ssl",
    }
    insecure.answer(**answer)
    done = offline()
    assert done.code == 0, done.err
    assert "key              encrypted for this server" in section(done, "what would be done")
    assert any(line.startswith("key              *** (") for line in section(done, "answer"))
    assert "PRIVATE KEY" not in done.out

    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    insecure.answer(**{**answer, "key": pem})
    done = offline()
    assert done.code == 1
    assert "private key cannot be sent" in done.err


def test_a_certificate_for_another_key_is_warned_of(
    insecure: Place, offline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csr, "KEY_BITS", 1024)
    authority = Authority(tmp_path)
    files = authority.issue(NAME, hosts=(NAME,))
    request = csr.request(csr.new_key(), dict.fromkeys(("c", "l", "o", "ou"), "") | {"cn": NAME})
    insecure.answer(
        configuration=CONFIGURATION, certificate=files.certificate.read_text(), ca=authority.certificate.read_text()
    )
    done = offline(csr={"csr": request, "public_key": "", "ssldir": "/etc/choria/ssl"})

    assert done.code == 0
    assert "warning: certificate: it is not for the key of the request" in done.out

    insecure.answer(
        configuration=CONFIGURATION,
        certificate=files.certificate.read_text(),
        ca=authority.certificate.read_text(),
        key=files.key.read_text(),
    )
    done = offline(csr={"csr": request, "public_key": "", "ssldir": "/etc/choria/ssl"})
    assert (done.code, "warning" in done.out) == (0, False), "the certificate is for the key that comes with it"


def test_a_secret_that_is_no_text_does_no_harm(insecure: Place, offline: Any) -> None:
    insecure.answer(configuration=CONFIGURATION)
    assert offline(jwt={"purpose": "choria_provisioning", "cht": "\ud800"}).code == 0


def test_keys_that_are_not_on_this_machine_are_told_and_do_no_harm(insecure: Place, offline: Any) -> None:
    insecure.settings |= {"features": {"jwt": True, "ed25519": True}, "jwt_signing_key": "/nowhere/issuer.seed"}
    insecure.answer(configuration=CONFIGURATION)
    done = offline(ed25519_pubkey={"public_key": "0f" * 32, "directory": "/etc/choria", "signature": ""})
    sent = section(done, "what would be done")

    assert done.code == 0, done.err
    assert any(line.startswith("warning: ") and "/nowhere/issuer.seed" in line for line in sent)
    assert not any(line.startswith("server_jwt") for line in sent)


def test_an_upgrade_comes_first(insecure: Place, offline: Any) -> None:
    insecure.settings |= {"features": {"jwt": True, "upgrades": True}, "upgrades_repository": "https://up.example.net"}
    insecure.answer(configuration=CONFIGURATION, upgrade="0.31.0")
    (line,) = section(offline(), "what would be done")
    assert line == "choria_provision#release_update to 0.31.0; it comes back for the rest"

    insecure.answer(configuration=CONFIGURATION, upgrade="0.30.0")
    assert section(offline(), "what would be done")[0] == "choria_provision#configure with"

    insecure.answer(upgrade="0.30.0")
    done = offline()
    assert done.code == 1
    assert "configuration: there is none" in done.err

    insecure.answer(configuration=CONFIGURATION, upgrade="0.31.0")
    done = offline(inventory='{"version":"0.30.0","upgradable":false}')
    assert done.code == 1
    assert "upgradable is false" in done.err

    insecure.settings["upgrades_optional"] = True
    warning, then, *_ = section(offline(inventory='{"version":"0.30.0","upgradable":false}'), "what would be done")
    assert warning.startswith("warning: configured without an upgrade: cannot upgrade from 0.30.0 to 0.31.0")
    assert then == "choria_provision#configure with"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"identity": 1}, "--input: identity: a string is wanted"),
        ({"identity": "a b"}, "--input: identity: holds white space"),
        ({"inventory": {}}, "--input: inventory: a string is wanted"),
        ({"inventory": "{"}, "--input: inventory: not a string that holds JSON"),
        ({"jwt": 1}, "--input: jwt: neither an object nor null"),
        ({"csr": []}, "--input: csr: neither an object nor null"),
        ({"csr": {"csr": 1}}, "--input: csr.csr: a string is wanted"),
    ],
)
def test_an_input_that_is_none_is_told_by_what_is_wrong(offline: Any, changes: dict[str, Any], reason: str) -> None:
    done = offline(**changes)
    assert done.code == 1
    assert done.err.startswith(reason)


def test_the_input_may_come_over_a_pipe(insecure: Place) -> None:
    command = [sys.executable, "-m", "provisioner", "helper", "--input", "-", "--config", str(insecure.config)]
    done = subprocess.run(command, input="[]", capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "--input: no JSON object\n")


@pytest.mark.parametrize("target", ["missing/file", ".", "link"])
def test_a_file_that_cannot_be_saved_is_told(insecure: Place, run: Run, tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    insecure.fleet(insecure.server(NAME))
    done = run("helper", NAME, "--save", tmp_path / target, *insecure.files)
    assert done.code == 1
    assert done.err.startswith("--save: ")
    assert not (tmp_path / "elsewhere").exists()


class TestAnotherProvisioner:
    """New keys in the middle of its work would spoil that."""

    @pytest.fixture
    def pid_file(self, tmp_path: Path) -> Any:
        file = tmp_path / "pid"
        file.write_text("123\n")
        with file.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield file

    @pytest.mark.parametrize("kind", ["x509", "org"])
    def test_a_server_is_not_asked_for_new_keys(self, kind: str, enter: Enter, run: Run, pid_file: Path) -> None:
        place = enter(kind)
        fleet = place.fleet(place.server(NAME))
        done = run("helper", NAME, *place.files, "--pid", pid_file)

        assert done.code == 1
        assert done.err.startswith(f"process 123 holds {pid_file}, and may be at work on the server: ")
        assert not fleet.counts().actions

    def test_it_is_on_request(self, enter: Enter, run: Run, pid_file: Path) -> None:
        place = enter("org")
        place.fleet(place.server(NAME))
        assert run("helper", NAME, *place.files, "--pid", pid_file, "--force").code == 0

    def test_it_is_where_no_keys_are_made(self, insecure: Place, run: Run, pid_file: Path) -> None:
        insecure.fleet(insecure.server(NAME))
        assert run("helper", NAME, *insecure.files, "--pid", pid_file).code == 0


def test_a_server_that_is_not_there(insecure: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RPC_BACKOFF", retry.Backoff((1,)))
    done = run("helper", "nobody.example.net", *insecure.files)
    assert (done.code, done.err) == (1, "choria_provision#jwt: no server of this identity is connected\n")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "Give either the IDENTITY"),
        ((NAME, "--input", "/dev/null"), "Give either the IDENTITY"),
        (("--input", "/dev/null", "--save", "x"), "--save is for the input from a server"),
        (("a b",), "'a b' holds white space"),
        (("--input", "/nowhere/file"), "No such file"),
    ],
)
def test_wrong_use_is_refused_with_a_hint(run: Run, arguments: tuple[str, ...], hint: str) -> None:
    done = run("helper", *arguments, "--config", "provisioner.yaml")
    assert done.code == 2
    assert hint in done.err
    assert "--help" in done.err


def test_long_values_are_cut() -> None:
    assert len(View(()).text("x" * 100_000)) < 250


@pytest.mark.parametrize("part", ["eyJ", "://", "a.", "eyJhbGciOiJ.", "-eyJ"])
def test_no_value_keeps_it_busy(part: str) -> None:
    before = time.thread_time()
    View(("s3cret",)).text(part * (1_000_000 // len(part)))
    assert time.thread_time() - before < 5
