"""The simulated networks: their brokers let in whom they should, and the daemon's own parts get along with them."""

from __future__ import annotations

import base64
import functools
import json
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from provisioner import config
from provisioner.choria import security, settings
from provisioner.choria.protocol import Protocol, reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.protocol_v2 import ProtocolV2
from provisioner.choria.rpc import Client
from provisioner.errors import ProvisionerError
from provisioner.simulate import ksuid, networks, pki
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.networks import NETWORKS, Network
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector

SECURED = ("x509", "org")
NAME = "s1.example.net"
CONFIG = {"plugin.choria.server.provision": "false", "identity": NAME, "collectives": "choria"}


@attrs.frozen
class Running:
    """A network whose broker and one server are up."""

    network: Network
    broker: NatsServer
    fleet: Fleet


Run = Callable[[str], Running]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    stops = []

    def start(kind: str) -> Running:
        network = NETWORKS[kind](tmp_path)
        broker = NatsServer(network.broker)
        stops.append(broker.close)
        broker.start()
        fleet = network.fleet(broker.url, [Server(identity=NAME, site=network.site(broker.url))])
        stops.append(fleet.stop)
        fleet.start()
        return Running(network, broker, fleet)

    yield start
    for stop in reversed(stops):
        stop()


def trusting(running: Running, *, certificate: bool = True) -> ssl.SSLContext:
    """A client's TLS context, which verifies the broker."""
    context = ssl.create_default_context(cafile=str(running.network.directory / "ca.pem"))
    if certificate and "plugin.security.file.key" in running.network.client:
        files = (running.network.client[f"plugin.security.file.{name}"] for name in ("certificate", "key"))
        context.load_cert_chain(*files)
    return context


def sign_with_certificate(network: Network, signed: bytes) -> tuple[str, str]:
    key = load_pem_private_key(Path(network.client["plugin.security.file.key"]).read_bytes(), None)
    assert isinstance(key, RSAPrivateKey)
    signature = key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
    return base64.b64encode(signature).decode(), Path(network.client["plugin.security.file.certificate"]).read_text()


def seed(network: Network) -> Ed25519PrivateKey:
    text = Path(network.client["plugin.security.choria.seed_file"]).read_text()
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def sign_with_token(network: Network, signed: bytes) -> tuple[str, str]:
    token = Path(network.client["plugin.security.choria.token_file"]).read_text()
    return base64.b64encode(seed(network).sign(signed)).decode(), token


def protocol(kind: str, network: Network) -> Protocol:
    if kind == "org":
        sign = functools.partial(sign_with_token, network)
        return ProtocolV2(identity=networks.IDENTITY, caller=networks.CALLER, ttl=60, sign=sign)
    caller, sign = f"choria={networks.CERTNAME}", functools.partial(sign_with_certificate, network)
    return ProtocolV1(identity=networks.IDENTITY, caller=caller, ttl=60, sign=sign)


Call = Callable[..., Mapping[str, Any]]


def connect(kind: str, running: Running, make_connector: MakeConnector) -> Call:
    """Gives what calls an action of the server, signed."""
    password = running.network.provisioner["broker_provisioning_password"]
    connector = make_connector(
        running.broker,
        authenticate=lambda _info: {"user": "provisioner", "pass": password},
        tls_context=lambda: trusting(running),
        reply_prefix=reply_prefix(networks.CALLER),
    )
    assert connector.connect(PATIENCE_SECONDS)
    assert connector.server_info["remote_account"] == "provisioning"
    assert connector.server_info["nonce"]
    session = Client(connector, protocol(kind, running.network)).session(NAME)

    def call(action: str, /, *, agent: str = "choria_provision", **data: Any) -> Mapping[str, Any]:
        inputs = {"token": running.network.token, **data}
        return session.call(agent, action, inputs, timeout=PATIENCE_SECONDS).data

    return call


def outcome(running: Running, call: Call, settings: Mapping[str, str], **material: str) -> tuple[int, int, list[str]]:
    """Configures and restarts the server; gives what the fleet has counted."""
    call("configure", config=json.dumps({**CONFIG, **settings}), **material)
    call("restart", splay=1)
    counts = running.fleet.counts()
    assert counts.bad_signatures == 0
    assert counts.good_signatures == counts.actions.total()
    return counts.provisioned, counts.unfit, list(counts.objections)


