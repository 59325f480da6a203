"""A sample helper for networks with certificates: signs what a server asks for, and says how it is to be configured.

    python -I sample_helper_x509.py DIRECTORY CA CA-KEY

A server whose facts say that its approval is pending is deferred, once; DIRECTORY holds a file for each that was. A
helper for real use would ask the site's own authority; what it has to look at is the same. It stands alone, so that it
can be copied, and starts fast since it imports little.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

VALIDITY = datetime.timedelta(days=1)


def main(notes: Path, ca: Path, ca_key: Path) -> None:
    known = json.load(sys.stdin)
    identity = known["identity"]
    if not re.fullmatch(r"[A-Za-z0-9._-]+", identity):
        fail("the identity is not one that this helper takes")
    facts = json.loads(known["inventory"])["facts"]
    if not re.fullmatch(r"[a-z]+", facts["role"]):
        fail("the role is not one that this helper takes")
    note = notes / identity
    if facts["approval"] == "pending" and not note.exists():
        note.touch()
        answer: dict[str, Any] = {"defer": True, "msg": "its approval is pending"}
    else:
        ssldir = known["csr"]["ssldir"]
        answer = {
            "certificate": sign(known["csr"]["csr"], identity, ca, ca_key),
            "ca": ca.read_text(),
            "ssldir": ssldir,
            "configuration": configuration(identity, facts["role"], ssldir),
        }
    json.dump(answer, sys.stdout)


def sign(request: str, identity: str, ca: Path, ca_key: Path) -> str:
    """Give the certificate. The provisioner has compared the names in the request with the identity."""
    key = serialization.load_pem_private_key(ca_key.read_bytes(), None)
    wanted = x509.load_pem_x509_csr(request.encode())
    public = wanted.public_key()
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(public, rsa.RSAPublicKey):
        fail("a key is of a kind that this helper does not take")
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(wanted.subject)
        .issuer_name(x509.load_pem_x509_certificate(ca.read_bytes()).subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity)]), critical=False)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def configuration(identity: str, role: str, ssldir: str) -> dict[str, str]:
    return {
        "plugin.choria.server.provision": "false",
        "plugin.choria.middleware_hosts": "broker.example.net:4222",
        "plugin.choria.use_srv": "false",
        "plugin.security.provider": "file",
        "plugin.security.file.certificate": f"{ssldir}/certificate.pem",
        "plugin.security.file.key": f"{ssldir}/private.pem",
        "plugin.security.file.ca": f"{ssldir}/ca.pem",
        "identity": identity,
        "collectives": f"choria,{role}",
        "loglevel": "info",
    }


def fail(reason: str) -> NoReturn:
    sys.exit(reason)


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:]))
    except (KeyError, TypeError, ValueError) as error:
        fail(f"the document is not what this helper takes: {error!r}")
