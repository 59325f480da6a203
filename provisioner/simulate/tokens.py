"""The provisioning JWT that a site puts on its servers, signed by a key made for the occasion."""

from __future__ import annotations

import time
import uuid

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

#: How long a token is valid.
VALIDITY_SECONDS = 24 * 3600


def issue(token: str, broker: str) -> tuple[str, bytes]:
    """Make a provisioning JWT.

    :param token: the shared secret that goes into it
    :param broker: URL of the broker that servers find in it
    :returns: the JWT, and the public key that verifies it as PEM
    """
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    now = int(time.time())
    claims = {
        "cht": token,
        "chs": False,
        "chu": broker,
        "chpd": True,
        "extensions": None,
        "ou": "choria",
        "purpose": "choria_provisioning",
        "iss": "Choria Tokens Package",
        "sub": "choria_provisioning",
        "exp": now + VALIDITY_SECONDS,
        "nbf": now,
        "iat": now,
        "jti": uuid.uuid4().hex,
    }
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return jwt.encode(claims, key, algorithm="RS256"), public
