"""What becomes of the daemon when tens of thousands of servers are there at once.

    python -m bench.bench_scale [--full]

Discovery: so many servers answer at once, faster than real ones could, and the one worker gets to few of them. Storm:
the same number announce that they have booted. Both come from a process of its own. "at least" is the time in which a
bare socket receives the same, and for a discovery what it waits for more after the last reply.

That nothing starves meanwhile is probed 20 times a second: "/livez" is the time of that request, "turn" the time from a
server's reply to the daemon's next request, which the worker makes of another server.

Wave: a whole fleet of simulated servers is there when the daemon starts, and is provisioned.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import hashlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import attrs

from bench import daemon
from bench.bench_connector import bare_socket
from bench.daemon import ENVIRONMENT, ROOT, Daemon
from bench.table import Table
from provisioner.choria.discovery import SLIDE_SECONDS
from provisioner.choria.nats import PONG, Command, FrameReader, Message
from provisioner.choria.protocol import DISCOVERY_SUBJECT
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.stream import READ_BYTES
from provisioner.cli.run import SWITCH_INTERVAL_SECONDS
from provisioner.hosts.registry import WORK_QUEUE_HOSTS
from provisioner.simulate import events
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request, encode
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import COLLECTIVE, Server, Site
from tests.installation import free_port
from tests.usage import Usage

#: Servers that boot just before, for the worker to be busy with from the first moment.
PROBED_SERVERS = 200
#: As many as may wait for a worker, with those.
MOST_SERVERS = WORK_QUEUE_HOSTS - PROBED_SERVERS
DISCOVERED = (1_000, 10_000, MOST_SERVERS)
STORMS = (10_000, MOST_SERVERS)
WAVE_SERVERS, FULL_WAVE_SERVERS = 10_000, 50_000
WAVE_WORKERS = 16

#: How often it is probed whether the daemon still answers, and how long a probed server takes to reply.
PROBE_SECONDS = 0.05
#: How often the daemon's metrics are read meanwhile.
LOOK_SECONDS = 0.25
#: All have come when none came for this long.
SETTLED_SECONDS = 1.5
#: The daemon is given this long for something to come, and for all of it.
PATIENCE_SECONDS = 60.0
WAVE_PATIENCE_SECONDS = 1800.0
#: Between the request for a discovery and the first reply, so that the daemon can be looked at before.
AHEAD_SECONDS = 0.1
#: Messages that are sent at once.
BATCH = 500
#: What a server of the wave is asked at least: inventory, configure, restart.
REQUESTS_PER_SERVER = 3
#: What the broker gets at least for each: these with their replies, one to the discovery, two events of the server.
MESSAGES_PER_SERVER = 2 * REQUESTS_PER_SERVER + 3
HELPER_STARTS_SECONDS = 2.0

REPLIES, EVENTS = "replies", "events"
STARTUP_SUBJECT = events.subject("startup")
NODES = f"{COLLECTIVE}.node."
#: What the other processes say when the broker knows what they listen to.
READY = "ready"
#: What the daemon logs of each that it admits.
ADDED = "added, "


# --- what is sent: in a process of its own


def crowd(port: int, way: str, count: int) -> None:
    """Answer every discovery as so many servers, or have them announce that they have booted."""
    boots = [publication(STARTUP_SUBJECT, startup(name(number, "p"))) for number in range(PROBED_SERVERS)]
    storm = [publication(STARTUP_SUBJECT, startup(name(number))) for number in range(count if way == EVENTS else 0)]
    with bare_socket(port, DISCOVERY_SUBJECT) as sock:
        print(READY, flush=True)
        for message in received(sock):
            request = EnvelopesV1().open(message.payload)
            print(time.time(), flush=True)
            time.sleep(AHEAD_SECONDS)
            sock.sendall(b"".join(boots))
            replies = (publication(request.reply_to, payload) for payload in pongs(request, count))
            for batch in batches(storm if way == EVENTS else replies):
                sock.sendall(batch)


def batches(messages: Iterable[bytes]) -> Iterator[bytes]:
    batch = []
    for message in messages:
        batch.append(message)
        if len(batch) == BATCH:
            yield b"".join(batch)
            batch = []
    yield b"".join(batch)


def name(number: int, first: str = "n") -> str:
    """All of one length."""
    return f"{first}{number:05}.example.net"


def startup(identity: str) -> bytes:
    return events.payload("startup", identity=identity, version="0.30.0", now=time.time())


def publication(subject: str, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)


def pongs(request: Request, count: int) -> Iterator[bytes]:
    """What :meth:`EnvelopesV1.seal` makes of the replies to a discovery, several times as fast."""
    envelope = {"requestid": request.id, "senderid": "%s", "agent": "discovery", "time": int(time.time())}
    reply = encode({"protocol": "choria:reply:1", "message": "pong", "envelope": envelope})
    secure = encode({"protocol": "choria:secure:reply:1", "message": reply, "hash": "%s"})
    transport = encode({"protocol": "choria:transport:1", "data": "%s", "headers": {"mc_sender": "%s"}})
    for number in range(count):
        sender = name(number)
        digest = base64.b64encode(hashlib.sha256((reply % sender).encode()).digest()).decode()
        data = base64.b64encode((secure % (sender, digest)).encode()).decode()
        yield (transport % (data, sender)).encode()


def probed(port: int) -> None:
    """Be all servers, refuse every request a moment after it came, and print how long it took until it came."""
    envelopes, answered = EnvelopesV1(), 0.0
    with bare_socket(port, f"{NODES}>") as sock:
        print(READY, flush=True)
        for message in received(sock):
            if answered:
                print(time.monotonic() - answered, flush=True)
            request = envelopes.open(message.payload)
            body = encode({"statuscode": 2, "statusmsg": "not today", "data": {}})
            identity = message.subject.removeprefix(NODES)
            payload = envelopes.seal(request, sender=identity, body=body, time=time.time())
            time.sleep(PROBE_SECONDS)
            answered = time.monotonic()
            sock.sendall(publication(request.reply_to, payload))


def received(sock: socket.socket) -> Iterator[Message]:
    """What comes on a socket; the broker's pings are answered."""
    frames = FrameReader(lambda: sock.recv(READ_BYTES))
    while True:
        frame = frames.next_frame()
        if isinstance(frame, Message):
            yield frame
        elif isinstance(frame, Command) and frame.name == b"PING":
            sock.sendall(PONG)


