"""The samples in etc/helpers: through the daemon's own runner, and at work on whole networks."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import hashlib
import hmac
import http.server
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from provisioner.host import answer, helper_process
from provisioner.host.answer import Answer
from provisioner.host.facts import parse
from provisioner.host.helper_process import ExitError
from provisioner.host.provision import check
from provisioner.simulate import csr, pki
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.networks import NETWORKS, Network
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "etc/helpers"
SITE = "/etc/choria-provisioner"
PROVISION = "plugin.choria.server.provision"

PLAIN, CERTIFYING, ORGANIZATION = ("plain.sh", "plain.py"), ("x509.sh", "x509.py", "cfssl.py"), ("organization.py",)
ALL = (*PLAIN, *CERTIFYING, *ORGANIZATION)
#: What real servers have said: written by the Go original, on the network that a sample is for.
SAVED = {name: ROOT / "tests/fixtures" / ("v2" if name in ORGANIZATION else "v1") / "helper-input.json" for name in ALL}
#: What a sample signs with, where that is not the key of the CA.
KEYS = {"cfssl.py": "cfssl.key"}
AUTH_KEY = bytes(range(16)).hex()


def need(program: str) -> None:
    """Skip where a program is not installed; in CI it has to be."""
    if not shutil.which(program):
        if os.environ.get("CI") == "true":
            pytest.fail(f"{program} is not installed")
        pytest.skip(f"{program} is not installed")


class Sample:
    """A sample that a site has copied, and changed where it is told to.

    :ivar site: the directory that stands for the site's own
    :ivar changes: what the site writes in the place of what is in the sample
    """

    def __init__(self, name: str, site: Path, **changes: str) -> None:
        self.name = name
        self.site = site
        self.changes = {SITE: str(site), **changes}
        (site / "nodes").mkdir(exist_ok=True)
        if name == "x509.sh":
            need("openssl")

    def knows(self, *identities: str, role: str = "web") -> None:
        """Have the site know some servers."""
        for identity in identities:
            (self.site / "nodes" / identity).write_text(f"{role}\n")

    @property
    def command(self) -> list[str]:
        """Copy it, and give what the setting `helper` is to say."""
        text = (SAMPLES / self.name).read_text()
        for old, new in self.changes.items():
            assert old in text
            text = text.replace(old, new)
        file = self.site / self.name
        file.write_text(text)
        file.chmod(0o755)
        return [str(file)] if file.suffix == ".sh" else [sys.executable, "-I", str(file)]

    def run(self, document: bytes | None = None) -> tuple[Answer, str]:
        """Run it as the daemon does; gives its answer, which the daemon would take, and its standard error."""
        document = SAVED[self.name].read_bytes() if document is None else document
        output = helper_process.run(self.command, document, timeout=PATIENCE_SECONDS, cancelled=lambda: False)
        wanted = answer.parse(output.stdout)
        assert check(parse(document), wanted, upgrades=False) == []
        return wanted, output.stderr

    def complaint(self, document: bytes | None = None) -> str:
        """What it says when it fails, which is one line."""
        with pytest.raises(ExitError) as caught:
            self.run(document)
        assert caught.value.code == 1
        text = str(caught.value).partition("its standard error: ")[2]
        assert " | " not in text
        return text


def changed(name: str, **members: Any) -> bytes:
    """The input of a sample with some members changed, written as this daemon does."""
    return json.dumps(json.loads(SAVED[name].read_text()) | members).encode()


def identity_of(name: str) -> str:
    identity: str = json.loads(SAVED[name].read_text())["identity"]
    return identity


class Authority:
    """A CA."""

    def __init__(self, authority: pki.Authority | None = None) -> None:
        self._authority = authority or pki.authority()

    @classmethod
    def of(cls, network: Network) -> Authority:
        """The one that a simulated network has."""
        key = load_pem_private_key((network.directory / "ca-key.pem").read_bytes(), None)
        assert isinstance(key, EllipticCurvePrivateKey)
        certificate = x509.load_pem_x509_certificate((network.directory / "ca.pem").read_bytes())
        return cls(pki.Authority(certificate, key))

    @property
    def certificate(self) -> x509.Certificate:
        return self._authority.certificate

    def write(self, site: Path) -> None:
        """Write its files."""
        (site / "ca.pem").write_text(pki.pem(self._authority.certificate))
        (site / "ca-key.pem").write_text(pki.key_pem(self._authority.key))

    def issue(self, name: str, request: str) -> str:
        public = x509.load_pem_x509_csr(request.encode()).public_key()
        assert isinstance(public, RSAPublicKey)
        return self._authority.issue(name, public)

    def files_for(self, host: str, directory: Path) -> tuple[Path, Path]:
        """A certificate for a server, and its key."""
        key, certificate, private = csr.new_key(), directory / "api.pem", directory / "api.key"
        certificate.write_text(self._authority.issue(host, key.public_key(), (host,)))
        private.write_text(pki.key_pem(key))
        return certificate, private


@attrs.define
class Api:
    """An HTTP API like that of cfssl.

    :ivar asked: what it was asked to sign
    :ivar reply: gives another reply than the one that is asked for: a status and a body
    """

    authority: Authority
    port: int = 0
    asked: list[Mapping[str, Any]] = attrs.field(factory=list)
    reply: Callable[[], tuple[int, bytes]] | None = None

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self.reply:
            return self.reply()
        message = json.loads(body)
        request = base64.b64decode(message["request"])
        token = hmac.new(bytes.fromhex(AUTH_KEY), request, hashlib.sha256).digest()
        if path != "/api/v1/cfssl/authsign" or not hmac.compare_digest(token, base64.b64decode(message["token"])):
            return 401, json.dumps({"success": False, "errors": [{"code": 6, "message": "invalid token"}]}).encode()
        wanted = json.loads(request)
        self.asked.append(wanted)
        (name,) = wanted["hosts"]
        certificate = self.authority.issue(name, wanted["certificate_request"])
        return 200, json.dumps({"success": True, "result": {"certificate": certificate}, "errors": []}).encode()


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, api: Api, *arguments: Any) -> None:
        self._api = api
        super().__init__(*arguments)

    def do_POST(self) -> None:
        status, body = self._api.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that went away is no error here."""


