"""Whole networks of the kinds that Choria can be: all their keys, certificates, tokens and files in a directory, what
their broker and their servers need, and the configuration of a provisioner for them.

The broker is a plain nats-server, which knows nothing of Choria's tokens. What differs from Choria's own broker:

* Users and passwords decide who gets into the account ``provisioning``. The provisioner's token and its signature of
  the broker's nonce are sent but not looked at, and servers log in with a password, not with their provisioning JWT.
  What the provisioner signs is judged by the servers instead, see :mod:`provisioner.simulate.trust`.
* nats-server either wants a client certificate of everybody or of nobody. Choria's broker spares the unprovisioned
  servers; on the simulated x509 network they have one, so that the provisioner's is asked for.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import secrets
import shlex
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from provisioner.simulate import csr, pki, tokens
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.envelopes_v2 import EnvelopesV2
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import AGENTS, COLLECTIVE, Server, Site
from provisioner.simulate.trust import Trust
from provisioner.simulate.trust_organization import OrganizationTrust
from provisioner.simulate.trust_x509 import CertificateTrust

IDENTITY = "provisioner.example.net"
#: The name that servers of an x509 network take requests from.
CERTNAME = "provisioner.choria"
#: The caller id of the provisioner in an organization.
CALLER = "provisioner_signer"

#: Keys that the servers of an x509 network share: making one for each would take longer than all the rest.
SHARED_KEYS = 8
#: For TLS and login, on a machine that has other things to do.
LOGIN_SECONDS = 10

_HERE = Path(__file__).parent


@attrs.frozen(kw_only=True)
class Network:
    """One network, its files written.

    :ivar directory: has the files
    :ivar notes: in which the sample helper leaves a file for every server that it has deferred
    :ivar token: the shared secret of the servers
    :ivar provisioning_key: signs the provisioning JWT
    :ivar broker: what the configuration of its nats-server has to say
    :ivar provisioner: the part of ``provisioner.yaml`` that depends on the network
    :ivar client: the part of ``choria.cfg`` that does
    :ivar environment: variables of the provisioner
    :ivar rpcs: the requests that a provisioning takes, as the metrics' labels name them
    :ivar proofs: what its servers verify: what they were given, and who asks them
    :ivar helper_seconds: what its sample helper takes on a busy machine, beyond next to nothing
    :ivar login: of the servers
    """

    directory: Path
    notes: Path
    token: str = attrs.field(repr=False)
    provisioning_key: RSAPrivateKey | Ed25519PrivateKey = attrs.field(repr=False)
    broker: str = attrs.field(default="", repr=False)
    provisioner: Mapping[str, Any] = attrs.field(repr=False)
    client: Mapping[str, str]
    environment: Mapping[str, str] = attrs.field(factory=dict)
    rpcs: tuple[str, ...]
    proofs: tuple[str, ...] = ()
    helper_seconds: float = 0.0
    envelopes: EnvelopesV1 | EnvelopesV2
    trust: Trust | None = None
    new_key: Callable[[], RSAPrivateKey] = csr.new_key
    login: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    tls_context: Callable[[], ssl.SSLContext] | None = None

    def site(self, broker: str, **settings: Any) -> Site:
        """Give what its servers have in common.

        :param broker: URL of the broker
        :param settings: of the site
        """
        jwt = tokens.provisioning(self.token, broker=broker, key=self.provisioning_key, secure=self.trust is not None)
        return Site(**{"token": self.token, "jwt": jwt, "trust": self.trust, "new_key": self.new_key, **settings})

    def fleet(self, broker: str, servers: Sequence[Server], **settings: Any) -> Fleet:
        """Give a fleet that speaks and logs in as its servers do."""
        ways: dict[str, Any] = {
            "envelopes": self.envelopes,
            "login": self.login,
            "tls_context": self.tls_context,
        }
        return Fleet(broker, servers, **{**ways, **settings})

    def configure(self, broker: str, **settings: object) -> tuple[Path, Path]:
        """Write the configuration of a provisioner; gives ``provisioner.yaml`` and ``choria.cfg``.

        :param settings: more of ``provisioner.yaml``
        """
        provisioner, client = self.directory / "provisioner.yaml", self.directory / "choria.cfg"
        documents = {"token": self.token, **self.provisioner, **settings}
        _write(provisioner, yaml.safe_dump(documents, sort_keys=False))
        lines = {
            "identity": IDENTITY,
            "plugin.choria.use_srv": "false",
            "plugin.choria.middleware_hosts": broker,
            **self.client,
        }
        _write(client, "".join(f"{key} = {value}\n" for key, value in lines.items()))
        return provisioner, client


def insecure(directory: Path) -> Network:
    """A network without TLS, signatures and logins: protocol 1."""
    key = csr.new_key()
    verify = _write(directory / "provisioning-jwt.pem", pki.public_pem(key))
    notes = _notes(directory)
    return Network(
        directory=directory,
        notes=notes,
        token=secrets.token_hex(16),
        provisioning_key=key,
        provisioner={
            "choria_insecure": True,
            "helper": shlex.join(["/bin/sh", str(_HERE / "sample_helper.sh"), str(notes)]),
            "jwt_verify_cert": str(verify),
            "features": {"jwt": True},
        },
        client={"plugin.security.provider": "file"},
        rpcs=_rpcs(),
        envelopes=EnvelopesV1(),
    )


def x509(directory: Path) -> Network:
    """A network of certificates: protocol 1, mutual TLS, signed requests, a certificate for every server."""
    key, authority, passwords = csr.new_key(), pki.authority(), _Passwords()
    verify = _write(directory / "provisioning-jwt.pem", pki.public_pem(key))
    # the helper needs the authority's key
    authority_key = _write(directory / "ca-key.pem", pki.key_pem(authority.key))
    ca = _write(directory / "ca.pem", pki.pem(authority.certificate))
    certificate, private = _certificate(directory, authority, CERTNAME)
    lent = _certificate(directory, authority, "unprovisioned.example.net")
    trust, notes = CertificateTrust(authority.certificate), _notes(directory)
    helper = (sys.executable, "-I", _HERE / "sample_helper_x509.py", notes, ca, authority_key)
    return Network(
        directory=directory,
        notes=notes,
        token=secrets.token_hex(16),
        provisioning_key=key,
        broker=_broker(directory, authority, passwords, verify=True),
        provisioner={
            "broker_provisioning_password": passwords.provisioner,
            "helper": shlex.join(map(str, helper)),
            "jwt_verify_cert": str(verify),
            "features": {"jwt": True, "pki": True},
        },
        client={
            "plugin.security.provider": "file",
            "plugin.security.file.certificate": str(certificate),
            "plugin.security.file.key": str(private),
            "plugin.security.file.ca": str(ca),
        },
        environment={"MCOLLECTIVE_CERTNAME": CERTNAME},
        rpcs=_rpcs("choria_provision#gencsr"),
        proofs=(
            "their certificates are of the CA, for their names, and fit their keys",
            "each verifies with the provisioner's certificate, none did not",
        ),
        helper_seconds=0.1,
        envelopes=EnvelopesV1(trust.check_request),
        trust=trust,
        new_key=csr.pool(SHARED_KEYS),
        login=passwords.servers_login,
        tls_context=functools.partial(_unverified, lent),
    )


def organization(directory: Path) -> Network:
    """A network with an organization's issuer: protocol 2, TLS, tokens for everybody."""
    issuer, signer, passwords = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate(), _Passwords()
    authority = pki.authority()
    ca = _write(directory / "ca.pem", pki.pem(authority.certificate))
    public = tokens.hexadecimal(issuer)
    signer_token = tokens.chain_issuer(CALLER, issuer=issuer, public=tokens.hexadecimal(signer))
    token = _write(directory / "signer.jwt", signer_token)
    seed = _write(directory / "signer.seed", signer.private_bytes_raw().hex())
    trust, notes = OrganizationTrust(public), _notes(directory)
    return Network(
        directory=directory,
        notes=notes,
        token=secrets.token_hex(16),
        provisioning_key=issuer,
        broker=_broker(directory, authority, passwords, verify=False),
        provisioner={
            "broker_provisioning_password": passwords.provisioner,
            "helper": shlex.join(["/bin/sh", str(_HERE / "sample_helper.sh"), str(notes), public]),
            "jwt_verify_cert": public,
            "jwt_signing_key": str(seed),
            "jwt_signing_token": str(token),
            "features": {"jwt": True, "ed25519": True},
        },
        client={
            "plugin.security.provider": "choria",
            "plugin.security.choria.ca": str(ca),
            "plugin.security.choria.token_file": str(token),
            "plugin.security.choria.seed_file": str(seed),
        },
        rpcs=_rpcs("choria_provision#gen25519"),
        proofs=(
            "their tokens verify by the broker's rules, and fit their seeds",
            "each verifies with the key of the provisioner's token, none did not",
        ),
        envelopes=EnvelopesV2(trust.check_request),
        trust=trust,
        login=passwords.servers_login,
        tls_context=_unverified,
    )


