"""JWTs for servers: what is in them, that brokers will take them, and what is said when none can be signed.

The golden tokens were accepted or refused by a real broker. The rules it judges by are written down once more here, and
hold both for those tokens and for what is issued.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provisioner import config
from provisioner.host import ksuid
from provisioner.host.answer import ServerClaims
from provisioner.host.server_jwt import IssueError, Issuer

FIXTURES = Path(__file__).parent / "fixtures" / "v2"
TOKENS = FIXTURES / "tokens"
KEYS = json.loads((FIXTURES / "keys.json").read_text())
CLAIMS = {name: token["claims"] for name, token in json.loads((TOKENS / "decoded.json").read_text()).items()}
#: all golden tokens are judged at this time
NOW: int = KEYS["reference_time"]
YEAR = 365 * 86400
ORGANIZATION = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(KEYS["issuer"]["seed"]))

CHORIA = {"plugin.security.provider": "choria"}


class RejectedError(Exception):
    """What a broker would log."""


def verify(token: str, *, now: float = NOW) -> dict[str, Any]:
    """Judge a server's token by the rules of the broker, which knows the organization `choria` alone."""
    claims: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
    if claims.get("ou") != "choria":
        raise RejectedError("no ou claim in token" if "ou" not in claims else "no issuer configured for ou")
    for name in ("public_key", "jti", "iat", "exp"):
        if not claims.get(name):
            raise RejectedError(f"no {name.replace('_', ' ')} set")
    signer = ORGANIZATION.public_key()
    if claims["iss"].startswith("C-"):
        signer = _chain_issuer(claims, now)
    try:
        jwt.decode(
            token, signer, algorithms=["EdDSA"], options={"verify_exp": False, "verify_nbf": False, "verify_iat": False}
        )
    except jwt.InvalidSignatureError:
        raise RejectedError("token signature is invalid") from None
    if claims["exp"] <= now:
        raise RejectedError("token is expired")
    if claims.get("nbf", 0) > now:
        raise RejectedError("token is not valid yet")
    if not claims.get("identity"):
        raise RejectedError("no identity")
    return claims


def _chain_issuer(claims: Mapping[str, Any], now: float) -> Ed25519PublicKey:
    if _ksuid_seconds(claims["jti"]) != int(claims["iat"]):
        raise RejectedError("id is not based on issued time")
    if "issexp" not in claims:
        raise RejectedError("no issuer expires set")
    if claims["issexp"] <= now:
        raise RejectedError("token is expired")
    issuer_id, _, issuer_key = claims["iss"].removeprefix("C-").partition(".")
    issued, _, signed = claims["tcs"].partition(".")
    if not signed:
        raise RejectedError("invalid trust chain signature")
    signer = Ed25519PublicKey.from_public_bytes(bytes.fromhex(issuer_key))
    try:
        ORGANIZATION.public_key().verify(bytes.fromhex(issued), f"{issuer_id}.{issuer_key}".encode())
        signer.verify(bytes.fromhex(signed), f"{claims['jti']}.{issued}".encode())
    except (InvalidSignature, ValueError):
        raise RejectedError("invalid chain signature") from None
    return signer


ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _ksuid_number(text: str) -> int:
    if len(text) != 27 or not set(text) <= set(ALPHABET):
        raise RejectedError("invalid ksuid format")
    return sum(ALPHABET.index(digit) * 62**place for place, digit in enumerate(reversed(text)))


def _ksuid_seconds(text: str) -> int:
    return (_ksuid_number(text) >> 128) + 1_400_000_000


def _ksuid_payload(text: str) -> bytes:
    return (_ksuid_number(text) % (1 << 128)).to_bytes(16, "big")


def _token(claims: object) -> bytes:
    parts = (json.dumps(part).encode() for part in ({"alg": "EdDSA"}, claims, ""))
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)


CLAIM_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*CLAIMS["signer.jwt"]]), inner),
)


