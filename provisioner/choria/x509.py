"""Networks secured by certificates: mutual TLS, and protocol 1 with every request signed by an RSA key."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256

from provisioner import lifetimes
from provisioner.choria import certificates, tls
from provisioner.choria.advice import Advice
from provisioner.choria.certificates import Pair
from provisioner.choria.credentials import CredentialsError, File, LastGood, attempt
from provisioner.choria.protocol import COLLECTIVE
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.settings import FILE_CA, FILE_CERTIFICATE, FILE_KEY, PROVIDER, SSLDIR, Settings

_PADDING = PKCS1v15()
_HASH = SHA256()


class X509:
    """Proves who we are by a certificate, :class:`provisioner.choria.security.Security` has the contract.

    :param clock: gives the seconds since the epoch
    :raises CredentialsError: with all that is wrong with the files
    """

    tls_always = True
    account = COLLECTIVE

    def __init__(self, settings: Settings, *, clock: Callable[[], float]) -> None:
        self._settings = settings
        puppet = f"{SSLDIR}, as {PROVIDER} is puppet" if settings.provider == "puppet" else None
        self._certificate = File(puppet or FILE_CERTIFICATE, settings.file_certificate)
        self._key = File(puppet or FILE_KEY, settings.file_key)
        self._ca = File(puppet or FILE_CA, settings.file_ca)
        self._pair = self._check(clock())
        self.protocol = ProtocolV1(
            identity=settings.identity, caller=settings.caller, ttl=settings.ttl, sign=self._sign, clock=clock
        )
        self.warnings = tuple(self._warnings(clock()))
        login = "broker_provisioning_password" + ("" if settings.login else ", which is not set")
        self.advice = Advice(login=lambda: login, authorities=str(self._ca), certificate=str(self._certificate))

    @property
    def summary(self) -> str:
        names = ", ".join(sorted(certificates.names(self._pair().certificate)))
        return f"the certificate for {names} fits its key; requests are sent as {self._settings.caller}"

    def authenticate(self, _info: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._settings.login

    def tls_context(self) -> ssl.SSLContext:
        return tls.network_context(self._settings, ca=self._ca, pair=(self._certificate, self._key))

    def expiries(self) -> Mapping[str, float]:
        return {"certificate": self._pair().expiry}

    def _check(self, now: float) -> LastGood[Pair]:
        problems: list[str] = []
        pair = attempt(problems, lambda: LastGood((self._certificate, self._key), self._load))
        if pair is not None:
            attempt(problems, lambda: certificates.check_lifetime(self._certificate, pair().certificate, now))
        attempt(problems, lambda: certificates.check_authorities(self._ca, now))
        if not problems:
            attempt(problems, self.tls_context)
        if pair is None or problems:
            raise CredentialsError(problems)
        return pair

    def _load(self) -> Pair:
        pair = certificates.load_pair(self._certificate, self._key)
        if not isinstance(pair.key, RSAPrivateKey):
            raise self._key.error("not an RSA key, as it takes to sign requests")
        return pair

    def _warnings(self, now: float) -> list[str]:
        warnings = [*tls.limit_warnings(self._settings)]
        not_before = self._pair().certificate.not_valid_before_utc.timestamp()
        if problem := lifetimes.problem(not_before, None, now):
            warnings.append(f"{self._certificate}: {problem}")
        if self._settings.certname not in certificates.names(self._pair().certificate):
            warnings.append(
                f"{self._certificate}: the certificate is not for {self._settings.certname}, the name in the caller "
                f"id: provisioned servers will not accept our requests (MCOLLECTIVE_CERTNAME sets another name)"
            )
        return warnings

    def _sign(self, request: bytes) -> tuple[str, str]:
        pair = self._pair()
        assert isinstance(pair.key, RSAPrivateKey)
        return base64.b64encode(pair.key.sign(request, _PADDING, _HASH)).decode(), pair.text
