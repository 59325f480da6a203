"""Networks of an organization: a client JWT and the key that goes with it, TLS, and protocol 2."""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from provisioner import lifetimes
from provisioner.choria import certificates, tls
from provisioner.choria.advice import Advice
from provisioner.choria.certificates import Pair
from provisioner.choria.credentials import CredentialsError, File, LastGood, attempt
from provisioner.choria.errors import WireError
from provisioner.choria.protocol import COLLECTIVE
from provisioner.choria.protocol_v2 import ProtocolV2
from provisioner.choria.settings import CHORIA_CA, CHORIA_CERTIFICATE, CHORIA_KEY, SEED_FILE, TOKEN_FILE, Settings
from provisioner.contract import YEAR_10000_SECONDS

#: What `purpose` says in the JWT of a client.
PURPOSE = "choria_client_id"
#: What `iss` begins with when a member of the organization has issued the JWT, not the organization itself.
CHAIN_ISSUER_PREFIX = "C-"

# With the same key requests and JWTs are signed: a broker must not have us sign one of those.
_NONCE = re.compile(r"[\w-]{1,64}", re.ASCII)
_KEY_HEX = re.compile(r"[0-9a-fA-F]{64}")
_COMPACT_JWT = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
_JWS = jwt.PyJWS(algorithms=["EdDSA"])


@attrs.frozen
class Credentials:
    """A client JWT and the key of its holder, as both files held them at one moment."""

    token: str = attrs.field(repr=False)
    claims: Mapping[str, Any] = attrs.field(repr=False)
    key: Ed25519PrivateKey = attrs.field(repr=False)


