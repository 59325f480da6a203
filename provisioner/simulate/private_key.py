"""How a server opens a private key that was encrypted for it: X25519, and the old encrypted PEM of OpenSSL.

The errors are those of a real server, word for word, as far as Go's libraries word them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import textwrap

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_BLOCK_BYTES = 16
_PEM = re.compile(r"-----BEGIN ([^\n]*?)-----[ \t\r]*\n(.*?)\n?-----END \1-----", re.DOTALL)
_HEADER = re.compile(r"([^:\n]+):[ \t]*([^\n]*)\n")


class UndecryptableError(ValueError):
    """The key cannot be decrypted; the text is what the server says about it."""


def decrypt(pem: str, *, own: X25519PrivateKey | None, other_public: str) -> str:
    """Decrypt a key as a server does it.

    :param own: the server's half of the exchange, None when it has made none yet
    :param other_public: the other half, hexadecimal
    :returns: PEM, whose label says RSA whatever the key is
    :raises UndecryptableError: when that cannot be done
    """
    secret = _secret(own, _hex(other_public))
    headers, encrypted = _block(pem)
    mode, _, iv = headers.get("DEK-Info", "").partition(",")
    if not mode:
        raise UndecryptableError("key is not encrypted")
    der = _decrypted(encrypted, mode, iv, secret)
    lines = textwrap.wrap(base64.b64encode(der).decode(), 64)
    return "\n".join(("-----BEGIN RSA PRIVATE KEY-----", *lines, "-----END RSA PRIVATE KEY-----", ""))


def _hex(text: str) -> bytes:
    for byte in text.encode(errors="replace"):
        if chr(byte) not in "0123456789abcdefABCDEF":
            raise UndecryptableError(f"encoding/hex: invalid byte: U+{byte:04X} {chr(byte)!r}")
    if len(text) % 2:
        raise UndecryptableError("encoding/hex: odd length hex string")
    return bytes.fromhex(text)


def _secret(own: X25519PrivateKey | None, other_public: bytes) -> bytes:
    if own is None:
        raise UndecryptableError("private key not set")
    try:
        public = X25519PublicKey.from_public_bytes(other_public)
    except ValueError:
        raise UndecryptableError("crypto/ecdh: invalid public key") from None
    try:
        return own.exchange(public)
    except ValueError:
        raise UndecryptableError("crypto/ecdh: bad X25519 remote ECDH input: low order point") from None


def _block(pem: str) -> tuple[dict[str, str], bytes]:
    """Give the headers and the contents of the first block."""
    found = _PEM.search(pem.replace("\r\n", "\n"))
    if found is None:
        raise UndecryptableError("bad key received")
    headers, text = {}, found[2]
    while header := _HEADER.match(text):
        headers[header[1].strip()] = header[2].strip()
        text = text[header.end() :]
    try:
        return headers, base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise UndecryptableError("bad key received") from None


def _decrypted(encrypted: bytes, mode: str, iv: str, secret: bytes) -> bytes:
    if mode != "AES-256-CBC":
        raise UndecryptableError("x509: unknown encryption mode")
    vector = _hex(iv)
    if len(vector) != _BLOCK_BYTES:
        raise UndecryptableError("x509: incorrect IV size")
    if len(encrypted) % _BLOCK_BYTES or not encrypted:
        raise UndecryptableError("x509: encrypted PEM data is not a multiple of the block size")
    salt = vector[:8]
    first = _md5(secret + salt)
    decryptor = Cipher(algorithms.AES(first + _md5(first + secret + salt)), modes.CBC(vector)).decryptor()
    padded = decryptor.update(encrypted) + decryptor.finalize()
    padding = padded[-1]
    if not 1 <= padding <= _BLOCK_BYTES or padded[-padding:] != bytes([padding]) * padding:
        raise UndecryptableError("x509: decryption password incorrect")
    return padded[:-padding]


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
