"""The scheduler in a thread of the test, with all that it needs but a broker; the servers that it provisions."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from provisioner import config
from provisioner.choria import lifecycle
from provisioner.choria.connector import Connector
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import Client
from provisioner.config import Config
from provisioner.host.provision import Provisioner
from provisioner.host.provisioning_jwt import Verifier
from provisioner.hosts import election, finisher, listener, scheduler, worker
from provisioner.hosts.scheduler import Scheduler
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.simulate.server import Server
from tests.installation import SITE
from tests.waiting import PATIENCE_SECONDS

CALLER = "choria=prov.example.net"
EVENTS = "choria.lifecycle.event.startup.provision_mode_server"


class ScheduledDaemon:
    """A scheduler that runs in a thread of the test, with everything it needs.

    :param identity: as which it sends its requests
    :param settings: of :class:`Config`, also those that no file may hold
    """

    def __init__(
        self,
        directory: Path,
        connector: Connector,
        *,
        identity: str = "prov.example.net",
        verifier: Verifier | None = None,
        discovery_timeout: float = 2.0,
        **settings: Any,
    ) -> None:
        helper = directory / "helper"
        helper.write_text(
            '#!/bin/sh\ncat >/dev/null\necho \'{"configuration":{"plugin.choria.server.provision":"0"}}\'\n'
        )
        helper.chmod(0o755)
        file = directory / "provisioner.yaml"
        file.write_text(json.dumps({"helper": str(helper), "token": "s3cret", "choria_insecure": True, "workers": 4}))
        self.config: Config = attrs.evolve(config.load(file), **settings)
        self.metrics = Metrics("lab")
        self.shutdown = Shutdown(grace=PATIENCE_SECONDS)
        self.connector = connector
        provisioner = Provisioner(
            config=self.config,
            client=Client(connector, ProtocolV1(identity=identity, caller=f"choria={identity}", ttl=60)),
            metrics=self.metrics,
            shutdown=self.shutdown,
            verifier=verifier,
            discovery_timeout=discovery_timeout,
        )
        self.scheduler = Scheduler(provisioner)
        self.healthy: bool | None = None
        self._thread = threading.Thread(target=self._run, name="main-of-the-test")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown.request()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_SECONDS)
            assert not self._thread.is_alive()
        self.connector.close()

    def __getitem__(self, name: str) -> float:
        return value(self.metrics, name)

    def _run(self) -> None:
        self.healthy = self.scheduler.run()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all threads look often whether to stop."""
    for module in (election, finisher, listener, scheduler, worker):
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)


MakeDaemon = Callable[..., ScheduledDaemon]


def servers(count: int, **options: Any) -> list[Server]:
    return [Server(identity=f"n{number}.example.net", site=SITE, **options) for number in range(count)]


def startup(identity: str) -> bytes:
    return lifecycle.startup(identity=identity, component="provision_mode_server", version="0.30.0")


def value(metrics: Metrics, name: str) -> float:
    """The value of a series without further labels than the site, as a scraper reads it."""
    prefix = f'choria_provisioner_{name}{{site="lab"}} '
    return next(
        float(line[len(prefix) :]) for line in metrics.render().decode().splitlines() if line.startswith(prefix)
    )
