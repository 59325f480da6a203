"""Networks of an organization, whose issuer vouches for everybody's token. The rules are those of Choria's broker."""

from __future__ import annotations

import base64
import binascii
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jwt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from provisioner.simulate import ksuid
from provisioner.simulate.tokens import ORGANIZATION
from provisioner.simulate.trust import UntrustedError, file, setting

_SEED = re.compile("[0-9a-fA-F]{64}")
#: Exp and nbf are compared with our own clock, the rest is not looked at by brokers.
_SIGNATURE_ONLY: Any = {"verify_signature": True} | dict.fromkeys(
    ("verify_exp", "verify_nbf", "verify_iat", "verify_aud", "verify_iss", "verify_sub", "verify_jti"), False
)


@attrs.frozen
class OrganizationTrust:
    """See :class:`provisioner.simulate.trust.Trust`.

    :ivar issuer: public key of the organization's issuer, hexadecimal
    """

    issuer: str
    clock: Callable[[], float] = time.time

    def check_request(self, signed: bytes, *, signature: str, proof: str, caller: str) -> str:
        try:
            claims = self.client(proof)
            _verify(claims.get("public_key"), signature, signed)
            if claims.get("callerid") != caller:
                raise UntrustedError("the token is not the caller's")
        except UntrustedError as error:
            return str(error)
        return ""

    def check_server(self, settings: Mapping[str, str], files: Mapping[str, str], *, identity: str) -> None:
        setting(settings, "plugin.security.provider", "choria")
        setting(settings, f"plugin.security.issuer.{ORGANIZATION}.public", self.issuer)
        claims = self.server(file(settings, files, "plugin.security.choria.token_file"))
        if claims["public_key"] != _public(file(settings, files, "plugin.security.choria.seed_file")):
            raise UntrustedError("the server's token does not fit its seed")
        if claims["identity"] != identity:
            raise UntrustedError("the server's token is for another identity")
        if not claims.get("collectives"):
            raise UntrustedError("the server's token is for no collective, so it may do nothing")

    def client(self, token: str) -> Mapping[str, Any]:
        """Give the claims of a client's token that the issuer has signed.

        :raises UntrustedError: when it is none, or not valid now
        """
        claims = _verified(token, self.issuer)
        _check_organization(claims)
        self._check_times(claims)
        _check_purpose(claims, "choria_client_id")
        return claims

    def server(self, token: str) -> Mapping[str, Any]:
        """Give the claims of a server's token, of the issuer or of a chain issuer.

        :raises UntrustedError: when a broker would refuse it
        """
        claims = _unverified(token)
        _check_organization(claims)
        signer = self._chain(claims) if str(claims.get("iss")).startswith("C-") else self.issuer
        claims = _verified(token, signer)
        self._check_times(claims)
        _check_purpose(claims, "choria_server")
        for claim in ("identity", "public_key"):
            if not isinstance(claims.get(claim), str) or not claims[claim]:
                raise UntrustedError(f"the token has no {claim}")
        return claims

    def _chain(self, claims: Mapping[str, Any]) -> str:
        """Give the key of the chain issuer that has signed a token, once it is known that it may."""
        for claim, kind in _CHAIN.items():
            if not claims.get(claim) or not isinstance(claims[claim], kind):
                raise UntrustedError(f"a token of a chain issuer without {claim}")
        made = ksuid.second(claims["jti"])
        if made is None:
            raise UntrustedError("the token's id is no ksuid")
        if made != int(claims["iat"]):
            raise UntrustedError("the token's id is not of the second in which it was issued")
        if claims["issexp"] <= self.clock():
            raise UntrustedError("the token's issuer is expired")
        issuer: str = claims["iss"]
        issuer_id, _, issuer_public = issuer.removeprefix("C-").partition(".")
        first, _, second = claims["tcs"].partition(".")
        _verify_hex(self.issuer, first, f"{issuer_id}.{issuer_public}")
        _verify_hex(issuer_public, second, f"{claims['jti']}.{first}")
        return issuer_public

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        """Without any leeway, as brokers do it."""
        now = self.clock()
        if not isinstance(claims.get("exp"), int | float) or claims["exp"] <= now:
            raise UntrustedError("the token is expired")
        if not isinstance(claims.get("nbf", 0), int | float) or claims.get("nbf", 0) > now:
            raise UntrustedError("the token is not valid yet")


_CHAIN = {"public_key": str, "tcs": str, "jti": str, "iss": str, "iat": int | float, "exp": int | float}
_CHAIN["issexp"] = int | float


def _check_organization(claims: Mapping[str, Any]) -> None:
    if claims.get("ou") != ORGANIZATION:
        raise UntrustedError("the token is of no organization that is known")


def _check_purpose(claims: Mapping[str, Any], purpose: str) -> None:
    if claims.get("purpose") != purpose:
        raise UntrustedError("the token is for another purpose")


def _unverified(token: str) -> Mapping[str, Any]:
    try:
        claims: Mapping[str, Any] = jwt.decode(token.strip(), options={"verify_signature": False})
    except jwt.PyJWTError:
        raise UntrustedError("not a token") from None
    return claims


@functools.lru_cache(maxsize=64)
def _verified(token: str, public: str) -> Mapping[str, Any]:
    """Give the claims of a token that a key has signed; a provisioner sends the same token over and over."""
    try:
        claims: Mapping[str, Any] = jwt.decode(token.strip(), _key(public), ["EdDSA"], options=_SIGNATURE_ONLY)
    except jwt.PyJWTError:
        raise UntrustedError("the token is not signed by its issuer") from None
    return claims


def _key(public: object) -> Ed25519PublicKey:
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(str(public)))
    except ValueError:
        raise UntrustedError("a public key cannot be read") from None


def _public(seed: str) -> str:
    if not _SEED.fullmatch(seed):
        raise UntrustedError("the seed has not 64 hexadecimal digits")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed)).public_key().public_bytes_raw().hex()


def _verify(public: object, signature: str, signed: bytes) -> None:
    try:
        _key(public).verify(base64.b64decode(signature, validate=True), signed)
    except (InvalidSignature, binascii.Error, ValueError):
        raise UntrustedError("the signature does not verify with the key of the caller's token") from None


def _verify_hex(public: str, signature: str, signed: str) -> None:
    try:
        _key(public).verify(bytes.fromhex(signature), signed.encode())
    except (InvalidSignature, ValueError):
        raise UntrustedError("the token's chain of trust is broken") from None
