"""What is done about servers, token holders, helpers and brokers that mean harm; docs/security.md is the list."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from provisioner import exposure
from provisioner.choria import discovery, retry, rpc, security
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector, Expectation
from provisioner.choria.errors import ConnectFailedError, NoRespondersError, NoTLSError, WireError
from provisioner.choria.nats import Message
from provisioner.choria.protocol import Reply, reply_prefix
from provisioner.choria.rpc import NobodyError, RefusedError, RPCReply, SilenceError
from provisioner.errors import HostError, SoftError
from provisioner.host import node
from provisioner.host.provision import Success
from provisioner.host.provisioning_jwt import Verifier
from provisioner.host.server_jwt import Issuer
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server as SimulatedServer
from provisioner.simulate.server import Site
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector, StartBroker
from tests.fake_broker import FakeBroker, Peer
from tests.installation import Installation
from tests.networks import Member, X509Network
from tests.test_provision import CALLER, CONFIGURATION, IDENTITY, Bench, Server

TOKEN = "s3cret"
INVENTORY = {"version": "0.30.0", "upgradable": False}
CONFLICT = "two different replies to one"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RPC_BACKOFF", retry.Backoff((10,)))
    monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, -1.5))


class Site25519:
    """A server of an organization and all that belongs to it; the intruder is a node that holds the same token."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.server = bench, bench.server
        self.organization, self.key, self.intruder = (ed25519.Ed25519PrivateKey.generate() for _ in range(3))
        public = self.organization.public_key().public_bytes_raw().hex()
        (bench.directory / "seed").write_text(self.organization.private_bytes_raw().hex())
        bench.config = bench.configured(
            features={"ed25519": True, "upgrades": True},
            jwt_verify_cert=public,
            jwt_signing_key=str(bench.directory / "seed"),
            upgrades_repository="https://updates.example.net",
        )
        bench.verifier, bench.issuer = Verifier(public), Issuer(bench.config)
        claims = {"purpose": "choria_provisioning", "cht": TOKEN}
        self.token = jwt.encode(claims, self.organization, algorithm="EdDSA")
        for action in ("jwt", "gen25519", "inventory"):
            self.server.behaviour[action] = lambda request: [self.genuine(request)]

    def genuine(self, request: Request) -> bytes:
        """The reply of the server itself."""
        action = json.loads(request.body)["action"]
        data: dict[str, Any] = {"message": "done"}
        if action == "jwt":
            data = {"jwt": self.token, "ecdh_public": "09" + "00" * 31}
        elif action == "gen25519":
            data = self.proof(request, self.key)
        elif action == "inventory":
            data = INVENTORY
        return self.server.ok(request, data=data)

    def forged(self, request: Request) -> bytes:
        """What the intruder says in its place, good in every respect that can be checked."""
        action = json.loads(request.body)["action"]
        data: dict[str, Any] = {"message": "forged"}
        if action == "jwt":
            data = {"jwt": self.token, "ecdh_public": "08" * 32}
        elif action == "gen25519":
            data = self.proof(request, self.intruder)
        elif action == "inventory":
            data = {**INVENTORY, "facts": {"role": "database"}}
        return self.server.ok(request, data=data)

    def proof(self, request: Request, key: ed25519.Ed25519PrivateKey) -> dict[str, Any]:
        nonce = json.loads(request.body)["data"]["nonce"]
        public = key.public_key().public_bytes_raw().hex()
        return {"public_key": public, "directory": "/etc/choria", "signature": key.sign(nonce.encode()).hex()}


@pytest.fixture
def bench(tmp_path: Path, broker: NatsServer, make_connector: MakeConnector) -> Bench:
    connector, other = make_connector(broker, reply_prefix=reply_prefix(CALLER)), make_connector(broker)
    assert connector.connect(PATIENCE_SECONDS)
    assert other.connect(PATIENCE_SECONDS)
    return Bench(tmp_path, Server(other), connector)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> X509Network:
    return X509Network.make(tmp_path_factory.mktemp("network"))