@contextlib.contextmanager
def serving(authority: Authority, directory: Path) -> Iterator[Api]:
    """Serve the API with TLS."""
    api = Api(authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.files_for("127.0.0.1", directory))
    with _Server(("127.0.0.1", 0), functools.partial(_Handler, api)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        api.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def _api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    directory = tmp_path_factory.mktemp("api")
    with serving(Authority(), directory) as api:
        yield api


@pytest.fixture
def api(_api: Api) -> Iterator[Api]:
    """A CA with an API."""
    yield _api
    _api.reply = None
    _api.asked.clear()


@pytest.fixture
def site(tmp_path: Path, api: Api) -> Path:
    """The directory of a site that has all files that samples may need, but knows no servers."""
    site = tmp_path / "site"
    site.mkdir()
    api.authority.write(site)
    (site / "issuer.public").write_text(Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex() + "\n")
    (site / "cfssl.key").write_text(f"{AUTH_KEY}\n")
    return site


def asking(api: Api) -> dict[str, str]:
    """What a site changes in the sample that is to ask this API."""
    return {'"ca.example.net", 8888': f'"127.0.0.1", {api.port}'}


def installed(name: str, site: Path, api: Api) -> Sample:
    """A sample on a site where all is well, and where the server of the saved input is known."""
    sample = Sample(name, site, **(asking(api) if name == "cfssl.py" else {}))
    sample.knows(identity_of(name))
    return sample


@pytest.fixture(params=ALL)
def sample(request: pytest.FixtureRequest, site: Path, api: Api) -> Sample:
    """Each of them."""
    return installed(request.param, site, api)


@pytest.fixture(params=CERTIFYING)
def certifying(request: pytest.FixtureRequest, site: Path, api: Api) -> Sample:
    """Each that has certificates signed."""
    return installed(request.param, site, api)


# all of them


def test_every_sample_is_here() -> None:
    assert sorted(path.name for path in SAMPLES.iterdir()) == sorted(ALL)
    assert all(os.access(path, os.X_OK) for path in SAMPLES.iterdir())


def test_every_sample_is_in_the_guide() -> None:
    guide = (ROOT / "docs/helpers.md").read_text().partition("\n## Samples\n")[2]
    assert [name for name in ALL if f"`{name}`" not in guide] == []


@pytest.mark.parametrize("name", ALL)
def test_it_starts_by_itself_and_fast(name: str) -> None:
    first = (SAMPLES / name).read_text().splitlines()[0]
    assert first == ("#!/bin/sh" if name.endswith(".sh") else "#!/usr/lib/choria-provisioner/bin/python3 -I")


@pytest.mark.parametrize("name", ALL)
def test_it_is_safe_as_it_is(name: str) -> None:
    text = (SAMPLES / name).read_text()
    assert "insecure" not in text
    assert "client_tls" not in text
    # neither a key nor a token
    assert not re.search(r"[0-9a-fA-F]{32}|[A-Za-z0-9+/]{40}", text)


def test_a_known_server_is_configured(sample: Sample) -> None:
    wanted, stderr = sample.run()
    assert wanted.configuration[PROVISION] == "false"
    assert wanted.configuration["plugin.choria.middleware_hosts"] == "broker.example.net:4222"
    assert wanted.configuration["identity"] == identity_of(sample.name)
    assert wanted.configuration["collectives"].endswith(",web")
    assert stderr == ""


def test_an_input_of_this_daemon_and_one_of_the_go_original_are_the_same(sample: Sample) -> None:
    assert changed(sample.name) != SAVED[sample.name].read_bytes()
    assert sample.run(changed(sample.name))[0].configuration == sample.run()[0].configuration


def test_an_unknown_server_has_to_wait(sample: Sample) -> None:
    wanted, _ = sample.run(changed(sample.name, identity="n9.example.net"))
    assert wanted == Answer(defer=True, msg=f"there is no {sample.site}/nodes/n9.example.net")


def test_an_identity_that_could_be_something_else_is_refused(sample: Sample) -> None:
    for identity in ("../nodes/n1", "a$(id)", 'a"b', ".", "-v", "ü"):
        complaint = sample.complaint(changed(sample.name, identity=identity))
        assert complaint == "the identity is not one that this helper takes"


def test_a_role_that_is_none_is_told_by_the_name_of_the_file(sample: Sample) -> None:
    for role in ("", "web,*", 'a"b'):
        sample.knows(identity_of(sample.name), role=role)
        assert sample.complaint().startswith(f"{sample.site}/nodes/{identity_of(sample.name)}: no role")


def test_an_input_that_is_none_is_told(sample: Sample) -> None:
    for document in (b"", b"{}", b"hello"):
        assert "input" in sample.complaint(document)


def test_nothing_is_left_on_disk(sample: Sample) -> None:
    _ = sample.command
    before = sorted(sample.site.rglob("*"))
    sample.run()
    assert sorted(sample.site.rglob("*")) == before


# those for certificates


def test_the_certificate_is_for_the_key_and_the_name_and_nothing_else(certifying: Sample, api: Api) -> None:
    wanted, _ = certifying.run()
    certificate = x509.load_pem_x509_certificate(wanted.certificate.encode())
    request = x509.load_pem_x509_csr(json.loads(SAVED[certifying.name].read_text())["csr"]["csr"].encode())
    identity = identity_of(certifying.name)

    certificate.verify_directly_issued_by(api.authority.certificate)
    assert x509.load_pem_x509_certificate(wanted.ca.encode()) == api.authority.certificate
    assert certificate.public_key() == request.public_key()
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(identity)]
    assert [(name.oid, name.value) for name in certificate.subject] == [(NameOID.COMMON_NAME, identity)]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.serial_number.bit_length() > 64
    settings = {key: wanted.configuration[f"plugin.security.file.{key}"] for key in ("certificate", "key", "ca")}
    ssldir = "/etc/choria/ssl"
    assert settings == {
        "certificate": f"{ssldir}/certificate.pem",
        "key": f"{ssldir}/private.pem",
        "ca": f"{ssldir}/ca.pem",
    }


