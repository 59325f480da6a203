"""Told to leave, whatever it is at, the process is gone within the grace time and a little more, and leaves nothing.

All of these processes run at once, since each spends its time waiting for something, and are looked at one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import pytest

from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server, Site
from tests.conftest import PATIENCE_SECONDS
from tests.fake_broker import FakeBroker, Peer
from tests.installation import HELPER, Installation
from tests.streams import PASSWORD, SERVERS_LOGIN, Streams

SITE = Site(token="s3cret")
#: What hosts in work are given, unless it is said otherwise, and what the process may take on top of that.
GRACE_SECONDS, LEAVE_SECONDS = 1.0, 5.0
#: What a busy machine may take on top.
SLACK_SECONDS = 3.0
#: How often is looked how far all of them are.
LOOK_SECONDS = 0.05
#: A pipe so large holds no more than the first lines of a log.
PIPE_BYTES = 8192

#: Runs the program where the name server does not answer a certain question.
WITHOUT_NAMES = """
import socket, sys, time
from provisioner.cli import main
look_up = socket.getaddrinfo
def getaddrinfo(host, *arguments, **options):
    if host != "broker.example.net":
        return look_up(host, *arguments, **options)
    open("asked", "w").close()
    time.sleep(3600)
socket.getaddrinfo = getaddrinfo
sys.exit(main(prog_name="choria-provisioner"))
"""

#: Runs the program so that a discovery lasts until it is told to leave.
LONG_DISCOVERY = """
import sys
from provisioner.choria import discovery
from provisioner.cli import main
discovery.LIMIT_SECONDS = discovery.SLIDE_SECONDS = 3600.0
sys.exit(main(prog_name="choria-provisioner"))
"""

#: Brings a process to where it is to be told to leave: what it gives has to come true before it goes on.
Way: TypeAlias = Iterator[Callable[[], object]]


class Stage:
    """One process, what it needs, and how it left.

    :ivar grace: seconds that it is given
    :ivar insistent: it is told to leave again and again
    :ivar told: when it was told; 0: it was not yet
    :ivar exit_code: None until it has left, and all of this is noted
    :ivar seconds: that it took to leave
    :ivar left_behind: commands of processes in its directory
    :ivar after: done as soon as it has left
    :ivar pages: of its monitor port, status and text
    :ivar sequences: of the key of its election, before and after
    """

    installation: Installation
    fleet: Fleet
    pipe: IO[bytes]

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        directory.mkdir()
        self.directory = directory
        self.grace = GRACE_SECONDS
        self.insistent = False
        self.told = self.seconds = 0.0
        self.exit_code: int | None = None
        self.left_behind: list[str] = []
        self.after: Callable[[], object] = lambda: None
        self.pages: list[tuple[int, str]] = []
        self.sequences: list[int] = []
        #: Makes whatever it is given last until all stages are over.
        self.keep = stack.enter_context
        self._stack = stack
        self._waiter = threading.Thread(target=self._note_how_it_leaves, name=f"waiter-{directory.name}")
        stack.callback(self._join)

    def broker(self) -> NatsServer:
        return self.keep(NatsServer())

    def streams(self) -> Streams:
        return self.keep(Streams(self.directory / "streams"))

    def install(self, broker: str, **settings: Any) -> Installation:
        self.installation = self.keep(Installation(self.directory / "daemon", broker))
        self.installation.settings |= {"shutdown_grace": f"{self.grace:.0f}s", **settings}
        return self.installation

    def install_elected(self, streams: Streams) -> Installation:
        return self.install(streams.server.url, leader_election=True, broker_provisioning_password=PASSWORD)

    def boot(self, broker: NatsServer, *servers: Server, **options: Any) -> Fleet:
        self.fleet = Fleet(broker.url, servers, **options)
        self._stack.enter_context(self.fleet)
        return self.fleet

    def tell(self) -> None:
        """Tell the process to leave."""
        self.told = time.monotonic()
        self.installation.process.send_signal(signal.SIGTERM)
        self._waiter.start()

    def has_left(self) -> bool:
        """Look whether it has left after it was told to, and tell it again if it is to be told again and again."""
        if self.insistent and self.told and self.exit_code is None:
            self.installation.process.send_signal(signal.SIGTERM)
        return self.exit_code is not None

    def _note_how_it_leaves(self) -> None:
        """In a thread of its own: who looks at all of the stages may be held up by one of them."""
        exit_code = self.installation.process.wait()
        self.seconds = time.monotonic() - self.told
        self.left_behind = list(commands_in(self.installation.directory))
        self.after()
        self.exit_code = exit_code

    def _join(self) -> None:
        """After the processes are gone, however that came."""
        if self.told:
            self._waiter.join(PATIENCE_SECONDS)


def commands_in(directory: Path) -> Iterator[str]:
    """The commands of processes whose current directory that is."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == directory:
                yield (process / "cmdline").read_text()


