#!/usr/lib/choria-provisioner/bin/python3 -I
"""A helper for networks with certificates: signs what the server asks for, with the feature pki.

The servers that may come are files in NODES, named for them, which hold the role of the server; others have to
wait. The daemon has compared the name in the request with the identity; here the certificate gets this name
and no other, whatever else the request asks for.

Copy it, and change what follows. The user of the daemon must be able to read the key of the CA, and nobody else.
"""

from __future__ import annotations

import datetime
import re

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from provisioner.helper import Answer, Server, configure, defer, fail, read_text, run

NODES = "/etc/choria-provisioner/nodes"
CA = "/etc/choria-provisioner/ca.pem"
CA_KEY = "/etc/choria-provisioner/ca-key.pem"
BROKERS = "broker.example.net:4222"
VALIDITY = datetime.timedelta(days=365)
# clocks may differ by this
BACKDATED = datetime.timedelta(minutes=5)


def decide(server: Server) -> Answer:
    role, ca = role_of(server), read_text(CA)
    return configure(
        {
            "plugin.choria.server.provision": "false",
            "plugin.choria.middleware_hosts": BROKERS,
            "plugin.choria.use_srv": "false",
            "plugin.security.provider": "file",
            "plugin.security.file.certificate": f"{server.csr.ssldir}/certificate.pem",
            "plugin.security.file.key": f"{server.csr.ssldir}/private.pem",
            "plugin.security.file.ca": f"{server.csr.ssldir}/ca.pem",
            "identity": server.identity,
            "collectives": f"mcollective,{role}",
            "loglevel": "info",
        },
        certificate=sign(server, ca),
        ca=ca,
    )


def sign(server: Server, ca: str) -> str:
    issuer = x509.load_pem_x509_certificate(ca.encode())
    # to look for mistakes in an RSA key takes as long as all the rest
    key = load_pem_private_key(read_text(CA_KEY).encode(), None, unsafe_skip_rsa_key_validation=True)
    if not isinstance(key, EllipticCurvePrivateKey | RSAPrivateKey):
        fail(f"{CA_KEY}: neither an EC nor an RSA key")
    if key.public_key() != issuer.public_key():
        fail(f"{CA_KEY}: not the key of the certificate in {CA}")
    request = x509.load_pem_x509_csr(server.csr.csr.encode())
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, server.identity)]))
        .issuer_name(issuer.subject)
        .public_key(request.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALIDITY)
    )
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([x509.DNSName(server.identity)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()


def role_of(server: Server) -> str:
    # it becomes a part of a path
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", server.identity):
        fail("the identity is not one that this helper takes")
    file = f"{NODES}/{server.identity}"
    try:
        role = read_text(file).strip()
    except FileNotFoundError:
        defer(f"there is no {file}")
    if not re.fullmatch("[a-z0-9_]+", role):
        fail(f"{file}: no role, and nothing else, is in it")
    return role


if __name__ == "__main__":
    run(decide)