@pytest.fixture
def site(bench: Bench) -> Site25519:
    return Site25519(bench)


def certificate_request() -> str:
    """One in the name of the server, with a new key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, IDENTITY)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    request = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


class TestATokenHolderWhoAnswersForOthers:
    @pytest.mark.parametrize("action", ["jwt", "gen25519", "inventory"])
    @pytest.mark.parametrize("forger_is", ["first", "second"])
    def test_a_forged_reply_ends_the_cycle_before_anything_secret_is_sent(
        self, site: Site25519, action: str, forger_is: str, caplog: pytest.LogCaptureFixture, eventually: Eventually
    ) -> None:
        def both(request: Request) -> list[bytes]:
            replies = [site.forged(request), site.genuine(request)]
            return replies if forger_is == "first" else replies[::-1]

        site.server.behaviour[action] = both
        with pytest.raises(HostError, match="different replies came to one request"):
            site.bench.provision()
        assert "configure" not in site.server.actions()
        eventually(lambda: CONFLICT in caplog.text)

    def test_so_does_a_forged_certificate_request(self, bench: Bench) -> None:
        def both(request: Request) -> list[bytes]:
            replies = ({"csr": certificate_request(), "public_key": "PUB", "ssldir": "/ssl"} for _ in range(2))
            return [bench.server.ok(request, data=data) for data in replies]

        bench.config = bench.configured(features={"pki": True})
        bench.server.behaviour["gencsr"] = both
        with pytest.raises(HostError, match="different replies came to one request"):
            bench.provision()
        assert "configure" not in bench.server.actions()

    @pytest.mark.parametrize("action", ["configure", "restart"])
    def test_a_forged_reply_to_the_last_steps_is_told(
        self, site: Site25519, action: str, caplog: pytest.LogCaptureFixture, eventually: Eventually
    ) -> None:
        site.server.behaviour[action] = lambda request: [site.forged(request), site.genuine(request)]
        with contextlib.suppress(HostError):
            site.bench.provision()
        eventually(lambda: CONFLICT in caplog.text)

    def test_a_forged_upgrade_is_told_and_comes_to_an_end(
        self, site: Site25519, caplog: pytest.LogCaptureFixture, eventually: Eventually
    ) -> None:
        site.bench.answer(configuration=CONFIGURATION, upgrade="0.31.0")
        site.server.behaviour["inventory"] = lambda request: [
            site.server.ok(request, data={"version": "0.30.0", "upgradable": True})
        ]
        site.server.behaviour["release_update"] = lambda request: [site.forged(request), site.genuine(request)]
        for _ in range(2):
            assert site.bench.provision() is Success.UPGRADING
        eventually(lambda: CONFLICT in caplog.text)
        with pytest.raises(HostError, match="not tried again for a day"):
            site.bench.provision()

    @pytest.mark.parametrize("action", ["jwt", "gen25519", "inventory", "configure", "restart", "shutdown"])
    @pytest.mark.parametrize("text", ["Incorrect provision token supplied", "Could not obtain provisioning lock"])
    def test_a_forged_refusal_costs_a_turn_and_is_told(
        self,
        site: Site25519,
        action: str,
        text: str,
        caplog: pytest.LogCaptureFixture,
        eventually: Eventually,
    ) -> None:
        if action == "shutdown":
            site.bench.answer(shutdown=True)
        site.server.behaviour[action] = lambda request: [
            site.server.ok(request, statuscode=1, statusmsg=text, data={}),
            site.genuine(request),
        ]
        with pytest.raises(HostError, match=text):
            site.bench.provision()
        assert site.server.actions()[-1] == action
        eventually(lambda: CONFLICT in caplog.text)

    @pytest.mark.parametrize("action", ["jwt", "gen25519", "inventory", "configure", "restart"])
    def test_the_forged_word_that_nobody_is_there_harms_nothing(self, site: Site25519, action: str) -> None:
        def forge(request: Request) -> list[bytes]:
            site.server._connector._send("HPUB", request.reply_to, 16, "16\r\nNATS/1.0 503\r\n\r\n")
            return [site.genuine(request)]

        site.server.behaviour[action] = forge
        assert site.bench.provision() is Success.PROVISIONED

    @pytest.mark.parametrize("action", ["jwt", "gen25519", "inventory", "configure", "restart"])
    def test_replies_in_its_own_name_are_dropped(self, site: Site25519, action: str) -> None:
        def intrude(request: Request) -> list[bytes]:
            own = site.server.seal(request, '{"statuscode": 1, "statusmsg": "no", "data": {}}', sender="intruder")
            return [own, site.genuine(request)]

        site.server.behaviour[action] = intrude
        assert site.bench.provision() is Success.PROVISIONED

    def test_the_reply_to_an_earlier_request_is_dropped(self, site: Site25519) -> None:
        recorded: list[bytes] = []

        def replay(request: Request) -> list[bytes]:
            recorded.append(site.genuine(request))
            return [recorded[0]]

        site.server.behaviour["inventory"] = replay
        assert site.bench.provision() is Success.PROVISIONED
        with pytest.raises(HostError, match="it names another request"):
            site.bench.provision()

    def test_a_forgery_does_not_hide_in_a_flood(self, site: Site25519, caplog: pytest.LogCaptureFixture) -> None:
        noise = [b"x"] * rpc.SECOND_REPLIES_EXAMINED
        site.server.behaviour["gen25519"] = lambda request: [site.forged(request), *noise, site.genuine(request)]

        with pytest.raises(HostError, match="different replies came to one request"):
            site.bench.provision()
        assert "configure" not in site.server.actions()
        assert "somebody floods it" in caplog.text

    def test_who_answers_alone_gets_a_token_unless_the_helper_objects(self, site: Site25519) -> None:
        """The protocol has no cure for this one, for nothing in it binds an identity to a key."""
        site.server.behaviour["gen25519"] = lambda request: [site.forged(request)]
        site.bench.answer(defer=True, msg="no such machine is expected")

        with pytest.raises(SoftError, match="no such machine is expected"):
            site.bench.provision()
        seen = site.bench.helper_input()
        assert seen["identity"] == IDENTITY
        assert seen["ed25519_pubkey"]["public_key"] == site.intruder.public_key().public_bytes_raw().hex()
        assert "configure" not in site.server.actions()


class TestAFlood:
    """More messages than can be looked at: no wait may become longer by them."""

    @pytest.fixture
    def flood(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        def get(_self: Expectation, _timeout: float) -> Message:
            if request.param == "503":
                raise NoRespondersError("nobody")
            return Message(1, "x", "", b"junk", received=time.monotonic())

        monkeypatch.setattr(Expectation, "get", get)

    @pytest.mark.parametrize(("flood", "error"), [("junk", SilenceError), ("503", NobodyError)], indirect=["flood"])
    @pytest.mark.usefixtures("flood")
    def test_of_replies(self, bench: Bench, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Expectation, "drain", lambda _: [])
        with pytest.raises(error):
            bench.client.session(IDENTITY).call("rpcutil", "inventory", {}, timeout=0.1)

    @pytest.mark.parametrize("flood", ["junk", "503"], indirect=True)
    @pytest.mark.usefixtures("flood")
    def test_of_discovery_answers(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "LIMIT_SECONDS", 0.1)
        found = discovery.discover(
            bench.client.connector,
            bench.client.protocol,
            target_agent="choria_provision",
            first_reply=0.1,
            interrupted=lambda: False,
        )
        assert found == []


class TestAHostileServer:
    @pytest.mark.parametrize("depth", [50, 400, 900, 950, 980, 990, 1000, 100_000])
    def test_an_inventory_nested_deeply_costs_its_turn_at_most(self, bench: Bench, depth: int) -> None:
        body = '{"statuscode":0,"statusmsg":"OK","data":{"a":' + "[" * depth + "]" * depth + "}}"
        bench.server.behaviour["inventory"] = lambda request: [bench.server.seal(request, body)]

        with contextlib.suppress(HostError):
            assert bench.provision() is Success.PROVISIONED

    def test_a_large_inventory_reaches_the_helper(self, bench: Bench) -> None:
        bench.server.reply("inventory", facts={"a": "x" * 500_000})
        assert bench.provision() is Success.PROVISIONED
        assert len(bench.helper_input()["inventory"]) > 500_000

    @pytest.mark.parametrize("version", ["1\n2\x1b[31m", "9" * 100_000, "1." * 100_000, "\ud800", "\u202e1"])
    def test_a_strange_version_is_told_on_one_short_line(self, site: Site25519, version: str) -> None:
        site.server.reply("inventory", version=version, upgradable=False)
        site.bench.answer(configuration=CONFIGURATION, upgrade="0.31.0")

        with pytest.raises(HostError, match="cannot upgrade") as error:
            site.bench.provision()
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 600

    @pytest.mark.parametrize("token", ["", "a.b.c", "x" * 300_000, "a\x00.b.c", "\ud800", "../../etc/passwd"])
    def test_a_provisioning_jwt_that_is_none(self, site: Site25519, token: str) -> None:
        site.server.reply("jwt", jwt=token, ecdh_public="09" * 32)
        with pytest.raises(HostError, match="the provisioning JWT is"):
            site.bench.provision()
        assert site.server.actions() == ["jwt"]

    def test_a_provisioning_jwt_signed_by_nobody(self, site: Site25519) -> None:
        unsigned = jwt.encode({"purpose": "choria_provisioning"}, "", algorithm="none")
        site.server.reply("jwt", jwt=unsigned, ecdh_public="09" * 32)
        with pytest.raises(HostError, match="algorithm none is not accepted"):
            site.bench.provision()

    def test_a_key_that_everybody_can_sign_for_gets_no_token(self, site: Site25519) -> None:
        neutral = "01" + "00" * 31  # with it, this is a signature of any message
        site.server.reply("gen25519", public_key=neutral, directory="/", signature=neutral + "00" * 32)

        with pytest.raises(HostError, match="the public_key in the reply is a weak one"):
            site.bench.provision()

    @pytest.mark.parametrize(
        "point",
        [
            "00" * 32,
            "00" * 31 + "80",
            "01" + "00" * 31,
            "ec" + "ff" * 30 + "7f",
            "ed" + "ff" * 30 + "7f",
            "ee" + "ff" * 30 + "7f",
            "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
            "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        ],
    )
    def test_all_such_keys_are_known(self, point: str) -> None:
        assert node._is_weak(ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(point)))

    def test_proper_keys_are_none_of_them(self) -> None:
        assert not any(node._is_weak(ed25519.Ed25519PrivateKey.generate().public_key()) for _ in range(20))

    def test_a_refusal_too_long_to_search_for_secrets_is_not_shown(self) -> None:
        text = TOKEN + "x" * rpc.REFUSAL_CHARACTERS
        body = json.dumps({"statuscode": 1, "statusmsg": text})
        with pytest.raises(RefusedError, match=r"^refused: a text of \d+ characters, too long to be shown$"):
            rpc.opened(body, {"token": TOKEN})


class TestSecrets:
    def test_a_helper_that_quotes_its_input_puts_no_token_into_the_log(
        self, site: Site25519, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        site.bench.helper("cat input >&2; exit 1")
        with pytest.raises(HostError, match=re.escape("***")) as error:
            site.bench.provision()
        assert TOKEN not in str(error.value)

        site.bench.helper("cat input >&2; cat answer")
        assert site.bench.provision() is Success.PROVISIONED
        assert "***" in caplog.text
        assert TOKEN not in caplog.text

    def test_no_secret_is_in_the_text_of_an_object(self, bench: Bench) -> None:
        config = bench.configured(broker_provisioning_password="hidden")
        reply = Reply(request_id="1", sender="a", transport_sender="a", agent="b", body="hidden")
        token = node.Token("hidden", "09")
        for thing in (config, reply, token, RPCReply("hidden", {"jwt": "hidden"}), node.Inventory("hidden", "1", True)):
            assert "hidden" not in repr(thing)
            assert TOKEN not in repr(thing)

    @pytest.mark.parametrize(
        ("mode", "forbidden", "warning"),
        [
            (0o600, exposure.KEY, ""),
            (0o640, exposure.KEY, "readable by its group (mode 0640), wanted at most 0600"),
            (0o604, exposure.KEY, "readable by everybody (mode 0604), wanted at most 0600"),
            (0o640, exposure.SECRET, ""),
            (0o660, exposure.SECRET, "writable by its group (mode 0660), wanted at most 0640"),
            (0o644, exposure.SECRET, "readable by everybody (mode 0644), wanted at most 0640"),
            (0o755, exposure.TRUSTED, ""),
            (0o757, exposure.TRUSTED, "writable by everybody (mode 0757), wanted at most 0755"),
        ],
    )
    def test_a_file_that_is_open_to_others_is_warned_of(
        self, tmp_path: Path, mode: int, forbidden: int, warning: str
    ) -> None:
        file = tmp_path / "key"
        file.touch()
        file.chmod(mode)
        expected = [f"setting: {file}: {warning}"] if warning else []
        assert exposure.warnings([exposure.GuardedFile("setting", str(file), forbidden)]) == expected

    def test_a_file_that_is_not_there_is_not_warned_of(self, tmp_path: Path) -> None:
        names = ["", str(tmp_path / "x"), "a\0b"]
        assert exposure.warnings(exposure.GuardedFile("s", name, exposure.KEY) for name in names) == []


class TestTheProcess:
    def test_it_leaves_no_secret_where_others_can_look(
        self, installation: Installation, broker: NatsServer, eventually: Eventually
    ) -> None:
        seen = installation.directory / "seen"
        helper = installation.directory / "helper"
        helper.write_text(
            f'#!/bin/sh\ncat >/dev/null\nulimit -c >"{seen}.core"\nenv -0 >"{seen}"\necho \'{{"defer":true}}\'\n'
        )
        installation.settings["token"] = "tok3n-of-the-site"
        environment = {**os.environ, "ONLY_HERE": "1"}
        server = SimulatedServer(identity=IDENTITY, site=Site(token="tok3n-of-the-site"))
        with Fleet(broker.url, [server]):
            process = installation.start("run", env=environment)
            eventually(lambda: seen.exists() and seen.read_text().endswith("\0"))
            proc = Path("/proc") / str(process.pid)
            assert re.search(r"^Max core file size +0 +0 ", (proc / "limits").read_text(), re.MULTILINE)
            for name in ("cmdline", "environ"):
                assert b"tok3n" not in (proc / name).read_bytes()
            installation.get("/metrics")
        assert Path(f"{seen}.core").read_text() == "0\n"
        by_the_shell = {"PWD", "OLDPWD", "SHLVL", "_", ""}
        names = {variable.partition("=")[0] for variable in seen.read_text().split("\0")}
        assert names - by_the_shell == set(environment) - by_the_shell
        assert "tok3n" not in seen.read_text()
        assert "tok3n" not in installation.log_file.read_text()
        assert installation.log_file.stat().st_mode & 0o022 == 0
        assert installation.pid_file.stat().st_mode & 0o777 == 0o644

    def test_it_warns_of_files_that_are_open_to_others(
        self, installation: Installation, eventually: Eventually
    ) -> None:
        installation.command("run")
        (installation.directory / "provisioner.yaml").chmod(0o644)
        (installation.directory / "helper").chmod(0o777)
        installation.start("run")
        eventually(installation.ready)
        warnings = [line["msg"] for line in installation.log() if line["level"] == "warning"]
        assert (
            f"{installation.directory}/provisioner.yaml: readable by everybody (mode 0644), wanted at most 0640"
            in warnings
        )
        assert (
            f"helper: {installation.directory}/helper: writable by everybody (mode 0777), wanted at most 0755"
            in warnings
        )


class TestAHostileBroker:
    def join(self, make_connector: MakeConnector, network: X509Network, port: int) -> Connector:
        chosen = security.choose(network.settings(), insecure=False)
        return make_connector(
            Broker("localhost", port),
            authenticate=chosen.authenticate,
            tls_context=chosen.tls_context,
            tls_always=chosen.tls_always,
            account=chosen.account,
        )

    def cause(self, connector: Connector, eventually: Eventually) -> Exception:
        connector.connect(0)
        eventually(lambda: isinstance(connector.failure, ConnectFailedError))
        assert isinstance(connector.failure, ConnectFailedError)
        return next(iter(connector.failure.causes.values()))

    def test_in_clear_it_gets_not_a_byte(
        self, network: X509Network, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        got: list[bytes] = []

        def script(peer: Peer) -> None:
            peer.info()
            got.append(peer.line())

        with FakeBroker(script) as rogue:
            connector = self.join(make_connector, network, rogue.port)
            assert isinstance(self.cause(connector, eventually), NoTLSError)
            connector.close()
        assert got
        assert not any(got)

    def test_a_greeting_without_end_is_cut(
        self, network: X509Network, make_connector: MakeConnector, eventually: Eventually
    ) -> None:
        def script(peer: Peer) -> None:
            while True:
                peer.send(b"INFO {" + b"x" * 65536)

        with FakeBroker(script) as rogue:
            connector = self.join(make_connector, network, rogue.port)
            assert isinstance(self.cause(connector, eventually), WireError)
            connector.close()

    @pytest.mark.usefixtures("quick_retries")
    def test_brokers_that_were_named_in_clear_are_not_gone_to(
        self,
        network: X509Network,
        start_broker: StartBroker,
        make_connector: MakeConnector,
        eventually: Eventually,
    ) -> None:
        """Every provisioned server has a certificate of the network: with it, somebody in between could be a broker."""
        real = start_broker(network.configuration())

        def meddle(peer: Peer) -> None:
            with socket.create_connection((real.host, real.port)) as upstream:
                greeting = b""
                while not greeting.endswith(b"\r\n"):
                    greeting += upstream.recv(1)
                info = json.loads(greeting.removeprefix(b"INFO "))
                info["connect_urls"] = ["rogue.example.net:4222"]
                peer.send(b"INFO " + json.dumps(info).encode() + b"\r\n")
                while True:
                    for ready in select.select([upstream, peer._socket], [], [])[0]:
                        data = ready.recv(65536)
                        if not data:
                            return
                        (peer._socket if ready is upstream else upstream).sendall(data)

        with FakeBroker(meddle) as meddler:
            connector = self.join(make_connector, network, meddler.port)
            assert connector.connect(PATIENCE_SECONDS)
            assert connector.server_info["connect_urls"] == ["rogue.example.net:4222"]
            real.kill()
            eventually(lambda: isinstance(connector.failure, ConnectFailedError))
            assert isinstance(connector.failure, ConnectFailedError)
            assert list(connector.failure.causes) == [f"nats://localhost:{meddler.port}"]
            connector.close()

    @pytest.mark.parametrize(
        "nonce", ['{"protocol":"io.choria.protocol.v2.request"}', "eyJhbGciOiJFZERTQSJ9.e30", "1.abc", "", "x" * 65]
    )
    def test_nothing_but_a_nonce_is_signed_for_it(self, tmp_path: Path, nonce: str) -> None:
        """The same key signs requests and JWTs."""
        member = Member.make(tmp_path, issuer=ed25519.Ed25519PrivateKey.generate())
        chosen = security.choose(member.settings(), insecure=False)
        with pytest.raises(WireError):
            chosen.authenticate({"nonce": nonce})
        assert "sig" in chosen.authenticate({"nonce": "xlu1Fu4LzOAgSe8"})