def servers(count: int, **options: Any) -> list[Server]:
    return [Server(identity=f"n{number}.example.net", site=SITE, **options) for number in range(count)]


def campaigning(installation: Installation) -> bool:
    with contextlib.suppress(OSError):
        return installation.metric("choria_election_campaigns", state="candidate") >= 2
    return False


# --- where a process can be


def to_a_broker_that_says_nothing(stage: Stage) -> Way:
    broker = stage.keep(FakeBroker(Peer.wait_until_left))
    stage.install(f"127.0.0.1:{broker.port}").start()
    yield lambda: broker.connections


def to_a_name_that_nobody_knows(stage: Stage) -> Way:
    installation = stage.install("broker.invalid:4222")
    installation.start()
    yield lambda: installation.logged("cannot connect")


def to_a_name_that_is_still_looked_up(stage: Stage) -> Way:
    installation = stage.install("broker.example.net:4222")
    installation.program = ("-c", WITHOUT_NAMES)
    installation.start()
    yield (installation.directory / "asked").exists


def in_a_discovery(stage: Stage) -> Way:
    broker = stage.broker()
    fleet = stage.boot(broker, *servers(5))
    installation = stage.install(broker.url)
    installation.program = ("-c", LONG_DISCOVERY)
    installation.choria += "discovery_timeout = 3600\n"
    installation.start()
    yield lambda: fleet.counts().discoveries >= 1


def with_requests_that_wait_for_a_reply(stage: Stage) -> Way:
    broker = stage.broker()
    fleet = stage.boot(broker, *servers(1, misbehaviour=Misbehaviour.SILENT))
    stage.install(broker.url).start()
    yield lambda: fleet.counts().actions["rpcutil#inventory"] >= 1


def with_requests_that_are_made_again_and_again(stage: Stage) -> Way:
    broker = stage.broker()
    fleet = stage.boot(broker, *servers(1, fails=True, fails_seconds=3600.0))
    stage.install(broker.url).start()
    yield lambda: fleet.counts().actions["choria_provision#configure"] >= 2


def with_a_queue_full_of_hosts(stage: Stage) -> Way:
    stage.grace = 20.0
    broker = stage.broker()
    fleet = stage.boot(broker, *servers(200), latency=0.2)
    stage.install(broker.url).start()
    yield lambda: fleet.counts().provisioned >= 4


def with_a_helper_that_has_children_told_again(stage: Stage) -> Way:
    stage.grace, stage.insistent = 3600.0, True
    broker = stage.broker()
    stage.boot(broker, *servers(1))
    installation = stage.install(broker.url, helper_timeout="1h")
    installation.helper("#!/bin/sh\nsleep 3600 &\nsleep 3600 &\ntouch running\nwait\n")
    installation.start()
    yield (installation.directory / "running").exists


def idle_when_its_broker_was_killed(stage: Stage) -> Way:
    broker = stage.broker()
    installation = stage.install(broker.url)
    installation.start()
    yield installation.ready
    broker.kill()


def idle_when_its_broker_is_frozen(stage: Stage) -> Way:
    stage.grace = 5.0  # it says good-bye, and waits for the answer
    broker = stage.broker()
    installation = stage.install(broker.url)
    installation.start()
    yield installation.ready
    broker.pause()


def with_requests_that_wait_when_its_broker_is_frozen(stage: Stage) -> Way:
    broker = stage.broker()
    fleet = stage.boot(broker, *servers(8), latency=1.0)
    stage.install(broker.url).start()
    yield lambda: fleet.counts().actions["rpcutil#inventory"] >= 4
    broker.pause()


def with_a_log_that_nobody_reads(stage: Stage) -> Way:
    broker = stage.broker()
    installation = stage.install(broker.url)
    del installation.settings["logfile"]
    reader, writer = os.pipe()
    stage.pipe = stage.keep(os.fdopen(reader, "rb"))
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    installation.start("run", "--debug", stdout=writer)
    os.close(writer)
    fleet = stage.boot(broker, *servers(20))
    yield lambda: fleet.counts().complete


def with_a_log_on_a_full_disk(stage: Stage) -> Way:
    broker = stage.broker()
    fleet = stage.boot(broker, *servers(5))
    stage.install(broker.url, logfile="/dev/full").start()
    yield lambda: fleet.counts().complete


def as_a_standby(stage: Stage) -> Way:
    streams = stage.streams()
    streams.make_bucket()
    streams.write(b"another.example.net")
    installation = stage.install_elected(streams)
    installation.start()
    yield lambda: campaigning(installation) and installation.ready()


