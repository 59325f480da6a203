"""Which certificate signing requests are fit to be signed. Most are made by hand here, byte by byte, since no library
makes the ones that a hostile server would send.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import re2
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from hypothesis import assume, given
from hypothesis import strategies as st

from provisioner.config import DEFAULT_DENY_LIST
from provisioner.errors import HostError
from provisioner.host.csr import CSRError, validate

FIXTURES = Path(__file__).parent / "fixtures"
IDENTITY = "n1.example.net"
DENY_LIST = tuple(re2.compile(pattern) for pattern in DEFAULT_DENY_LIST)
KEY = ec.generate_private_key(ec.SECP256R1())

UTF8, NUMERIC, PRINTABLE, T61, IA5, UNIVERSAL, BMP = 0x0C, 0x12, 0x13, 0x14, 0x16, 0x1C, 0x1E
COMMON_NAME, ORGANIZATION, EMAIL = b"\x55\x04\x03", b"\x55\x04\x0a", b"\x2a\x86\x48\x86\xf7\x0d\x01\x09\x01"
NO_ATTRIBUTES = b"\xa0\x00"
ECDSA_SHA256 = b"\x30\x0a\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x02"
PKCS9_EXTENSIONS = b"\x2a\x86\x48\x86\xf7\x0d\x01\x09\x0e"
MICROSOFT_EXTENSIONS = b"\x2b\x06\x01\x04\x01\x82\x37\x02\x01\x0e"


def tlv(tag: int, *parts: bytes) -> bytes:
    """One DER value."""
    content = b"".join(parts)
    if len(content) < 128:
        return bytes([tag, len(content)]) + content
    length = len(content).to_bytes((len(content).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def pem(der: bytes, label: str = "CERTIFICATE REQUEST") -> str:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n"


def by_hand(
    *names: tuple[bytes, int, bytes], version: int = 0, attributes: bytes = NO_ATTRIBUTES, signer: object = KEY
) -> str:
    """A request with these parts of the subject (kind, encoding, bytes), signed."""
    subject = tlv(0x30, *(tlv(0x31, tlv(0x30, tlv(0x06, kind), tlv(tag, value))) for kind, tag, value in names))
    public = KEY.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    info = tlv(0x30, tlv(0x02, bytes([version])), subject, public, attributes)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    signature = signer.sign(info, ec.ECDSA(hashes.SHA256()))
    return pem(tlv(0x30, info, ECDSA_SHA256, tlv(0x03, b"\x00", signature)))


def asking(*names: x509.GeneralName, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey = KEY) -> str:
    """A request for these alternative names."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(name(IDENTITY))
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM).decode()


def name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def extensions(kind: bytes, *lists: bytes) -> bytes:
    return tlv(0x30, tlv(0x06, kind), tlv(0x31, *lists))


def alternative_names(dns: str) -> bytes:
    names = tlv(0x30, tlv(0x82, dns.encode()))
    return tlv(0x30, tlv(0x30, tlv(0x06, b"\x55\x1d\x11"), tlv(0x04, names)))


def check(text: str, identity: str = IDENTITY, deny_list: Sequence[object] = DENY_LIST) -> str:
    return validate(text, identity=identity, deny_list=deny_list)  # type: ignore[arg-type]


def refusal(text: str, identity: str = IDENTITY) -> str:
    with pytest.raises(CSRError) as refused:
        check(text, identity)
    assert str(refused.value).isprintable()
    return str(refused.value)


GOOD = by_hand((COMMON_NAME, PRINTABLE, IDENTITY.encode()))


def recorded() -> list[tuple[str, str]]:
    bodies = json.loads((FIXTURES / "v1" / "expected.json").read_text())
    found = [
        (body["data"]["csr"], document["envelope"]["senderid"])
        for document in bodies.values()
        if (body := document.get("body", "")) and isinstance(body, dict) and body.get("action") == "gencsr"
        if "csr" in body.get("data", {})
    ]
    for case in json.loads((FIXTURES / "agents" / "rpc-matrix.json").read_text()):
        if case.get("case") in ("gencsr ok", "gencsr all subject parts"):
            found.append((json.loads(case["reply_body"])["data"]["csr"], "s1.lab"))
    return found


