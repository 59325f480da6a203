"""A leader and a standby as they are installed: real processes, and the times that they really have.

A hand-over takes its fifteen seconds, so all of them are done at once, and looked at one by one.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest

from provisioner.choria.nats import Message
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import LOCK_SECONDS, Server, Site
from tests.installation import Installation
from tests.streams import PASSWORD, SERVERS_LOGIN, Streams, connector
from tests.waiting import PATIENCE_SECONDS, wait_until

SITE = Site(token="s3cret")
SERVERS = 24
#: In the worst case a server is left configured and locked.
LOCKED_SECONDS = 2 * LOCK_SECONDS
#: How often is looked how far they are.
LOOK_SECONDS = 0.1

LEFT, KILLED, FROZEN = "told to leave", "killed", "frozen"


@attrs.frozen
class Sent:
    """A request to a server."""

    at: float
    sender: str
    server: str
    action: str


class Pair:
    """A leader and its standby, on a broker of their own.

    :ivar requests: to servers, by both
    :ivar frozen: the leader is, and says nothing
    :ivar done: when something was done to the leader, by the monotonic clock
    :ivar succeeded: when the standby led
    :ivar both: both said that they led, at least once
    :ivar duplicates: servers that were configured more than once
    """

    def __init__(self, directory: Path, *identities: str) -> None:
        self.done = self.succeeded = 0.0
        self.frozen = self.both = False
        self.duplicates = 0
        self.requests: list[Sent] = []
        self.streams = Streams(directory / "streams")
        self.leader, self.standby = (
            self._installation(directory / name, identity) for name, identity in zip("ab", identities, strict=True)
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[Pair]:
        """Its broker runs, and its processes do not outlive the block."""
        with self.streams, self.leader, self.standby:
            self.streams.make_bucket()
            with contextlib.closing(connector(self.streams.server, SERVERS_LOGIN)) as spy:
                spy.subscribe("provisioning.node.>", callback=self._note)
                yield self

    def settled(self) -> bool:
        """Look whether one of them leads and the other stands by."""
        if leads(self.standby):
            self.leader, self.standby = self.standby, self.leader
        return leads(self.leader) and standing_by(self.standby)

    def succeeds(self) -> bool:
        """Look whether the standby leads now."""
        if not leads(self.standby):
            return False
        self.succeeded = self.succeeded or time.monotonic()
        self.both = self.both or (not self.frozen and leads(self.leader))
        return True

    @property
    def seconds(self) -> float:
        """From what was done to the leader until the standby led."""
        return self.succeeded - self.done

    def sent(self, installation: Installation) -> list[Sent]:
        """The requests of one of the two, which have identities of their own."""
        return [request for request in self.requests if f"identity = {request.sender}\n" in installation.choria]

    def _installation(self, directory: Path, identity: str) -> Installation:
        directory.parent.mkdir(exist_ok=True)
        installation = Installation(directory, self.streams.server.url)
        installation.settings |= {"leader_election": True, "broker_provisioning_password": PASSWORD}
        installation.choria = installation.choria.replace("prov.example.net", identity)
        return installation

    def _note(self, message: Message) -> None:
        request = EnvelopesV1().open(message.payload)
        server = message.subject.removeprefix("provisioning.node.")
        self.requests.append(Sent(message.received, request.sender, server, json.loads(request.body)["action"]))


def leads(installation: Installation) -> bool:
    """Whether a process says that it is the one that provisions; not one that does not answer."""
    try:
        return installation.metric("leader") == 1
    except OSError:
        return False


def standing_by(installation: Installation) -> bool:
    return installation.ready() and installation.metric("choria_election_campaigns", state="candidate") >= 2


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Pair]]:
    """By what is done to the leader. When the tests see them the standbys lead, and all is done with."""
    directory = tmp_path_factory.mktemp("pairs")
    pairs = {
        LEFT: Pair(directory / "left", "a.example.net", "b.example.net"),
        KILLED: Pair(directory / "killed", "prov.example.net", "prov.example.net"),
        FROZEN: Pair(directory / "frozen", "a.example.net", "b.example.net"),
    }
    with contextlib.ExitStack() as stack:
        for pair in pairs.values():
            stack.enter_context(pair.running())
            pair.leader.start()
            pair.standby.start()
        wait_until(
            lambda: all(pair.settled() for pair in pairs.values()), seconds=2 * PATIENCE_SECONDS, every=LOOK_SECONDS
        )
        fleet = boot(pairs[FROZEN], stack)

        for how, signum in ((LEFT, signal.SIGTERM), (KILLED, signal.SIGKILL), (FROZEN, signal.SIGSTOP)):
            pairs[how].done = time.monotonic()
            pairs[how].leader.process.send_signal(signum)
        frozen = pairs[FROZEN]
        frozen.frozen = True
        wait_until(
            lambda: {pair.succeeds() for pair in pairs.values()} == {True},
            seconds=2 * PATIENCE_SECONDS,
            every=LOOK_SECONDS,
        )

        wait_until(lambda: bool(frozen.sent(frozen.standby)), every=LOOK_SECONDS)
        frozen.leader.process.send_signal(signal.SIGCONT)
        frozen.frozen = False
        wait_until(frozen.succeeds, every=LOOK_SECONDS)
        assert fleet.wait(lambda counts: counts.complete, LOCKED_SECONDS), fleet.counts()
        frozen.duplicates = fleet.counts().duplicate_configures
        wait_until(lambda: standing_by(frozen.leader), every=LOOK_SECONDS)
        yield pairs


def boot(pair: Pair, stack: contextlib.ExitStack) -> Fleet:
    """Have the leader be in the midst of provisioning servers."""
    servers = [
        Server(identity=f"n{number}.example.net", site=SITE, boots_after=0.1 * (number + 1))
        for number in range(SERVERS)
    ]
    fleet = Fleet(pair.streams.server.url, servers, login=SERVERS_LOGIN, latency=0.3)
    stack.enter_context(fleet)
    assert fleet.wait(lambda counts: counts.provisioned >= SERVERS / 5, PATIENCE_SECONDS)
    return fleet


@pytest.mark.parametrize(("how", "seconds"), [(LEFT, 20.0), (KILLED, 30.0), (FROZEN, 30.0)])
def test_the_standby_leads_in_time_and_never_both_do(pairs: Mapping[str, Pair], how: str, seconds: float) -> None:
    assert pairs[how].seconds <= seconds
    assert not pairs[how].both


def test_a_leader_that_was_told_to_leave_does_so_in_good_order(pairs: Mapping[str, Pair]) -> None:
    leader = pairs[LEFT].leader
    assert leader.process.wait(PATIENCE_SECONDS) == 0
    assert not leader.pid_file.exists()


class TestFrozen:
    """A leader in the midst of its work that stood still until after another one had begun."""

    @pytest.fixture
    def pair(self, pairs: Mapping[str, Pair]) -> Pair:
        return pairs[FROZEN]

    def test_it_sends_nothing_any_more_but_restarts_of_servers_that_it_had_configured(self, pair: Pair) -> None:
        begun = pair.sent(pair.standby)[0].at
        before = [request for request in pair.sent(pair.leader) if request.at < begun]
        after = [request for request in pair.sent(pair.leader) if request.at >= begun]
        restarted = {request.server for request in before if request.action == "restart"}
        assert {request.server for request in before} - restarted, "it had some in hand when it was frozen"

        assert {request.action for request in after} <= {"restart"}
        configured = {request.server for request in before if request.action == "configure"}
        assert {request.server for request in after} <= configured

    def test_it_notices_and_stands_by(self, pair: Pair) -> None:
        assert any(message.startswith("the process stood still for ") for message in pair.leader.messages())
        assert any(message.startswith("lost the leadership: ") for message in pair.leader.messages())
        assert pair.leader.metric("paused") == 1
        assert pair.leader.get("/readyz?verbose") == (200, "broker: ok\nelection: ok, candidate\n")

    def test_each_server_is_provisioned_and_none_configured_twice(self, pair: Pair) -> None:
        assert len({request.server for request in pair.requests if request.action == "restart"}) == SERVERS
        assert pair.duplicates == 0