def in_an_election_without_a_bucket(stage: Stage) -> Way:
    installation = stage.install_elected(stage.streams())
    installation.start()
    yield lambda: campaigning(installation)
    stage.pages = [installation.get("/readyz"), installation.get("/livez")]


def as_a_leader_with_work_in_its_hands(stage: Stage) -> Way:
    stage.grace = 20.0
    streams = stage.streams()
    streams.make_bucket()
    stage.boot(streams.server, *servers(1), login=SERVERS_LOGIN)
    installation = stage.install_elected(streams)
    installation.helper(HELPER.replace("cat >/dev/null", "touch running; sleep 2"))
    installation.start()
    yield (installation.directory / "running").exists
    stage.sequences = [streams.sequence()]
    stage.after = lambda: stage.sequences.append(streams.sequence())


EVERYWHERE: tuple[Callable[[Stage], Way], ...] = (
    to_a_broker_that_says_nothing,
    to_a_name_that_nobody_knows,
    to_a_name_that_is_still_looked_up,
    in_a_discovery,
    with_requests_that_wait_for_a_reply,
    with_requests_that_are_made_again_and_again,
    with_a_queue_full_of_hosts,
    with_a_helper_that_has_children_told_again,
    idle_when_its_broker_was_killed,
    idle_when_its_broker_is_frozen,
    with_requests_that_wait_when_its_broker_is_frozen,
    with_a_log_that_nobody_reads,
    with_a_log_on_a_full_disk,
    as_a_standby,
    in_an_election_without_a_bucket,
    as_a_leader_with_work_in_its_hands,
)


Stages: TypeAlias = Mapping[Callable[[Stage], Way], Stage]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """By the way that led there. Each was told to leave as soon as it was there, and all have left, or will not."""
    directory = tmp_path_factory.mktemp("stages")
    with contextlib.ExitStack() as stack:
        stages = {way: Stage(directory / way.__name__, stack) for way in EVERYWHERE}
        on_the_way = {way: way(stage) for way, stage in stages.items()}
        awaited: dict[Callable[[Stage], Way], Callable[[], object]] = dict.fromkeys(EVERYWHERE, lambda: True)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while {stage.has_left() for stage in stages.values()} != {True} and time.monotonic() < give_up:
            for way in [way for way, condition in awaited.items() if condition()]:
                try:
                    awaited[way] = next(on_the_way[way])
                except StopIteration:
                    del awaited[way]
                    stages[way].tell()
            time.sleep(LOOK_SECONDS)
        yield stages


@pytest.mark.parametrize("way", EVERYWHERE, ids=lambda way: way.__name__)
def test_it_leaves_in_time_and_leaves_nothing(stages: Stages, way: Callable[[Stage], Way]) -> None:
    stage = stages[way]
    assert stage.told, "it never got there"
    assert stage.exit_code == 0
    assert stage.seconds <= (0.0 if stage.insistent else stage.grace) + LEAVE_SECONDS + SLACK_SECONDS
    assert not stage.installation.pid_file.exists()
    assert stage.left_behind == []


def test_nothing_is_admitted_after_a_discovery_that_was_ended(stages: Stages) -> None:
    assert set(stages[in_a_discovery].fleet.counts().actions) == {"discovery"}


def test_hosts_in_work_are_finished_and_those_in_the_queue_are_not_waited_for(stages: Stages) -> None:
    counts = stages[with_a_queue_full_of_hosts].fleet.counts()
    assert counts.actions["choria_provision#configure"] == counts.provisioned < 100


def test_a_helper_is_killed_at_the_second_signal(stages: Stages) -> None:
    stage = stages[with_a_helper_that_has_children_told_again]
    assert stage.installation.logged("the helper was killed: the work on this host was cancelled")


def test_a_log_that_nobody_reads_loses_its_lines_and_nothing_else(stages: Stages) -> None:
    stage = stages[with_a_log_that_nobody_reads]
    assert stage.pipe
    log = stage.pipe.read()
    assert b"started with 4 workers" in log
    assert b"choria-provisioner ended" not in log


def test_without_a_bucket_it_lives_and_is_not_ready(stages: Stages) -> None:
    ready, alive = stages[in_an_election_without_a_bucket].pages
    assert ready[0] == 503
    assert ready[1].startswith("election: the broker has no bucket CHORIA_LEADER_ELECTION: ")
    assert alive == (200, "ok\n")


def test_a_leader_finishes_its_work_and_writes_the_key_no_more(stages: Stages) -> None:
    stage = stages[as_a_leader_with_work_in_its_hands]
    assert stage.fleet.counts().provisioned == 1
    before, after = stage.sequences
    assert after <= before + 1