class TestAccepted:
    """What real servers and real tools make."""

    @pytest.mark.parametrize(("text", "identity"), recorded())
    def test_those_of_real_servers(self, text: str, identity: str) -> None:
        assert check(text, identity) == text

    def test_there_are_recorded_ones(self) -> None:
        assert len(recorded()) == 4

    def test_the_other_label(self) -> None:
        text = GOOD.replace("CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST")
        assert check(text) == text

    @pytest.mark.parametrize(
        ("before", "after"),
        [("\ufeff", ""), ("Certificate Request:\n    Data:\n", "\nBye\n"), ("\r\n\r\n", "\r\n"), ("# --- \n", "")],
    )
    def test_text_around_it_is_left_out(self, before: str, after: str) -> None:
        assert check(before + GOOD + after) == GOOD

    def test_line_ends_of_windows(self) -> None:
        text = GOOD.replace("\n", "\r\n")
        assert check(text) == text

    def test_without_a_line_end(self) -> None:
        assert check(GOOD.rstrip("\n")) == GOOD.rstrip("\n")

    @pytest.mark.parametrize(
        "key",
        [
            rsa.generate_private_key(65537, 2048),
            ec.generate_private_key(ec.SECP384R1()),
            ed25519.Ed25519PrivateKey.generate(),
        ],
        ids=["RSA", "EC", "Ed25519"],
    )
    def test_all_usual_kinds_of_key(
        self, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
    ) -> None:
        algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
        request = x509.CertificateSigningRequestBuilder().subject_name(name(IDENTITY)).sign(key, algorithm)
        assert check(request.public_bytes(serialization.Encoding.PEM).decode())

    @pytest.mark.parametrize(
        ("tag", "codec"),
        [
            (UTF8, "utf-8"),
            (PRINTABLE, "ascii"),
            (IA5, "ascii"),
            (T61, "ascii"),
            (BMP, "utf-16-be"),
            (UNIVERSAL, "utf-32-be"),
        ],
    )
    def test_every_encoding_of_the_same_name(self, tag: int, codec: str) -> None:
        assert check(by_hand((COMMON_NAME, tag, IDENTITY.encode(codec))))

    def test_a_name_longer_than_certificates_allow(self) -> None:
        identity = ".".join(["abcdefgh"] * 12)
        assert check(by_hand((COMMON_NAME, UTF8, identity.encode())), identity)

    def test_alternative_names_that_nothing_denies(self) -> None:
        assert check(
            asking(
                x509.DNSName("www.example.net"),
                x509.RFC822Name("root@example.net"),
                x509.UniformResourceIdentifier("https://example.net/"),
                x509.IPAddress(ipaddress.ip_address("192.0.2.1")),
                x509.DirectoryName(name("other.example.net")),
                x509.RegisteredID(ObjectIdentifier("1.2.3.4")),
            )
        )


class TestNotOneRequest:
    """It must be one PEM block that can be read in one way only."""

    @pytest.mark.parametrize("text", ["", "\n", "not PEM", "MIIB", "----BEGIN CERTIFICATE REQUEST----"])
    def test_no_pem(self, text: str) -> None:
        assert "is not PEM" in refusal(text)

    @pytest.mark.parametrize("label", ["CERTIFICATE", "PRIVATE KEY", "X509 CRL", "certificate request"])
    def test_another_label(self, label: str) -> None:
        assert "labelled" in refusal(GOOD.replace("CERTIFICATE REQUEST", label))

    def test_more_than_one_block(self) -> None:
        other = by_hand((COMMON_NAME, UTF8, b"root.mcollective"))
        assert "2 PEM blocks" in refusal(GOOD + other)
        assert "2 PEM blocks" in refusal(other + GOOD)
        assert "2 PEM blocks" in refusal(GOOD + pem(b"x", "CERTIFICATE"))

    def test_two_blocks_made_to_look_like_one(self) -> None:
        inner = GOOD.split("\n", 1)[1]
        assert refusal("-----BEGIN CERTIFICATE REQUEST-----\n-----BEGIN CERTIFICATE REQUEST-----\n" + inner)
        assert refusal(GOOD.replace("\n", "\nProc-Type: 4,ENCRYPTED\n\n", 1))
        assert refusal(GOOD.replace("-----END", "----- END"))

    def test_a_block_that_is_not_base64(self) -> None:
        assert "base64" in refusal("-----BEGIN CERTIFICATE REQUEST-----\nA=AA\n-----END CERTIFICATE REQUEST-----\n")

    def test_other_data_behind_the_request_in_the_block(self) -> None:
        der = base64.b64decode("".join(GOOD.splitlines()[1:-1]))
        assert "cannot be read" in refusal(pem(der + b"\x05\x00"))

    def test_version_three(self) -> None:
        assert "cannot be read" in refusal(by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), version=2))

    def test_without_the_set_of_attributes(self) -> None:
        assert "cannot be read" in refusal(by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), attributes=b""))

    def test_signed_by_another_key(self) -> None:
        other = ec.generate_private_key(ec.SECP256R1())
        text = by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), signer=other)
        assert "not signed by its own key" in refusal(text)