def test_other_names_and_uses_that_a_server_asks_for_are_not_in_its_certificate(certifying: Sample) -> None:
    identity, key = identity_of(certifying.name), csr.new_key()
    builder = x509.CertificateSigningRequestBuilder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)]))
    for extension in (
        x509.SubjectAlternativeName([x509.DNSName("broker.example.net")]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]),
        x509.OCSPNoCheck(),
    ):
        builder = builder.add_extension(extension, critical=False)
    request = builder.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()
    members = {"csr": request, "public_key": "", "ssldir": "/etc/choria/ssl"}

    certificate = x509.load_pem_x509_certificate(
        certifying.run(changed(certifying.name, csr=members))[0].certificate.encode()
    )
    assert certificate.public_key() == key.public_key()
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(identity)]
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert x509.OCSPNoCheck.oid not in {extension.oid for extension in certificate.extensions}


@pytest.mark.parametrize("name", ["x509.sh", "x509.py"])
def test_a_certificate_is_valid_from_now_on_for_a_year(name: str, site: Path, api: Api) -> None:
    certificate = x509.load_pem_x509_certificate(installed(name, site, api).run()[0].certificate.encode())
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc <= now
    assert abs(certificate.not_valid_after_utc - now - datetime.timedelta(days=365)) < datetime.timedelta(minutes=5)