#: By the name that the command line has for them.
NETWORKS: Mapping[str, Callable[[Path], Network]] = {"insecure": insecure, "x509": x509, "org": organization}


@attrs.frozen
class _Passwords:
    """For the two users that the broker knows."""

    provisioner: str = attrs.field(factory=secrets.token_urlsafe, repr=False)
    servers: str = attrs.field(factory=secrets.token_urlsafe, repr=False)

    @property
    def servers_login(self) -> Mapping[str, str]:
        return {"user": "servers", "pass": self.servers}


#: What Choria's broker allows unprovisioned servers; the inbox is a need of the connection that they share here.
_PUBLISH = [f"{COLLECTIVE}.reply.>", "choria.lifecycle.>", f"{COLLECTIVE}.registration.>"]
_SUBSCRIBE = [f"{COLLECTIVE}.node.>", *(f"{COLLECTIVE}.broadcast.agent.{agent}" for agent in AGENTS), "_INBOX.>"]

_BROKER = """
tls {{
  cert_file: "{certificate}"
  key_file: "{key}"
  ca_file: "{ca}"
  verify: {verify}
  timeout: {seconds}
}}
authorization {{ timeout: {seconds} }}
accounts {{
  provisioning {{
    users: [
      {{user: provisioner, password: "{provisioner}"}}
      {{user: servers, password: "{servers}", permissions: {{publish: {publish}, subscribe: {subscribe}}}}}
      # nobody has the key of this one: where there is one of its kind the broker sends a nonce to be signed
      {{nkey: {nkey}}}
    ]
  }}
}}
"""


