"""Which provisioning JWTs are trusted, and that each refusal says why without showing the token.

The tokens in the fixtures were made by Choria, and accepted or refused by its broker. All are judged at a time at which
they were fresh.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from hypothesis import given
from hypothesis import strategies as st

from provisioner.errors import ConfigurationError, HostError
from provisioner.host.provisioning_jwt import NESTING_LIMIT, TokenError, Verifier

FIXTURES = Path(__file__).parent / "fixtures"
KEYS = FIXTURES / "v1" / "keys"
TOKENS = FIXTURES / "v2" / "tokens"
#: signed the tokens of the second protocol
ORGANIZATION_KEY = "7621a8e7f0725a9587fb69801478f17b8874f829a3a62dec8893b83900639961"
#: a time at which all golden tokens were fresh, in seconds since the epoch
NOW = 1_795_989_824

RSA_KEY = serialization.load_pem_private_key((KEYS / "jwt-signer-key.pem").read_bytes(), None)
RSA_PUBLIC_PEM = (KEYS / "jwt-signer.pem").read_bytes()
ED25519_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ED25519_HEX = ED25519_KEY.public_key().public_bytes_raw().hex()

GOOD = {"purpose": "choria_provisioning", "cht": "s3cret", "exp": NOW + 60}


def verifier(setting: str | Path = ED25519_HEX, *, now: float = NOW) -> Verifier:
    return Verifier(str(setting), clock=lambda: now)


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token_of(payload: bytes, header: object = None, key: Ed25519PrivateKey = ED25519_KEY) -> str:
    """A token with any payload and header, well-formed or not, and a good signature."""
    signed = f"{base64url(json.dumps(header or {'alg': 'EdDSA'}).encode())}.{base64url(payload)}"
    return f"{signed}.{base64url(key.sign(signed.encode()))}"


def token(claims: Mapping[str, Any]) -> str:
    return token_of(json.dumps(claims).encode())


def refusal(text: str, verify: Verifier | None = None) -> str:
    with pytest.raises(TokenError) as caught:
        (verify or verifier()).verify(text)
    message = str(caught.value)
    assert message.isprintable()
    return message.removeprefix("the provisioning JWT ")


def claims_of(text: str) -> dict[str, Any]:
    part = text.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims


# tokens made by Choria


@pytest.mark.parametrize("name", ["provisioning-insecure.jwt", "provisioning-x509.jwt"])
def test_an_rsa_token_of_chorias_gives_all_its_claims(name: str) -> None:
    text = (KEYS / name).read_text()
    claims = verifier(KEYS / "jwt-signer.pem").verify(text)
    assert claims == claims_of(text)
    assert (claims["cht"], claims["chpd"]) == ("s3cret-lab-token", True)


def test_an_ed25519_token_of_chorias_gives_all_its_claims() -> None:
    text = (TOKENS / "provisioning.jwt").read_text()
    decoded = json.loads((TOKENS / "decoded.json").read_text())["provisioning.jwt"]["claims"]
    assert verifier(ORGANIZATION_KEY).verify(text) == decoded


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("provisioning-expired.jwt", "is expired since 2025-11-29T22:03:44+00:00"),
        ("provisioning-of-another-issuer.jwt", "is signed by another key than that of jwt_verify_cert"),
        ("provisioning-signed-by-chain-issuer.jwt", "is signed by another key than that of jwt_verify_cert"),
        (
            "provisioning-with-org-tcs.jwt",
            "is expired: it has a chain signature (tcs), but its issuer is not valid now (issexp)",
        ),
    ],
)
def test_what_chorias_broker_refuses_is_refused(name: str, reason: str) -> None:
    assert refusal((TOKENS / "bad" / name).read_text(), verifier(ORGANIZATION_KEY)) == reason


def test_these_are_all_provisioning_tokens_that_chorias_broker_refuses() -> None:
    refused = {Path(case["file"]).name for case in json.loads((TOKENS / "rejected.json").read_text())}
    kept = {path.name for path in (TOKENS / "bad").glob("provisioning-*")}
    assert {name for name in refused if name.startswith("provisioning-")} == kept


def test_a_token_for_another_purpose_is_refused() -> None:
    assert refusal((TOKENS / "signer.jwt").read_text(), verifier(ORGANIZATION_KEY)) == (
        "is for another purpose: choria_client_id"
    )


# signature and algorithm


@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512"])
def test_an_rsa_key_takes_each_of_its_algorithms(algorithm: str) -> None:
    assert isinstance(RSA_KEY, RSAPrivateKey)
    assert verifier(KEYS / "jwt-signer.pem").verify(jwt.encode(GOOD, RSA_KEY, algorithm)) == GOOD


@pytest.mark.parametrize("algorithm", ["PS256", "PS512"])
def test_an_rsa_key_takes_no_other(algorithm: str) -> None:
    assert isinstance(RSA_KEY, RSAPrivateKey)
    assert refusal(jwt.encode(GOOD, RSA_KEY, algorithm), verifier(KEYS / "jwt-signer.pem")) == (
        f"is refused: algorithm {algorithm} is not accepted, the key of jwt_verify_cert goes with RS256, RS384, RS512"
    )


def test_a_token_of_the_other_kind_of_key_is_refused() -> None:
    assert "algorithm RS256 is not accepted" in refusal((KEYS / "provisioning-x509.jwt").read_text())
    assert "algorithm EdDSA is not accepted" in refusal(token(GOOD), verifier(KEYS / "jwt-signer.pem"))


@pytest.mark.parametrize("name", ["none", "None", "NONE"])
def test_an_unsigned_token_is_refused(name: str) -> None:
    text = f"{base64url(json.dumps({'alg': name}).encode())}.{base64url(json.dumps(GOOD).encode())}."
    for setting in (ED25519_HEX, KEYS / "jwt-signer.pem"):
        assert f"algorithm {name} is not accepted" in refusal(text, verifier(setting))


def test_the_public_key_is_no_shared_secret() -> None:
    signed = f"{base64url(json.dumps({'alg': 'HS256'}).encode())}.{base64url(json.dumps(GOOD).encode())}"
    text = f"{signed}.{base64url(hmac.digest(RSA_PUBLIC_PEM, signed.encode(), hashlib.sha256))}"
    assert "algorithm HS256 is not accepted" in refusal(text, verifier(KEYS / "jwt-signer.pem"))


def test_a_changed_claim_breaks_the_signature() -> None:
    header, _, signature = token(GOOD).split(".")
    other = base64url(json.dumps({**GOOD, "cht": "mine"}).encode())
    assert refusal(f"{header}.{other}.{signature}") == "is signed by another key than that of jwt_verify_cert"


@pytest.mark.parametrize("header", [{"alg": "a\nb"}, {"alg": ["EdDSA"]}, {"alg": {}}, {"alg": None}, {"typ": "JWT"}])
def test_an_odd_algorithm_is_refused_and_not_shown(header: object) -> None:
    assert "algorithm (not a word) is not accepted" in refusal(token_of(b"{}", header))


@pytest.mark.parametrize("header", [["EdDSA"], "EdDSA", {"alg": "EdDSA", "kid": 1}])
def test_an_odd_header_is_malformed(header: object) -> None:
    assert refusal(token_of(b"{}", header)) == "is malformed: its header or its base64url cannot be read"


def test_a_header_nested_without_end_is_malformed() -> None:
    header = base64url(b'{"alg":' + b"[" * 100_000)
    assert refusal(f"{header}.{base64url(b'{}')}.AAAA") == "is malformed: its header or its base64url cannot be read"


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a.b", "a.b.c.d", "a b.c.d", "ä.b.c", "\ud800.a.b", f"Bearer {token(GOOD)}", token(GOOD) + "="],
)
def test_what_is_no_compact_jwt_is_malformed(text: str) -> None:
    assert refusal(text) == "is malformed: not three parts in base64url"


def test_white_space_around_the_token_does_not_matter() -> None:
    assert verifier().verify(f"\r\n {token(GOOD)}\n") == GOOD


# claims


@pytest.mark.parametrize(
    "claims",
    [
        {"purpose": "choria_provisioning"},
        {"sub": "choria_provisioning"},
        {"sub": "choria_provisioning", "purpose": "choria_server"},
        {"purpose": "choria_provisioning", "sub": 5, "aud": ["x"], "iss": 1, "iat": "soon", "jti": {}},
        {**GOOD, "iat": NOW + 1000},
        {**GOOD, "exp": None, "nbf": None},
        {**GOOD, "exp": NOW + 0.5, "nbf": NOW},
        {**GOOD, "exp": 10**400, "nbf": -(10**400)},
        {**GOOD, "tcs": "ab", "issexp": NOW + 1},
        {**GOOD, "tcs": "", "issexp": 0},
        {**GOOD, "tcs": None},
        {**GOOD, "issexp": NOW - 1},
    ],
)
def test_a_token_is_trusted_when_purpose_and_times_are_right_whatever_else_it_says(claims: dict[str, Any]) -> None:
    assert verifier().verify(token(claims)) == claims


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({}, "is for another purpose: (not a word)"),
        ({"purpose": "choria_server", "sub": ["choria_provisioning"]}, "is for another purpose: choria_server"),
        ({"purpose": "a\nb"}, "is for another purpose: (not a word)"),
        ({**GOOD, "exp": NOW}, "is expired since 2026-11-29T22:03:44+00:00"),
        ({**GOOD, "exp": NOW - 0.5}, "is expired since 2026-11-29T22:03:43+00:00"),
        ({**GOOD, "exp": 0}, "is expired since 1970-01-01T00:00:00+00:00"),
        ({**GOOD, "exp": -(10**400)}, "is expired since a time beyond all calendars"),
        ({**GOOD, "exp": -1e300}, "is expired since a time beyond all calendars"),
        ({**GOOD, "exp": str(NOW + 60)}, "is malformed: its claim exp is not a number"),
        ({**GOOD, "exp": True}, "is malformed: its claim exp is not a number"),
        ({**GOOD, "exp": []}, "is malformed: its claim exp is not a number"),
        ({**GOOD, "nbf": NOW + 1}, "is not valid before 2026-11-29T22:03:45+00:00"),
        ({**GOOD, "nbf": 1e300}, "is not valid before a time beyond all calendars"),
        ({**GOOD, "nbf": {}}, "is malformed: its claim nbf is not a number"),
    ],
)
def test_a_token_is_refused_for_purpose_and_times(claims: dict[str, Any], reason: str) -> None:
    assert refusal(token(claims)) == reason


@pytest.mark.parametrize(
    "issuer", [{}, {"issexp": None}, {"issexp": NOW}, {"issexp": str(NOW + 60)}, {"issexp": True}, {"issexp": []}]
)
@pytest.mark.parametrize("chain", ["ab", 1, True, ["a"]])
def test_a_chain_signature_without_a_valid_issuer_expiry_counts_as_expired(
    chain: object, issuer: dict[str, object]
) -> None:
    assert "is expired: it has a chain signature" in refusal(token({**GOOD, "tcs": chain, **issuer}))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"not JSON", "its claims are not JSON"),
        (b"\xff", "its claims are not JSON"),
        ("{}".encode("utf-16"), "its claims are not JSON"),
        (b"\xef\xbb\xbf{}", "its claims are not JSON"),
        (b'{"exp":' + b"9" * 5000 + b"}", "its claims are not JSON"),
        (b'{"x":' + b"[" * 100_000, "its claims are not JSON"),
        (b"[]", "its claims are no object"),
        (b"null", "its claims are no object"),
        (b'{"purpose":"choria_provisioning","exp":NaN}', "a number in its claims is not finite"),
        (b'{"purpose":"choria_provisioning","x":[{"y":-1e999}]}', "a number in its claims is not finite"),
        (b'{"x":' * 900 + b"1" + b"}" * 900, f"its claims are nested more than {NESTING_LIMIT} deep"),
    ],
)
def test_a_signed_payload_that_is_no_claims_is_malformed(payload: bytes, reason: str) -> None:
    assert refusal(token_of(payload)) == f"is malformed: {reason}"


def test_claims_nested_as_deep_as_is_usual_are_fine() -> None:
    extensions: object = "leaf"
    for _ in range(NESTING_LIMIT // 2 - 1):
        extensions = {"a": [extensions]}
    assert verifier().verify(token({**GOOD, "extensions": extensions}))["extensions"] == extensions


def test_the_token_is_judged_at_the_time_of_the_call() -> None:
    now = [NOW]
    verify = Verifier(ED25519_HEX, clock=lambda: now[0])
    text = token(GOOD)
    verify.verify(text)
    now[0] += 61
    assert "is expired since" in refusal(text, verify)


def test_token_errors_concern_one_host() -> None:
    assert issubclass(TokenError, HostError)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
CLAIMS = st.dictionaries(st.sampled_from(["purpose", "sub", "exp", "nbf", "iat", "tcs", "issexp", "aud"]), JSON)


@given(CLAIMS)
def test_any_signed_claims_are_given_back_or_a_token_error(claims: dict[str, Any]) -> None:
    with contextlib.suppress(TokenError):
        assert verifier().verify(token({"sub": "choria_provisioning", **claims})) == {
            "sub": "choria_provisioning",
            **claims,
        }


@given(st.binary(), JSON)
def test_any_signed_payload_and_header_are_a_token_error_at_most(payload: bytes, header: object) -> None:
    for text in (token_of(payload), token_of(payload, header)):
        with contextlib.suppress(TokenError):
            verifier().verify(text)


@given(st.text() | st.from_regex(r"\A[\w-]*\.[\w-]*\.[\w-]*\Z"))
def test_any_text_is_a_token_error(text: str) -> None:
    with pytest.raises(TokenError):
        verifier().verify(text)


# the key


def certificate(key: RSAPrivateKey) -> bytes:
    """Expired long ago: it stands for its key, and its own dates do not matter."""
    name = x509.Name([])
    return (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime(2001, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2002, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def rsa_key_files() -> dict[str, bytes]:
    assert isinstance(RSA_KEY, RSAPrivateKey)
    pkcs1 = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.PKCS1)
    return {
        "public key": RSA_PUBLIC_PEM,
        "PKCS#1": pkcs1,
        "certificate": certificate(RSA_KEY),
        "trailing newlines": RSA_PUBLIC_PEM + b"\n\n",
        "text before": b"Signer of 2026, \xe9t\xe9\nkeep: well\n\n" + RSA_PUBLIC_PEM,
        "byte order mark and CRLF": b"\xef\xbb\xbf" + RSA_PUBLIC_PEM.replace(b"\n", b"\r\n"),
        "text before a certificate": b"subject=x\n" + certificate(RSA_KEY),
    }


@pytest.mark.parametrize("name", rsa_key_files())
def test_an_rsa_key_file_is_taken_in_every_usual_form(name: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(rsa_key_files()[name])
    assert verifier(file).verify((KEYS / "provisioning-x509.jwt").read_text())["purpose"] == "choria_provisioning"


@pytest.mark.parametrize("content", [ED25519_HEX, ED25519_HEX + "\n", f"  {ED25519_HEX.upper()}\r\n"])
def test_a_file_may_hold_an_ed25519_key_in_hexadecimal(content: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    assert verifier(file).verify(token(GOOD)) == GOOD


def test_the_setting_may_be_the_hexadecimal_key_in_either_case() -> None:
    assert verifier(ED25519_HEX.upper()).verify(token(GOOD)) == GOOD


def test_a_file_that_exists_wins_over_the_same_text_as_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(ED25519_HEX).write_bytes(RSA_PUBLIC_PEM)
    verifier(ED25519_HEX).verify((KEYS / "provisioning-x509.jwt").read_text())


def problem(setting: str | Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        verifier(setting)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("setting", ["/no/such/file", ED25519_HEX[1:], ED25519_HEX + "0", "x" * 64, "\udcff", "a\0b"])
def test_a_setting_that_is_neither_file_nor_key_is_an_error_at_once(setting: str) -> None:
    assert problem(setting) == f"jwt_verify_cert: {setting!r} is neither a file that exists nor 64 hexadecimal digits"


def test_no_setting_is_an_error_at_once() -> None:
    assert problem("") == "jwt_verify_cert: is not set"


def unusable_key_files() -> dict[str, tuple[bytes, str]]:
    assert isinstance(RSA_KEY, RSAPrivateKey)
    none = "holds neither a public key or certificate in PEM nor 64 hexadecimal digits"
    elliptic = generate_private_key(SECP256R1()).public_key()
    return {
        "empty": (b"", none),
        "short": (ED25519_HEX[1:].encode(), none),
        "cut": (RSA_PUBLIC_PEM[:200], none),
        "private": ((KEYS / "jwt-signer-key.pem").read_bytes(), none),
        "broken": (RSA_PUBLIC_PEM.replace(b"MII", b"AAA"), "the PEM in it cannot be read"),
        "no base64": (RSA_PUBLIC_PEM.replace(b"MII", b"!!!"), "the PEM in it cannot be read"),
        "broken certificate": (certificate(RSA_KEY).replace(b"MII", b"AAA"), "the PEM in it cannot be read"),
        "elliptic": (
            elliptic.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
            "the key in it is neither RSA nor Ed25519",
        ),
    }


@pytest.mark.parametrize("name", unusable_key_files())
def test_a_file_without_a_usable_key_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    content, reason = unusable_key_files()[name]
    file = tmp_path / "key"
    file.write_bytes(content)
    assert problem(file) == f"jwt_verify_cert: {file}: {reason}"


def test_a_directory_is_an_error_at_once(tmp_path: Path) -> None:
    assert problem(tmp_path) == f"jwt_verify_cert: {tmp_path}: Is a directory"


def rename_over(file: Path, content: bytes) -> None:
    other = file.with_name("new")
    other.write_bytes(content)
    other.rename(file)


@pytest.mark.parametrize("replace", [rename_over, Path.write_bytes], ids=["renamed over", "written over"])
def test_a_key_file_that_changes_is_read_again(replace: Callable[[Path, bytes], object], tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(RSA_PUBLIC_PEM)
    verify = verifier(file)
    replace(file, ED25519_HEX.encode())
    assert verify.verify(token(GOOD)) == GOOD


def test_what_the_key_before_has_signed_is_refused_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(ED25519_HEX)
    verify = verifier(file)
    assert verify.verify(token(GOOD)) == GOOD
    file.write_bytes(RSA_PUBLIC_PEM)
    assert "algorithm EdDSA is not accepted" in refusal(token(GOOD), verify)


def test_an_unchanged_key_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(ED25519_HEX)
    verify = verifier(file)
    monkeypatch.setattr(Path, "read_bytes", None)
    assert verify.verify(token(GOOD)) == GOOD


def test_a_key_file_is_found_from_another_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(ED25519_HEX)
    monkeypatch.chdir(tmp_path)
    verify = verifier("key")
    monkeypatch.chdir("/")
    assert verify.verify(token(GOOD)) == GOOD


def test_a_key_file_that_goes_bad_fails_the_hosts_until_it_is_good_again(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(ED25519_HEX)
    verify = verifier(file)
    cannot = f"cannot be verified: jwt_verify_cert: {file}:"
    file.unlink()
    assert refusal(token(GOOD), verify) == f"{cannot} No such file or directory"
    file.write_text("garbage")
    assert refusal(token(GOOD), verify).startswith(f"{cannot} holds neither a public key")
    file.write_text(ED25519_HEX)
    assert verify.verify(token(GOOD)) == GOOD
