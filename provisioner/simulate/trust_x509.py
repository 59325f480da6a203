"""Networks whose members have certificates of one authority."""

from __future__ import annotations

import base64
import binascii
import datetime
import re
import time
from collections.abc import Callable, Mapping

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from provisioner.simulate.trust import UntrustedError, file, setting

_CALLER = re.compile(r"[a-z]+=(.+)")
#: Whose requests servers take, unless they are told otherwise.
_CALLER_NAMES = re.compile(r"\.(mcollective|choria)$")
_PEM_BODY = re.compile(r"-----BEGIN [^\n]*-----\n(.*?)-----END ", re.DOTALL)


@attrs.frozen
class CertificateTrust:
    """See :class:`provisioner.simulate.trust.Trust`."""

    authority: x509.Certificate
    clock: Callable[[], float] = time.time

    def check_request(self, signed: bytes, *, signature: str, proof: str, caller: str) -> str:
        try:
            certificate = self._certificate(proof)
            _check_signature(certificate, signed, signature)
            name = _CALLER.fullmatch(caller)
            if name is None or name[1] not in _names(certificate):
                raise UntrustedError("the certificate is not the caller's")
            if not _CALLER_NAMES.search(name[1]):
                raise UntrustedError("servers do not take requests from a caller of this name")
        except UntrustedError as error:
            return str(error)
        return ""

    def check_server(self, settings: Mapping[str, str], files: Mapping[str, str], *, identity: str) -> None:
        setting(settings, "plugin.security.provider", "file")
        certificate = self._certificate(file(settings, files, "plugin.security.file.certificate"))
        key = _key(file(settings, files, "plugin.security.file.key"))
        if self.authority not in _certificates(file(settings, files, "plugin.security.file.ca")):
            raise UntrustedError("the CA is not that of the network")
        if key != certificate.public_key():
            raise UntrustedError("the certificate does not fit the private key")
        if identity not in _names(certificate):
            raise UntrustedError("the certificate is for another name")

    def _certificate(self, pem: str) -> x509.Certificate:
        certificate = _certificates(pem)[0]
        try:
            certificate.verify_directly_issued_by(self.authority)
        except (InvalidSignature, ValueError, TypeError):
            raise UntrustedError("the certificate is not of the network's CA") from None
        now = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise UntrustedError("the certificate is not valid now")
        return certificate


def _certificates(pem: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode(errors="replace"))
    except ValueError:
        raise UntrustedError("a certificate cannot be read") from None


def _key(pem: str) -> object:
    """Give the public half of a key. The label does not count, as with Go: what is inside does."""
    body = _PEM_BODY.search(pem)
    try:
        der = base64.b64decode("".join(body[1].split()) if body else "")
        return serialization.load_der_private_key(der, None).public_key()
    except (ValueError, TypeError):
        raise UntrustedError("the private key cannot be read") from None


def _check_signature(certificate: x509.Certificate, signed: bytes, signature: str) -> None:
    key = certificate.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise UntrustedError("the caller's key is not of RSA")
    try:
        key.verify(base64.b64decode(signature, validate=True), signed, padding.PKCS1v15(), hashes.SHA256())
    except (InvalidSignature, binascii.Error, ValueError):
        raise UntrustedError("the signature does not verify with the caller's certificate") from None


def _names(certificate: x509.Certificate) -> list[str]:
    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return names
    return names + extension.value.get_values_for_type(x509.DNSName)
