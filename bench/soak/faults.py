"""What goes wrong, and when: a plan made by chance from a seed, and the hands that carry it out."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import attrs

from bench.soak.instance import Instance
from bench.soak.nodes import BAD, SITE, Ledger
from provisioner.errors import ProvisionerError
from provisioner.simulate import events
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests.streams import SERVERS_LOGIN

#: Nothing goes wrong before, and the time after the end of a fault until the next one of the same lane.
FIRST_SECONDS = 15.0
PAUSE_SECONDS = (8.0, 40.0)
#: The part of the run, from its beginning, in which every daemon may be restarted. One process has to live through the
#: rest, that of the first daemon.
RESTARTS_UNTIL = 0.4
#: The part of the faults of a daemon, or of its link, that strikes the leader.
LEADER_STRUCK = 0.7
#: A reply, and the request that follows it, may be under way for so long on a busy machine.
UNDER_WAY_SECONDS = 5.0
#: Bytes a second of a throttled connection, and seconds that a slow one takes.
THROTTLED_BYTES = (30_000, 500_000)
SLOW_SECONDS = (0.05, 1.5)
#: Events of a storm, most of them of servers that wait, some of servers that nobody knows, some that are none.
STORM_EVENTS = 20_000
STORM_WAITING, STORM_GHOSTS = 60, 20
STORM_TIMEOUT_SECONDS = 10.0
#: Misbehaving servers that come together.
MOB_SERVERS = 48


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of fault.

    :ivar lane: faults of one lane come one after the other, those of another at the same time
    :ivar seconds: from and to which time it lasts
    :ivar weight: how often it comes, in relation to the others of its lane
    :ivar of_one: it strikes one daemon, or its link to the broker
    :ivar loses: it may cost a message between server and daemon, or what the daemon knows of it
    :ivar restarts: it is the end of a process of the daemon
    """

    name: str
    lane: str
    seconds: tuple[float, float] = (0.0, 0.0)
    weight: int = 1
    of_one: bool = False
    loses: bool = False
    restarts: bool = False


KINDS = (
    Kind(name="broker killed", lane="network", seconds=(1, 15), weight=3, loses=True),
    Kind(name="broker frozen", lane="network", seconds=(5, 40), weight=2, loses=True),
    Kind(name="link black-holed", lane="network", seconds=(5, 75), of_one=True, loses=True),
    Kind(name="link half-open", lane="network", of_one=True, loses=True),
    Kind(name="link half-closed", lane="network", of_one=True, loses=True),
    Kind(name="link cut", lane="network", weight=2, of_one=True, loses=True),
    Kind(name="link slow", lane="network", seconds=(5, 30), of_one=True),
    Kind(name="link throttled", lane="network", seconds=(5, 30), of_one=True, loses=True),
    Kind(name="daemon stopped", lane="machine", seconds=(2, 20), weight=2, of_one=True),
    # for longer than it waits for a reply: what arrives meanwhile comes too late
    Kind(name="daemon suspended", lane="machine", seconds=(25, 45), of_one=True, loses=True),
    Kind(name="daemon killed", lane="machine", seconds=(0, 5), weight=2, of_one=True, loses=True, restarts=True),
    Kind(name="daemon terminated", lane="machine", seconds=(0, 5), weight=2, of_one=True, restarts=True),
    Kind(name="helper fails", lane="machine", seconds=(5, 20)),
    Kind(name="event storm", lane="machine"),
    Kind(name="misbehaving join", lane="machine", seconds=(20, 60)),
)
LANES = tuple(dict.fromkeys(kind.lane for kind in KINDS))


@attrs.frozen
class Fault:
    """An entry of the plan.

    :ivar at: seconds from the start of the run to its beginning
    :ivar on_leader: of several daemons it strikes the leader
    :ivar spares_first: of several daemons it does not strike the first
    :ivar strength: of those that have one: a number between 0 and 1
    """

    kind: Kind
    at: float
    seconds: float
    on_leader: bool
    spares_first: bool
    strength: float

    def between(self, low: float, high: float) -> float:
        """Give a value by the strength; its order of magnitude is what chance decides about."""
        return low * math.pow(high / low, self.strength)


@attrs.define
class Happened:
    """A fault as it came about, by the monotonic clock.

    :ivar victim: the name of the daemon that it struck; empty: all of them, or none
    :ivar end: None while it lasts
    :ivar text: more about it
    """

    kind: Kind
    start: float
    victim: str = ""
    end: float | None = None
    text: str = ""

    def explains(self, moment: float, daemon: str, *, now: float) -> bool:
        """Whether it can have lost what a daemon and a server had under way at a moment."""
        if not self.kind.loses or self.victim not in ("", daemon):
            return False
        end = now if self.end is None else self.end
        return self.start - UNDER_WAY_SECONDS <= moment <= end + UNDER_WAY_SECONDS