class TestCommonName:
    """Exactly one, and exactly the identity."""

    @pytest.mark.parametrize(
        "common_name",
        ["N1.example.net", "n1.example.net.", " n1.example.net", "n1.example.net\n", "n1.example.net\0", "*", "", "ñ1"],
    )
    def test_another_one(self, common_name: str) -> None:
        assert "only common name" in refusal(by_hand((COMMON_NAME, UTF8, common_name.encode())))

    def test_none(self) -> None:
        assert "found: none" in refusal(by_hand((ORGANIZATION, UTF8, IDENTITY.encode())))

    def test_two(self) -> None:
        right = (COMMON_NAME, UTF8, IDENTITY.encode())
        assert "only common name" in refusal(by_hand(right, right))
        assert "only common name" in refusal(by_hand(right, (COMMON_NAME, UTF8, b"root.choria")))

    def test_one_in_an_encoding_that_is_broken(self) -> None:
        for tag, value in ((UTF8, b"\xff"), (BMP, b"\xd8\x00"), (BMP, b"n"), (UNIVERSAL, b"\xff" * 4), (0x02, b"\x01")):
            assert refusal(by_hand((COMMON_NAME, tag, value)))

    def test_one_that_is_denied_although_it_is_the_identity(self) -> None:
        assert "cert_deny_list" in refusal(by_hand((COMMON_NAME, UTF8, b"root.mcollective")), "root.mcollective")

    def test_a_denied_name_elsewhere_in_the_subject(self) -> None:
        right = (COMMON_NAME, UTF8, IDENTITY.encode())
        assert "cert_deny_list" in refusal(by_hand(right, (EMAIL, IA5, b"root@root.mcollective")))

    def test_control_characters_elsewhere_in_the_subject(self) -> None:
        right = (COMMON_NAME, UTF8, IDENTITY.encode())
        assert "control characters" in refusal(by_hand(right, (ORGANIZATION, UTF8, b"x\nCN=root.choria")))


class TestAlternativeNames:
    """The deny list is about every name that the certificate may end up with."""

    @pytest.mark.parametrize("common_name", ["root.MCOLLECTIVE", "root.mcollective.", "root.Choria."])
    def test_another_spelling_of_the_common_name(self, common_name: str) -> None:
        request = by_hand((COMMON_NAME, UTF8, common_name.encode()))
        assert "cert_deny_list" in refusal(request, common_name)

    @pytest.mark.parametrize(
        "denied",
        [
            x509.DNSName("root.mcollective"),
            x509.DNSName("bob.privileged.choria"),
            x509.DNSName("ROOT.McOllective"),
            x509.DNSName("root.mcollective."),
            x509.DNSName("*.choria"),
            x509.RFC822Name("root@root.choria"),
            x509.UniformResourceIdentifier("choria://root.choria"),
            x509.DirectoryName(name("root.choria")),
            x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.DOMAIN_COMPONENT, "x.choria")])),
        ],
    )
    def test_a_denied_one_of_any_kind(self, denied: x509.GeneralName) -> None:
        assert "cert_deny_list" in refusal(asking(x509.DNSName("www.example.net"), denied))

    @pytest.mark.parametrize(
        ("pattern", "denied"),
        [
            (r"^192\.0\.2\.", x509.IPAddress(ipaddress.ip_address("192.0.2.1"))),
            (r"^2001:db8::", x509.IPAddress(ipaddress.ip_address("2001:db8::1"))),
            (r"^1\.2\.3", x509.RegisteredID(ObjectIdentifier("1.2.3.4"))),
        ],
    )
    def test_addresses_and_registered_ids_are_compared_as_text(self, pattern: str, denied: x509.GeneralName) -> None:
        with pytest.raises(CSRError, match="cert_deny_list"):
            check(asking(denied), deny_list=[re2.compile(pattern)])

    def test_a_kind_that_cannot_be_compared_is_refused(self) -> None:
        principal = x509.OtherName(ObjectIdentifier("1.3.6.1.4.1.311.20.2.3"), tlv(UTF8, b"harmless"))
        assert "otherName" in refusal(asking(principal))

    @pytest.mark.parametrize("tag", [0xA3, 0xA5], ids=["x400Address", "ediPartyName"])
    def test_a_kind_that_nobody_knows_is_refused(self, tag: int) -> None:
        names = tlv(0x30, tlv(tag, tlv(UTF8, b"x")))
        listed = tlv(0x30, tlv(0x30, tlv(0x06, b"\x55\x1d\x11"), tlv(0x04, names)))
        attributes = tlv(0xA0, extensions(PKCS9_EXTENSIONS, listed))
        assert "cannot be read" in refusal(by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), attributes=attributes))

    @pytest.mark.parametrize("dns", ["x\0.root.choria", "a\nb"])
    def test_a_name_that_no_host_has(self, dns: str) -> None:
        attributes = tlv(0xA0, extensions(PKCS9_EXTENSIONS, alternative_names(dns)))
        assert refusal(by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), attributes=attributes))

    @pytest.mark.parametrize(
        "attributes",
        [
            [
                extensions(PKCS9_EXTENSIONS, alternative_names("a.b")),
                extensions(PKCS9_EXTENSIONS, alternative_names("r.choria")),
            ],
            [extensions(PKCS9_EXTENSIONS, alternative_names("a.b"), alternative_names("r.choria"))],
            [extensions(MICROSOFT_EXTENSIONS, alternative_names("r.choria"))],
        ],
        ids=["twice", "two values", "Microsoft's"],
    )
    def test_names_where_only_some_tools_find_them_are_refused(self, attributes: list[bytes]) -> None:
        assert refusal(by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), attributes=tlv(0xA0, *attributes)))

    def test_a_pattern_means_what_it_means_in_re2(self) -> None:
        pattern = re2.compile(r"^[[:alpha:]]+\.mcollective\z")
        with pytest.raises(CSRError):
            check(asking(x509.DNSName("bob.mcollective")), deny_list=[pattern])
        assert check(asking(x509.DNSName("bob2.mcollective")), deny_list=[pattern])


