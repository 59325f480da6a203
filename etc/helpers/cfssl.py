#!/usr/lib/choria-provisioner/bin/python3 -I
"""A helper for networks with certificates: has cfssl sign what the server asks for, with the feature pki.

It asks the endpoint `authsign`, and proves with a shared key that it may. Other CAs with an HTTP API are asked much
alike. When the CA is not there the helper fails, which the daemon counts, and the server is tried again later.

The servers that may come are files in NODES, named for them, which hold the role of the server; others have to
wait. Copy it, and change what follows. The user of the daemon must be able to read AUTH_KEY, and nobody else.
"""

from __future__ import annotations

import base64
import hmac
import http.client
import json
import re
import ssl
from typing import Any

from provisioner.helper import Answer, Server, configure, defer, fail, read_text, run

NODES = "/etc/choria-provisioner/nodes"
CA = "/etc/choria-provisioner/ca.pem"
# in hexadecimal digits, as in cfssl's configuration
AUTH_KEY = "/etc/choria-provisioner/cfssl.key"
BROKERS = "broker.example.net:4222"
API_HOST, API_PORT = "ca.example.net", 8888
PROFILE = "choria"
# less than helper_timeout
TIMEOUT_SECONDS = 5.0


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
    wanted = {
        "certificate_request": server.csr.csr,
        # these count, whatever the request asks for
        "hosts": [server.identity],
        "subject": {"CN": server.identity},
        "profile": PROFILE,
    }
    request = json.dumps(wanted).encode()
    token = hmac.digest(auth_key(), request, "sha256")
    answer = post("/api/v1/cfssl/authsign", {"token": encoded(token), "request": encoded(request)}, ca)
    try:
        certificate = answer["result"]["certificate"]
    except (KeyError, TypeError):
        fail(f"{API_HOST} gives no certificate: {answer.get('errors')}")
    return str(certificate)


def auth_key() -> bytes:
    try:
        return bytes.fromhex(read_text(AUTH_KEY).strip())
    except ValueError:
        fail(f"{AUTH_KEY}: not hexadecimal digits")


def post(path: str, body: dict[str, str], ca: str) -> dict[str, Any]:
    context = ssl.create_default_context(cadata=ca)
    connection = http.client.HTTPSConnection(API_HOST, API_PORT, timeout=TIMEOUT_SECONDS, context=context)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        fail(f"{API_HOST}:{API_PORT} cannot be asked to sign: {error}")
    except ValueError:
        fail(f"{API_HOST}:{API_PORT} answers with {response.status} and no JSON")
    return answer if isinstance(answer, dict) else {}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


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
