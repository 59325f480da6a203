#!/usr/lib/choria-provisioner/bin/python3 -I
"""A helper for networks of an organization: the daemon signs a JWT for the server, with the feature ed25519.

So all there is to say is the configuration, and what the JWT is to permit. The servers that may come are files in
NODES, named for them, which hold the role of the server; others have to wait.

Copy it, and change what follows.
"""

from __future__ import annotations

import re

from provisioner.helper import Answer, Server, configure, defer, fail, read_text, run

NODES = "/etc/choria-provisioner/nodes"
BROKERS = "broker.example.net:4222"
# the public key of the organization's issuer, 64 hexadecimal digits in a file
ISSUER = "/etc/choria-provisioner/issuer.public"
# on the server: what the broker's certificate is verified with
CA_ON_SERVER = "/etc/choria/ca.pem"


def decide(server: Server) -> Answer:
    role, directory = role_of(server), server.ed25519_pubkey.directory
    return configure(
        {
            "plugin.choria.server.provision": "false",
            "plugin.choria.middleware_hosts": BROKERS,
            "plugin.choria.use_srv": "false",
            "plugin.security.provider": "choria",
            "plugin.security.choria.ca": CA_ON_SERVER,
            "plugin.security.choria.seed_file": f"{directory}/server.seed",
            "plugin.security.choria.token_file": f"{directory}/server.jwt",
            "plugin.security.issuer.names": "choria",
            "plugin.security.issuer.choria.public": issuer(),
            "identity": server.identity,
            "collectives": f"choria,{role}",
            "loglevel": "info",
        },
        # its collectives are those of the configuration, its validity is server_jwt_validity
        server_claims={"permissions": {"submission": True, "streams": True}},
    )


def issuer() -> str:
    key = read_text(ISSUER).strip()
    if not re.fullmatch("[0-9a-f]{64}", key):
        fail(f"{ISSUER}: not 64 hexadecimal digits")
    return key


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