# --- x509


def certified(network: Network, request: str) -> dict[str, str]:
    key = load_pem_private_key((network.directory / "ca-key.pem").read_bytes(), None)
    ca = (network.directory / "ca.pem").read_text()
    public = x509.load_pem_x509_csr(request.encode()).public_key()
    assert isinstance(key, EllipticCurvePrivateKey)
    assert isinstance(public, RSAPublicKey)
    authority = pki.Authority(x509.load_pem_x509_certificate(ca.encode()), key)
    return {"certificate": authority.issue(NAME, public), "ca": ca}


def x509_settings(ssldir: str) -> dict[str, str]:
    names = {"certificate": "certificate.pem", "key": "private.pem", "ca": "ca.pem"}
    files = {f"plugin.security.file.{key}": f"{ssldir}/{name}" for key, name in names.items()}
    return {"plugin.security.provider": "file", **files}


def test_a_server_with_a_certificate_is_provisioned(run: Run, make_connector: MakeConnector) -> None:
    running = run("x509")
    call = connect("x509", running, make_connector)
    reply = call("gencsr", cn=NAME)
    material = certified(running.network, reply["csr"])
    settings = x509_settings(reply["ssldir"])
    assert outcome(running, call, settings, ssldir=reply["ssldir"], **material) == (1, 0, [])


def test_a_server_that_made_another_key_since_is_unfit(run: Run, make_connector: MakeConnector) -> None:
    running = run("x509")
    call = connect("x509", running, make_connector)
    reply = call("gencsr", cn=NAME)
    call("gencsr", cn=NAME)
    material = certified(running.network, reply["csr"])
    settings = x509_settings(reply["ssldir"])
    assert outcome(running, call, settings, ssldir=reply["ssldir"], **material) == (
        0,
        1,
        ["the certificate does not fit the private key"],
    )


def test_the_broker_of_certificates_wants_one(run: Run, make_connector: MakeConnector) -> None:
    running = run("x509")
    password = running.network.provisioner["broker_provisioning_password"]
    connector = make_connector(
        running.broker,
        authenticate=lambda _info: {"user": "provisioner", "pass": password},
        tls_context=lambda: trusting(running, certificate=False),
    )
    assert not connector.connect(0.5)
    assert "certificate" in str(connector.failure)


# --- organization


def org_settings(network: Network, directory: str) -> dict[str, str]:
    return {
        "plugin.security.provider": "choria",
        "plugin.security.issuer.names": "choria",
        "plugin.security.issuer.choria.public": network.provisioner["jwt_verify_cert"],
        "plugin.security.choria.token_file": f"{directory}/server.jwt",
        "plugin.security.choria.seed_file": f"{directory}/server.seed",
    }


def server_token(network: Network, public: str) -> str:
    """What a provisioner has to make, of the claims that brokers look at."""
    issuer_token = Path(network.client["plugin.security.choria.token_file"]).read_text()
    issuer = jwt.decode(issuer_token, options={"verify_signature": False})
    now = issuer["iat"]
    unique, key = ksuid.new(now), seed(network)
    signature = key.sign(f"{unique}.{issuer['tcs']}".encode()).hex()
    claims = {
        "purpose": "choria_server",
        "identity": NAME,
        "collectives": ["choria"],
        "ou": issuer["ou"],
        "public_key": public,
        "iat": now,
        "exp": issuer["exp"],
        "jti": unique,
        "iss": f"C-{issuer['jti']}.{issuer['public_key']}",
        "issexp": issuer["exp"],
        "tcs": f"{issuer['tcs']}.{signature}",
    }
    return jwt.encode(claims, key, algorithm="EdDSA")


def test_a_server_with_a_token_of_the_chain_is_provisioned(run: Run, make_connector: MakeConnector) -> None:
    running = run("org")
    call = connect("org", running, make_connector)
    assert jwt.decode(call("jwt")["jwt"], options={"verify_signature": False})["v2"] is True
    reply = call("gen25519", nonce=secrets.token_hex(16))
    token = server_token(running.network, reply["public_key"])
    settings = org_settings(running.network, reply["directory"])
    assert outcome(running, call, settings, server_jwt=token) == (1, 0, [])


