"""Which setting may be the cause of a failure to connect."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from provisioner.choria.errors import (
    AccountError,
    AlertError,
    AuthorizationError,
    CertificateError,
    ConnectorError,
    NoTLSError,
)
from provisioner.choria.settings import HOSTS, PROVIDER

# what OpenSSL finds in certificates
_NOT_YET_VALID = 9
_EXPIRED = 10
_OTHER_NAMES = (62, 64)  # host name, address


@attrs.frozen(kw_only=True)
class Advice:
    """What to look at on one kind of network.

    :ivar login: gives the settings to look at when a broker refuses the login
    :ivar authorities: where those are from that are trusted to vouch for a broker
    :ivar certificate: the setting to look at when a broker refuses our certificate
    """

    login: Callable[[], str]
    authorities: str
    certificate: str

    def __call__(self, error: ConnectorError) -> str:
        """What to check after an error; empty when nothing is more likely to be its cause than anything else."""
        if isinstance(error, AuthorizationError):
            return f"check {self.login()}"
        if isinstance(error, AccountError):
            return "no unprovisioned server is there: check that broker_provisioning_password is set"
        if isinstance(error, AlertError):
            return f"check {self.certificate}"
        if isinstance(error, NoTLSError):
            return f"check {HOSTS}, and whether {PROVIDER} is right for this network"
        if isinstance(error, CertificateError):
            return self._on_certificate(error)
        return ""

    def _on_certificate(self, error: CertificateError) -> str:
        if error.code == _EXPIRED:
            return "the broker needs a new one, or this machine's clock is ahead"
        if error.code == _NOT_YET_VALID:
            return "check this machine's clock, and the broker's"
        if error.code in _OTHER_NAMES:
            return (
                f"check {HOSTS}, which has to name the broker as its certificate does (in a subject alternative name)"
            )
        return f"check {self.authorities}"