def _broker(directory: Path, authority: pki.Authority, passwords: _Passwords, *, verify: bool) -> str:
    certificate, key = _certificate(directory, authority, "broker.example.net", ("localhost", "127.0.0.1"))
    return _BROKER.format(
        certificate=certificate,
        key=key,
        ca=directory / "ca.pem",
        verify=str(verify).lower(),
        seconds=LOGIN_SECONDS,
        provisioner=passwords.provisioner,
        servers=passwords.servers,
        publish=_list(_PUBLISH),
        subscribe=_list(_SUBSCRIBE),
        nkey=_nkey(),
    )


def _list(subjects: Iterable[str]) -> str:
    return json.dumps(list(subjects))


def _nkey() -> str:
    """Give the name of a user that has a key pair."""
    data = bytes([20 << 3]) + secrets.token_bytes(32)
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")


def _certificate(
    directory: Path, authority: pki.Authority, name: str, hosts: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Write a certificate and its key; gives their names."""
    key = csr.new_key()
    certificate = _write(directory / f"{name}.pem", authority.issue(name, key.public_key(), hosts))
    return certificate, _write(directory / f"{name}.key", pki.key_pem(key))


def _unverified(certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Make the TLS context of an unprovisioned server, which takes whatever broker it finds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(*certificate)
    return context


def _rpcs(*more: str) -> tuple[str, ...]:
    return (
        "choria_provision#jwt",
        *more,
        "rpcutil#inventory",
        "choria_provision#configure",
        "choria_provision#restart",
    )


def _notes(directory: Path) -> Path:
    notes = directory / "deferred"
    notes.mkdir()
    return notes


def _write(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path
