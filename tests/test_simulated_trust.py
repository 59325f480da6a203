"""Who is trusted on the simulated secured networks: as the real ones decide it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from hypothesis import given
from hypothesis import strategies as st

from provisioner.simulate import csr, ksuid, pki
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.trust import UntrustedError
from provisioner.simulate.trust_organization import OrganizationTrust
from provisioner.simulate.trust_x509 import CertificateTrust

FIXTURES = Path(__file__).parent / "fixtures"
KEYS: dict[str, Any] = json.loads((FIXTURES / "v2" / "keys.json").read_text())
REFERENCE = KEYS["reference_time"]
ISSUER: str = KEYS["issuer"]["public"]
TOKENS = FIXTURES / "v2" / "tokens"
REFUSED_SERVERS = sorted(path.name for path in (TOKENS / "bad").glob("server-*.jwt"))
GOOD_SERVERS = ("server-s1-by-go.jwt", "server-py1.jwt", "server-py1-org-signed.jwt")

trust = OrganizationTrust(ISSUER, clock=lambda: REFERENCE)


def token(name: str) -> str:
    return (TOKENS / name).read_text()


# --- organizations


@pytest.mark.parametrize("name", GOOD_SERVERS)
def test_a_server_token_that_real_brokers_take_is_taken(name: str) -> None:
    assert trust.server(token(name)) == json.loads(token("decoded.json"))[name]["claims"]


@pytest.mark.parametrize("name", REFUSED_SERVERS)
def test_a_server_token_that_real_brokers_refuse_is_refused(name: str) -> None:
    with pytest.raises(UntrustedError):
        trust.server(token(f"bad/{name}"))


def test_it_says_what_is_wrong_with_a_token() -> None:
    for name, reason in {
        "server-jti-not-ksuid.jwt": "no ksuid",
        "server-ksuid-not-iat.jwt": "not of the second",
        "server-no-issexp.jwt": "without issexp",
        "server-issuer-expired.jwt": "issuer is expired",
        "server-tcs-tampered.jwt": "chain of trust is broken",
        "server-chain-but-signed-by-org.jwt": "not signed by its issuer",
        "server-no-ou.jwt": "organization",
        "server-no-public-key.jwt": "without public_key",
        "server-not-yet-valid.jwt": "not valid yet",
        "server-expired.jwt": "expired",
        "server-signed-by-signer-without-chain.jwt": "not signed by its issuer",
    }.items():
        with pytest.raises(UntrustedError, match=reason):
            trust.server(token(f"bad/{name}"))


@pytest.mark.parametrize("name", ["client-expired.jwt", "client-of-another-issuer.jwt", "client-unknown-ou.jwt"])
def test_a_client_token_that_real_brokers_refuse_is_refused(name: str) -> None:
    with pytest.raises(UntrustedError):
        trust.client(token(f"bad/{name}"))


def test_a_server_token_is_not_a_clients_nor_the_other_way_round() -> None:
    with pytest.raises(UntrustedError):
        trust.client(token("server-py1-org-signed.jwt"))
    with pytest.raises(UntrustedError, match="another purpose"):
        trust.server(token("signer.jwt"))


@given(st.text(max_size=100))
def test_any_text_is_no_token(text: str) -> None:
    for check in (trust.client, trust.server):
        with pytest.raises(UntrustedError):
            check(text)


SETTINGS = {
    "plugin.security.provider": "choria",
    "plugin.security.issuer.choria.public": ISSUER,
    "plugin.security.choria.token_file": "/c/server.jwt",
    "plugin.security.choria.seed_file": "/c/server.seed",
}
S1 = {"/c/server.jwt": token("server-s1-by-go.jwt"), "/c/server.seed": KEYS["server_s1"]["seed"]}


def test_a_server_with_a_token_for_its_seed_is_fit() -> None:
    trust.check_server(SETTINGS, S1, identity="s1.org.lab")


@pytest.mark.parametrize(
    ("settings", "files", "identity", "reason"),
    [
        ({"plugin.security.provider": "file"}, {}, "s1.org.lab", "plugin.security.provider is not choria"),
        ({"plugin.security.issuer.choria.public": "00"}, {}, "s1.org.lab", "issuer"),
        ({"plugin.security.choria.token_file": "/d"}, {}, "s1.org.lab", "token_file names no file"),
        ({}, {"/c/server.seed": KEYS["server_py"]["seed"]}, "s1.org.lab", "does not fit its seed"),
        ({}, {"/c/server.seed": "00"}, "s1.org.lab", "64 hexadecimal digits"),
        ({}, {"/c/server.seed": "z" * 64}, "s1.org.lab", "64 hexadecimal digits"),
        ({}, {"/c/server.jwt": "a.b.c"}, "s1.org.lab", "not a token"),
        ({}, {}, "s2.org.lab", "another identity"),
    ],
)
def test_a_server_without_all_of_it_is_unfit(
    settings: dict[str, str], files: dict[str, str], identity: str, reason: str
) -> None:
    with pytest.raises(UntrustedError, match=reason):
        trust.check_server({**SETTINGS, **settings}, {**S1, **files}, identity=identity)


# --- ids


@given(st.integers(ksuid.EPOCH_SECONDS, ksuid.EPOCH_SECONDS + 2**32 - 1))
def test_a_ksuid_has_its_second(second: int) -> None:
    assert ksuid.second(ksuid.new(second)) == second


def test_the_second_of_a_recorded_ksuid_is_that_of_its_token() -> None:
    claims = json.loads(token("decoded.json"))["signer.jwt"]["claims"]
    assert ksuid.second(claims["jti"]) == claims["iat"]


@pytest.mark.parametrize("text", ["", "0" * 26, "0" * 28, "-" * 27, "z" * 27])
def test_what_is_no_ksuid_has_no_second(text: str) -> None:
    assert ksuid.second(text) is None


# --- certificates


AUTHORITY, KEY = pki.authority(), csr.new_key()
CERTIFICATE = AUTHORITY.issue("s1.lab", KEY.public_key())
certificates = CertificateTrust(AUTHORITY.certificate)


@pytest.mark.parametrize("name", ["discovery", "jwt", "gencsr", "inventory", "configure", "restart", "shutdown"])
def test_the_signatures_of_the_go_provisioner_verify(name: str) -> None:
    keys = FIXTURES / "v1" / "keys"
    real = CertificateTrust(x509.load_pem_x509_certificate((keys / "ca.pem").read_bytes()), clock=lambda: REFERENCE)
    request = EnvelopesV1(real.check_request).open((FIXTURES / "v1" / "x509" / f"{name}-request.json").read_bytes())
    assert request.objection == ""


def signed(key: RSAPrivateKey, text: bytes = b"text") -> str:
    return base64.b64encode(key.sign(text, padding.PKCS1v15(), hashes.SHA256())).decode()


@pytest.mark.parametrize(
    ("caller", "proof", "signature", "objection"),
    [
        ("choria=prov.choria", lambda: AUTHORITY.issue("prov.choria", KEY.public_key()), lambda: signed(KEY), ""),
        (
            "choria=prov.choria",
            lambda: AUTHORITY.issue("prov.choria", KEY.public_key()),
            lambda: signed(KEY, b"other"),
            "the signature does not verify with the caller's certificate",
        ),
        (
            "choria=prov.choria",
            lambda: AUTHORITY.issue("prov.choria", KEY.public_key()),
            lambda: "insecure",
            "the signature does not verify with the caller's certificate",
        ),
        (
            "choria=other.choria",
            lambda: AUTHORITY.issue("prov.choria", KEY.public_key()),
            lambda: signed(KEY),
            "the certificate is not the caller's",
        ),
        (
            "choria=s1.lab",
            lambda: CERTIFICATE,
            lambda: signed(KEY),
            "servers do not take requests from a caller of this name",
        ),
        (
            "choria=prov.choria",
            lambda: pki.authority().issue("prov.choria", KEY.public_key()),
            lambda: signed(KEY),
            "the certificate is not of the network's CA",
        ),
        ("choria=prov.choria", lambda: "insecure", lambda: signed(KEY), "a certificate cannot be read"),
        (
            "choria=prov.choria",
            lambda: AUTHORITY.issue("prov.choria", ec.generate_private_key(ec.SECP256R1()).public_key()),
            lambda: "",
            "the caller's key is not of RSA",
        ),
    ],
)
def test_the_signature_of_a_request_is_judged_as_provisioned_servers_do_it(
    caller: str, proof: Callable[[], str], signature: Callable[[], str], objection: str
) -> None:
    assert certificates.check_request(b"text", signature=signature(), proof=proof(), caller=caller) == objection


X509_SETTINGS = {
    "plugin.security.provider": "file",
    "plugin.security.file.certificate": "/s/certificate.pem",
    "plugin.security.file.key": "/s/private.pem",
    "plugin.security.file.ca": "/s/ca.pem",
}
X509_FILES = {
    "/s/certificate.pem": CERTIFICATE,
    "/s/private.pem": csr.private_pem(KEY),
    "/s/ca.pem": pki.pem(AUTHORITY.certificate),
}


def test_a_server_with_a_certificate_for_its_key_is_fit() -> None:
    certificates.check_server(X509_SETTINGS, X509_FILES, identity="s1.lab")


def test_an_expired_certificate_makes_a_server_unfit() -> None:
    later = CertificateTrust(AUTHORITY.certificate, clock=lambda: REFERENCE + 10 * 365 * 86400)
    with pytest.raises(UntrustedError, match="not valid now"):
        later.check_server(X509_SETTINGS, X509_FILES, identity="s1.lab")


@pytest.mark.parametrize(
    ("settings", "files", "identity", "reason"),
    [
        ({"plugin.security.provider": "choria"}, lambda: {}, "s1.lab", "provider is not file"),
        ({"plugin.security.file.key": "/other"}, lambda: {}, "s1.lab", "plugin.security.file.key names no file"),
        ({}, lambda: {"/s/private.pem": csr.private_pem(csr.new_key())}, "s1.lab", "does not fit the private key"),
        ({}, lambda: {"/s/private.pem": "rubbish"}, "s1.lab", "private key cannot be read"),
        ({}, lambda: {"/s/certificate.pem": "rubbish"}, "s1.lab", "certificate cannot be read"),
        ({}, lambda: {"/s/ca.pem": pki.pem(pki.authority().certificate)}, "s1.lab", "CA is not that of the network"),
        ({}, lambda: {}, "s2.lab", "for another name"),
    ],
)
def test_a_server_without_all_material_is_unfit(
    settings: dict[str, str], files: Callable[[], dict[str, str]], identity: str, reason: str
) -> None:
    with pytest.raises(UntrustedError, match=reason):
        certificates.check_server({**X509_SETTINGS, **settings}, {**X509_FILES, **files()}, identity=identity)
