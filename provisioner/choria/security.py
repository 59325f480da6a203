"""The kinds of networks: how to prove on each who we are, and how to know its brokers."""

from __future__ import annotations

import ssl
import time
import typing
from collections.abc import Callable, Mapping
from typing import Any

from provisioner.choria import tls
from provisioner.choria.advice import Advice
from provisioner.choria.credentials import CredentialsError
from provisioner.choria.organization import Organization
from provisioner.choria.protocol import Protocol
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.settings import Settings
from provisioner.choria.x509 import X509
from provisioner.errors import ConfigurationError


class Security(typing.Protocol):
    """How this client proves who it is on one kind of network, and how it knows the broker. For any thread.

    Files that were replaced are read again: at the next connection, and for signatures within a tenth of a second.
    """

    @property
    def protocol(self) -> Protocol:
        """Makes requests and opens replies."""

    @property
    def tls_always(self) -> bool:
        """Whether a broker that offers no TLS is refused."""

    @property
    def account(self) -> str:
        """The account of the unprovisioned servers, which the broker has to put us into; empty: any will do."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line each, what the operator should know although it stops nothing."""

    @property
    def summary(self) -> str:
        """Who we are, and what proves it."""

    @property
    def advice(self) -> Advice:
        """Says which setting may be the cause of a failure to connect."""

    def authenticate(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """The members of CONNECT that prove who we are, given the INFO of the broker."""

    def tls_context(self) -> ssl.SSLContext:
        """A context for one connection.

        :raises CredentialsError: when a file cannot be used
        """

    def expiries(self) -> Mapping[str, float]:
        """When our credentials expire, by their kind (`certificate`, `token`), in seconds since the epoch."""


def choose(settings: Settings, *, insecure: bool, clock: Callable[[], float] = time.time) -> Security:
    """What it takes on the network that the settings are for.

    :param insecure: no credentials but a password; otherwise the provider in the settings decides
    :param clock: gives the seconds since the epoch
    :raises ConfigurationError: with all that is wrong with credentials, and TLS settings
    """
    if insecure:
        return Insecure(settings)
    problems = list(tls.limit_problems(settings))
    try:
        if settings.provider == "choria":
            chosen: Security = Organization(settings, clock=clock)
        else:
            chosen = X509(settings, clock=clock)
    except CredentialsError as error:
        problems += error.problems
    if problems:
        raise ConfigurationError(f"{settings.path}: {problem}" for problem in problems)
    return chosen


class Insecure:
    """For networks without any security: requests are not signed, and TLS is used where the broker insists on it."""

    tls_always = False
    account = ""
    warnings = ()
    summary = "none: choria_insecure is on, so nothing is signed"
    advice = Advice(
        login=lambda: "broker_provisioning_password",
        authorities="the trust store of this system (or SSL_CERT_FILE)",
        certificate="choria_insecure, with which no certificate is sent",
    )

    def __init__(self, settings: Settings) -> None:
        self._login = settings.login
        self.protocol = ProtocolV1(identity=settings.identity, caller=settings.caller, ttl=settings.ttl)

    def authenticate(self, _info: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._login

    def tls_context(self) -> ssl.SSLContext:
        return tls.system_trust_context()

    def expiries(self) -> Mapping[str, float]:
        return {}
