"""The daemon as the benches run it, what it takes up, and how often its helper could be started at best."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import provisioner
from provisioner.cli.demo_progress import Page
from provisioner.simulate.networks import Network
from tests.conftest import PATIENCE_SECONDS
from tests.installation import Installation
from tests.usage import Usage, usage

#: The root of the source, so that the daemon and other processes are of it and not of what is installed.
ROOT = Path(provisioner.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
#: How often it is looked whether the daemon has come so far.
POLL_SECONDS = 0.01

#: A helper of each kind; all give the same answer to whatever they read.
HELPERS = {
    "sh": "#!/bin/sh\ncat >/dev/null\necho '{answer}'\n",
    "python3 -I -S": "#!{python} -IS\nimport json, sys\njson.load(sys.stdin)\nprint(r'''{answer}''')\n",
}


class Daemon(Installation):
    """One daemon in a ``with`` block, at the end of which it is killed.

    :param network: that its broker is on; None: one without TLS, tokens and provisioning JWTs
    :param settings: more of ``provisioner.yaml``
    """

    def __init__(self, directory: Path, broker: str, network: Network | None = None, **settings: Any) -> None:
        super().__init__(directory, broker)
        if network:
            del self.settings["choria_insecure"]
            self.settings |= {"token": network.token, **network.provisioner}
            self.settings["helper"] = str(directory / "helper")
            self.choria += "".join(f"{key} = {value}\n" for key, value in network.client.items())
        self.settings |= settings

    def begin(self) -> Self:
        """Start it and wait until it is connected."""
        self.start("run", env=ENVIRONMENT, stdout=None, stderr=None)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > give_up:
                sys.exit(f"the daemon does not get ready, see {self.log_file}")
            time.sleep(POLL_SECONDS)
        return self

    def taken(self) -> Usage:
        """What it takes up now."""
        taken = self.usage()
        if taken is None:
            sys.exit(f"the daemon has ended, see {self.log_file}")
        return taken

    def page(self) -> Page:
        """Its metrics."""
        return Page(self.get("/metrics")[1])


def answer(network: Network | None) -> str:
    """What a helper has to say so that a server can live in its network, in one line."""
    configuration = {"plugin.choria.server.provision": "false"}
    if network is None or not network.provisioner["features"].get("ed25519"):
        return json.dumps({"configuration": configuration})
    configuration |= {
        "plugin.security.provider": "choria",
        "plugin.security.issuer.names": "choria",
        "plugin.security.issuer.choria.public": network.provisioner["jwt_verify_cert"],
        "plugin.security.choria.token_file": "/etc/choria/server.jwt",
        "plugin.security.choria.seed_file": "/etc/choria/server.seed",
        "collectives": "choria",
    }
    claims: Mapping[str, Any] = {"permissions": {"submission": True}}
    return json.dumps({"configuration": configuration, "server_claims": claims})


def helper_script(kind: str, network: Network | None = None) -> str:
    """A helper of one of :data:`HELPERS`."""
    return HELPERS[kind].format(answer=answer(network), python=sys.executable)


def bare_starts_per_minute(helper: Path, threads: int, seconds: float) -> float:
    """How often a helper can be started when that is all there is to do."""
    counts = [0] * threads
    began = time.monotonic()

    def work(number: int) -> None:
        while time.monotonic() < began + seconds:
            subprocess.run([helper], input=b"{}", stdout=subprocess.PIPE, check=True)
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) * 60 / (time.monotonic() - began)


def cpu_seconds(pid: int) -> float:
    """What a process has used up to now, without its children."""
    taken = usage(pid)
    return taken.cpu_seconds if taken else 0.0