class Organization:
    """Proves who we are by a JWT; :class:`provisioner.choria.security.Security` has the contract.

    :param clock: gives the seconds since the epoch
    :raises CredentialsError: with all that is wrong with the files
    """

    tls_always = True
    account = COLLECTIVE

    def __init__(self, settings: Settings, *, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._token = File(TOKEN_FILE, settings.choria_token_file)
        self._seed = File(SEED_FILE, settings.choria_seed_file)
        self._ca = File(CHORIA_CA, settings.choria_ca) if settings.choria_ca else None
        self._certificate_files: tuple[File, File] | None = None
        if settings.choria_certificate or settings.choria_key:
            certificate = File(CHORIA_CERTIFICATE, settings.choria_certificate)
            self._certificate_files = certificate, File(CHORIA_KEY, settings.choria_key)
        self._caller: str | None = None  # of the first JWT, which all later ones have to share
        self._credentials, self._certificate = self._check()
        self._caller = caller = self._credentials().claims["callerid"]
        self.protocol = ProtocolV2(identity=settings.identity, caller=caller, ttl=settings.ttl, sign=self._sign)
        self.warnings = tuple(self._warnings())
        self.advice = Advice(
            login=self._login_advice,
            authorities=str(self._ca or CHORIA_CA),
            certificate=str(File(CHORIA_CERTIFICATE, settings.choria_certificate)),
        )

    @property
    def summary(self) -> str:
        claims = self._credentials().claims
        granted = sorted(name for name, given in claims["permissions"].items() if given is True)
        return f"the token of {claims['callerid']} fits its seed; it permits: {', '.join(granted)}"

    def authenticate(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        credentials = self._credentials()
        members = {**self._settings.login, "auth_token": credentials.token, "jwt": credentials.token}
        nonce = info.get("nonce")
        if isinstance(nonce, str):
            if not _NONCE.fullmatch(nonce):
                raise WireError("the broker wants something signed that is not a nonce")
            # the text itself is signed, although it looks like base64
            signature = credentials.key.sign(nonce.encode())
            members["sig"] = base64.urlsafe_b64encode(signature).decode().rstrip("=")
        return members

    def tls_context(self) -> ssl.SSLContext:
        return tls.network_context(self._settings, ca=self._ca, pair=self._certificate_files)

    def expiries(self) -> Mapping[str, float]:
        expiries = {}
        if "exp" in (claims := self._credentials().claims):
            expiries["token"] = float(claims["exp"])
        if self._certificate:
            expiries["certificate"] = self._certificate().expiry
        return expiries

    def _login_advice(self) -> str:
        password = "broker_provisioning_password" + ("" if self._settings.login else ", which is not set,")
        claims = self._credentials().claims
        problem = lifetimes.problem(claims.get("nbf"), claims.get("exp"), self._clock())
        return f"{self._token}, which is {problem}" if problem else f"{password} and {self._token}"

    def _sign(self, request: bytes) -> tuple[str, str]:
        credentials = self._credentials()
        return base64.b64encode(credentials.key.sign(request)).decode(), credentials.token

    def _check(self) -> tuple[LastGood[Credentials], LastGood[Pair] | None]:
        problems: list[str] = []
        certificate = None
        credentials = attempt(problems, lambda: LastGood((self._token, self._seed), self._load))
        if files := self._certificate_files:
            certificate = attempt(problems, lambda: LastGood(files, lambda: certificates.load_pair(*files)))
            if pair := certificate and certificate():
                attempt(problems, lambda: certificates.check_lifetime(files[0], pair.certificate, self._clock()))
        if ca := self._ca:
            attempt(problems, lambda: certificates.check_authorities(ca, self._clock()))
        if not problems:
            attempt(problems, self.tls_context)
        if credentials is None or problems:
            raise CredentialsError(problems)
        return credentials, certificate

    def _load(self) -> Credentials:
        problems: list[str] = []
        found = attempt(problems, lambda: _read_token(self._token))
        key = attempt(problems, self._seed.read_seed)
        if found is not None:
            for problem in self._token_problems(*found):
                problems += self._token.error(problem).problems
            if key is not None and key.public_key().public_bytes_raw().hex() != _lower(found[1].get("public_key")):
                problems += self._seed.error(f"not the seed of the key in {self._token}").problems
        if found is None or key is None or problems:
            raise CredentialsError(problems)
        return Credentials(*found, key)

    def _token_problems(self, token: str, claims: Mapping[str, Any]) -> Iterator[str]:
        if claims.get("purpose") != PURPOSE:
            yield f"not the JWT of a client, whose purpose is {PURPOSE}"
        caller, permissions = claims.get("callerid"), claims.get("permissions")
        if not isinstance(caller, str) or not caller:
            yield "lacks a caller id (claim callerid)"
        if not isinstance(permissions, dict) or permissions.get("provisioner") is not True:
            yield "lacks the permission to provision servers (claim permissions.provisioner)"
        if self._settings.issuers:
            yield from _issuer_problems(token, claims, self._settings.issuers)
        if self._caller is None:
            # later on it is for the broker to say, whose clock may be another, as it is of what is not valid yet
            yield from filter(None, [lifetimes.problem(None, claims.get("exp"), self._clock())])
        elif caller != self._caller:
            yield "for another caller id than the one before, which takes a restart"

    def _warnings(self) -> Iterator[str]:
        yield from tls.limit_warnings(self._settings)
        if problem := lifetimes.problem(self._credentials().claims.get("nbf"), None, self._clock()):
            yield f"{self._token}: {problem}"
        if not self._credentials().claims.get("ou"):
            yield f"{self._token}: names no organization (claim ou), which brokers refuse"
        if self._ca is None:
            yield f"{CHORIA_CA}: not set, so brokers are not verified: whoever answers gets the password and the token"


def _read_token(file: File) -> tuple[str, dict[str, Any]]:
    """The text and the claims of a JWT, its signature unchecked: it is our own."""
    token = file.read().decode("ascii", "replace").strip()
    try:
        if not _COMPACT_JWT.fullmatch(token):
            raise ValueError
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, RecursionError):
        raise file.error("holds no JWT") from None
    if not isinstance(claims, dict):
        raise file.error("holds no JWT")
    for name in ("nbf", "exp"):
        time = claims.get(name, 0)
        if not isinstance(time, int | float) or isinstance(time, bool) or not 0 <= time < YEAR_10000_SECONDS:
            raise file.error(f"holds a JWT whose claim {name} is not a number")
    return token, claims


def _issuer_problems(token: str, claims: Mapping[str, Any], issuers: Mapping[str, str]) -> Iterator[str]:
    public = issuers.get(str(claims.get("ou")))
    if public is None:
        yield f"of an organization (claim ou) other than {', '.join(issuers)}, which have an issuer configured"
    elif not str(claims.get("iss")).startswith(CHAIN_ISSUER_PREFIX) and not _is_signed_by(public, token):
        yield "not signed by the configured issuer of its organization"


def _is_signed_by(public: str, token: str) -> bool:
    if not _KEY_HEX.fullmatch(public):
        return False
    try:
        _JWS.decode(token, Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)), algorithms=["EdDSA"])
    except jwt.PyJWTError:
        return False
    return True


def _lower(claim: object) -> str:
    return claim.lower() if isinstance(claim, str) else ""
