"""The JWT that a server shows to prove that it was given to it by us, to be provisioned by us."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from provisioner import lifetimes
from provisioner.choria.credentials import Cached, CredentialsError, File
from provisioner.errors import ConfigurationError, HostError

#: What `purpose` or `sub` says in a provisioning JWT.
PURPOSE = "choria_provisioning"
#: Good tokens that are remembered by their text: servers made from one image share one.
KNOWN_TOKENS = 64
#: How many levels of lists and objects claims may have, so that nobody who recurses into them can fail.
NESTING_LIMIT = 50

_RSA_ALGORITHMS = ("RS256", "RS384", "RS512")
_ED25519_ALGORITHMS = ("EdDSA",)
_JWS = jwt.PyJWS(algorithms=[*_RSA_ALGORITHMS, *_ED25519_ALGORITHMS])

_COMPACT_JWT = re.compile(r"[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)
_PLAIN_WORD = re.compile(r"[\w-]{1,40}", re.ASCII)
_HEX_KEY = re.compile(rb"[0-9a-fA-F]{64}")
_HEX_DIGITS = "64 hexadecimal digits"
_PEM = re.compile(rb"-----BEGIN (CERTIFICATE|(?:RSA )?PUBLIC KEY)-----.+?-----END \1-----", re.DOTALL)


class TokenError(HostError):
    """A server's JWT is none, or none to trust; the text says why and never shows it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the provisioning JWT {problem}")


class Verifier:
    """Verifies provisioning JWTs with the key that the setting `jwt_verify_cert` names. Used by every worker at once.

    :param setting: a file that exists, which holds an RSA public key or certificate as PEM, or an Ed25519 public key as
        64 hexadecimal digits; else these digits themselves. A file is read again whenever it has changed.
    :param clock: gives the seconds since the epoch
    :raises ConfigurationError: the setting leads to no key
    """

    def __init__(self, setting: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        try:
            self._key = _key_source(File("jwt_verify_cert", setting))
        except CredentialsError as error:
            raise ConfigurationError(error.problems) from error

    def verify(self, token: str) -> dict[str, Any]:
        """Give all claims of a JWT that may be trusted; white space around it does not matter.

        As Choria does: `exp` and `nbf` count when there, without leeway; `iat` and `aud` do not. Beyond that all
        numbers are finite and nothing is nested deeper than `NESTING_LIMIT`, so the claims can be written as JSON.

        :raises TokenError: not signed by our key, not valid now, not for provisioning, or no JWT at all
        """
        try:
            key = self._key()
        except CredentialsError as error:
            raise TokenError(f"cannot be verified: {error}") from error
        claims = _claims(key.signed_payload(token.strip()))
        _check_purpose(claims)
        _check_times(claims, self._clock())
        return claims


class _Key:
    """A public key, and what it has signed."""

    def __init__(self, public: RSAPublicKey | Ed25519PublicKey) -> None:
        self._public = public
        self._algorithms = _RSA_ALGORITHMS if isinstance(public, RSAPublicKey) else _ED25519_ALGORITHMS
        #: Gives what is in a token; raises :class:`TokenError` when it is none that the key has signed.
        self.signed_payload = functools.lru_cache(KNOWN_TOKENS)(self._signed_payload)

    def _signed_payload(self, token: str) -> bytes:
        if not _COMPACT_JWT.fullmatch(token):
            raise TokenError("is malformed: not three parts in base64url")
        try:
            algorithm = _JWS.get_unverified_header(token).get("alg")
            if algorithm not in self._algorithms:
                raise TokenError(
                    f"is refused: algorithm {_shown(algorithm)} is not accepted, "
                    f"the key of jwt_verify_cert goes with {', '.join(self._algorithms)}"
                )
            payload: bytes = _JWS.decode_complete(token, self._public, algorithms=self._algorithms)["payload"]
        except jwt.InvalidSignatureError:
            raise TokenError("is signed by another key than that of jwt_verify_cert") from None
        except (jwt.PyJWTError, RecursionError):
            raise TokenError("is malformed: its header or its base64url cannot be read") from None
        return payload


def _key_source(setting: File) -> Callable[[], _Key]:
    """Something that gives the key at any time, and has given it once already.

    :raises CredentialsError: there is none
    """
    if not setting.path:
        raise setting.error("is not set")
    path = Path(setting.path)
    if _exists(path):
        # the process may change its directory
        file = File(setting.setting, str(path.absolute()))
        source = Cached([file], lambda: _Key(_parsed(file)))
        source()
        return source
    if not _HEX_KEY.fullmatch(setting.path.encode("utf-8", "replace")):
        raise CredentialsError([f"{setting.setting}: {setting.path!r} is neither a file that exists nor {_HEX_DIGITS}"])
    key = _Key(Ed25519PublicKey.from_public_bytes(bytes.fromhex(setting.path)))
    return lambda: key


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # one that may not even be looked for: reading it will say so
        return True


def _parsed(file: File) -> RSAPublicKey | Ed25519PublicKey:
    data = file.read()
    if _HEX_KEY.fullmatch(data.strip()):
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(data.decode("ascii")))
    block = _PEM.search(data)
    if block is None:
        raise file.error(f"holds neither a public key or certificate in PEM nor {_HEX_DIGITS}")
    try:
        key: object
        if block[1] == b"CERTIFICATE":
            key = x509.load_pem_x509_certificate(block[0]).public_key()
        else:
            key = load_pem_public_key(block[0])
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise file.error("the PEM in it cannot be read") from None
    if not isinstance(key, RSAPublicKey | Ed25519PublicKey):
        raise file.error("the key in it is neither RSA nor Ed25519")
    return key


def _claims(payload: bytes) -> dict[str, Any]:
    try:
        claims = json.loads(payload.decode("utf-8"))
    except (ValueError, RecursionError):
        raise TokenError("is malformed: its claims are not JSON") from None
    if not isinstance(claims, dict):
        raise TokenError("is malformed: its claims are no object")
    level: Iterable[Any] = [claims]
    for _ in range(NESTING_LIMIT):
        level = [member for value in level for member in _inside(value)]
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise TokenError("is malformed: a number in its claims is not finite")
        if not level:
            return claims
    raise TokenError(f"is malformed: its claims are nested more than {NESTING_LIMIT} deep")


def _inside(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_purpose(claims: dict[str, Any]) -> None:
    if PURPOSE not in (claims.get("purpose"), claims.get("sub")):
        raise TokenError(f"is for another purpose: {_shown(claims.get('purpose'))}")


def _check_times(claims: dict[str, Any], now: float) -> None:
    not_before, expiry = _seconds(claims, "nbf"), _seconds(claims, "exp")
    if not_before is not None and now < not_before:
        raise TokenError(f"is not valid before {lifetimes.date(not_before)}")
    if expiry is not None and now >= expiry:
        raise TokenError(f"is expired since {lifetimes.date(expiry)}")
    if claims.get("tcs") not in (None, ""):
        # of an issuer in the middle of a chain, and good for no longer than that one is
        issuer_expiry = claims.get("issexp")
        if not _is_number(issuer_expiry) or now >= issuer_expiry:
            raise TokenError("is expired: it has a chain signature (tcs), but its issuer is not valid now (issexp)")


def _seconds(claims: dict[str, Any], name: str) -> float | None:
    value: float | None = claims.get(name)
    if value is not None and not _is_number(value):
        raise TokenError(f"is malformed: its claim {name} is not a number")
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """One word of an unverified token; anything else in it is not for a log."""
    return value if isinstance(value, str) and _PLAIN_WORD.fullmatch(value) else "(not a word)"