# --- discovery and storm


@attrs.frozen(kw_only=True)
class Burst:
    """What became of it.

    :ivar counted: servers that were admitted
    :ivar dropped: servers and events that found a queue full
    :ivar seconds: from the first message to the last admission
    :ivar least_seconds: what it had taken a bare socket
    :ivar waiting: servers that are known at the end
    :ivar megabytes: of the daemon, before and after
    :ivar livez: seconds that each of these requests took
    :ivar turns: seconds from each reply of a server to the next request
    """

    counted: int
    dropped: int
    seconds: float
    least_seconds: float
    cpu_seconds: float
    waiting: int
    megabytes: tuple[float, float]
    livez: Sequence[float]
    turns: Sequence[float]


def bursts(way: str, counts: Sequence[int]) -> list[Burst]:
    """Measure one of each size, and print a table."""
    columns = ("admitted", "dropped", "s", "at least s", "ratio", "CPU s", "MB before", "MB after", "kB each")
    table = Table(way, *columns, *("/livez ms, median", "most", "turn ms, median", "most"))
    results = []
    for count in counts:
        burst = measure(way, count)
        results.append(burst)
        before, after = burst.megabytes
        table.row(
            *(f"{count:,}", f"{burst.counted:,}", f"{burst.dropped:,}"),
            *(f"{burst.seconds:.2f}", f"{burst.least_seconds:.2f}", f"{burst.seconds / burst.least_seconds:.1f}"),
            *(f"{burst.cpu_seconds:.1f}", f"{before:.0f}", f"{after:.0f}"),
            f"{(after - before) * 1e3 / burst.waiting:.1f}",
            *(f"{value * 1e3:.1f}" for value in _median_and_most(burst.livez)),
            *(f"{value * 1e3:.1f}" for value in _median_and_most(burst.turns)),
        )
    return results


