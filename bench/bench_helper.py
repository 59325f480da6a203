"""What it takes to run helpers: the runner against what the standard library does at its barest, then helpers by kind.

    python -m bench.bench_helper [--runs N] [--rounds N]

Every round measures every way with 1, 4 and 16 threads, and every kind of helper, so that what else the machine does
hits them alike; the medians are printed. In the first table CPU time is this process's own, without that of the
helpers; in the second it is that of the helpers alone, which bounds how many servers are provisioned in a minute.
Run it with the Python of an installation: one that is editable takes 15 ms longer to start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import provisioner
from bench.table import Table
from provisioner.cli import sample_input
from provisioner.config import Features
from provisioner.host import helper_process
from provisioner.simulate import pki

HELPER = ["/bin/sh", "-c", "cat >/dev/null; echo '{\"defer\": true}'"]
DOCUMENT = b'{"identity": "n1.example.net"' + b" " * 2048 + b"}"
THREADS = (1, 4, 16)

SAMPLES = Path(__file__).parent.parent / "etc/helpers"
SITE = "/etc/choria-provisioner"
#: A helper that does nothing, but with what most need.
BARE = "import json, sys; json.load(sys.stdin); print(json.dumps({'defer': True}))"


def ours() -> None:
    helper_process.run(HELPER, DOCUMENT, timeout=10, cancelled=lambda: False)


def subprocess_run() -> None:
    subprocess.run(HELPER, input=DOCUMENT, capture_output=True, timeout=10, check=True)


def posix_spawn() -> None:
    """The least that can be done: no limits, no standard error, no group, nothing closed in the helper."""
    stdin, document = os.pipe()
    output, stdout = os.pipe()
    os.write(document, DOCUMENT)
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stdout, 1)]
    pid = os.posix_spawn(HELPER[0], HELPER, os.environ, file_actions=actions)
    for descriptor in (stdin, document, stdout):
        os.close(descriptor)
    while os.read(output, 65536):
        pass
    os.close(output)
    os.waitpid(pid, 0)


def measure(way: Callable[[], None], threads: int, runs: int) -> tuple[float, float]:
    """Helpers a second, and our own CPU microseconds for each."""
    share = runs // threads

    def work() -> None:
        for _ in range(share):
            way()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    started, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done = share * threads
    return done / (time.perf_counter() - started), (time.process_time() - cpu) / done * 1e6


def kinds(site: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """Helpers by what they are made of; the samples as a site would have them."""
    python = sys.executable
    yield "sh", ["/bin/sh", "-c", "echo '{\"defer\": true}'"]
    yield "plain.sh", [str(_copied("plain.sh", site))]
    yield "x509.sh", [str(_copied("x509.sh", site))]
    yield "jq", ["jq", "-c", "{defer: true}"]
    yield "python3 -I -S", [python, "-I", "-S", "-c", BARE]
    yield "python3 -I", [python, "-I", "-c", BARE]
    yield "python3", [python, "-c", BARE]
    for module in ("pathlib", "typing", "subprocess", "http.client, ssl", "attrs", "yaml", "cryptography.x509"):
        yield f"python3 -I, import {module}", [python, "-I", "-c", f"import {module}; {BARE}"]
    # without `site` the path has to be told
    home = Path(provisioner.__file__).parent.parent
    plain = _copied("plain.py", site)
    fast = plain.with_name("plain-fast.py")
    fast.write_text(f"import sys; sys.path.append({str(home)!r})\n" + plain.read_text().replace("from __future__", "#"))
    yield "plain.py, -I -S", [python, "-I", "-S", str(fast)]
    yield "plain.py", [python, "-I", str(plain)]
    yield "organization.py", [python, "-I", str(_copied("organization.py", site))]
    yield "x509.py", [python, "-I", str(_copied("x509.py", site))]


def _copied(name: str, site: Path) -> Path:
    file = site / name
    file.write_text((SAMPLES / name).read_text().replace(SITE, str(site)))
    file.chmod(0o755)
    return file


def furnish(site: Path) -> bytes:
    """Make what the samples need; gives the input of a server that they know."""
    authority = pki.authority()
    (site / "ca.pem").write_text(pki.pem(authority.certificate))
    (site / "ca-key.pem").write_text(pki.key_pem(authority.key))
    (site / "issuer.public").write_text(Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex())
    (site / "nodes").mkdir()
    (site / "nodes" / sample_input.IDENTITY).write_text("web")
    # with the key and with the request, so that it suits all of them
    members = [
        json.loads(sample_input.facts(features).document()) for features in (_features("pki"), _features("ed25519"))
    ]
    return json.dumps(members[0] | {"ed25519_pubkey": members[1]["ed25519_pubkey"]}).encode()


def with_facts(document: bytes, size: int) -> bytes:
    """The same server, which says more of itself."""
    members = json.loads(document)
    inventory = json.loads(members["inventory"]) | {"facts": {"blob": "x" * size}}
    return json.dumps(members | {"inventory": json.dumps(inventory)}).encode()


def _features(name: str) -> Features:
    return Features(**{"jwt": True, name: True})


def cost(command: Sequence[str], document: bytes, runs: int) -> float:
    """CPU milliseconds of one helper."""
    before = _children()
    for _ in range(runs):
        helper_process.run(command, document, timeout=10, cancelled=lambda: False)
    return (_children() - before) / runs * 1e3


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def runner(rounds: int, runs: int) -> None:
    ways = (subprocess_run, posix_spawn, ours)
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for threads in THREADS:
            for way in ways:
                results.setdefault((way.__name__, threads), []).append(measure(way, threads, runs))
    columns = [f"{way.__name__} {what}" for way in ways for what in ("/s", "CPU µs")]
    table = Table("threads", *columns, "ratio to posix_spawn")
    for threads in THREADS:
        medians = {
            way: [statistics.median(column) for column in zip(*results[way.__name__, threads], strict=True)]
            for way in ways
        }
        cells = [f"{value:,.0f}" for pair in medians.values() for value in pair]
        table.row(threads, *cells, f"{medians[ours][0] / medians[posix_spawn][0]:.2f}")


def helpers(rounds: int, runs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory)
        document = furnish(site)
        candidates = {name: (command, document) for name, command in kinds(site) if shutil.which(command[0])}
        for name in ("plain.sh", "x509.sh", "plain.py"):
            candidates[f"{name}, 32 kB of facts"] = (candidates[name][0], with_facts(document, 32 * 1024))
        results: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(rounds):
            for name, (command, told) in candidates.items():
                results[name].append(cost(command, told, runs))
    table = Table("helper", "CPU ms", "ratio to sh", "a minute on each core, at most", width=max(map(len, results)))
    least = statistics.median(results["sh"])
    for name, costs in results.items():
        median = statistics.median(costs)
        table.row(name, f"{median:.1f}", f"{median / least:.1f}", f"{60_000 / median:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=800, help="helpers for each way and number of threads")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runner(options.rounds, options.runs)
    helpers(options.rounds, max(1, options.runs // 80))


if __name__ == "__main__":
    main()
