"""Networks of an organization: the login as recorded, and a JWT and seed that are checked, watched and read again."""

from __future__ import annotations

import base64
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from provisioner.choria.organization import Organization
from provisioner.choria.protocol_v2 import ProtocolV2
from provisioner.choria.security import choose
from provisioner.choria.settings import Settings
from provisioner.errors import ConfigurationError
from tests.certificates import Authority, replace
from tests.networks import IDENTITY, Member, public_hex

FIXTURES = Path(__file__).parent / "fixtures" / "v2"
KEYS: dict[str, Any] = json.loads((FIXTURES / "keys.json").read_text())
CONNECT: dict[str, Any] = json.loads((FIXTURES / "wire" / "00-connect.json").read_text())
ISSUER = Ed25519PrivateKey.generate()


def problems(settings: Settings, *, clock: Any = time.time) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        choose(settings, insecure=False, clock=clock)
    return list(raised.value.problems)


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member.make(tmp_path, issuer=ISSUER)


def organization(member: Member, **changes: Any) -> Organization:
    return Organization(member.settings(**changes), clock=time.time)


def is_signed_by(member: Member, text: bytes, signature: bytes) -> bool:
    """Whether it is by the key of a member, who must not have got another since; else this raises."""
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(member.seed.read_text()))
    key.public_key().verify(signature, text)
    return True


class TestRecorded:
    def settings(self, tmp_path: Path, token: str, seed: str = "signer", **changes: Any) -> Settings:
        member = Member(FIXTURES / "tokens" / token, tmp_path / "seed")
        member.seed.write_text(KEYS[seed]["seed"])
        return member.settings(**{"nats_pass": KEYS["broker_password"]} | changes)

    def test_the_login_is_the_recorded_one(self, tmp_path: Path) -> None:
        settings = self.settings(tmp_path, "signer.jwt")
        found = Organization(settings, clock=lambda: KEYS["reference_time"])
        members = found.authenticate(CONNECT["info_before_tls"])
        recorded = {name: CONNECT["connect_options"][name] for name in ("user", "pass", "sig")}
        text = (FIXTURES / "tokens" / "signer.jwt").read_text().strip()
        assert members == recorded | {"auth_token": text, "jwt": text}
        assert found.protocol.caller == "provisioner_signer"

    @pytest.mark.parametrize(
        ("token", "seed", "reason"),
        [
            ("bad/client-without-provisioner-claim.jwt", "signer", "lacks the permission to provision servers"),
            ("bad/client-of-another-issuer.jwt", "signer", "not signed by the configured issuer"),
            ("bad/client-unknown-ou.jwt", "signer", "of an organization (claim ou) other than choria"),
            ("bad/client-expired.jwt", "signer", "expired since 20"),
            ("admin.jwt", "admin", "lacks the permission to provision servers"),
            ("server-s1-by-go.jwt", "server_s1", "not the JWT of a client"),
            ("provisioning.jwt", "signer", "not the JWT of a client"),
        ],
    )
    def test_a_jwt_that_the_broker_refused_is_refused_for_the_same_reason(
        self, tmp_path: Path, token: str, seed: str, reason: str
    ) -> None:
        settings = self.settings(tmp_path, token, seed, issuers={"choria": KEYS["issuer"]["public"]})
        lines = problems(settings, clock=lambda: KEYS["reference_time"])
        assert any(
            line.startswith(
                f"/etc/choria.cfg: plugin.security.choria.token_file: {settings.choria_token_file}: {reason}"
            )
            for line in lines
        )

    def test_one_that_it_took_passes(self, tmp_path: Path) -> None:
        settings = self.settings(tmp_path, "signer.jwt", issuers={"choria": KEYS["issuer"]["public"]})
        choose(settings, insecure=False, clock=lambda: KEYS["reference_time"])


