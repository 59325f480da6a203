"""The helper of the networks in these tests: enrolls the node that it reads about from standard input.

It marks in the folder ``asked`` of the network that it was asked about a node. As long as there is a file ``gate`` in
the network's folder it waits with its answer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: The collective of all servers once they are provisioned.
COLLECTIVE = "fleet"
GATE_POLL_SECONDS = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=("insecure", "x509", "org"), required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--answer", choices=("enroll", "defer", "shutdown"), default="enroll")
    parser.add_argument(
        "--private-keys", action="store_true", help="give every node a key, of the kind it is named after"
    )
    arguments = parser.parse_args()

    node = json.load(sys.stdin)
    asked = arguments.dir / "asked"
    asked.mkdir(exist_ok=True)
    (asked / node["identity"]).touch()
    while (arguments.dir / "gate").exists():
        time.sleep(GATE_POLL_SECONDS)
    if arguments.answer == "enroll":
        answer = enroll(node, arguments.network, arguments.dir, private_key=arguments.private_keys)
    else:
        answer = {arguments.answer: True, "msg": "not now"}
    json.dump(answer, sys.stdout)


def enroll(node: dict[str, Any], network: str, directory: Path, *, private_key: bool) -> dict[str, Any]:
    """The answer that makes the node a member of its network."""
    identity = node["identity"]
    configuration = {
        "identity": identity,
        "collectives": COLLECTIVE,
        "main_collective": COLLECTIVE,
        "rpcauthorization": "0",
        "plugin.choria.server.provision": "false",
        "plugin.choria.use_srv": "false",
        "plugin.choria.middleware_hosts": node["jwt"]["chu"],
        "plugin.choria.status_file_path": str(directory / "servers" / identity / "status.json"),
    }
    answer: dict[str, Any] = {"msg": "welcome", "configuration": configuration}
    if network == "org":
        keys = Path(node["ed25519_pubkey"]["directory"])
        configuration |= {
            "plugin.security.provider": "choria",
            "plugin.security.issuer.names": "choria",
            "plugin.security.issuer.choria.public": (directory / "keys" / "issuer.public").read_text(),
            "plugin.security.choria.ca": str(directory / "pki" / "ca.pem"),
            "plugin.security.choria.token_file": str(keys / "server.jwt"),
            "plugin.security.choria.seed_file": str(keys / "server.seed"),
        }
        answer["server_claims"] = {"collectives": [COLLECTIVE], "permissions": {"submission": True}}
    elif network == "x509":
        ssl = Path(node["csr"]["ssldir"])
        configuration |= _file_security(ssl / "certificate.pem", ssl / "private.pem", ssl / "ca.pem")
        answer |= _certificate(identity, node["csr"]["csr"], directory / "pki", private_key=private_key)
        answer |= {"ssldir": str(ssl), "action_policies": {"rpcutil.policy": "policy default allow\n"}}
    else:  # servers want a certificate in any case; they share one
        pki = directory / "pki"
        configuration |= _file_security(pki / "provisioner.pem", pki / "provisioner-key.pem", pki / "ca.pem")
    return answer


def _file_security(certificate: Path, key: Path, ca: Path) -> dict[str, str]:
    return {
        "plugin.security.provider": "file",
        "plugin.security.file.certificate": str(certificate),
        "plugin.security.file.key": str(key),
        "plugin.security.file.ca": str(ca),
    }


def _certificate(identity: str, csr: str, pki: Path, *, private_key: bool) -> dict[str, str]:
    ca = (pki / "ca.pem").read_text()
    if not private_key:
        public = x509.load_pem_x509_csr(csr.encode()).public_key()
        return {"ca": ca, "certificate": _signed(identity, public, pki)}
    key, encoding = _private_key(identity.partition(".")[0])
    pem = key.private_bytes(serialization.Encoding.PEM, encoding, serialization.NoEncryption())
    return {"ca": ca, "certificate": _signed(identity, key.public_key(), pki), "key": pem.decode()}


def _private_key(kind: str) -> tuple[rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, PrivateFormat]:
    if kind == "ec":
        return ec.generate_private_key(ec.SECP256R1()), PrivateFormat.TraditionalOpenSSL
    formats = {"pkcs1": PrivateFormat.TraditionalOpenSSL, "pkcs8": PrivateFormat.PKCS8}
    return rsa.generate_private_key(public_exponent=65537, key_size=2048), formats[kind]


def _signed(identity: str, public: Any, pki: Path) -> str:
    issuer = x509.load_pem_x509_certificate((pki / "ca.pem").read_bytes())
    issuer_key = serialization.load_pem_private_key((pki / "ca-key.pem").read_bytes(), None)
    assert isinstance(issuer_key, rsa.RSAPrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)]))
        .issuer_name(issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


if __name__ == "__main__":
    main()
