"""What counts as an answer when all servers are asked at once, and when it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from provisioner.choria import survey
from provisioner.choria.connector import Connector
from provisioner.choria.errors import ConnectorError
from provisioner.choria.nats import Message
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.survey import Stats
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.server import Server, Site
from tests.conftest import PATIENCE_SECONDS, MakeConnector, StartFleet

CALLER = "choria=prov.example.net"
NAMES = ("n1.example.net", "n2.example.net")
GOOD = {"version": "0.30.0", "starttime": 1700000000}

Answer = Callable[[Request], list[bytes]]


def body(data: Any = GOOD, status: int = 0) -> str:
    return json.dumps({"action": "daemon_stats", "statuscode": status, "statusmsg": "OK", "data": data})


def sealed(sender: str = NAMES[0], text: str = body(), **changes: Any) -> Answer:
    """A reply; `changes` are members of the request that it answers."""
    return lambda request: [
        EnvelopesV1().seal(attrs.evolve(request, **changes), sender=sender, body=text, time=time.time())
    ]


@pytest.fixture
def connected(broker: NatsServer, make_connector: MakeConnector) -> Connector:
    connector = make_connector(broker, reply_prefix=reply_prefix(CALLER))
    assert connector.connect(PATIENCE_SECONDS)
    return connector


def ask(connector: Connector, *names: str) -> dict[str, Stats]:
    protocol = ProtocolV1(identity="prov.example.net", caller=CALLER, ttl=60)
    return survey.survey(connector, protocol, names or NAMES, target_agent="choria_provision")


@pytest.fixture
def answering(broker: NatsServer, make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has somebody answer with what the given functions make."""
    monkeypatch.setattr(survey, "FIRST_REPLY_SECONDS", 1.0)
    monkeypatch.setattr(survey, "SLIDE_SECONDS", 0.3)
    other = make_connector(broker)
    assert other.connect(PATIENCE_SECONDS)
    requests: list[Request] = []

    def start(*answers: Answer) -> list[Request]:
        def reply(message: Message) -> None:
            request = EnvelopesV1().open(message.payload)
            requests.append(request)
            for answer in answers:
                for payload in answer(request):
                    other.publish(request.reply_to, payload=payload)

        other.subscribe("provisioning.broadcast.agent.rpcutil", callback=reply)
        other.flush()
        return requests

    return start


def test_servers_tell_their_version_and_their_start(connected: Connector, start_fleet: StartFleet) -> None:
    site = Site(token="s3cret", version="0.29.4")
    start_fleet(*(Server(identity=name, site=site) for name in NAMES))
    before = time.monotonic()
    found = ask(connected)

    assert found.keys() == set(NAMES)
    assert {stats.version for stats in found.values()} == {"0.29.4"}
    assert all(abs(time.time() - (stats.started or 0)) < 60 for stats in found.values())
    assert time.monotonic() - before < survey.FIRST_REPLY_SECONDS, "it is over with the last answer"


def test_only_servers_with_the_agent_are_asked(connected: Connector, answering: Any) -> None:
    requests = answering(sealed(), sealed(NAMES[1]))
    assert ask(connected) == dict.fromkeys(NAMES, Stats("0.30.0", 1700000000.0))
    (request,) = requests
    assert request.filter["agent"] == ["choria_provision"]
    assert json.loads(request.body) == {"agent": "rpcutil", "action": "daemon_stats", "data": {}}


@pytest.mark.parametrize(
    "forgery",
    [
        sealed(id="0" * 32),
        sealed(agent="discovery"),
        sealed(text=body(status=1)),
        sealed(text="pong"),
        sealed(text=body(data=[])),
        sealed("stranger.example.net"),
        lambda request: [
            payload.replace(b'"mc_sender":"n1.', b'"mc_sender":"n2.') for payload in sealed(NAMES[0])(request)
        ],
        lambda _: [b"null"],
    ],
    ids=[
        "another request",
        "another agent",
        "a refusal",
        "no JSON",
        "no data",
        "a stranger",
        "two senders",
        "no envelope",
    ],
)
def test_what_is_no_answer_hides_none(connected: Connector, answering: Any, forgery: Answer) -> None:
    answering(forgery, sealed(text=body(GOOD | {"version": "9"})), sealed(), forgery)
    assert ask(connected) == {NAMES[0]: Stats("9", 1700000000.0)}, "the first that is one counts"


@pytest.mark.parametrize("data", [{}, {"version": 1, "starttime": "x"}, {"starttime": True}, {"starttime": 10**400}])
def test_a_server_that_says_nothing_of_use_has_answered(connected: Connector, answering: Any, data: Any) -> None:
    answering(sealed(text=body(data)))
    assert ask(connected, NAMES[0]) == {NAMES[0]: Stats("", None)}


def test_it_ends_when_no_more_answers_come(connected: Connector, answering: Any) -> None:
    answering(sealed())
    before = time.monotonic()
    assert ask(connected) == {NAMES[0]: Stats("0.30.0", 1700000000.0)}
    assert survey.SLIDE_SECONDS <= time.monotonic() - before < survey.LIMIT_SECONDS


def test_nobody_is_asked_for(connected: Connector) -> None:
    protocol = ProtocolV1(identity="prov.example.net", caller=CALLER, ttl=60)
    assert survey.survey(connected, protocol, (), target_agent="choria_provision") == {}


def test_without_a_connection_it_fails(connected: Connector) -> None:
    connected.close()
    with pytest.raises(ConnectorError):
        ask(connected)