class TestLogin:
    def test_white_space_around_token_and_seed_does_not_matter(self, member: Member) -> None:
        text = member.token.read_text()
        member.token.write_text(f"\n{text}\r\n")
        member.seed.write_text(f" {member.seed.read_text().upper()}\n")
        assert organization(member).authenticate({})["auth_token"] == text

    def test_nothing_is_signed_without_a_nonce(self, member: Member) -> None:
        assert "sig" not in organization(member).authenticate({"nonce": 1})

    def test_no_password_is_sent_when_none_is_configured(self, member: Member) -> None:
        members = organization(member, nats_pass="").authenticate({})
        assert "user" not in members
        assert "pass" not in members

    def test_the_caller_id_is_the_claim_as_it_stands(self, tmp_path: Path) -> None:
        found = organization(Member.make(tmp_path, issuer=ISSUER, callerid="up=bob"))
        assert found.protocol.caller == "up=bob"
        assert found.protocol.identity == IDENTITY


@pytest.mark.usefixtures("replaced_files_are_seen_at_once")
class TestReplacedFiles:
    def test_are_used_at_the_next_login_and_request(self, member: Member, tmp_path: Path) -> None:
        found = organization(member)
        renewed = Member.make(tmp_path, "renewed", issuer=ISSUER, exp=int(time.time()) + 86400)
        replace(member.token, renewed.token.read_bytes())
        replace(member.seed, renewed.seed.read_bytes())
        members = found.authenticate({"nonce": "abc"})
        assert members["auth_token"] == renewed.token.read_text()
        assert is_signed_by(renewed, b"abc", base64.urlsafe_b64decode(members["sig"] + "=="))
        assert isinstance(found.protocol, ProtocolV2)
        signature, token = found.protocol.sign(b"request")
        assert token == renewed.token.read_text()
        assert is_signed_by(renewed, b"request", base64.b64decode(signature))
        assert found.expiries()["token"] < time.time() + 2 * 86400

    def test_never_mix_while_they_are_replaced_one_after_the_other(
        self, member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = organization(member)
        before = member.token.read_text()
        replace(member.token, Member.make(tmp_path, "renewed", issuer=ISSUER).token.read_bytes())
        for _ in range(3):
            members = found.authenticate({"nonce": "abc"})
            assert members["auth_token"] == before
            assert is_signed_by(member, b"abc", base64.urlsafe_b64decode(members["sig"] + "=="))
        (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
        assert "plugin.security.choria.seed_file" in warning
        assert before not in warning

    def test_must_not_change_the_caller_id(
        self, member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = organization(member)
        before = member.token.read_text()
        other = Member.make(tmp_path, "other", issuer=ISSUER, callerid="somebody")
        replace(member.token, other.token.read_bytes())
        replace(member.seed, other.seed.read_bytes())
        assert found.authenticate({})["auth_token"] == before
        assert "takes a restart" in caplog.text


class TestAtTheStart:
    def test_all_problems_are_told_at_once(self, tmp_path: Path) -> None:
        member = Member.make(
            tmp_path, issuer=ISSUER, permissions={"provisioner": 1}, callerid=None, exp=1, tcs=None, iss=""
        )
        other = Member.make(tmp_path, "other", issuer=ISSUER)
        settings = member.settings(
            choria_seed_file=str(other.seed),
            choria_ca=str(tmp_path / "ca.pem"),
            choria_certificate=str(tmp_path / "cert.pem"),
        )
        token = f"/etc/choria.cfg: plugin.security.choria.token_file: {member.token}"
        seed = f"/etc/choria.cfg: plugin.security.choria.seed_file: {other.seed}"
        assert problems(settings) == [
            f"{token}: lacks a caller id (claim callerid)",
            f"{token}: lacks the permission to provision servers (claim permissions.provisioner)",
            f"{token}: expired since 1970-01-01T00:00:01+00:00",
            f"{seed}: not the seed of the key in plugin.security.choria.token_file ({member.token})",
            f"/etc/choria.cfg: plugin.security.choria.certificate: {tmp_path}/cert.pem: No such file or directory",
            "/etc/choria.cfg: plugin.security.choria.key: not set, wanted the name of a file",
            f"/etc/choria.cfg: plugin.security.choria.ca: {tmp_path}/ca.pem: No such file or directory",
        ]

    def test_chain_data_is_not_wanted(self, tmp_path: Path) -> None:
        member = Member.make(tmp_path, issuer=ISSUER, tcs=None)
        choose(member.settings(), insecure=False)

    def test_nothing_configured_is_two_problems(self) -> None:
        bare = Settings(path=Path("/etc/choria.cfg"), identity=IDENTITY, certname=IDENTITY, provider="choria")
        assert problems(bare) == [
            f"/etc/choria.cfg: plugin.security.choria.{name}_file: not set, wanted the name of a file"
            for name in ("token", "seed")
        ]

    @pytest.mark.parametrize(
        "text", [b"", b"a.b", b"a.b.c", b"\xff\x00", b"a.bnVsbA.c", b"a.W10.c", b"a." + b"W1tb" * 50_000 + b".c"]
    )
    def test_what_is_no_jwt(self, member: Member, text: bytes) -> None:
        member.token.write_bytes(text)
        (problem,) = problems(member.settings())
        assert problem.endswith(f"{member.token}: holds no JWT")

    @pytest.mark.parametrize("text", ["", "00", "g" * 64, "0" * 65])
    def test_what_is_no_seed_and_is_not_shown(self, member: Member, text: str) -> None:
        member.seed.write_text(text)
        (problem,) = problems(member.settings())
        assert problem.endswith(f"{member.seed}: holds no seed, which is 64 hexadecimal digits")

    @pytest.mark.parametrize("value", ["1", True, [], float("nan"), float("inf")])
    @pytest.mark.parametrize("claim", ["exp", "nbf"])
    def test_a_time_that_is_none(self, tmp_path: Path, claim: str, value: object) -> None:
        claims: dict[str, Any] = {claim: value}
        member = Member.make(tmp_path, issuer=ISSUER, **claims)
        (problem,) = problems(member.settings())
        assert problem.endswith(f"holds a JWT whose claim {claim} is not a number")

    def test_a_jwt_of_the_future_tells_of_the_clock(self, tmp_path: Path) -> None:
        member = Member.make(tmp_path, issuer=ISSUER, nbf=int(time.time()) + 120)
        warning = organization(member).warnings[0]
        assert "not valid before 20" in warning
        assert "the clock of this machine says" in warning

    @pytest.mark.parametrize("public", ["", "00", "00" * 32, "ff" * 32])
    def test_a_configured_issuer_that_has_not_signed(self, member: Member, public: str) -> None:
        (problem,) = problems(member.settings(issuers={"choria": public}))
        assert "not signed by the configured issuer" in problem

    def test_a_configured_issuer_that_has_signed(self, member: Member) -> None:
        choose(member.settings(issuers={"choria": public_hex(ISSUER)}), insecure=False)

    def test_without_an_authority_it_warns_once(self, member: Member) -> None:
        (warning,) = organization(member).warnings
        assert warning.startswith("plugin.security.choria.ca: not set, so brokers are not verified")

    def test_with_one_it_does_not(self, member: Member, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        assert organization(member, choria_ca=str(authority.certificate)).warnings == ()

    def test_a_client_certificate_may_be_of_an_elliptic_curve(self, member: Member, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        files = authority.issue("client")
        found = organization(
            member,
            choria_ca=str(authority.certificate),
            choria_certificate=str(files.certificate),
            choria_key=str(files.key),
        )
        assert set(found.expiries()) == {"token", "certificate"}
        found.tls_context()

    def test_secrets_are_not_shown(self, member: Member) -> None:
        shown = repr(organization(member)._credentials())
        assert member.token.read_text() not in shown
        assert "key" not in shown


def test_a_jwt_without_expiry_has_none(tmp_path: Path) -> None:
    assert organization(Member.make(tmp_path, issuer=ISSUER, exp=None)).expiries() == {}


def test_the_recorded_signature_verifies() -> None:
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(KEYS["signer"]["public"]))
    public.verify(bytes.fromhex(CONNECT["signature_hex"]), CONNECT["signed_bytes"].encode())
