"""X.509 certificates in PEM files, and the keys that go with them."""

from __future__ import annotations

import attrs
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from provisioner import lifetimes
from provisioner.choria.credentials import CredentialsError, File, attempt


@attrs.frozen
class Pair:
    """A certificate and its private key, as both files held them at one moment.

    :ivar text: all that is in the file of the certificate
    :ivar certificate: the first in it; those that follow lead to the authority
    """

    text: str
    certificate: x509.Certificate
    key: PrivateKeyTypes = attrs.field(repr=False)

    @property
    def expiry(self) -> float:
        """Until when the certificate is valid, in seconds since the epoch."""
        return self.certificate.not_valid_after_utc.timestamp()


def load_pair(certificate: File, key: File) -> Pair:
    """Read a certificate and its key.

    :raises CredentialsError: with all problems: missing, not PEM, encrypted, of different pairs
    """
    problems: list[str] = []
    data = attempt(problems, certificate.read)
    first = None if data is None else attempt(problems, lambda: _certificates(certificate, data)[0])
    private = attempt(problems, lambda: _private_key(key))
    if data is None or first is None or private is None:
        raise CredentialsError(problems)
    if _encoded(first.public_key()) != _encoded(private.public_key()):
        raise key.error(f"not the key of the certificate in {certificate}")
    # text around the PEM may be in any encoding; servers get what the Go original would send for such bytes
    return Pair(data.decode(errors="replace"), first, private)


def check_lifetime(file: File, certificate: x509.Certificate, now: float) -> None:
    """Make sure that a certificate has not expired at the time `now`. One that is not valid yet will be.

    :raises CredentialsError: it has
    """
    if problem := lifetimes.problem(None, certificate.not_valid_after_utc.timestamp(), now):
        raise file.error(problem)


def check_authorities(file: File, now: float) -> None:
    """Make sure that a file holds certificates of authorities, one of them valid at the time `now`.

    :raises CredentialsError: it does not
    """
    problems = [_lifetime_problem(certificate, now) for certificate in _certificates(file, file.read())]
    if all(problems):
        raise file.error(f"no certificate in it is valid: {problems[0]}")


def names(certificate: x509.Certificate) -> set[str]:
    """The names that a server knows the holder of a certificate by: the common name and the DNS names."""
    found = {str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)}
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return found
    return found | set(extension.value.get_values_for_type(x509.DNSName))


def _certificates(file: File, data: bytes) -> list[x509.Certificate]:
    try:
        certificates = x509.load_pem_x509_certificates(data)
        certificates[0].public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise file.error("holds no certificate in PEM that can be read") from None
    return certificates


def _private_key(file: File) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(file.read(), password=None)
    except TypeError:
        raise file.error("the key is encrypted, wanted one without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise file.error("holds no private key in PEM that can be read") from None


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _lifetime_problem(certificate: x509.Certificate, now: float) -> str | None:
    not_before, not_after = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return lifetimes.problem(not_before.timestamp(), not_after.timestamp(), now)
