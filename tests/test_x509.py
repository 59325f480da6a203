"""Networks secured by certificates: signatures as recorded, and files that are checked, watched and read again."""

from __future__ import annotations

import base64
import json
import logging
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509 import load_pem_x509_certificate

from provisioner.choria import settings, tls
from provisioner.choria.certificates import load_pair
from provisioner.choria.credentials import CredentialsError, File
from provisioner.choria.security import choose
from provisioner.choria.settings import Settings
from provisioner.choria.x509 import X509
from provisioner.errors import ConfigurationError
from tests.certificates import Authority, Files, replace
from tests.conftest import Eventually
from tests.networks import IDENTITY, X509Network

FIXTURES = Path(__file__).parent / "fixtures" / "v1"
REQUESTS = sorted(str(path.relative_to(FIXTURES)) for path in FIXTURES.glob("x509*/*-request.json"))
RECORDED = Files(FIXTURES / "keys" / "provisioner.pem", FIXTURES / "keys" / "provisioner-key.pem")
#: When all certificates of the fixtures are valid.
RECORDED_TIME = 1795990000.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> X509Network:
    return X509Network.make(tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Another certificate and key for the provisioner, valid for a month more."""
    authority = Authority(tmp_path_factory.mktemp("renewed"))
    return authority.issue(IDENTITY, hosts=(IDENTITY,), rsa_key=True, days=(-1, 90))


@pytest.fixture
def network(made: X509Network, tmp_path: Path) -> X509Network:
    """A network whose provisioner's files may be changed."""
    own = Files(tmp_path / "own.pem", tmp_path / "own.key")
    own.replace(made.own)
    return attrs.evolve(made, own=own)


def problems(configured: Settings) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        choose(configured, insecure=False)
    return list(raised.value.problems)


def is_signed_by(files: Files, text: bytes, signature: str) -> bool:
    public = load_pem_x509_certificate(files.certificate.read_bytes()).public_key()
    assert isinstance(public, RSAPublicKey)
    try:
        public.verify(base64.b64decode(signature), text, PKCS1v15(), SHA256())
    except InvalidSignature:
        return False
    return True


class TestSigning:
    @pytest.fixture
    def recorded(self) -> X509:
        configured = Settings(
            path=Path("choria.cfg"),
            identity="provisioner.choria",
            certname="provisioner.choria",
            provider="file",
            file_certificate=str(RECORDED.certificate),
            file_key=str(RECORDED.key),
            file_ca=str(FIXTURES / "keys" / "ca.pem"),
        )
        return X509(configured, clock=lambda: RECORDED_TIME)

    @pytest.mark.parametrize("name", REQUESTS)
    def test_a_request_is_byte_for_byte_the_recorded_one(self, recorded: X509, name: str) -> None:
        payload = (FIXTURES / name).read_bytes()
        transport = json.loads(payload)
        secure = json.loads(base64.b64decode(transport["data"]))
        request = json.loads(secure["message"])
        envelope = request["envelope"]
        assert recorded.protocol.sign(secure["message"].encode()) == (secure["signature"], secure["pubcert"])

        protocol = attrs.evolve(recorded.protocol, clock=lambda: envelope["time"])
        made = protocol.request(
            agent=envelope["agent"],
            target_agent=envelope["filter"]["agent"][0],
            body=request["message"],
            request_id=envelope["requestid"],
            reply_to=transport["headers"]["reply-to"],
            connected_url=transport["headers"]["seen-by"][0][0],
        )

        assert made == payload
        assert is_signed_by(RECORDED, secure["message"].encode(), secure["signature"])

    def test_a_tampered_request_does_not_verify(self) -> None:
        payload = json.loads((FIXTURES / "bad" / "request-bad-signature.json").read_bytes())
        secure = json.loads(base64.b64decode(payload["data"]))
        assert not is_signed_by(RECORDED, secure["message"].encode(), secure["signature"])

    def test_the_whole_file_of_the_certificate_goes_along(self, network: X509Network) -> None:
        text = b"first the text\r\n\xff\r\n" + network.own.certificate.read_bytes() + b"\nand a chain:\n"
        text += network.authority.certificate.read_bytes()
        network.own.certificate.write_bytes(text)
        _, certificate = X509(network.settings(), clock=time.time).protocol.sign(b"x")
        assert certificate == text.decode(errors="replace")

    @pytest.mark.parametrize("form", [PrivateFormat.TraditionalOpenSSL, PrivateFormat.PKCS8])
    def test_either_form_of_the_key_will_do(self, network: X509Network, form: PrivateFormat) -> None:
        key = load_pem_private_key(network.own.key.read_bytes(), None)
        network.own.key.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
        signature, _ = X509(network.settings(), clock=time.time).protocol.sign(b"x")
        assert is_signed_by(network.own, b"x", signature)


@pytest.mark.usefixtures("replaced_files_are_seen_at_once")
class TestReplacedFiles:
    @pytest.fixture
    def x509(self, network: X509Network) -> X509:
        return X509(network.settings(), clock=time.time)

    def test_are_used_from_the_next_signature_on(self, x509: X509, network: X509Network, renewed: Files) -> None:
        before = x509.expiries()["certificate"]
        network.own.replace(renewed)
        signature, certificate = x509.protocol.sign(b"x")
        assert certificate == renewed.certificate.read_text()
        assert is_signed_by(renewed, b"x", signature)
        month = 30 * 86400
        assert x509.expiries()["certificate"] == pytest.approx(before + month, abs=3600)

    def test_never_mix_while_they_are_replaced_one_after_the_other(
        self, x509: X509, network: X509Network, made: X509Network, renewed: Files, caplog: pytest.LogCaptureFixture
    ) -> None:
        replace(network.own.certificate, renewed.certificate.read_bytes())
        for _ in range(3):
            signature, certificate = x509.protocol.sign(b"x")
            assert certificate == made.own.certificate.read_text()
            assert is_signed_by(made.own, b"x", signature)
        (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
        assert "plugin.security.file.key" in warning
        assert "not the key of the certificate" in warning

        replace(network.own.key, renewed.key.read_bytes())
        signature, certificate = x509.protocol.sign(b"x")
        assert certificate == renewed.certificate.read_text()
        assert is_signed_by(renewed, b"x", signature)

    def test_that_are_of_no_use_leave_those_before_in_use(
        self, x509: X509, network: X509Network, made: X509Network
    ) -> None:
        network.own.key.unlink()
        network.own.certificate.write_text("nonsense")
        signature, certificate = x509.protocol.sign(b"x")
        assert certificate == made.own.certificate.read_text()
        assert is_signed_by(made.own, b"x", signature)
        assert "certificate" in x509.expiries()

    def test_are_not_read_as_long_as_nothing_has_changed(
        self, x509: X509, network: X509Network, renewed: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[Path] = []
        read_bytes = Path.read_bytes

        def noting(path: Path) -> bytes:
            read.append(path)
            return read_bytes(path)

        network.own.replace(renewed)
        x509.protocol.sign(b"x")
        monkeypatch.setattr(Path, "read_bytes", noting)
        x509.protocol.sign(b"x")
        assert not read

        replace(network.own.key, b"another")
        for _ in range(3):
            x509.protocol.sign(b"x")
        assert read.count(network.own.key) == 1, "what cannot be used is not read at every use either"


def test_replaced_files_are_used_before_long(network: X509Network, renewed: Files, eventually: Eventually) -> None:
    x509 = X509(network.settings(), clock=time.time)
    network.own.replace(renewed)
    eventually(lambda: x509.protocol.sign(b"x")[1] == renewed.certificate.read_text())


def _missing(files: Files) -> None:
    files.certificate.unlink()
    files.key.unlink()


def _unreadable(files: Files) -> None:
    _missing(files)
    files.certificate.mkdir()
    files.key.mkdir()


def _nonsense(files: Files) -> None:
    files.certificate.write_text("nonsense")
    files.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")


class TestAtTheStart:
    @pytest.mark.parametrize(
        ("spoil", "certificate", "key"),
        [
            (_missing, "No such file or directory", "No such file or directory"),
            (_unreadable, "Is a directory", "Is a directory"),
            (_nonsense, "holds no certificate in PEM that can be read", "holds no private key in PEM that can be read"),
        ],
        ids=["missing", "unreadable", "nonsense"],
    )
    def test_all_problems_are_told_at_once(
        self, network: X509Network, spoil: Any, certificate: str, key: str, tmp_path: Path
    ) -> None:
        spoil(network.own)
        ca = tmp_path / "ca.pem"
        ca.write_text("nothing")
        suites, *others = problems(network.settings(file_ca=str(ca), cipher_suites=("TLS_X",), ecc_curves=("P1", "")))
        assert suites.startswith("/etc/choria.cfg: plugin.security.cipher_suites: given 'TLS_X', wanted a name like")
        assert others == [
            "/etc/choria.cfg: plugin.security.ecc_curves: given 'P1', wanted X25519, CurveP256, CurveP384, CurveP521",
            f"/etc/choria.cfg: plugin.security.file.certificate: {network.own.certificate}: {certificate}",
            f"/etc/choria.cfg: plugin.security.file.key: {network.own.key}: {key}",
            f"/etc/choria.cfg: plugin.security.file.ca: {ca}: holds no certificate in PEM that can be read",
        ]

    def test_nothing_configured_is_three_problems(self) -> None:
        bare = Settings(path=Path("/etc/choria.cfg"), identity=IDENTITY, certname=IDENTITY, provider="file")
        assert problems(bare) == [
            f"/etc/choria.cfg: plugin.security.file.{name}: not set, wanted the name of a file"
            for name in ("certificate", "key", "ca")
        ]

    def test_the_key_of_another_certificate(self, network: X509Network, renewed: Files) -> None:
        replace(network.own.key, renewed.key.read_bytes())
        (problem,) = problems(network.settings())
        assert problem.startswith(f"/etc/choria.cfg: plugin.security.file.key: {network.own.key}: not the key of")
        assert "plugin.security.file.certificate" in problem

    def test_a_key_that_cannot_sign(self, network: X509Network) -> None:
        network.own.replace(network.authority.issue("ec", hosts=(IDENTITY,)))
        (problem,) = problems(network.settings())
        assert "plugin.security.file.key" in problem
        assert "not an RSA key" in problem

    def test_an_encrypted_key(self, network: X509Network) -> None:
        network.own.replace(network.authority.issue("encrypted", hosts=(IDENTITY,), rsa_key=True, encrypted=True))
        (problem,) = problems(network.settings())
        assert "plugin.security.file.key" in problem
        assert "encrypted" in problem

    def test_a_certificate_that_has_expired(self, network: X509Network) -> None:
        network.own.replace(network.authority.issue("invalid", hosts=(IDENTITY,), rsa_key=True, days=(-2, -1)))
        (problem,) = problems(network.settings())
        assert f"plugin.security.file.certificate: {network.own.certificate}: expired since" in problem

    def test_one_that_will_be_valid_later_is_a_warning(self, network: X509Network) -> None:
        network.own.replace(network.authority.issue("invalid", hosts=(IDENTITY,), rsa_key=True, days=(1, 2)))
        (warning,) = choose(network.settings(), insecure=False).warnings
        assert "not valid before" in warning

    def test_an_authority_that_is_not_valid_now(self, network: X509Network) -> None:
        far = time.time() + 10 * 365 * 86400
        with pytest.raises(ConfigurationError) as raised:
            choose(network.settings(), insecure=False, clock=lambda: far)
        assert any("plugin.security.file.ca" in problem for problem in raised.value.problems)

    def test_an_authority_that_has_expired_beside_one_that_has_not(self, network: X509Network, tmp_path: Path) -> None:
        bundle = tmp_path / "bundle.pem"
        expired = network.authority.issue("expired authority", days=(-2, -1))
        bundle.write_bytes(expired.certificate.read_bytes() + network.authority.certificate.read_bytes())
        assert choose(network.settings(file_ca=str(bundle)), insecure=False).warnings == ()

    def test_a_key_too_weak_for_tls(self, network: X509Network, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.certificates.RSA_BITS", 1024)
        network.own.replace(network.authority.issue("weak", hosts=(IDENTITY,), rsa_key=True))
        (problem,) = problems(network.settings())
        assert problem.endswith("key too small")

    def test_what_stops_nothing_is_a_warning(self, network: X509Network) -> None:
        network.own.replace(network.authority.issue("soon", rsa_key=True, days=(-1, 2.5)))
        (name,) = choose(network.settings(ecc_curves=("CurveP256",)), insecure=False).warnings
        assert f"is not for {IDENTITY}" in name

    def test_the_common_name_counts_too(self, network: X509Network) -> None:
        network.own.replace(network.authority.issue(IDENTITY, rsa_key=True, days=(-1, 60)))
        assert choose(network.settings(), insecure=False).warnings == ()

    def test_secrets_are_not_shown(self, network: X509Network) -> None:
        pair = load_pair(File("c", str(network.own.certificate)), File("k", str(network.own.key)))
        assert "key=" not in repr(pair)


class TestLimits:
    def test_cipher_suites_by_the_names_of_go(self, network: X509Network) -> None:
        suites = ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", "TLS_AES_128_GCM_SHA256")
        context = X509(network.settings(cipher_suites=suites), clock=time.time).tls_context()
        older = {cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"}
        assert older == {"ECDHE-RSA-AES256-GCM-SHA384"}

    def test_only_suites_of_tls_1_3_leave_nothing_older(self, network: X509Network) -> None:
        configured = network.settings(cipher_suites=("TLS_AES_128_GCM_SHA256",))
        assert X509(configured, clock=time.time).tls_context().minimum_version == ssl.TLSVersion.TLSv1_3

    @pytest.mark.parametrize("name", sorted(tls.TLS12_CIPHERS))
    def test_every_suite_is_one_that_openssl_has(self, network: X509Network, name: str) -> None:
        X509(network.settings(cipher_suites=(name,)), clock=time.time).tls_context()

    @pytest.mark.parametrize("name", sorted(tls.CURVES))
    def test_every_curve_is_one_that_openssl_has(self, network: X509Network, name: str) -> None:
        if name == "X25519" and sys.version_info < (3, 11, 3):
            pytest.skip("this Python cannot choose it")
        X509(network.settings(ecc_curves=(name,)), clock=time.time).tls_context()

    def test_a_curve_that_python_cannot_choose(self, network: X509Network, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(tls.CURVES, "CurveP256", "unheard of")
        with pytest.raises(CredentialsError, match=r"ecc_curves: this system's Python cannot choose CurveP256"):
            X509(network.settings(ecc_curves=("CurveP256",)), clock=time.time).tls_context()

    def test_several_curves_are_warned_about(self, network: X509Network) -> None:
        (warning,) = X509(network.settings(ecc_curves=("X25519", "CurveP256")), clock=time.time).warnings
        assert warning.startswith("plugin.security.ecc_curves: ignored")


class TestPuppet:
    @pytest.fixture
    def load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        file = tmp_path / "choria.cfg"

        def load(text: str = "", **arguments: Any) -> Settings:
            file.write_text(f"identity = {IDENTITY}\n{text}")
            usual: dict[str, Any] = {"environ": {"USER": "bob", "HOME": "/home/bob"}, "cwd": tmp_path, "uid": 1000}
            return settings.load(file, **usual | arguments)

        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        return load

    def test_the_files_are_found_below_the_directory(self, load: Any) -> None:
        loaded = load("plugin.choria.ssldir = /ssl\n")
        assert loaded.file_certificate == "/ssl/certs/bob.mcollective.pem"
        assert loaded.file_key == "/ssl/private_keys/bob.mcollective.pem"
        assert loaded.file_ca == "/ssl/certs/ca.pem"
        assert loaded.support_legacy_certificates

    def test_which_is_in_the_home_of_a_user(self, load: Any) -> None:
        assert load().file_ca == "/home/bob/.puppetlabs/etc/puppet/ssl/certs/ca.pem"

    def test_and_for_root_where_puppet_says(self, load: Any, tmp_path: Path) -> None:
        puppet = tmp_path / "bin" / "puppet"
        puppet.parent.mkdir()
        puppet.write_text('#!/bin/sh\n[ "$*" = "config print ssldir" ] && echo /etc/puppetlabs/puppet/ssl\n')
        puppet.chmod(0o755)
        assert load(uid=0).file_ca == "/etc/puppetlabs/puppet/ssl/certs/ca.pem"

    def test_without_puppet_root_has_to_name_it(self, load: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"plugin\.choria\.ssldir: given nothing, wanted a directory"):
            load(uid=0)

    def test_missing_files_are_told_by_the_setting_that_led_there(self, load: Any) -> None:
        lines = problems(load("plugin.choria.ssldir = /ssl\n"))
        assert len(lines) == 3
        assert all("plugin.choria.ssldir, as plugin.security.provider is puppet: /ssl/" in line for line in lines)