def test_no_two_certificates_have_the_same_number(certifying: Sample) -> None:
    first, second = (x509.load_pem_x509_certificate(certifying.run()[0].certificate.encode()) for _ in range(2))
    assert first.serial_number != second.serial_number


@pytest.mark.parametrize(
    ("name", "file"), [(name, file) for name in CERTIFYING for file in ("ca.pem", KEYS.get(name, "ca-key.pem"))]
)
def test_a_file_of_the_ca_that_is_missing_is_named(name: str, file: str, site: Path, api: Api) -> None:
    sample = installed(name, site, api)
    (site / file).unlink()
    assert sample.complaint().startswith(f"{site}/{file}: ")


@pytest.mark.parametrize("name", ["x509.sh", "x509.py"])
def test_the_key_of_another_ca_is_told(name: str, site: Path, api: Api) -> None:
    sample = installed(name, site, api)
    (site / "ca-key.pem").write_text(pki.key_pem(pki.authority().key))
    wanted = "Issuer CA certificate and key do not match" if name == "x509.sh" else f"{site}/ca-key.pem: not the key of"
    with pytest.raises(ExitError, match=re.escape(wanted)):
        sample.run()


@pytest.mark.parametrize(
    "change", [("\n", "\r\n"), ("-----BEGIN", 'Subject: "x"\n-----BEGIN'), ("-----B", "\t\n-----B")]
)
def test_a_ca_that_is_not_pem_alone_does_not_spoil_the_json_of_a_shell(
    change: tuple[str, str], site: Path, api: Api
) -> None:
    sample = installed("x509.sh", site, api)
    (site / "ca.pem").write_text((site / "ca.pem").read_text().replace(*change), newline="")
    assert sample.complaint().startswith(f"{site}/ca.pem: something else than PEM is in it")


