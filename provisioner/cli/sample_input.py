"""A made-up server, for a helper that is to be tried without a real one."""

from __future__ import annotations

import json
import secrets
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner.config import Features
from provisioner.host.facts import Facts
from provisioner.host.node import CSR, Inventory, SigningKey
from provisioner.simulate import csr

#: No server can have this name: nobody will ever be called anything in .invalid.
IDENTITY = "sample.choria-provisioner.invalid"

_VERSION = "0.30.0"
_VALIDITY_SECONDS = 365 * 86400


def facts(features: Features) -> Facts:
    """What a server would say, its keys made for the occasion and thrown away."""
    return Facts(
        identity=IDENTITY,
        token=None,
        claims=_claims() if features.jwt else None,
        signing_key=_signing_key() if features.ed25519 else None,
        inventory=_inventory(),
        csr=_csr() if features.pki else None,
    )


def _claims() -> dict[str, object]:
    now = int(time.time())
    return {
        "cht": "a-made-up-token",
        "chs": True,
        "chu": "broker.example.net:4222",
        "chpd": True,
        "extensions": None,
        "purpose": "choria_provisioning",
        "sub": "choria_provisioning",
        "iss": "Choria Tokens Package",
        "ou": "choria",
        "iat": now,
        "nbf": now,
        "exp": now + _VALIDITY_SECONDS,
        "jti": "sample",
    }


def _signing_key() -> SigningKey:
    key = Ed25519PrivateKey.generate()
    return SigningKey(
        public_key=key.public_key().public_bytes_raw().hex(),
        directory="/etc/choria",
        signature=key.sign(secrets.token_hex(16).encode()).hex(),
    )


def _inventory() -> Inventory:
    data = {
        "agents": ["choria_provision", "choria_util", "discovery", "rpcutil"],
        "classes": [],
        "collectives": ["provisioning"],
        "data_plugins": [],
        "facts": {},
        "machines": [],
        "main_collective": "provisioning",
        "upgradable": False,
        "version": _VERSION,
    }
    return Inventory(json.dumps(data), _VERSION, upgradable=False)


def _csr() -> CSR:
    key = csr.new_key()
    request = csr.request(key, dict.fromkeys(("c", "l", "o", "ou"), "") | {"cn": IDENTITY})
    return CSR(csr=request, public_key=csr.public_pem(key), ssldir="/etc/choria/ssl")
