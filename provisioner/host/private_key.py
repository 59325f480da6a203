"""A server's private key that the helper made, encrypted so that only this server can read it.

The server makes a new X25519 key pair at every call of its action `jwt`, and decrypts with the last one.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, SECP521R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from provisioner.errors import HostError

_IV_BYTES = 16
_SALT_BYTES = 8
_LINE_CHARACTERS = 64

_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
_KEY_BLOCK = re.compile(r"-----BEGIN (?P<label>(?:[A-Z0-9]+ )*PRIVATE KEY)-----.*?-----END (?P=label)-----", re.DOTALL)
_CERTIFICATE_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# what servers can load with a certificate
_CURVES = (SECP256R1, SECP384R1, SECP521R1)

_Key = RSAPrivateKey | EllipticCurvePrivateKey | Ed25519PrivateKey


class PrivateKeyError(HostError):
    """The private key that the helper returned cannot be sent; the text never shows any of it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the helper's private key cannot be sent: {problem}")


def encrypt(key_pem: str, *, certificate: str, server_public: str) -> tuple[str, str]:
    """Encrypt a private key for one server.

    :param key_pem: RSA, Ed25519 or EC on one of the curves P-256, P-384 and P-521, as PKCS#1, PKCS#8 or SEC1; not
        encrypted
    :param certificate: PEM; that of the key comes first
    :param server_public: X25519 public key from the last call of the server's action `jwt`, 64 hexadecimal digits;
        empty when there was none
    :returns: the encrypted PEM, and the public key that the server needs to read it, in hexadecimal digits
    :raises PrivateKeyError: the key is not usable, is not that of the certificate, or there is nothing to encrypt with
    """
    key = _loaded(key_pem)
    _check_pair(key, certificate)
    secret, own_public = _agree(server_public)
    return encrypted_pem(_der(key), secret=secret, iv=os.urandom(_IV_BYTES)), own_public


def encrypted_pem(der: bytes, *, secret: bytes, iv: bytes) -> str:
    """A PEM block as OpenSSL once wrote them (RFC 1423): AES-256-CBC with a key derived from a secret by MD5.

    The label is `RSA PRIVATE KEY` for every kind of key, since servers write just that around the decrypted bytes.
    """
    salt = iv[:_SALT_BYTES]
    first = _md5(secret + salt)
    cipher = Cipher(algorithms.AES256(first + _md5(first + secret + salt)), modes.CBC(iv)).encryptor()
    padder = PKCS7(algorithms.AES256.block_size).padder()
    encrypted = cipher.update(padder.update(der) + padder.finalize()) + cipher.finalize()
    text = base64.b64encode(encrypted).decode("ascii")
    lines = [text[start : start + _LINE_CHARACTERS] for start in range(0, len(text), _LINE_CHARACTERS)]
    head = ["-----BEGIN RSA PRIVATE KEY-----", "Proc-Type: 4,ENCRYPTED", f"DEK-Info: AES-256-CBC,{iv.hex()}", ""]
    return "\n".join([*head, *lines, "-----END RSA PRIVATE KEY-----", ""])


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _loaded(pem: str) -> _Key:
    blocks = list(_KEY_BLOCK.finditer(pem))
    if len(blocks) != 1:
        raise PrivateKeyError(f"one PEM block with a private key is wanted, {len(blocks)} came")
    if "ENCRYPTED" in blocks[0][0]:
        raise PrivateKeyError("it is encrypted, and a plain one is wanted")
    try:
        key = load_pem_private_key(blocks[0][0].encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # not "from error": nothing that was made of a key goes anywhere
        raise PrivateKeyError("the PEM cannot be read") from None
    if not isinstance(key, _Key) or (isinstance(key, EllipticCurvePrivateKey) and not isinstance(key.curve, _CURVES)):
        raise PrivateKeyError("neither RSA, nor Ed25519, nor EC on one of the curves P-256, P-384, P-521")
    return key


def _check_pair(key: _Key, certificate: str) -> None:
    block = _CERTIFICATE_BLOCK.search(certificate)
    try:
        certified = x509.load_pem_x509_certificate(block[0].encode()).public_key() if block else None
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        certified = None
    if certified is None:
        raise PrivateKeyError("the certificate with it cannot be read")
    if certified != key.public_key():
        raise PrivateKeyError("the certificate with it is that of another key")


def _agree(server_public: str) -> tuple[bytes, str]:
    """The secret shared with the server, and our half of how it came about."""
    if not server_public:
        raise PrivateKeyError("the server's key to encrypt it with comes with features.jwt, which is off")
    if not _HEX_KEY.fullmatch(server_public):
        raise PrivateKeyError("the server's key to encrypt it with is not 64 hexadecimal digits")
    own = X25519PrivateKey.generate()
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(server_public)))
    except ValueError:
        # one of the few keys that make the secret known to everybody
        raise PrivateKeyError("the server's key to encrypt it with is a weak one") from None
    return secret, own.public_key().public_bytes_raw().hex()


def _der(key: _Key) -> bytes:
    """The encoding that most software reads under the label that the server writes."""
    form = PrivateFormat.TraditionalOpenSSL if isinstance(key, RSAPrivateKey) else PrivateFormat.PKCS8
    return key.private_bytes(Encoding.DER, form, NoEncryption())