def _median_and_most(seconds: Sequence[float]) -> tuple[float, float]:
    return statistics.median(seconds), max(seconds)


def measure(way: str, count: int) -> Burst:
    """Have so many servers come at once."""
    with NatsServer() as broker, contextlib.ExitStack() as stack:
        sending = stack.enter_context(_process("crowd", broker.port, way, count))
        bare = bare_seconds(broker.port, way, count)
        _line(sending)
        probing = stack.enter_context(_process("probed", broker.port))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with Daemon(directory / "daemon", broker.url, workers=1, interval="1h") as program:
            before = program.begin().taken()
            counter = "event_discovered" if way == EVENTS else "discovered"
            livez, after = watch(program, counter)
            page = program.page()
        added = max(_timestamp(line["time"]) for line in program.log() if line["msg"].startswith(ADDED))
        probing.kill()
        return Burst(
            counted=page.value(counter) - (PROBED_SERVERS if way == EVENTS else 0),
            dropped=page.value("events_dropped") + page.value("queue_full"),
            seconds=added - float(_line(sending)) - AHEAD_SECONDS,
            least_seconds=bare + (SLIDE_SECONDS if way == REPLIES else 0.0),
            cpu_seconds=after.cpu_seconds - before.cpu_seconds,
            waiting=page.value("waiting_nodes"),
            megabytes=(before.rss_bytes / 1e6, after.rss_bytes / 1e6),
            livez=livez,
            turns=[float(line) for line in probing.communicate()[0].splitlines()],
        )


def bare_seconds(port: int, way: str, count: int) -> float:
    """How long it takes until a socket has received it all."""
    subject, protocol = "bench.bare", ProtocolV1(identity="bench", caller="choria=bench", ttl=60)
    request = protocol.request(
        agent="discovery",
        target_agent="choria_provision",
        body="cGluZw==",
        request_id=protocol.new_request_id(),
        reply_to=subject,
        connected_url="",
    )
    if way == EVENTS:
        subject, payload, count = STARTUP_SUBJECT, startup(name(0)), count + PROBED_SERVERS
    else:
        payload = next(pongs(EnvelopesV1().open(request), 1))
    missing = count * len(b"MSG %b 1 %d\r\n%b\r\n" % (subject.encode(), len(payload), payload))
    with bare_socket(port, subject) as sock:
        sock.sendall(publication(DISCOVERY_SUBJECT, request))
        began = time.monotonic()
        while missing > 0:
            missing -= len(sock.recv(READ_BYTES))
    return time.monotonic() - began - AHEAD_SECONDS


def watch(program: Daemon, counter: str) -> tuple[list[float], Usage]:
    """Wait until a counter has come to rest.

    :return: seconds that each request for /livez took meanwhile, and what the daemon took up at the last change
    """
    livez, taken, value, look = [], program.taken(), 0, 0.0
    changed = time.monotonic()
    while True:
        began = time.monotonic()
        status, text = program.get("/livez")
        livez.append(time.monotonic() - began)
        if status != HTTPStatus.OK:
            sys.exit(f"the daemon is not well: {text}")
        if began >= look:
            look = began + LOOK_SECONDS
            if (now := program.page().value(counter)) != value:
                value, changed, taken = now, began, program.taken()
            elif began > changed + (SETTLED_SECONDS if value else PATIENCE_SECONDS):
                return livez, taken
        time.sleep(max(0.0, began + PROBE_SECONDS - time.monotonic()))


