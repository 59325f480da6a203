#!/usr/lib/choria-provisioner/bin/python3 -I
"""A helper for servers that have their certificates already: they get their configuration, and nothing else.

The servers that may come are files in NODES, named for them, which hold the role of the server; others have to
wait. Copy it, and change what follows.
"""

from __future__ import annotations

import re

from provisioner.helper import Answer, Server, configure, defer, fail, read_text, run

NODES = "/etc/choria-provisioner/nodes"
BROKERS = "broker.example.net:4222"


def decide(server: Server) -> Answer:
    return configure(
        {
            "plugin.choria.server.provision": "false",
            "plugin.choria.middleware_hosts": BROKERS,
            "plugin.choria.use_srv": "false",
            "identity": server.identity,
            "collectives": f"mcollective,{role_of(server)}",
            "loglevel": "info",
        }
    )


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
