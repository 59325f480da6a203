"""Secured networks for tests: the files of their members, and brokers that insist on them."""

from __future__ import annotations

import base64
import datetime
import json
from pathlib import Path
from typing import Any

import attrs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner.choria.settings import Settings
from tests.certificates import Authority, Files

PASSWORD = "pass:w@rd/%"
IDENTITY = "prov.example.net"


@attrs.frozen
class X509Network:
    """A network where everybody has a certificate of one authority."""

    authority: Authority
    broker: Files
    own: Files

    @classmethod
    def make(cls, directory: Path) -> X509Network:
        authority = Authority(directory)
        return cls(
            authority,
            broker=authority.issue("broker", hosts=("localhost", "127.0.0.1")),
            own=authority.issue(IDENTITY, hosts=(IDENTITY,), rsa_key=True, days=(-1, 60)),
        )

    def settings(self, **changes: Any) -> Settings:
        """Of a provisioner that belongs to the network."""
        members: dict[str, Any] = {
            "path": Path("/etc/choria.cfg"),
            "identity": IDENTITY,
            "certname": IDENTITY,
            "provider": "file",
            "file_certificate": str(self.own.certificate),
            "file_key": str(self.own.key),
            "file_ca": str(self.authority.certificate),
            "nats_user": "provisioner",
            "nats_pass": PASSWORD,
        }
        return Settings(**members | changes)

    def configuration(self, broker: Files | None = None, *, ca: Path | None = None, password: str = PASSWORD) -> str:
        """Of a nats-server."""
        ca = ca or self.authority.certificate
        return f"{tls_configuration(broker or self.broker, ca=ca)}\n{accounts_configuration(password)}"


def tls_configuration(files: Files, *, ca: Path | None = None, more: str = "") -> str:
    """TLS for a nats-server; with an authority it wants certificates of its clients too."""
    verify = f'ca_file: "{ca}", verify: true' if ca else ""
    return f'tls {{ cert_file: "{files.certificate}", key_file: "{files.key}"\n {verify}\n {more} }}'


def accounts_configuration(password: str = PASSWORD) -> str:
    """As a Choria broker has them: who has no password gets in, but not to where the unprovisioned servers are."""
    return (
        f'accounts {{ provisioning: {{ users: [{{ user: provisioner, password: "{password}" }}] }}\n'
        '            choria: { users: [{ user: other, password: "other" }] } }\n'
        "no_auth_user: other"
    )


@attrs.frozen
class Member:
    """The JWT of a client in a file, and the seed of its key in another."""

    token: Path
    seed: Path

    @classmethod
    def make(cls, directory: Path, name: str = "signer", *, issuer: Ed25519PrivateKey, **claims: Any) -> Member:
        """A member that may provision; claims that are None are left out."""
        key = Ed25519PrivateKey.generate()
        public, now = public_hex(key), int(datetime.datetime.now(datetime.UTC).timestamp())
        usual = {
            "purpose": "choria_client_id",
            "callerid": "provisioner_signer",
            "permissions": {"provisioner": True},
            "ou": "choria",
            "iss": f"I-{public_hex(issuer)}",
            "jti": "1",
            "tcs": issuer.sign(f"1.{public}".encode()).hex(),
            "public_key": public,
            "nbf": now - 60,
            "exp": now + 60 * 86400,
        }
        member = cls(directory / f"{name}.jwt", directory / f"{name}.seed")
        member.token.write_text(token({k: v for k, v in (usual | claims).items() if v is not None}, issuer))
        member.seed.write_text(key.private_bytes_raw().hex())
        for file in (member.token, member.seed):
            file.chmod(0o600)
        return member

    def settings(self, **changes: Any) -> Settings:
        """Of a provisioner that is this member."""
        members: dict[str, Any] = {
            "path": Path("/etc/choria.cfg"),
            "identity": IDENTITY,
            "certname": IDENTITY,
            "provider": "choria",
            "choria_token_file": str(self.token),
            "choria_seed_file": str(self.seed),
            "nats_user": "provisioner",
            "nats_pass": PASSWORD,
        }
        return Settings(**members | changes)


def token(claims: dict[str, Any], key: Ed25519PrivateKey) -> str:
    """A JWT signed with a key."""
    parts = [json.dumps(part).encode() for part in ({"alg": "EdDSA", "typ": "JWT"}, claims)]
    signed = b".".join(map(_base64url, parts))
    return b".".join((signed, _base64url(key.sign(signed)))).decode()


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public half of a key."""
    return key.public_key().public_bytes_raw().hex()


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