@pytest.mark.parametrize("ssldir", ["", "ssl", "/etc/$(id)", '/a"b', "/a b", "/a\nb"])
def test_a_directory_that_could_be_something_else_is_refused_by_a_shell(ssldir: str, site: Path, api: Api) -> None:
    sample = installed("x509.sh", site, api)
    request = json.loads(SAVED["x509.sh"].read_text())["csr"] | {"ssldir": ssldir}
    assert sample.complaint(changed("x509.sh", csr=request)) == "the ssldir is not one that this helper takes"


def test_without_a_request_the_feature_is_named(certifying: Sample) -> None:
    complaint = certifying.complaint(changed(certifying.name, csr=None))
    assert complaint == "the input has no csr: it comes with features: pki: true in provisioner.yaml"


def test_what_openssl_chokes_on_is_told(site: Path, api: Api) -> None:
    sample = installed("x509.sh", site, api)
    members = {"csr": "-----BEGIN CERTIFICATE REQUEST-----\nMIIB\n-----END CERTIFICATE REQUEST-----\n"}
    document = changed("x509.sh", csr={"public_key": "", **members, "ssldir": "/etc/choria/ssl"})
    with pytest.raises(ExitError, match=r"openssl could not sign the request$"):
        helper_process.run(sample.command, document, timeout=PATIENCE_SECONDS, cancelled=lambda: False)


class TestApi:
    """The sample that asks an API, when that is not well."""

    @pytest.fixture
    def asking(self, site: Path, api: Api) -> Sample:
        return installed("cfssl.py", site, api)

    def test_it_asks_for_the_name_and_the_profile(self, asking: Sample, api: Api) -> None:
        asking.run()
        identity = identity_of("cfssl.py")
        (asked,) = api.asked
        assert {key: value for key, value in asked.items() if key != "certificate_request"} == {
            "hosts": [identity],
            "subject": {"CN": identity},
            "profile": "choria",
        }

    def test_it_is_down(self, site: Path, api: Api, tmp_path: Path) -> None:
        with serving(api.authority, tmp_path) as other:
            sample = installed("cfssl.py", site, other)
        assert re.match(r"127\.0\.0\.1:\d+ cannot be asked to sign: .*refused", sample.complaint())

    def test_it_is_somebody_else(self, asking: Sample, site: Path) -> None:
        Authority().write(site)
        assert "CERTIFICATE_VERIFY_FAILED" in asking.complaint()

    def test_it_refuses_the_key(self, asking: Sample, site: Path) -> None:
        (site / "cfssl.key").write_text("00" * 16)
        assert asking.complaint().startswith(
            "127.0.0.1 gives no certificate: [{'code': 6, 'message': 'invalid token'}]"
        )

    def test_its_key_is_none(self, asking: Sample, site: Path) -> None:
        (site / "cfssl.key").write_text("s3cret")
        assert asking.complaint() == f"{site}/cfssl.key: not hexadecimal digits"

    @pytest.mark.parametrize(
        ("status", "body", "text"),
        [
            (502, b"<html>", "127.0.0.1:{port} answers with 502 and no JSON"),
            (200, b"[]", "127.0.0.1 gives no certificate: None"),
            (200, b'{"result": {}}', "127.0.0.1 gives no certificate: None"),
            (200, b'{"result": null, "errors": ["x"]}', "127.0.0.1 gives no certificate: ['x']"),
        ],
    )
    def test_it_answers_something_else(self, asking: Sample, api: Api, status: int, body: bytes, text: str) -> None:
        api.reply = lambda: (status, body)
        assert asking.complaint().startswith(text.format(port=api.port))

    def test_it_does_not_answer(self, asking: Sample, api: Api) -> None:
        release = threading.Event()

        def wait() -> tuple[int, bytes]:
            release.wait(PATIENCE_SECONDS)
            return 200, b"{}"

        api.reply = wait
        asking.changes["TIMEOUT_SECONDS = 5.0"] = "TIMEOUT_SECONDS = 0.2"
        try:
            assert asking.complaint().endswith("cannot be asked to sign: The read operation timed out")
        finally:
            release.set()


