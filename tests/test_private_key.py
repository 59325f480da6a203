"""How a private key of the helper's gets to its server, and to nobody else."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa, x25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
    load_pem_private_key,
)
from hypothesis import given
from hypothesis import strategies as st

from provisioner.errors import HostError
from provisioner.host.private_key import PrivateKeyError, encrypt, encrypted_pem

FIXTURES = Path(__file__).parent / "fixtures"
VECTOR = json.loads((FIXTURES / "v1" / "ecdh-vector.json").read_text())
DELIVERY = json.loads((FIXTURES / "v2" / "ecdh.json").read_text())

Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

SERVER = x25519.X25519PrivateKey.generate()
SERVER_PUBLIC = SERVER.public_key().public_bytes_raw().hex()
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED25519 = ed25519.Ed25519PrivateKey.generate()


def pem(key: Key, form: PrivateFormat, encryption: KeySerializationEncryption | None = None) -> str:
    return key.private_bytes(Encoding.PEM, form, encryption or NoEncryption()).decode()


def certificate(key: Key) -> str:
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "n1.example.net")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    return builder.sign(EC, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


CERTIFICATE = certificate(RSA)
KEY = pem(RSA, PrivateFormat.TraditionalOpenSSL)
EC_CERTIFICATE = certificate(EC)
EC_KEY = pem(EC, PrivateFormat.PKCS8)


def decrypted(text: str, secret: bytes) -> bytes:
    """Decrypt as a server does; the DER."""
    block = re.fullmatch(
        r"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,(?P<iv>[0-9a-f]{32})\n\n"
        r"(?P<body>(?:[A-Za-z0-9+/=]{1,64}\n)+)-----END RSA PRIVATE KEY-----\n",
        text,
    )
    assert block
    iv = bytes.fromhex(block["iv"])
    first = hashlib.md5(secret + iv[:8]).digest()
    key = first + hashlib.md5(first + secret + iv[:8]).digest()
    decryptor = Cipher(algorithms.AES256(key), modes.CBC(iv)).decryptor()
    padded = decryptor.update(base64.b64decode(block["body"])) + decryptor.finalize()
    unpadder = PKCS7(128).unpadder()
    return unpadder.update(padded) + unpadder.finalize()


def shape(text: str) -> list[str]:
    """The lines of an encrypted PEM, but for what is random and for the last line of base64."""
    lines = re.sub("AES-256-CBC,[0-9a-f]{32}", "AES-256-CBC,IV", text).split("\n")
    return lines[:4] + lines[-2:]


def delivered(key_pem: str, certificate_pem: str) -> bytes:
    """What the server ends up with."""
    text, own_public = encrypt(key_pem, certificate=certificate_pem, server_public=SERVER_PUBLIC)
    assert re.fullmatch("[0-9a-f]{64}", own_public)
    return decrypted(text, SERVER.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(own_public))))


def refusal(key_pem: str = KEY, certificate_pem: str = CERTIFICATE, server_public: str = SERVER_PUBLIC) -> str:
    with pytest.raises(PrivateKeyError) as refused:
        encrypt(key_pem, certificate=certificate_pem, server_public=server_public)
    chain = [refused.value, refused.value.__cause__]
    assert all(secret not in repr(error) for error in chain for secret in key_pem.splitlines() if len(secret) > 8)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return str(refused.value)


class TestGolden:
    """Bytes that Choria made or read."""

    @pytest.mark.parametrize("form", ["pkcs1", "pkcs8"])
    def test_the_same_key_and_vector_give_the_same_pem(self, form: str) -> None:
        lines = VECTOR[f"{form}_plain_pem"].splitlines()
        secret, iv = bytes.fromhex(VECTOR["shared_secret"]), bytes.fromhex(VECTOR["iv"])

        assert (
            encrypted_pem(base64.b64decode("".join(lines[1:-1])), secret=secret, iv=iv)
            == VECTOR[f"{form}_encrypted_pem"]
        )

    def test_a_pem_that_a_real_server_decrypted(self) -> None:
        own = x25519.X25519PrivateKey.from_private_bytes(bytes.fromhex(DELIVERY["provisioner_private_hex"]))
        secret = own.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(DELIVERY["server_public_hex"])))
        assert secret.hex() == DELIVERY["shared_secret_hex"]

        der = decrypted(DELIVERY["encrypted_pem"], secret)
        (stored,) = [value for name, value in DELIVERY.items() if "pem" in name and name != "encrypted_pem"]
        assert der == base64.b64decode("".join(stored.splitlines()[1:-1]))
        iv = re.search("AES-256-CBC,([0-9a-f]+)", DELIVERY["encrypted_pem"])
        assert iv
        assert encrypted_pem(der, secret=secret, iv=bytes.fromhex(iv[1])) == DELIVERY["encrypted_pem"]

    @pytest.mark.parametrize("network", ["x509-key", "insecure-key"])
    def test_what_goes_out_looks_like_what_the_go_original_sends(self, network: str) -> None:
        recorded = json.loads((FIXTURES / "v1" / "expected.json").read_text())[f"{network}/configure-request.json"]
        theirs = recorded["body"]["data"]
        key, ecdh_public = encrypt(KEY, certificate=CERTIFICATE, server_public=SERVER_PUBLIC)

        assert shape(key) == shape(theirs["key"])
        assert len(ecdh_public) == len(theirs["ecdh_public"])


class TestDelivery:
    """What helpers return, and in which encoding it reaches the server."""

    @pytest.mark.parametrize("form", [PrivateFormat.TraditionalOpenSSL, PrivateFormat.PKCS8])
    def test_rsa_arrives_as_pkcs1(self, form: PrivateFormat) -> None:
        der = delivered(pem(RSA, form), CERTIFICATE)
        assert der == RSA.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())

    @pytest.mark.parametrize("form", [PrivateFormat.TraditionalOpenSSL, PrivateFormat.PKCS8])
    @pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
    def test_ec_arrives_as_pkcs8(self, curve: ec.EllipticCurve, form: PrivateFormat) -> None:
        key = ec.generate_private_key(curve)
        der = delivered(pem(key, form), certificate(key))
        assert der == key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())

    def test_ed25519_arrives_as_pkcs8(self) -> None:
        der = delivered(pem(ED25519, PrivateFormat.PKCS8), certificate(ED25519))
        assert isinstance(load_der_private_key(der, None), ed25519.Ed25519PrivateKey)

    def test_text_around_the_key_and_parameters_before_it_do_not_matter(self) -> None:
        parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
        text = "\ufeffBag Attributes\r\n" + (parameters + pem(EC, PrivateFormat.TraditionalOpenSSL)).replace(
            "\n", "\r\n"
        )
        assert delivered(text, "subject=n1\n" + certificate(EC) + certificate(RSA))

    def test_every_time_it_is_encrypted_with_another_key(self) -> None:
        first, second = (encrypt(KEY, certificate=CERTIFICATE, server_public=SERVER_PUBLIC) for _ in range(2))
        assert first[0] != second[0]
        assert first[1] != second[1]

    def test_openssl_reads_it_with_the_secret(self) -> None:
        text, own_public = encrypt(KEY, certificate=CERTIFICATE, server_public=SERVER_PUBLIC.upper())
        secret = SERVER.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(own_public)))
        key = load_pem_private_key(text.encode(), secret)
        assert isinstance(key, rsa.RSAPrivateKey)
        assert key.public_key() == RSA.public_key()


class TestRefused:
    """What cannot be sent is an error that shows nothing of the key."""

    @pytest.mark.parametrize("form", [PrivateFormat.TraditionalOpenSSL, PrivateFormat.PKCS8])
    def test_an_encrypted_key(self, form: PrivateFormat) -> None:
        assert "is encrypted" in refusal(pem(RSA, form, BestAvailableEncryption(b"password")))

    @pytest.mark.parametrize("text", ["garbage", "-----BEGIN RSA PRIVATE KEY-----\nAAAA", CERTIFICATE])
    def test_no_key_at_all(self, text: str) -> None:
        assert "0 came" in refusal(text)

    def test_two_keys(self) -> None:
        assert "2 came" in refusal(KEY + pem(EC, PrivateFormat.PKCS8))

    @pytest.mark.parametrize("body", ["", "AAAA", "!!!!", "MIIBVgIBADANBgkqhkiG9w0BAQEFAASCAUAwggE8AgEAAkEAq7BFUpkG"])
    def test_a_key_that_is_damaged(self, body: str) -> None:
        assert "cannot be read" in refusal(f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n")

    def test_kinds_that_servers_cannot_use(self) -> None:
        for key in (dsa.generate_private_key(1024), x25519.X25519PrivateKey.generate()):
            assert "neither RSA" in refusal(
                key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
            )
        assert "neither RSA" in refusal(pem(ec.generate_private_key(ec.SECP256K1()), PrivateFormat.PKCS8))

    @pytest.mark.parametrize("other", [certificate(EC), certificate(rsa.generate_private_key(65537, 2048))])
    def test_the_certificate_of_another_key(self, other: str) -> None:
        assert "is that of another key" in refusal(certificate_pem=other)
        assert "is that of another key" in refusal(certificate_pem=other + CERTIFICATE), "the first one counts"

    @pytest.mark.parametrize(
        "other", ["", "CERT", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", KEY]
    )
    def test_a_certificate_that_is_none(self, other: str) -> None:
        assert "certificate with it cannot be read" in refusal(certificate_pem=other)

    def test_without_a_key_of_the_server_nothing_is_sent(self) -> None:
        assert "features.jwt" in refusal(server_public="")

    @pytest.mark.parametrize("public", ["09", "0" * 63, "x" * 64, "09" * 33, " " + "09" * 32, "٠" * 64])
    def test_a_key_of_the_server_that_is_none(self, public: str) -> None:
        assert "64 hexadecimal digits" in refusal(server_public=public)

    @pytest.mark.parametrize(
        "public",
        [
            "00" * 32,
            "01" + "00" * 31,
            "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
            "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        ],
    )
    def test_keys_of_the_server_with_which_everybody_knows_the_secret(self, public: str) -> None:
        assert "weak" in refusal(server_public=public)

    @given(key=st.text(), certificate_pem=st.text(), public=st.text())
    def test_any_text(self, key: str, certificate_pem: str, public: str) -> None:
        for texts in (
            (key, EC_CERTIFICATE, SERVER_PUBLIC),
            (EC_KEY, certificate_pem, SERVER_PUBLIC),
            (EC_KEY, EC_CERTIFICATE, public),
        ):
            with pytest.raises(HostError):
                encrypt(texts[0], certificate=texts[1], server_public=texts[2])

    @given(st.binary(), st.sampled_from(["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "CERTIFICATE"]))
    def test_any_bytes_in_a_block(self, der: bytes, label: str) -> None:
        block = f"-----BEGIN {label}-----\n{base64.encodebytes(der).decode()}-----END {label}-----\n"
        for texts in ((block, EC_CERTIFICATE), (EC_KEY, block)):
            with pytest.raises(HostError):
                encrypt(texts[0], certificate=texts[1], server_public=SERVER_PUBLIC)
