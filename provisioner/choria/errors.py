"""What can go wrong between us and the broker."""

from __future__ import annotations

from collections.abc import Mapping

from pynats2 import NATSError, NATSRequestTimeoutError

from provisioner.errors import ProvisionerError


class ConnectorError(NATSError, ProvisionerError):  # type: ignore[misc]  # pynats2 has no types
    """Anything that goes wrong between us and the broker.

    :ivar advice: which setting to look at, where one may be the cause
    """

    advice = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}; {self.advice}" if self.advice else text


class NotConnectedError(ConnectorError):
    """There is no connection at present."""


class ConnectionClosedError(NotConnectedError):
    """The connector was closed: there will be no connection any more."""


class ConnectionLostError(ConnectorError):
    """The connection broke."""


class UnreachableError(ConnectorError):
    """No connection could be made: unknown name, refused, no answer in time."""


class ConnectFailedError(ConnectorError):
    """None of the brokers could be connected to.

    :ivar causes: what was wrong, by the URL of the broker
    """

    def __init__(self, causes: Mapping[str, ProvisionerError]) -> None:
        self.causes = causes
        super().__init__(
            "; ".join(f"{url}: {cause}" for url, cause in causes.items()) or "there is no broker to connect to"
        )


class TLSError(ConnectorError):
    """TLS could not be agreed on, or one side does not accept the other's certificate."""


class NoTLSError(TLSError):
    """The broker speaks in clear only."""


class CertificateError(TLSError):
    """The broker's certificate is not to be trusted.

    :ivar code: OpenSSL's number for what is wrong with it
    """

    def __init__(self, text: str, code: int) -> None:
        self.code = code
        super().__init__(text)


class AlertError(TLSError):
    """The broker has ended TLS with an alert: it does not accept our certificate, or our terms."""


class AuthorizationError(ConnectorError):
    """The broker refuses our credentials, or no longer accepts them."""


class AccountError(ConnectorError):
    """The broker has let us in, but not to where the unprovisioned servers are."""


class BrokerError(ConnectorError):
    """Another error that the broker reports before it closes the connection."""


class WireError(ConnectorError):
    """The other side does not speak NATS as we know it."""


class NoRespondersError(ConnectorError):
    """The broker says that nobody listens to the subject of a request."""


class RequestTimeoutError(ConnectorError, NATSRequestTimeoutError):  # type: ignore[misc]
    """Nothing, or nothing more, came in time."""


class PayloadTooLargeError(ConnectorError):
    """The broker would end the connection if it were sent this."""


class SubjectError(ConnectorError):
    """A subject, or a part of one, that must not be sent to a broker."""


class HeaderError(ConnectorError):
    """A header that must not be sent to a broker."""


def broker_error(text: str) -> ConnectorError:
    """The exception for the text of a -ERR that ends the connection."""
    if "authorization" in text.lower() or "authentication" in text.lower():
        return AuthorizationError(f"the broker refuses the login: {text}")
    return BrokerError(f"the broker reports: {text}")
