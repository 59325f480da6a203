"""Certificates for tests of TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

#: The fastest to make among those that TLS accepts.
RSA_BITS = 2048

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@attrs.frozen
class Files:
    """A certificate and its key, in PEM."""

    certificate: Path
    key: Path

    def replace(self, other: Files) -> None:
        """Put those of another pair in their place, the way a careful administrator does."""
        for file, new in ((self.certificate, other.certificate), (self.key, other.key)):
            replace(file, new.read_bytes())


def replace(file: Path, data: bytes) -> None:
    """Put a new file in the place of another; nobody ever sees half of it."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_bytes(data)
    fresh.rename(file)


class Authority:
    """A certificate authority, with its files in a directory."""

    def __init__(self, directory: Path, name: str = "Test CA") -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = directory / f"{name}.pem"
        certificate = self._builder(self._name, self._key.public_key())
        certificate = certificate.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate.write_bytes(self._signed(certificate))

    def issue(
        self,
        name: str,
        *,
        hosts: tuple[str, ...] = (),
        rsa_key: bool = False,
        days: tuple[float, float] = (-1, 1),
        encrypted: bool = False,
    ) -> Files:
        """A certificate for some host names and addresses.

        :param name: its common name
        :param rsa_key: with an RSA key, not one of an elliptic curve
        :param days: from when to when it is valid, in days from now
        :param encrypted: the file of the key takes a passphrase
        """
        key: PrivateKey = (
            rsa.generate_private_key(65537, RSA_BITS) if rsa_key else ec.generate_private_key(ec.SECP256R1())
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(subject, key.public_key(), days)
        if hosts:
            certificate = certificate.add_extension(x509.SubjectAlternativeName(map(_general_name, hosts)), False)
        files = Files(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        files.certificate.write_bytes(self._signed(certificate))
        files.key.write_bytes(private_pem(key, encrypted=encrypted))
        files.key.chmod(0o600)
        return files

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
        days: tuple[float, float] = (-1, 1),
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=days[0]))
            .not_valid_after(now + datetime.timedelta(days=days[1]))
        )

    def _signed(self, certificate: x509.CertificateBuilder) -> bytes:
        return certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def private_pem(key: PrivateKey, *, encrypted: bool = False) -> bytes:
    """A key in PEM."""
    encryption = serialization.BestAvailableEncryption(b"secret") if encrypted else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
