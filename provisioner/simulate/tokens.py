"""The tokens that a site hands out, signed by keys made for the occasion."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from provisioner.simulate import ksuid

#: How long a token is valid.
VALIDITY_SECONDS = 365 * 24 * 3600
#: The name of the organization, which selects the issuer at the broker.
ORGANIZATION = "choria"


def provisioning(token: str, *, broker: str, key: RSAPrivateKey | Ed25519PrivateKey, secure: bool = True) -> str:
    """Make the provisioning JWT that is put on servers.

    :param token: the shared secret that goes into it
    :param broker: URL of the broker that servers find in it
    :param key: of the organization's issuer, whose servers then speak protocol 2; or a site's RSA key
    :param secure: the network is not an insecure one
    """
    organization = isinstance(key, Ed25519PrivateKey)
    claims = {
        "cht": token,
        "chs": secure,
        "chu": broker,
        "chpd": True,
        "extensions": None,
        "purpose": "choria_provisioning",
        "sub": "choria_provisioning",
        "iss": "Choria Tokens Package",
        **({"v2": True} if organization else {}),
        **_common(),
    }
    return jwt.encode(claims, key, algorithm="EdDSA" if organization else "RS256")


def chain_issuer(caller: str, *, issuer: Ed25519PrivateKey, public: str) -> str:
    """Make the token of a provisioner that may sign the tokens of servers.

    :param caller: its caller id
    :param issuer: key of the organization's issuer
    :param public: the provisioner's public key, hexadecimal
    """
    common = _common()
    claims = {
        "callerid": caller,
        "permissions": {"provisioner": True, "fleet_management": True},
        "purpose": "choria_client_id",
        "public_key": public,
        "iss": f"I-{hexadecimal(issuer)}",
        "tcs": issuer.sign(f"{common['jti']}.{public}".encode()).hex(),
        **common,
    }
    return jwt.encode(claims, issuer, algorithm="EdDSA")


def hexadecimal(key: Ed25519PrivateKey) -> str:
    """Give the public half of a key as tokens and configurations have it."""
    return key.public_key().public_bytes_raw().hex()


def _common() -> Mapping[str, Any]:
    now = int(time.time())
    unique = ksuid.new(now)
    return {"ou": ORGANIZATION, "exp": now + VALIDITY_SECONDS, "nbf": now, "iat": now, "jti": unique}
