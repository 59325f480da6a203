"""A certificate authority for brokers, clients and servers, made for the occasion."""

from __future__ import annotations

import datetime
import ipaddress

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: How long a certificate is valid.
VALIDITY = datetime.timedelta(days=365)
#: Clocks may differ by this.
BACKDATED = datetime.timedelta(minutes=5)


@attrs.frozen
class Authority:
    """Signs certificates.

    :ivar certificate: its own
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = attrs.field(repr=False)

    def issue(self, name: str, key: CertificateIssuerPublicKeyTypes, hosts: tuple[str, ...] = ()) -> str:
        """Give a certificate as PEM.

        :param name: the common name
        :param hosts: names and addresses that it is for; none: `name`
        """
        alternatives = x509.SubjectAlternativeName([_general_name(host) for host in hosts or (name,)])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(name, self.certificate.subject, key).add_extension(alternatives, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(issuer, critical=False).add_extension(usage, critical=False)
        return pem(builder.sign(self.key, hashes.SHA256()))


def authority(name: str = "Simulated CA") -> Authority:
    """Make an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = _builder(name, subject, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def pem(certificate: x509.Certificate) -> str:
    """Give a certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def key_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    """Give a private key as text."""
    kind = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()).decode()


def public_pem(key: rsa.RSAPrivateKey) -> str:
    """Give the public half of a key as text."""
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, kind).decode()


def _builder(name: str, issuer: x509.Name, key: CertificateIssuerPublicKeyTypes) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALIDITY)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
