"""The JWT by which a provisioned server proves to brokers who it is, on networks with an organization issuer."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jwt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from provisioner import lifetimes
from provisioner.choria.credentials import Cached, CredentialsError, File, attempt
from provisioner.config import Config
from provisioner.contract import YEAR_10000_SECONDS
from provisioner.errors import HostError
from provisioner.host import ksuid
from provisioner.host.answer import ServerClaims

LOG = logging.getLogger(__name__)

#: An expiry that the helper asks for must be further away than this, or the default validity is used.
SHORTEST_VALIDITY_SECONDS = 3600
#: Who signs where the signing key is that of the organization itself.
ISSUER = "Choria Provisioner"
#: The organization where neither the helper nor the signing token names one.
ORGANIZATION = "choria"

_SIGNATURE_HEX = re.compile(r"[0-9a-fA-F]{128}")
_ORGANIZATION_ISSUER = re.compile(r"I-(?P<key>[0-9a-fA-F]{64})")
_JWS = jwt.PyJWS(algorithms=["EdDSA"])


class IssueError(HostError):
    """No JWT can be signed; the text names the setting and the file, never what is in it."""


class Issuer:
    """Signs server JWTs with `jwt_signing_key`, in the name of `jwt_signing_token` if set.

    Replacing the files is enough to rotate. Used by every worker at once.

    :param clock: gives the seconds since the epoch
    :param entropy: gives so many random bytes
    """

    def __init__(
        self, config: Config, *, clock: Callable[[], float] = time.time, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._key = File("jwt_signing_key", config.jwt_signing_key)
        self._token = File("jwt_signing_token", config.jwt_signing_token) if config.jwt_signing_token else None
        tokens = [self._token] if self._token else []
        self._signer = Cached(tokens, self._read_signer)
        self._pair = Cached([self._key, *tokens], self._read_pair)
        self._validity = int(config.server_jwt_validity)
        self._clock = clock
        self._entropy = entropy

    def issue(self, *, identity: str, public_key: str, configuration: Mapping[str, str], wanted: ServerClaims) -> str:
        """Sign a JWT for a server.

        :param public_key: the server's, 64 hexadecimal digits
        :param configuration: what the server will be configured with; names its collectives unless `wanted` does
        :param wanted: what the helper wants in the JWT
        :raises IssueError: the key or the token cannot be used, or the token has expired
        """
        try:
            key, signer = self._valid_pair()
        except CredentialsError as error:
            raise IssueError(str(error)) from error
        # the three go together: brokers refuse an id of another second, and have no leeway
        now = int(self._clock())
        try:
            token_id = ksuid.encode(now, self._entropy(ksuid.PAYLOAD_BYTES))
        except ValueError as error:
            raise IssueError(
                f"no server JWT can be signed: the clock of this machine says {lifetimes.date(now)}"
            ) from error
        claims: dict[str, Any] = {
            "purpose": "choria_server",
            "iss": f"C-{signer.id}.{signer.public_key}" if signer else ISSUER,
            "iat": now,
            "nbf": now,
            "exp": self._expiry(now, signer, wanted, identity),
            "jti": token_id,
            "identity": identity,
            "collectives": _collectives(configuration, wanted),
            "ou": wanted.ou or (signer.organization if signer else ORGANIZATION),
            "public_key": public_key.lower(),
        }
        if permissions := {name: True for name, granted in wanted.permissions.items() if granted}:
            claims["permissions"] = permissions
        if wanted.pub_subjects:
            claims["pub_subjects"] = list(wanted.pub_subjects)
        if signer:
            claims["issexp"] = signer.expiry
            claims["tcs"] = f"{signer.chain}.{key.sign(f'{token_id}.{signer.chain}'.encode()).hex()}"
        return jwt.encode(claims, key, algorithm="EdDSA")

    def problems(self) -> list[str]:
        """What is wrong with key and token right now, one line each; for the start, where all is told at once."""
        problems: list[str] = []
        attempt(problems, self._pair)
        signer = attempt([], self._signer)
        attempt(problems, lambda: self._check_expiry(signer))
        return problems

    def expiries(self) -> dict[str, float]:
        """When the signing token expires, in seconds since the epoch; nothing while there is none that can be read."""
        signer = attempt([], self._signer)
        return {"signing_token": signer.expiry} if signer else {}

    def _valid_pair(self) -> tuple[Ed25519PrivateKey, _Signer | None]:
        key, signer = self._pair()
        self._check_expiry(signer)
        return key, signer

    def _check_expiry(self, signer: _Signer | None) -> None:
        if self._token and signer and signer.expiry <= self._clock():
            raise self._token.error(f"expired since {lifetimes.date(signer.expiry)}")

    def _read_signer(self) -> _Signer | None:
        """None when there need not be one."""
        return _signer(self._token) if self._token else None

    def _read_pair(self) -> tuple[Ed25519PrivateKey, _Signer | None]:
        problems: list[str] = []
        key = attempt(problems, self._key.read_seed)
        signer = attempt(problems, self._signer)
        if self._token and key and signer and signer.public_key.lower() != key.public_key().public_bytes_raw().hex():
            problems += self._token.error(f"for another key than that of {self._key}").problems
        if key is None or problems:
            raise CredentialsError(problems)
        return key, signer

    def _expiry(self, now: int, signer: _Signer | None, wanted: ServerClaims, identity: str) -> int:
        expiry = now + self._validity
        if wanted.exp is not None and wanted.exp > now + SHORTEST_VALIDITY_SECONDS:
            expiry = wanted.exp
        elif wanted.exp is not None:
            LOG.warning(
                "server_claims.exp of the helper is %s, an hour ahead or less: server_jwt_validity counts instead",
                lifetimes.date(wanted.exp),
                extra={"identity": identity},
            )
        return min(expiry, signer.expiry) if signer else expiry


@attrs.frozen
class _Signer:
    """What the signing token says of the key that signs.

    :ivar chain: the organization's signature of it
    :ivar expiry: seconds since the epoch
    """

    id: str
    public_key: str
    organization: str
    chain: str
    expiry: int


def _signer(file: File) -> _Signer:
    """What a file says of the signing key.

    Damage and mix-ups are found here, not at a broker when servers come back: the token names the key that signed it.
    """
    token = file.read().strip()
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise file.error("holds no JWT") from None
    expiry = claims.get("exp")
    if not isinstance(expiry, int | float) or not 0 < expiry < YEAR_10000_SECONDS:
        raise file.error("does not say when it expires (claim exp), which every server JWT must repeat")
    token_id, public_key, chain = (claims.get(name) for name in ("jti", "public_key", "tcs"))
    if not isinstance(chain, str) or not chain:
        raise file.error("carries no chain signature (claim tcs), as one made with --issuer does")
    if not isinstance(token_id, str) or not token_id or not isinstance(public_key, str):
        raise file.error("lacks its id or the public key of its holder (claims jti, public_key)")
    issuer = _ORGANIZATION_ISSUER.fullmatch(str(claims.get("iss")))
    if issuer is None or not _SIGNATURE_HEX.fullmatch(chain):
        raise file.error("not issued by an organization, as one made with --issuer is (claims iss, tcs)")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(issuer["key"]))
        _JWS.decode(token, key, algorithms=["EdDSA"])
        key.verify(bytes.fromhex(chain), f"{token_id}.{public_key}".encode())
    except (jwt.PyJWTError, InvalidSignature, ValueError):
        raise file.error("damaged: its signature or its chain signature (claim tcs) is wrong") from None
    organization = claims.get("ou")
    if not isinstance(organization, str):
        organization = ""
    return _Signer(token_id, public_key, organization or ORGANIZATION, chain, int(expiry))


def _collectives(configuration: Mapping[str, str], wanted: ServerClaims) -> list[str]:
    if wanted.collectives:
        return list(wanted.collectives)
    configured = [name.strip() for name in configuration.get("collectives", "").split(",")]
    if any(configured):
        return [name for name in configured if name]
    is_choria = configuration.get("plugin.security.provider", "").strip() == "choria"
    return ["choria" if is_choria else "mcollective"]
