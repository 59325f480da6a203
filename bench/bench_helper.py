"""Helpers a second: ours against what the standard library does at its barest, in one run.

    python bench/bench_helper.py [--runs N] [--rounds N]

Every round measures every way with 1, 4 and 16 threads, so that what else the machine does hits them alike; the medians
are printed. CPU time is this process's own, without that of the helpers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable

from provisioner.host import helper

HELPER = ["/bin/sh", "-c", "cat >/dev/null; echo '{\"defer\": true}'"]
DOCUMENT = b'{"identity": "n1.example.net"' + b" " * 2048 + b"}"
THREADS = (1, 4, 16)


def ours() -> None:
    helper.run(HELPER, DOCUMENT, timeout=10, cancelled=lambda: False)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=800, help="helpers for each way and number of threads")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways = (subprocess_run, posix_spawn, ours)
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for threads in THREADS:
            for way in ways:
                results.setdefault((way.__name__, threads), []).append(measure(way, threads, options.runs))
    print(f"{'threads':>7}  " + "".join(f"{way.__name__:>24}" for way in ways))
    for threads in THREADS:
        cells = []
        for way in ways:
            rate, cpu = (statistics.median(column) for column in zip(*results[way.__name__, threads], strict=True))
            cells.append(f"{rate:>10.0f}/s {cpu:>7.0f} µs")
        print(f"{threads:>7}  " + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
