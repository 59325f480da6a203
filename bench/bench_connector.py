"""How fast the connector is on this machine, next to a bare socket that does the same with no client around it.

    python -m bench.bench_connector [seconds per figure]

A nats-server and a peer, which replies or publishes, run as processes of their own. The bare socket keeps as many
requests under way as there are threads, so it is what could be had at best with what else the machine is doing.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.table import Table
from provisioner.choria import tls
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.errors import NoRespondersError, RequestTimeoutError
from provisioner.choria.nats import PING, PONG, Command, FrameReader, Message
from provisioner.choria.stream import READ_BYTES
from provisioner.cli.run import SWITCH_INTERVAL_SECONDS
from provisioner.monitor.metrics import ConnectorMetrics
from provisioner.simulate.broker import NatsServer

ROOT = Path(__file__).parent.parent
REQUEST_BYTES = 2048
MESSAGE_BYTES = 1024
THREADS = (1, 4, 16, 64)


def main() -> None:
    if sys.argv[1:2] == ["peer"]:
        peer(int(sys.argv[2]))
        return
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    with peer_running() as port:
        report(port, seconds)


@contextlib.contextmanager
def peer_running() -> Iterator[int]:
    """A nats-server with a peer on it; gives the port."""
    command = (sys.executable, "-m", "bench.bench_connector", "peer")
    with NatsServer() as server:
        process = subprocess.Popen((*command, str(server.port)), cwd=ROOT)
        try:
            await_peer(server.port)
            yield server.port
        finally:
            process.kill()
            process.wait()


def report(port: int, seconds: float, threads: Sequence[int] = THREADS) -> None:
    columns = ("a second", "bare socket", "ratio", "CPU µs each", "ms each")
    table = Table("what", *columns, width=len("requests of 2 kB, 16 threads"))
    for count in threads:
        rate, cpu = measured(functools.partial(requests, port, count, seconds))
        bare, _ = measured(functools.partial(bare_requests, port, count, seconds))
        name = f"requests of 2 kB, {count} threads"
        table.row(name, f"{rate:,.0f}", f"{bare:,.0f}", f"{rate / bare:.2f}", f"{cpu:.0f}", f"{count / rate * 1e3:.2f}")
    bare, _ = measured(functools.partial(bare_messages, port, seconds))
    for name, take in (("callback", by_callback), ("queue", by_queue)):
        rate, cpu = measured(functools.partial(take, port, seconds))
        table.row(
            f"messages of 1 kB, by {name}", f"{rate:,.0f}", f"{bare:,.0f}", f"{rate / bare:.2f}", f"{cpu:.1f}", ""
        )


def measured(run: Callable[[], tuple[int, float]]) -> tuple[float, float]:
    """Operations a second, and microseconds of CPU for each."""
    cpu = time.process_time()
    count, seconds = run()
    return count / seconds, (time.process_time() - cpu) / count * 1e6


def await_peer(port: int) -> None:
    with connector(port) as client:
        while True:
            try:
                client.request("bench.echo", timeout=1)
            except NoRespondersError:
                time.sleep(0.05)
            except RequestTimeoutError:  # it came while the peer was still waiting for its subscription
                continue
            else:
                return


def connector(port: int) -> Connector:
    return Connector(
        lambda: [Broker("127.0.0.1", port)],
        name="bench",
        reply_prefix="bench.reply",
        authenticate=lambda _: {},
        tls_context=tls.system_trust_context,
        metrics=ConnectorMetrics(),
    )


def requests(port: int, threads: int, seconds: float) -> tuple[int, float]:
    payload = bytes(REQUEST_BYTES)
    counts = [0] * threads

    def work(number: int) -> None:
        while time.monotonic() < end:
            client.request("bench.echo", payload=payload, timeout=10)
            counts[number] += 1

    with connector(port) as client:
        end = time.monotonic() + seconds
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return sum(counts), seconds


def by_callback(port: int, seconds: float) -> tuple[int, float]:
    counted = 0

    def count(_: Message) -> None:
        nonlocal counted
        counted += 1

    with connector(port) as client:
        client.subscribe("bench.flood", callback=count)
        client.publish("bench.start", payload=b"%d" % (seconds * 1000))
        began, before = time.monotonic(), counted
        time.sleep(seconds)
        return counted - before, time.monotonic() - began


def by_queue(port: int, seconds: float) -> tuple[int, float]:
    messages: queue.Queue[Message] = queue.Queue()
    counted = 0
    with connector(port) as client:
        client.subscribe("bench.flood", callback=messages.put)
        client.publish("bench.start", payload=b"%d" % (seconds * 1000))
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            messages.get(timeout=10)
            counted += 1
        return counted, time.monotonic() - began


# --- the same with as little around a socket as can be


def bare_requests(port: int, under_way: int, seconds: float) -> tuple[int, float]:
    request = b"PUB bench.echo bench.bare %d\r\n%b\r\n" % (REQUEST_BYTES, bytes(REQUEST_BYTES))
    reply_bytes = len(b"MSG bench.bare 1 %d\r\n" % REQUEST_BYTES) + REQUEST_BYTES + 2
    sent, received = under_way, 0
    with bare_socket(port, "bench.bare") as sock:
        sock.sendall(request * under_way)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            received += len(sock.recv(READ_BYTES))
            due = received // reply_bytes + under_way - sent
            sock.sendall(request * due)
            sent += due
    return received // reply_bytes, seconds


def bare_messages(port: int, seconds: float) -> tuple[int, float]:
    message_bytes = len(b"MSG bench.flood 1 %d\r\n" % MESSAGE_BYTES) + MESSAGE_BYTES + 2
    received = 0
    with bare_socket(port, "bench.flood") as sock:
        sock.sendall(b"PUB bench.start 8\r\n%08d\r\n" % (seconds * 1000))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            received += len(sock.recv(READ_BYTES))
    return received // message_bytes, seconds


def peer(port: int) -> None:
    """Reply to requests as soon as they come; publish as much as the server takes when asked to."""
    flood = b"PUB bench.flood %d\r\n%b\r\n" % (MESSAGE_BYTES, bytes(MESSAGE_BYTES)) * 200
    with bare_socket(port, "bench.echo", "bench.start") as sock:
        frames = FrameReader(lambda: sock.recv(READ_BYTES))
        answers = b""
        while True:
            frame = frames.next_frame()
            if isinstance(frame, Command):
                answers += PONG if frame.name == b"PING" else b""
            elif frame.reply:
                answers += b"PUB %b %d\r\n%b\r\n" % (frame.reply.encode(), len(frame.payload), frame.payload)
            else:
                end = time.monotonic() + int(frame.payload) / 1000
                while time.monotonic() < end:
                    sock.sendall(flood)
            if answers and not frames.pending:
                sock.sendall(answers)
                answers = b""


def bare_socket(port: int, *subjects: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    subscriptions = "".join(f"SUB {subject} {number}\r\n" for number, subject in enumerate(subjects, start=1))
    sock.sendall(b'CONNECT {"verbose": false}\r\n' + subscriptions.encode() + PING)
    answer = b""
    while PONG not in answer:
        answer += sock.recv(READ_BYTES)
    return sock


if __name__ == "__main__":
    main()