def test_a_server_asked_for_a_new_key_after_it_was_configured_is_unfit(run: Run, make_connector: MakeConnector) -> None:
    running = run("org")
    call = connect("org", running, make_connector)
    reply = call("gen25519", nonce="n")
    settings = org_settings(running.network, reply["directory"])
    token = server_token(running.network, reply["public_key"])
    call("configure", config=json.dumps({**CONFIG, **settings}), server_jwt=token)
    call("gen25519", nonce="n")
    call("restart", splay=1)
    counts = running.fleet.counts()
    assert (counts.provisioned, counts.unfit) == (0, 1)
    assert list(counts.objections) == ["plugin.security.choria.token_file names no file that is there"]


# --- both


@pytest.mark.parametrize("kind", SECURED)
@pytest.mark.parametrize("user", ["provisioner", "servers", "somebody"])
def test_a_wrong_password_is_refused(kind: str, user: str, run: Run, make_connector: MakeConnector) -> None:
    running = run(kind)
    connector = make_connector(
        running.broker,
        authenticate=lambda _info: {"user": user, "pass": "wrong"},
        tls_context=lambda: trusting(running),
    )
    assert not connector.connect(0.5)
    assert "Authorization Violation" in str(connector.failure)


@pytest.mark.parametrize("kind", SECURED)
def test_servers_may_do_no_more_than_choria_allows_them(
    kind: str, run: Run, make_connector: MakeConnector, eventually: Eventually
) -> None:
    running = run(kind)
    context = running.network.tls_context
    assert context is not None
    member, provisioner = (
        make_connector(running.broker, authenticate=authenticate, tls_context=context, reply_prefix="_INBOX.x")
        for authenticate in (
            lambda _info: running.network.login,
            lambda _info: {
                "user": "provisioner",
                "pass": running.network.provisioner["broker_provisioning_password"],
            },
        )
    )
    assert member.connect(PATIENCE_SECONDS)
    assert provisioner.connect(PATIENCE_SECONDS)
    heard: list[str] = []
    provisioner.subscribe(">", callback=lambda message: heard.append(message.subject))
    provisioner.flush()
    for subject in ("provisioning.node.s2", "provisioning.reply.a.b", "elsewhere", "choria.lifecycle.event.x.y"):
        member.publish(subject)
    eventually(lambda: "choria.lifecycle.event.x.y" in heard)
    assert heard == ["provisioning.reply.a.b", "choria.lifecycle.event.x.y"]


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_configuration_suits_the_daemon(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[kind](tmp_path)
    for name, value in network.environment.items():
        monkeypatch.setenv(name, value)
    provisioner_file, client_file = network.configure("nats://127.0.0.1:4222", site="x")
    conf = config.load(provisioner_file)
    assert (conf.token, conf.site, conf.warnings) == (network.token, "x", ())
    choria = settings.load(client_file, insecure=conf.choria_insecure, cwd=tmp_path)
    chosen = security.choose(choria, insecure=conf.choria_insecure)
    assert (choria.warnings, chosen.warnings) == ((), ())
    expected = {"x509": f"choria={networks.CERTNAME}", "org": networks.CALLER}
    assert chosen.protocol.caller == expected.get(kind, chosen.protocol.caller)


@pytest.mark.parametrize("kind", NETWORKS)
def test_only_the_owner_may_read_the_files(kind: str, tmp_path: Path) -> None:
    NETWORKS[kind](tmp_path).configure("nats://127.0.0.1:4222")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.is_file()}
    assert set(modes.values()) == {0o600}, modes


def test_servers_that_the_broker_does_not_let_in_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.simulate.fleet.CONNECT_SECONDS", 0.5)
    network = NETWORKS["org"](tmp_path)
    with NatsServer(network.broker) as broker:
        fleet = network.fleet(broker.url, [], login={"user": "servers", "pass": "wrong"})
        with pytest.raises(ProvisionerError, match="Authorization Violation"):
            fleet.start()
        fleet.stop()