# the one for an organization


class TestOrganization:
    """The daemon signs what it asks for."""

    @pytest.fixture
    def sample(self, site: Path, api: Api) -> Sample:
        return installed("organization.py", site, api)

    def test_the_files_are_where_the_server_has_its_seed(self, sample: Sample) -> None:
        wanted, _ = sample.run()
        assert wanted.configuration["plugin.security.choria.seed_file"] == "/srv/server.seed"
        assert wanted.configuration["plugin.security.choria.token_file"] == "/srv/server.jwt"
        assert wanted.server_claims.permissions == {"submission": True, "streams": True}

    def test_without_a_key_the_feature_is_named(self, sample: Sample) -> None:
        complaint = sample.complaint(changed(sample.name, ed25519_pubkey=None))
        assert complaint.startswith("the input has no ed25519_pubkey: it comes with features: ed25519: true")

    def test_the_key_of_the_issuer_is_missing(self, sample: Sample, site: Path) -> None:
        (site / "issuer.public").unlink()
        assert sample.complaint().startswith(f"{site}/issuer.public: No such file or directory")

    def test_the_key_of_the_issuer_is_none(self, sample: Sample, site: Path) -> None:
        (site / "issuer.public").write_text("AB" * 32)
        assert sample.complaint() == f"{site}/issuer.public: not 64 hexadecimal digits"


# on whole networks


@contextlib.contextmanager
def at_work(network: Network, broker: NatsServer, sample: Sample) -> Iterator[Path]:
    """A daemon with this sample for its helper; gives its log."""
    log = sample.site / "daemon.log"
    helper_setting = shlex.join(sample.command)
    config, client = network.configure(broker.url, helper=helper_setting, workers=2, logfile=str(log))
    command = [sys.executable, "-m", "provisioner", "run", "--config", str(config), "--choria-config", str(client)]
    with subprocess.Popen(command, env={**os.environ, **network.environment}, cwd=ROOT) as daemon:
        try:
            yield log
        finally:
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(PATIENCE_SECONDS) == 0


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Network, NatsServer]]]:
    """Gives the network of a kind, and its broker."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def network(kind: str) -> tuple[Network, NatsServer]:
            made = NETWORKS[kind](tmp_path_factory.mktemp(kind))
            return made, stack.enter_context(NatsServer(made.broker))

        yield network


@pytest.mark.parametrize("name", ALL)
def test_the_servers_of_a_network_are_provisioned_by_it(
    name: str,
    networks: Callable[[str], tuple[Network, NatsServer]],
    site: Path,
    tmp_path: Path,
    eventually: Callable[[Callable[[], object]], None],
) -> None:
    kind = "x509" if name in CERTIFYING else "org" if name in ORGANIZATION else "insecure"
    network, broker = networks(kind)
    known = [f"n{number}.example.net" for number in range(4)]
    sample = Sample(name, site, **{"broker.example.net:4222": broker.url})
    sample.knows(*known)
    with contextlib.ExitStack() as stack:
        if kind == "x509":
            authority = Authority.of(network)
            authority.write(site)
        if name == "cfssl.py":
            sample.changes |= asking(stack.enter_context(serving(authority, tmp_path)))
        if kind == "org":
            (site / "issuer.public").write_text(network.provisioner["jwt_verify_cert"])
        servers = [
            Server(identity=identity, site=network.site(broker.url)) for identity in (*known, "stray.example.net")
        ]
        fleet = network.fleet(broker.url, servers)
        stack.enter_context(fleet)
        log = stack.enter_context(at_work(network, broker, sample))
        eventually(lambda: fleet.counts().provisioned == len(known))
        eventually(lambda: "configuration deferred: there is no " in log.read_text())
        counts = fleet.counts()
        assert (counts.provisioned, counts.unfit, list(counts.objections)) == (len(known), 0, [])
        assert servers[-1].config is None