def plan(seed: int, seconds: float, *, daemons: int) -> Sequence[Fault]:
    """Say what goes wrong in a run of so many seconds, in order.

    Each kind comes about as often as its weight says: they are drawn like cards, from a deck that is shuffled anew
    when it is empty.
    """
    faults = [
        fault for lane in LANES for fault in _lane(random.Random(f"faults {lane} {seed}"), lane, seconds, daemons)
    ]
    return sorted(faults, key=lambda fault: fault.at)


def _lane(chance: random.Random, lane: str, seconds: float, daemons: int) -> Iterator[Fault]:
    at = FIRST_SECONDS
    for kind in _deck(chance, [kind for kind in KINDS if kind.lane == lane]):
        lasts = chance.uniform(*kind.seconds)
        if at + lasts > seconds:
            return
        spares_first = kind.restarts and at + lasts > seconds * RESTARTS_UNTIL
        on_leader = chance.random() < LEADER_STRUCK
        if spares_first and daemons == 1:
            continue
        yield Fault(kind, at, lasts, on_leader, spares_first, chance.random())
        at += lasts + chance.uniform(*PAUSE_SECONDS)


def _deck(chance: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    """Deal for ever."""
    while True:
        deck = [kind for kind in kinds for _ in range(kind.weight)]
        chance.shuffle(deck)
        yield from deck


class Faults:
    """Carries out a plan, in a thread for each lane, and writes down what happened.

    :param record: a file, gets a line of JSON for each fault that is over
    """

    def __init__(self, faults: Sequence[Fault], hands: Hands, record: Path) -> None:
        self._hands = hands
        self._record = record
        self._lock = threading.Lock()
        self._happened: list[Happened] = []
        self._ending = threading.Event()
        self._started = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=([each for each in faults if each.kind.lane == lane],), name=lane)
            for lane in LANES
        ]

    def start(self) -> None:
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the faults that last, and begin no other."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def happened(self) -> Sequence[Happened]:
        """All that has begun so far."""
        with self._lock:
            return sorted(self._happened, key=lambda each: each.start)

    def reason(self, moment: float, daemon: str) -> str:
        """Which faults can have lost what a daemon and a server had under way at a moment; empty: none can."""
        now = time.monotonic()
        return ", ".join(each.kind.name for each in self.happened() if each.explains(moment, daemon, now=now))

    def _run(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if self._ending.wait(max(0.0, self._started + fault.at - time.monotonic())):
                return
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        happened = Happened(fault.kind, time.monotonic())
        with self._lock:
            self._happened.append(happened)
        try:
            victim = self._hands.victim(fault)
            happened.victim = victim.name if fault.kind.of_one else ""
            with self._hands.actions[fault.kind.name](fault, victim) as text:
                happened.text = text
                self._ending.wait(fault.seconds)
        except (ProvisionerError, OSError) as error:
            happened.text = f"did not come about: {error}"
        happened.end = time.monotonic()
        entry = {
            "kind": fault.kind.name,
            "at": happened.start - self._started,
            "seconds": happened.end - happened.start,
            "victim": happened.victim,
            "text": happened.text,
        }
        with self._lock, self._record.open("a") as record:
            record.write(json.dumps(entry) + "\n")


class Hands:
    """Does the damage. Each action is a context that gives a text, and mends at its end what it has damaged.

    :param connect: makes the fleet of some servers
    :ivar actions: by the name of the kind
    """

    def __init__(
        self,
        broker: NatsServer,
        instances: Sequence[Instance],
        ledger: Ledger,
        connect: Callable[[Sequence[Server]], Fleet],
    ) -> None:
        self._connect = connect
        self._broker = broker
        self._instances = instances
        self._ledger = ledger
        self._numbers = itertools.count(1)
        self.actions: Mapping[str, Callable[[Fault, Instance], AbstractContextManager[str]]] = {
            "broker killed": self._broker_killed,
            "broker frozen": self._broker_frozen,
            "link black-holed": self._black_holed,
            "link half-open": self._half_open,
            "link half-closed": self._half_closed,
            "link cut": self._cut,
            "link slow": self._slow,
            "link throttled": self._throttled,
            "daemon stopped": self._stopped,
            "daemon suspended": self._stopped,
            "daemon killed": self._killed,
            "daemon terminated": self._terminated,
            "helper fails": self._helper_fails,
            "event storm": self._storm,
            "misbehaving join": self._mob,
        }

    def victim(self, fault: Fault) -> Instance:
        """Choose the daemon that a fault strikes."""
        able = self._instances[fault.spares_first and len(self._instances) > 1 :]
        leaders = [instance for instance in able if instance.leads]
        others = [instance for instance in able if instance not in leaders]
        preferred, rest = (leaders, others) if fault.on_leader else (others, leaders)
        return (preferred or rest)[0]

    # --- network

    @contextlib.contextmanager
    def _broker_killed(self, _fault: Fault, _victim: Instance) -> Iterator[str]:
        self._broker.kill()
        try:
            yield ""
        finally:
            self._broker.start()

    @contextlib.contextmanager
    def _broker_frozen(self, _fault: Fault, _victim: Instance) -> Iterator[str]:
        self._broker.pause()
        try:
            yield ""
        finally:
            self._broker.resume()

    @contextlib.contextmanager
    def _black_holed(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        victim.proxy.black_hole()
        try:
            yield ""
        finally:
            victim.proxy.heal()

    @contextlib.contextmanager
    def _slow(self, fault: Fault, victim: Instance) -> Iterator[str]:
        seconds = fault.between(*SLOW_SECONDS)
        victim.proxy.delay(seconds)
        try:
            yield f"{seconds:.2f} s each way"
        finally:
            victim.proxy.heal()

    @contextlib.contextmanager
    def _throttled(self, fault: Fault, victim: Instance) -> Iterator[str]:
        rate = fault.between(*THROTTLED_BYTES)
        victim.proxy.throttle(rate)
        try:
            yield f"{rate:,.0f} bytes a second"
        finally:
            victim.proxy.heal()

    @contextlib.contextmanager
    def _half_open(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        victim.proxy.forget()
        yield ""

    @contextlib.contextmanager
    def _half_closed(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        victim.proxy.half_close()
        yield ""

    @contextlib.contextmanager
    def _cut(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        victim.proxy.cut()
        yield ""

    # --- machine

    @contextlib.contextmanager
    def _stopped(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        process = victim.process
        process.send_signal(signal.SIGSTOP)
        try:
            yield ""
        finally:
            process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _killed(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        with victim.killed():
            yield ""

    @contextlib.contextmanager
    def _terminated(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        with victim.terminated():
            yield f"exit code {victim.exit_codes[-1]}"

    @contextlib.contextmanager
    def _helper_fails(self, _fault: Fault, victim: Instance) -> Iterator[str]:
        outage = victim.notes / "outage"
        outage.touch()
        try:
            yield ""
        finally:
            outage.unlink()

    @contextlib.contextmanager
    def _storm(self, _fault: Fault, _victim: Instance) -> Iterator[str]:
        """Publish a lot of events as fast as the broker takes them."""
        ghosts = [f"ghost{next(self._numbers)}.example.net" for _ in range(STORM_GHOSTS)]
        names = [*self._ledger.waiting()[-STORM_WAITING:], *ghosts]
        payloads = [events.payload("startup", identity=each, version="0.30.0", now=time.time()) for each in names]
        payloads += [b"null", b'{"data": []}', b"\xff"]
        subject = events.subject("startup").encode()
        frames = [b"PUB %s %d\r\n%s\r\n" % (subject, len(each), each) for each in payloads]
        storm = b"".join(itertools.islice(itertools.cycle(frames), STORM_EVENTS))
        started = time.monotonic()
        with socket.create_connection((self._broker.host, self._broker.port), STORM_TIMEOUT_SECONDS) as connection:
            login = json.dumps({"verbose": False, **SERVERS_LOGIN}).encode()
            connection.sendall(b"CONNECT " + login + b"\r\n" + storm + b"PING\r\n")
            received = b""
            while b"PONG\r\n" not in received:
                data = connection.recv(65536)
                if not data:
                    raise ConnectionError("the broker closed the connection")
                received += data
        yield f"{STORM_EVENTS} events in {time.monotonic() - started:.1f} s"

    @contextlib.contextmanager
    def _mob(self, _fault: Fault, _victim: Instance) -> Iterator[str]:
        """Have misbehaving servers boot, and go after a while."""
        mob = [
            Server(identity=f"mob{next(self._numbers)}.example.net", site=SITE, misbehaviour=way, boots_after=0.01)
            for way in itertools.islice(itertools.cycle(BAD), MOB_SERVERS)
        ]
        fleet = self._connect(mob)
        try:
            fleet.start()
            yield f"{MOB_SERVERS} servers"
        finally:
            fleet.stop()
