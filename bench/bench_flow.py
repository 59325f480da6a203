"""How many servers a minute the daemon provisions, from the first request to the last restart.

Everything is real but the servers, which are simulated in this process. So that figures of machines and days can be
compared, each is also given as a ratio to what bounds it: how often the same helper can be started by as many threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server, Site

SERVERS = 1000
WORKERS = (1, 4, 16, 64)
PATIENCE_SECONDS = 300.0
HELPER = '#!/bin/sh\ncat >/dev/null\necho \'{"configuration":{"plugin.choria.server.provision":"false"}}\'\n'


def main() -> None:
    print(f"{'workers':>8} {'servers/min':>12} {'bare helper starts/min':>23} {'ratio':>6} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as directory, NatsServer() as broker:
        helper = Path(directory) / "helper"
        helper.write_text(HELPER)
        helper.chmod(0o755)
        for workers in WORKERS:
            bare = bare_starts_per_minute(helper, workers)
            rate, peak = provision(Path(directory), broker.url, helper, workers)
            print(f"{workers:>8} {rate:>12.0f} {bare:>23.0f} {rate / bare:>6.2f} {peak:>8.0f}", flush=True)


def bare_starts_per_minute(helper: Path, threads: int) -> float:
    def start(_number: int) -> None:
        subprocess.run([helper], input=b"{}", stdout=subprocess.PIPE, check=True)

    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(start, range(SERVERS)))
    return SERVERS * 60 / (time.monotonic() - started)


def provision(directory: Path, broker: str, helper: Path, workers: int) -> tuple[float, float]:
    """Servers a minute, and the peak memory of the daemon in MB."""
    config, choria = directory / "provisioner.yaml", directory / "choria.cfg"
    settings = {"workers": workers, "helper": str(helper), "token": "s3cret", "choria_insecure": True}
    config.write_text(json.dumps({**settings, "logfile": str(directory / "log")}))
    choria.write_text(f"identity = bench.example.net\nplugin.choria.middleware_hosts = {broker}\n")
    site = Site(token="s3cret")
    facts = {"blob": "x" * 2048}
    fleet = Fleet(broker, [Server(identity=f"n{n}.example.net", site=site, facts=facts) for n in range(SERVERS)])
    fleet.start()
    command = [sys.executable, "-m", "provisioner", "--config", str(config), "--choria-config", str(choria)]
    daemon = subprocess.Popen(command)
    try:
        if not fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS):
            sys.exit(f"not all servers were provisioned: {fleet.counts()}")
        status = Path(f"/proc/{daemon.pid}/status").read_text().split()
        return fleet.counts().servers_per_minute, int(status[status.index("VmHWM:") + 1]) / 1024
    finally:
        daemon.terminate()
        daemon.wait()
        fleet.stop()


if __name__ == "__main__":
    main()
