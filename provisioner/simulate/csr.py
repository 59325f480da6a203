"""The key and the certificate signing request that a server makes."""

from __future__ import annotations

import base64
import itertools
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

KEY_BITS = 2048

#: In this order; a real server has an input for the state, too, and ignores it.
_SUBJECT = {
    "c": NameOID.COUNTRY_NAME,
    "l": NameOID.LOCALITY_NAME,
    "o": NameOID.ORGANIZATION_NAME,
    "ou": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "cn": NameOID.COMMON_NAME,
}


def new_key() -> rsa.RSAPrivateKey:
    """Make a key, as real servers do for every request; takes about a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)


def pool(size: int) -> Callable[[], rsa.RSAPrivateKey]:
    """Make some keys beforehand, for servers that are to share them: the time for a key each can be spared so."""
    keys: Iterator[rsa.RSAPrivateKey] = itertools.cycle([new_key() for _ in range(size)])
    lock = threading.Lock()

    def take() -> rsa.RSAPrivateKey:
        with lock:
            return next(keys)

    return take


def request(key: rsa.RSAPrivateKey, subject: Mapping[str, str]) -> str:
    """Give a request as PEM.

    :param subject: the parts of the subject as they are called in the inputs; not checked, by real servers neither
    """
    with warnings.catch_warnings():  # of parts that are too long
        warnings.simplefilter("ignore")
        names = [
            x509.NameAttribute(oid, subject[part].encode(errors="replace").decode(), _validate=False)
            for part, oid in _SUBJECT.items()
            if subject[part]
        ]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def private_pem(key: rsa.RSAPrivateKey) -> str:
    """Give the key as it is written to disk."""
    kind = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()).decode()


def public_pem(key: rsa.RSAPrivateKey) -> str:
    """Give the public key as servers send it: PKCS#1 under the label of another format."""
    der = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.PKCS1)
    lines = textwrap.wrap(base64.b64encode(der).decode(), 64)
    return "\n".join(("-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""))