class Bench:
    """The files and settings of an issuer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = directory / "signer.seed"
        self.token = directory / "signer.jwt"
        self.now = float(NOW)
        self.payload = bytes(range(16))
        self.settings: dict[str, Any] = {"jwt_signing_key": str(self.key), "jwt_signing_token": str(self.token)}
        self.key.write_text(KEYS["signer"]["seed"])
        self.token.write_bytes((TOKENS / "signer.jwt").read_bytes())

    def issuer(self) -> Issuer:
        file = self.directory / "provisioner.yaml"
        features = {"features": {"ed25519": True}, "jwt_verify_cert": KEYS["issuer"]["public"]}
        file.write_text(json.dumps({"helper": "/bin/true", "choria_insecure": True, **features, **self.settings}))
        return Issuer(config.load(file), clock=lambda: self.now, entropy=lambda _: self.payload)

    def issue(self, configuration: Mapping[str, str] | None = None, **wanted: Any) -> str:
        return self.issuer().issue(
            identity="py1.org.lab",
            public_key=KEYS["server_py"]["public"],
            configuration=CHORIA if configuration is None else configuration,
            wanted=ServerClaims(**wanted),
        )

    def issued(self, configuration: Mapping[str, str] | None = None, **wanted: Any) -> dict[str, Any]:
        """The claims of a token that a broker would take."""
        return verify(self.issue(configuration, **wanted), now=self.now)

    def sign_token(self, signer: Ed25519PrivateKey = ORGANIZATION, **changes: Any) -> None:
        """Have another signing token; None as a change leaves a claim out."""
        claims = {name: value for name, value in {**CLAIMS["signer.jwt"], **changes}.items() if value is not None}
        self.token.write_text(jwt.encode(claims, signer, algorithm="EdDSA"))

    def refusal(self) -> str:
        with pytest.raises(IssueError) as refused:
            self.issue()
        assert self.issuer().problems() == [str(refused.value)]
        return str(refused.value)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class TestGolden:
    """Tokens that a real broker accepted or refused."""

    def remade(self, bench: Bench, name: str) -> str:
        claims = CLAIMS[name]
        bench.now, bench.payload = claims["iat"], _ksuid_payload(claims["jti"])
        permissions = claims.get("permissions", {})
        return bench.issue(permissions=permissions)

    def test_one_of_a_chain_is_made_again_byte_for_byte(self, bench: Bench) -> None:
        assert self.remade(bench, "server-py1.jwt") == (TOKENS / "server-py1.jwt").read_text().strip()

    def test_one_of_the_organization_is_made_again_byte_for_byte(self, bench: Bench) -> None:
        bench.key.write_text(KEYS["issuer"]["seed"])
        bench.settings["jwt_signing_token"] = ""
        name = "server-py1-org-signed.jwt"
        assert self.remade(bench, name) == (TOKENS / name).read_text().strip()

    def test_one_of_the_go_original_is_made_again_but_for_the_order(self, bench: Bench) -> None:
        claims = CLAIMS["server-s1-by-go.jwt"]
        bench.now, bench.payload = claims["iat"], _ksuid_payload(claims["jti"])
        output = json.loads((FIXTURES / "helper-output.json").read_text())
        token = bench.issuer().issue(
            identity="s1.org.lab",
            public_key=KEYS["server_s1"]["public"],
            configuration=output["configuration"],
            wanted=ServerClaims(permissions=output["server_claims"]["permissions"]),
        )
        assert verify(token) == claims

    @pytest.mark.parametrize("name", ["server-py1", "server-py1-org-signed", "server-s1-by-go"])
    def test_the_rules_here_accept_what_the_broker_accepted(self, name: str) -> None:
        assert verify((TOKENS / f"{name}.jwt").read_text().strip())

    @pytest.mark.parametrize(
        "case",
        [case for case in json.loads((TOKENS / "rejected.json").read_text()) if case["used_as"] == "server"],
        ids=lambda case: Path(case["file"]).stem,
    )
    def test_the_rules_here_refuse_what_the_broker_refused_and_say_the_same(self, case: dict[str, Any]) -> None:
        with pytest.raises(RejectedError) as refused:
            verify((FIXTURES / case["file"]).read_text().strip())
        assert str(refused.value) in case["broker_log"][0]


class TestClaims:
    """What a token says."""

    def test_what_always_is_in_it(self, bench: Bench) -> None:
        claims = bench.issued()
        signer = CLAIMS["signer.jwt"]
        assert claims.pop("tcs").startswith(f"{signer['tcs']}.")
        assert claims == {
            "purpose": "choria_server",
            "identity": "py1.org.lab",
            "collectives": ["choria"],
            "ou": "choria",
            "public_key": KEYS["server_py"]["public"],
            "iat": NOW,
            "nbf": NOW,
            "exp": signer["exp"],
            "issexp": signer["exp"],
            "jti": ksuid.encode(NOW, bench.payload),
            "iss": f"C-{signer['jti']}.{signer['public_key']}",
        }
        assert jwt.get_unverified_header(bench.issue()) == {"alg": "EdDSA", "typ": "JWT"}

    def test_its_id_is_of_the_second_in_which_it_was_issued(self, bench: Bench) -> None:
        bench.now = NOW + 0.999
        claims = bench.issued()
        assert claims["iat"] == NOW
        assert _ksuid_seconds(claims["jti"]) == NOW

    def test_no_two_ids_are_alike(self, bench: Bench) -> None:
        bench.issuer()
        issuer = Issuer(config.load(bench.directory / "provisioner.yaml"), clock=lambda: bench.now)
        tokens = {
            issuer.issue(identity="a", public_key="00" * 32, configuration={}, wanted=ServerClaims()) for _ in range(5)
        }
        assert len(tokens) == 5

    @pytest.mark.parametrize(
        ("configuration", "wanted", "collectives"),
        [
            ({}, (), ["mcollective"]),
            ({"plugin.security.provider": "file"}, (), ["mcollective"]),
            ({"plugin.security.provider": " choria "}, (), ["choria"]),
            (CHORIA | {"collectives": "a, b ,,c"}, (), ["a", "b", "c"]),
            (CHORIA | {"collectives": " , "}, (), ["choria"]),
            (CHORIA | {"collectives": "a"}, ("x", "y"), ["x", "y"]),
        ],
    )
    def test_its_collectives(
        self, bench: Bench, configuration: Mapping[str, str], wanted: tuple[str, ...], collectives: list[str]
    ) -> None:
        assert bench.issued(configuration, collectives=wanted)["collectives"] == collectives

    def test_what_the_helper_grants(self, bench: Bench) -> None:
        claims = bench.issued(permissions={"streams": True, "governor": False}, pub_subjects=("a.>", "b"))
        assert claims["permissions"] == {"streams": True}
        assert claims["pub_subjects"] == ["a.>", "b"]

    def test_its_organization_is_that_of_the_signing_token_unless_the_helper_says_another(self, bench: Bench) -> None:
        bench.sign_token(ou="acme")
        assert jwt.decode(bench.issue(), options={"verify_signature": False})["ou"] == "acme"
        assert bench.issued(ou="choria")["ou"] == "choria"

    def test_a_public_key_in_capitals_is_written_in_small_letters(self, bench: Bench) -> None:
        key = KEYS["server_py"]["public"]
        token = bench.issuer().issue(identity="a", public_key=key.upper(), configuration={}, wanted=ServerClaims())
        assert verify(token)["public_key"] == key


class TestExpiry:
    """A token ends with the one that signed it, at the latest."""

    @pytest.fixture
    def bench(self, bench: Bench) -> Bench:
        bench.sign_token(exp=NOW + 10 * YEAR)
        return bench

    def test_a_year_unless_configured(self, bench: Bench) -> None:
        assert bench.issued()["exp"] == NOW + YEAR
        bench.settings["server_jwt_validity"] = "30d"
        assert bench.issued()["exp"] == NOW + 30 * 86400

    def test_what_the_helper_wants(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        assert bench.issued(exp=NOW + 3601)["exp"] == NOW + 3601
        assert bench.issued(exp=NOW + 2 * YEAR)["exp"] == NOW + 2 * YEAR
        assert not caplog.records

    @pytest.mark.parametrize("exp", [157_680_000, NOW + 3600, NOW, 0, -1, -(10**15)])
    def test_an_hour_ahead_or_less_is_warned_of_and_the_default_counts(
        self, bench: Bench, caplog: pytest.LogCaptureFixture, exp: int
    ) -> None:
        assert bench.issued(exp=exp)["exp"] == NOW + YEAR
        (record,) = caplog.records
        assert (record.levelname, record.identity) == ("WARNING", "py1.org.lab")  # type: ignore[attr-defined]
        assert "server_claims.exp" in record.getMessage()

    def test_never_after_that_of_the_signing_token(self, bench: Bench) -> None:
        bench.sign_token(exp=NOW + 60)
        assert bench.issued()["exp"] == NOW + 60
        assert bench.issued(exp=NOW + YEAR)["exp"] == NOW + 60


class TestFiles:
    """Key and token: read again when they are replaced, and told what is wrong with them."""

    def test_replacing_both_is_enough_to_rotate(self, bench: Bench) -> None:
        issuer = bench.issuer()
        new = Ed25519PrivateKey.generate()
        public = new.public_key().public_bytes_raw().hex()
        bench.key.write_text(new.private_bytes_raw().hex().upper() + "\n")
        bench.sign_token(public_key=public, jti="abc", tcs=ORGANIZATION.sign(f"abc.{public}".encode()).hex())

        token = issuer.issue(identity="a", public_key="00" * 32, configuration={}, wanted=ServerClaims())
        assert verify(token)["iss"] == f"C-abc.{public}"

    def test_they_are_not_read_as_long_as_nothing_has_changed(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        issuer = bench.issuer()
        assert issuer.problems() == []
        monkeypatch.setattr(Path, "read_bytes", None)
        assert issuer.issue(identity="a", public_key="00" * 32, configuration={}, wanted=ServerClaims())

    def test_one_without_the_other_fails_hosts_until_both_are_right(self, bench: Bench) -> None:
        issuer = bench.issuer()
        assert issuer.problems() == []
        bench.key.write_text(KEYS["admin"]["seed"] + "\n")
        with pytest.raises(IssueError, match="for another key than that of jwt_signing_key"):
            issuer.issue(identity="a", public_key="00" * 32, configuration={}, wanted=ServerClaims())
        bench.key.write_text(KEYS["signer"]["seed"])
        assert issuer.issue(identity="a", public_key="00" * 32, configuration={}, wanted=ServerClaims())

    def test_white_space_around_them_does_not_matter(self, bench: Bench) -> None:
        bench.key.write_text(f"\n{KEYS['signer']['seed']}\r\n")
        bench.token.write_text(f" {bench.token.read_text()}\n")
        assert bench.issued()
        assert bench.issuer().problems() == []

    def test_all_that_is_wrong_is_told_at_once(self, bench: Bench) -> None:
        bench.key.unlink()
        bench.token.write_text("x")
        first, second = bench.issuer().problems()
        assert first == f"jwt_signing_key: {bench.key}: No such file or directory"
        assert second == f"jwt_signing_token: {bench.token}: holds no JWT"

    def test_a_token_that_has_expired_is_told_beside_a_key_that_is_none(self, bench: Bench) -> None:
        bench.now = CLAIMS["signer.jwt"]["exp"]
        bench.key.unlink()
        first, second = bench.issuer().problems()
        assert (first.split(":")[0], second.split(":")[0]) == ("jwt_signing_key", "jwt_signing_token")
        assert bench.issuer().expiries() == {"signing_token": CLAIMS["signer.jwt"]["exp"]}

    @pytest.mark.parametrize("content", ["", "x" * 64, KEYS["signer"]["seed"] + "00", "\xff"])
    def test_a_key_that_is_none(self, bench: Bench, content: str) -> None:
        bench.key.write_text(content)
        refusal = bench.refusal()
        assert refusal == f"jwt_signing_key: {bench.key}: holds no seed, which is 64 hexadecimal digits"

    def test_files_that_cannot_be_read(self, bench: Bench) -> None:
        bench.token.unlink()
        assert f"jwt_signing_token: {bench.token}: No such file" in bench.refusal()
        bench.key.unlink()
        bench.key.mkdir()
        with pytest.raises(IssueError, match=r"jwt_signing_key: .*: Is a directory"):
            bench.issue()

    def test_the_key_of_another_token(self, bench: Bench) -> None:
        bench.key.write_text(KEYS["admin"]["seed"])
        assert "for another key than that of jwt_signing_key" in bench.refusal()

    def test_a_token_without_a_chain_signature(self, bench: Bench) -> None:
        bench.token.write_bytes((TOKENS / "admin.jwt").read_bytes())
        bench.key.write_text(KEYS["admin"]["seed"])
        assert "tcs" in bench.refusal()

    def test_one_that_is_expired(self, bench: Bench) -> None:
        bench.now = CLAIMS["signer.jwt"]["exp"]
        assert f"jwt_signing_token: {bench.token}: expired since 2027" in bench.refusal()
        bench.now -= 1
        assert bench.issue()

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"exp": None}, "expires"),
            ({"exp": "soon"}, "expires"),
            ({"exp": 10**40}, "expires"),
            ({"exp": 0}, "expires"),
            ({"jti": None}, "lacks its id"),
            ({"public_key": None}, "lacks its id"),
            ({"tcs": ""}, "tcs"),
            ({"tcs": "00" * 64}, "damaged"),
            ({"tcs": "zz" * 64}, "not issued by an organization"),
            ({"jti": "another"}, "damaged"),
            ({"iss": "Choria Tokens Package"}, "not issued by an organization"),
            ({"iss": "I-" + "00" * 32}, "damaged"),
            ({"iss": None}, "not issued by an organization"),
        ],
    )
    def test_one_that_brokers_would_not_take(self, bench: Bench, change: dict[str, Any], said: str) -> None:
        bench.sign_token(**change)
        assert said in bench.refusal()

    def test_one_that_was_signed_by_somebody_else(self, bench: Bench) -> None:
        bench.sign_token(signer=Ed25519PrivateKey.generate())
        assert "damaged" in bench.refusal()

    @pytest.mark.parametrize("ou", [None, "", 5, ["choria"]])
    def test_one_without_an_organization_is_of_the_default_one(self, bench: Bench, ou: Any) -> None:
        bench.sign_token(ou=ou)
        assert bench.issued()["ou"] == "choria"

    def test_no_error_shows_what_is_in_a_file(self, bench: Bench) -> None:
        bench.key.write_text("hunter2")
        bench.token.write_text("hunter2.hunter2.hunter2")
        assert all("hunter2" not in problem for problem in bench.issuer().problems())

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(), st.binary() | CLAIM_VALUES.map(_token))
    def test_any_content(self, bench: Bench, key: bytes, token: bytes) -> None:
        bench.key.write_bytes(key)
        bench.token.write_bytes(token)
        assert len(bench.issuer().problems()) == 2
        with pytest.raises(IssueError):
            bench.issue()


class TestExpiries:
    """For those who warn in time."""

    def test_that_of_the_signing_token(self, bench: Bench) -> None:
        assert bench.issuer().expiries() == {"signing_token": CLAIMS["signer.jwt"]["exp"]}

    def test_of_one_that_is_expired_too(self, bench: Bench) -> None:
        bench.now = CLAIMS["signer.jwt"]["exp"] + 1.0
        assert bench.issuer().expiries() == {"signing_token": CLAIMS["signer.jwt"]["exp"]}

    def test_nothing_without_a_token(self, bench: Bench) -> None:
        bench.token.write_text("x")
        assert bench.issuer().expiries() == {}
        bench.settings["jwt_signing_token"] = ""
        assert bench.issuer().expiries() == {}


class TestKSUID:
    """The format of the ids."""

    def test_those_of_the_golden_tokens(self) -> None:
        for claims in CLAIMS.values():
            assert ksuid.encode(claims["iat"], _ksuid_payload(claims["jti"])) == claims["jti"]

    @given(st.integers(1_400_000_000, 1_400_000_000 + 2**32 - 1), st.binary(min_size=16, max_size=16))
    def test_time_and_payload_come_back(self, seconds: int, payload: bytes) -> None:
        text = ksuid.encode(seconds, payload)
        assert (_ksuid_seconds(text), _ksuid_payload(text)) == (seconds, payload)
