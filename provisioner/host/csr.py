"""The certificate signing request of a server, checked before anybody signs it."""

from __future__ import annotations

import base64
import binascii
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

from provisioner.config import Pattern
from provisioner.errors import HostError
from provisioner.text import printable

#: The attributes of a request that ask for extensions: that of PKCS#9, and Microsoft's, which some tools read too.
_EXTENSION_REQUESTS = ("1.2.840.113549.1.9.14", "1.3.6.1.4.1.311.2.1.14")

#: The extensions that may be asked for.
_EXTENSIONS = (x509.SubjectAlternativeName, x509.KeyUsage, x509.ExtendedKeyUsage)

_BLOCK = re.compile(
    r"-----BEGIN (?P<label>(?:NEW )?CERTIFICATE REQUEST)-----[ \t]*\r?\n"
    r"(?P<body>[A-Za-z0-9+/=\r\n\t ]+)"
    r"-----END (?P=label)-----(?:\r?\n)?"
)
_WHITE_SPACE = re.compile(r"[\r\n\t ]+")

_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)

#: Held while warnings are switched off, which is done for the whole process.
_WARNINGS = threading.Lock()


class CSRError(HostError):
    """A server's certificate signing request is none, or none to sign."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the certificate signing request {problem}")


def validate(pem: str, *, identity: str, deny_list: Iterable[Pattern]) -> str:
    """Check a request, and give the very PEM block that was checked: what stood around it may be read by others.

    Its only common name must be the identity, letter by letter, and its own key must have signed it. No name in its
    subject and no alternative name of any kind may be one that the deny list is about, as it is written, in lower case
    or without a final dot, since all of these are the same name in DNS. One of kind otherName is refused: it holds
    data of any shape, which a pattern cannot be compared with. So are extensions that real servers never ask for: a
    helper that copies them into the certificate could make the node an authority.

    :param pem: what the server sent; text around the one PEM block does not matter
    :param identity: of the server
    :param deny_list: patterns as in `cert_deny_list`
    :raises CSRError: for everything else
    """
    block, der = _only_block(pem)
    request = _read(der)
    if not request.is_signed:
        raise CSRError("is not signed by its own key")
    if request.common_names != [identity]:
        found = ", ".join(repr(printable(name)) for name in request.common_names[:3]) or "none"
        raise CSRError(f"must have the identity as its only common name; found: {found}")
    patterns = tuple(deny_list)
    for name in (*request.subject, *request.alternative_names):
        _check(name, patterns)
    return block


def _check(name: str, deny_list: Iterable[Pattern]) -> None:
    if not name.isprintable():
        raise CSRError("holds a name with control characters")
    for pattern in deny_list:
        if pattern.search(name) or pattern.search(name.lower().rstrip(".")):
            raise CSRError(f"asks for the name {printable(name)!r}, which {pattern.pattern!r} in cert_deny_list denies")


def _only_block(pem: str) -> tuple[str, bytes]:
    """The only PEM block of a text, and the DER in it. Counted here, since readers take one of several and stop."""
    count = pem.count("-----BEGIN ")
    if count != 1:
        raise CSRError("is not PEM" if count == 0 else f"is not alone: {count} PEM blocks came")
    block = _BLOCK.search(pem)
    if block is None:
        raise CSRError("is not a whole PEM block labelled CERTIFICATE REQUEST")
    try:
        return block[0], base64.b64decode(_WHITE_SPACE.sub("", block["body"]), validate=True)
    except binascii.Error:
        raise CSRError("has a PEM block that is not base64") from None


@attrs.frozen
class _Request:
    common_names: list[str]
    subject: list[str]
    alternative_names: list[str]
    is_signed: bool


def _read(der: bytes) -> _Request:
    """All that is of interest in a request. The library reads most parts only when they are asked for."""
    try:
        # it warns of long names, and of more that is no reason to refuse
        with _WARNINGS, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            request = x509.load_der_x509_csr(der)
            return _Request(
                common_names=list(_texts(request.subject.get_attributes_for_oid(NameOID.COMMON_NAME))),
                subject=list(_texts(request.subject)),
                alternative_names=list(_alternative_names(request)),
                is_signed=request.is_signature_valid,
            )
    except _UNREADABLE:
        raise CSRError("cannot be read: it is damaged, or of a kind that is not known here") from None


def _texts(attributes: Iterable[x509.NameAttribute[Any]]) -> Iterator[str]:
    for attribute in attributes:
        if not isinstance(attribute.value, str):
            raise CSRError("holds a name that is not text")
        yield attribute.value


def _alternative_names(request: x509.CertificateSigningRequest) -> Iterator[str]:
    asked = [each.oid.dotted_string for each in request.attributes if each.oid.dotted_string in _EXTENSION_REQUESTS]
    # the library reads the first and only the first kind, the signer's tools may read others
    if asked not in ([], [_EXTENSION_REQUESTS[0]]):
        raise CSRError("asks for extensions in more than one way, or in Microsoft's")
    for extension in request.extensions:
        if not isinstance(extension.value, _EXTENSIONS):
            raise CSRError("asks for an extension other than alternative names and the uses of the key")
        if isinstance(extension.value, x509.SubjectAlternativeName):
            for name in extension.value:
                yield from _alternative_name(name)


def _alternative_name(name: x509.GeneralName) -> Iterator[str]:
    if isinstance(name, x509.OtherName):
        raise CSRError("asks for an alternative name of kind otherName, which cannot be compared with cert_deny_list")
    if isinstance(name, x509.DirectoryName):
        yield from _texts(name.value)
        yield name.value.rfc4514_string()
    elif isinstance(name, x509.RegisteredID):
        yield name.value.dotted_string
    else:
        yield str(name.value)