@contextlib.contextmanager
def _process(role: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run this module in a process of its own, which is ready to receive."""
    command = (sys.executable, "-m", "bench.bench_scale", role, *map(str, arguments))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT) as process:
        try:
            _line(process)
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    """The next one that a process says."""
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        sys.exit("a process of the bench has ended")
    return line


def _timestamp(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


# --- the wave


def wave(count: int, workers: int) -> Wave:
    """Have a daemon provision a whole fleet, and print a table."""
    columns = ("s", "a minute", "bare/min", "ratio", "discoveries", "waited too long")
    asked = (f"requests each, {REQUESTS_PER_SERVER} at least", "ratio", "configured twice")
    traffic = (f"messages each to the broker, {MESSAGES_PER_SERVER} at least", "ratio", "from it", "kB to", "kB from")
    table = Table("servers", *columns, *asked, *traffic, "CPU ms each", "of helpers", "peak MB")
    seen = provision(count, workers)
    requests, messages = seen.requests / count, seen.traffic["in_msgs"] / count
    table.row(
        *(f"{count:,}", f"{seen.seconds:.0f}", f"{seen.rate:,.0f}", f"{seen.bare:,.0f}"),
        *(f"{seen.rate / seen.bare:.2f}", seen.discoveries, f"{seen.late:,}"),
        *(f"{requests:.2f}", f"{requests / REQUESTS_PER_SERVER:.2f}", seen.duplicates),
        *(f"{messages:.2f}", f"{messages / MESSAGES_PER_SERVER:.2f}", f"{seen.traffic['out_msgs'] / count:.2f}"),
        *(f"{seen.traffic[way] / count / 1e3:.1f}" for way in ("in_bytes", "out_bytes")),
        *(f"{seen.cpu_seconds / count * 1e3:.1f}", f"{seen.children_cpu_seconds / count * 1e3:.1f}"),
        f"{seen.peak_megabytes:.0f}",
    )
    return seen


@attrs.frozen(kw_only=True)
class Wave:
    """What became of it.

    :ivar seconds: from the first discovery to the last restart
    :ivar rate: servers a minute in that time
    :ivar bare: helper starts a minute of as many threads, measured before
    :ivar late: times that a server had waited for a worker for too long
    :ivar requests: directed at a server
    :ivar duplicates: servers that were configured once more
    :ivar traffic: of the broker, under its names
    """

    seconds: float
    rate: float
    bare: float
    discoveries: int
    late: int
    requests: int
    duplicates: int
    traffic: Mapping[str, int]
    cpu_seconds: float
    children_cpu_seconds: float
    peak_megabytes: float


def provision(count: int, workers: int) -> Wave:
    monitor = free_port()
    with NatsServer(f'http: "127.0.0.1:{monitor}"') as broker, tempfile.TemporaryDirectory() as directory:
        site = Site(token="s3cret")
        servers = [Server(identity=name(number), site=site) for number in range(count)]
        with Fleet(broker.url, servers) as fleet:
            with Daemon(Path(directory), broker.url, workers=workers) as program:
                program.helper(daemon.helper_script("sh"))
                bare = daemon.bare_starts_per_minute(Path(directory) / "helper", workers, HELPER_STARTS_SECONDS)
                counted, before = _traffic(monitor), program.begin().taken()
                began = time.monotonic()
                if not fleet.wait(lambda counts: counts.complete, WAVE_PATIENCE_SECONDS):
                    sys.exit(f"not all servers were provisioned: {fleet.counts()}")
                seconds, after = time.monotonic() - began, program.taken()
            counts = fleet.counts()
            return Wave(
                seconds=seconds,
                rate=count * 60 / seconds,
                bare=bare,
                discoveries=counts.discoveries,
                late=sum("waited too long" in text for text in program.messages()),
                requests=counts.actions.total() - counts.actions["discovery"],
                duplicates=counts.duplicate_configures,
                traffic={way: value - counted[way] for way, value in _traffic(monitor).items()},
                cpu_seconds=after.cpu_seconds - before.cpu_seconds,
                children_cpu_seconds=after.children_cpu_seconds,
                peak_megabytes=after.peak_rss_bytes / 1e6,
            )


def _traffic(port: int) -> Mapping[str, int]:
    """What the broker has received and sent."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/varz") as response:
        told = json.load(response)
    return {way: told[way] for way in ("in_msgs", "out_msgs", "in_bytes", "out_bytes")}


def main() -> None:
    if sys.argv[1:2] == ["crowd"]:
        crowd(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    if sys.argv[1:2] == ["probed"]:
        probed(int(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"a wave of {FULL_WAVE_SERVERS:,} servers")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    bursts(REPLIES, DISCOVERED)
    bursts(EVENTS, STORMS)
    wave(FULL_WAVE_SERVERS if options.full else WAVE_SERVERS, WAVE_WORKERS)


if __name__ == "__main__":
    main()