class TestAnything:
    """Whatever comes, the only exception is the one that costs this host its turn."""

    @given(st.text())
    def test_any_text(self, text: str) -> None:
        with pytest.raises(HostError):
            check(text)

    @given(st.binary())
    def test_any_bytes_in_a_block(self, der: bytes) -> None:
        with pytest.raises(HostError):
            check(pem(der))

    @given(st.data())
    def test_a_request_with_changed_bytes(self, data: st.DataObject) -> None:
        # signed by a kind of key that signs the same twice, since what is drawn must not depend on chance
        key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
        text = asking(x509.DNSName("www.example.net"), x509.DirectoryName(name("x")), x509.RFC822Name("a@b"), key=key)
        der = base64.b64decode("".join(text.splitlines()[1:-1]))
        changed = bytearray(der)
        for _ in range(data.draw(st.integers(1, 3))):
            # but not in the last bytes, which say how many bits of the signature count
            changed[data.draw(st.integers(0, len(der) - 66))] ^= data.draw(st.integers(1, 255))
        assume(changed != der)
        with pytest.raises(HostError):
            check(pem(bytes(changed)))

    @given(st.sampled_from([UTF8, NUMERIC, PRINTABLE, T61, IA5, UNIVERSAL, BMP, 0x03, 0x04, 0x05]), st.binary())
    def test_a_signed_request_with_any_name(self, tag: int, value: bytes) -> None:
        with pytest.raises(HostError):
            check(by_hand((COMMON_NAME, tag, value), (COMMON_NAME, UTF8, IDENTITY.encode())))

    @given(st.binary())
    def test_a_signed_request_with_any_attributes(self, attributes: bytes) -> None:
        text = by_hand((COMMON_NAME, UTF8, IDENTITY.encode()), attributes=tlv(0xA0, attributes))
        if attributes:
            with pytest.raises(HostError):
                check(text)
        else:
            check(text)

    @given(st.binary(), st.sampled_from([0x81, 0x82, 0x86, 0x87, 0x88, 0xA0, 0xA3, 0xA4, 0xA5]))
    def test_a_signed_request_with_any_alternative_name(self, value: bytes, tag: int) -> None:
        names = tlv(0x30, tlv(tag, value))
        listed = tlv(0x30, tlv(0x30, tlv(0x06, b"\x55\x1d\x11"), tlv(0x04, names)))
        text = by_hand(
            (COMMON_NAME, UTF8, IDENTITY.encode()), attributes=tlv(0xA0, extensions(PKCS9_EXTENSIONS, listed))
        )
        with contextlib.suppress(HostError):
            assert check(text) == text


class TestExtensions:
    """A helper may copy what is asked for into the certificate."""

    @pytest.mark.parametrize(
        "extension",
        [
            x509.BasicConstraints(ca=True, path_length=None),
            x509.IssuerAlternativeName([x509.DNSName("root.choria")]),
            x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00"),
        ],
        ids=["an authority", "a name of the issuer", "unknown"],
    )
    def test_those_that_no_server_asks_for_are_refused(self, extension: x509.ExtensionType) -> None:
        assert "extension" in refusal(requesting(extension))

    def test_the_uses_of_the_key_may_be_asked_for(self) -> None:
        request = requesting(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))
        assert check(request) == request


def requesting(extension: x509.ExtensionType) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(name(IDENTITY))
    request = builder.add_extension(extension, critical=False).sign(KEY, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()
