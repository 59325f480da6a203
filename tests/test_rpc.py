"""Requests directed at one server, and what may come back to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import rpc
from provisioner.choria.connector import Connector, Expectation
from provisioner.choria.errors import ConnectionLostError, NotConnectedError, SubjectError
from provisioner.choria.nats import Message
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import (
    BadReplyError,
    Client,
    ConflictError,
    NobodyError,
    NoBrokerError,
    RefusedError,
    RPCReply,
    Session,
    SilenceError,
)
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector
from tests.puppet import Puppet

CALLER = "choria=prov.example.net"
#: For a request that is to end in silence: long enough for all that is sent to arrive.
SILENCE_SECONDS = 0.5


@pytest.fixture
def connector(broker: NatsServer, make_connector: MakeConnector) -> Connector:
    connector = make_connector(broker, reply_prefix=reply_prefix(CALLER))
    assert connector.connect(PATIENCE_SECONDS)
    return connector


@pytest.fixture
def puppet(broker: NatsServer, make_connector: MakeConnector) -> Puppet:
    connector = make_connector(broker, reply_prefix="puppet")
    assert connector.connect(PATIENCE_SECONDS)
    return Puppet(connector, "n1.example.net")


@pytest.fixture
def client(connector: Connector) -> Client:
    return Client(connector, ProtocolV1(identity="prov.example.net", caller=CALLER, ttl=60))


@pytest.fixture
def session(client: Client, puppet: Puppet) -> Session:
    return client.session(puppet.identity)


def call(session: Session, timeout: float = PATIENCE_SECONDS) -> RPCReply:
    return session.call("choria_provision", "jwt", {"token": "s3cret"}, timeout=timeout)


def test_a_request_reaches_the_server_and_its_reply_comes_back(session: Session, puppet: Puppet) -> None:
    assert call(session).data == {"message": "done"}
    assert puppet.requests == [{"agent": "choria_provision", "action": "jwt", "data": {"token": "s3cret"}}]


def test_nobody_there_is_known_at_once(session: Session, puppet: Puppet) -> None:
    puppet.leave()

    with pytest.raises(NobodyError):
        call(session, timeout=3600)


def test_a_forged_word_that_nobody_is_there_does_not_keep_a_server_from_answering(
    session: Session, puppet: Puppet
) -> None:
    def forge(request: Request) -> list[bytes]:
        puppet._connector._send("HPUB", request.reply_to, 16, "16\r\nNATS/1.0 503\r\n\r\n")
        return [puppet.ok(request)]

    puppet.script = forge
    assert call(session).data == {"message": "done"}


def test_after_the_word_that_nobody_is_there_a_reply_is_awaited_for_the_grace_time(
    session: Session, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "NOBODY_GRACE_SECONDS", PATIENCE_SECONDS)
    late: list[threading.Timer] = []

    def forge(request: Request) -> list[bytes]:
        puppet._connector._send("HPUB", request.reply_to, 16, "16\r\nNATS/1.0 503\r\n\r\n")
        late.append(threading.Timer(SILENCE_SECONDS, puppet.publish, (request, puppet.ok(request))))
        late[0].start()
        return []

    puppet.script = forge
    assert call(session).data == {"message": "done"}


@pytest.mark.parametrize("timeout", [3600.0, PATIENCE_SECONDS / 2])
def test_after_that_word_no_wait_is_longer_than_the_grace_time_and_what_is_left_of_the_timeout(
    session: Session, puppet: Puppet, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    assert rpc.NOBODY_GRACE_SECONDS == 0.25
    monkeypatch.setattr(rpc, "NOBODY_GRACE_SECONDS", PATIENCE_SECONDS)
    puppet.leave()
    waits: list[float] = []
    get = Expectation.get

    def noting(self: Expectation, timeout: float) -> Message:
        waits.append(timeout)
        return get(self, timeout if len(waits) == 1 else 0.0)

    monkeypatch.setattr(Expectation, "get", noting)
    with pytest.raises(NobodyError):
        call(session, timeout=timeout)
    first, second = waits
    assert first <= timeout
    assert 0 < second <= min(timeout, PATIENCE_SECONDS)


@pytest.mark.parametrize("quote", [json.dumps, repr, lambda body: json.dumps(json.dumps(body))])
def test_a_server_that_quotes_the_request_puts_no_secret_into_the_error(
    session: Session, puppet: Puppet, quote: Callable[[Any], str]
) -> None:
    puppet.script = lambda request: [
        puppet.ok(request, statuscode=4, statusmsg=f"Could not parse: {quote(json.loads(request.body))}")
    ]
    secrets = {
        "token": "s3cret",
        "config": json.dumps({"plugin.nats.pass": 'hunter2"x'}),
        "policies": {"a": "hunter33"},
    }

    with pytest.raises(RefusedError, match="Could not parse") as refused:
        session.call("choria_provision", "configure", secrets, timeout=PATIENCE_SECONDS)
    for secret in ("s3cret", "hunter2", "hunter33"):
        assert secret not in str(refused.value)


def test_a_silence_while_the_broker_is_frozen_is_not_that_of_the_server(
    session: Session, puppet: Puppet, broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "CONNECTION_PROOF_SECONDS", 0.2)

    def freeze(_request: Request) -> list[bytes]:
        broker.pause()
        return []

    puppet.script = freeze
    try:
        with pytest.raises(NoBrokerError, match="the broker does not answer either"):
            call(session, timeout=SILENCE_SECONDS)
    finally:
        broker.resume()


def test_silence_ends_the_wait(session: Session, puppet: Puppet) -> None:
    puppet.script = lambda _request: []

    with pytest.raises(SilenceError, match=r"^no reply within 0\.5 s$"):
        call(session, timeout=SILENCE_SECONDS)


def relabelled(payload: bytes, sender: str) -> bytes:
    """A reply of protocol version 1 whose outermost envelope names another sender."""
    transport = json.loads(payload)
    transport["headers"]["mc_sender"] = sender
    return json.dumps(transport).encode()


BAD_REPLIES: dict[str, Callable[[Puppet, Request], bytes]] = {
    "not JSON": lambda _puppet, _request: b"hello",
    "JSON null": lambda _puppet, _request: b"null",
    "wrong UTF-8": lambda _puppet, _request: b'{"protocol":"\xff"}',
    "a million bytes": lambda _puppet, _request: b'"' + b"x" * 1_000_000 + b'"',
    "deep nesting": lambda _puppet, _request: b"[" * 100_000,
    "nothing": lambda _puppet, _request: b"",
    "another sender": lambda puppet, request: puppet.seal(request, "{}", sender="intruder"),
    "another request": lambda puppet, request: puppet.seal(request, "{}", id="0" * 32),
    "another agent": lambda puppet, request: puppet.seal(request, "{}", agent="rpcutil"),
    "another sender outside": lambda puppet, request: relabelled(puppet.seal(request, "{}"), "intruder"),
    "another sender inside": lambda puppet, request: relabelled(
        puppet.seal(request, "{}", sender="intruder"), puppet.identity
    ),
    "damaged": lambda puppet, request: puppet.ok(request).replace(b"data", b"date", 1),
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_is_dropped_and_the_good_one_after_it_counts(
    session: Session, puppet: Puppet, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    puppet.script = lambda request: [BAD_REPLIES[kind](puppet, request), puppet.ok(request)]

    assert call(session).data == {"message": "done"}
    assert "dropped a reply to choria_provision" in caplog.text
    assert caplog.records[0].identity == puppet.identity  # type: ignore[attr-defined]


def test_when_nothing_else_comes_the_error_names_what_was_dropped(
    session: Session, puppet: Puppet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet.script = lambda request: [b"hello"] * 3 + [puppet.seal(request, "{}", sender="intruder")]
    waits = itertools.count()
    get = Expectation.get
    # all four are awaited, and nothing after them
    monkeypatch.setattr(Expectation, "get", lambda self, timeout: get(self, timeout if next(waits) < 4 else 0.0))

    with pytest.raises(
        SilenceError, match="dropped 3, since the transport is not JSON; dropped 1, since it comes from"
    ):
        call(session)
    assert len(caplog.records) == 2, "a flood of one kind is one line"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"statuscode": "0"}, "statuscode"),
        ({"statuscode": True}, "statuscode"),
        ({"statuscode": None}, "statuscode"),
        ({"data": None}, "data"),
        ({"data": []}, "data"),
        ({"data": "x" * 400_000}, "data"),
    ],
)
def test_a_reply_body_of_wrong_types_fails_the_try(
    session: Session, puppet: Puppet, changes: dict[str, Any], error: str
) -> None:
    puppet.script = lambda request: [puppet.ok(request, **changes)]

    with pytest.raises(BadReplyError, match=f"lacks a valid {error}"):
        call(session)


@pytest.mark.parametrize("body", ["pong", "", "null", "[]", '{"statuscode":NaN}', "[" * 5000, '{"a":1}{"b":2}'])
def test_a_reply_body_that_is_none_fails_the_try(session: Session, puppet: Puppet, body: str) -> None:
    puppet.script = lambda request: [puppet.seal(request, body)]

    with pytest.raises(BadReplyError):
        call(session)


def test_a_field_that_is_missing_or_of_another_type_is_named() -> None:
    for data in ({}, {"jwt": None}, {"jwt": 5}, {"jwt": ["a"]}):
        with pytest.raises(BadReplyError, match="lacks a valid jwt"):
            RPCReply("{}", data).text("jwt")


MATRIX: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "fixtures" / "agents" / "rpc-matrix.json").read_text()
)


@pytest.mark.parametrize(
    "case", [case for case in MATRIX if case["reply_body"] not in (None, "pong")], ids=lambda case: case["case"]
)
def test_replies_recorded_from_real_servers_are_understood(session: Session, puppet: Puppet, case: Any) -> None:
    puppet.script = lambda request: [puppet.seal(request, case["reply_body"])]
    recorded = json.loads(case["reply_body"])

    if recorded["statuscode"] == 0:
        assert call(session).data == recorded["data"]
    else:
        with pytest.raises(RefusedError) as refused:
            call(session)
        assert refused.value.status == recorded["statuscode"]
        assert recorded["statusmsg"][:100] in str(refused.value)


@pytest.mark.parametrize(
    ("status", "text", "final"),
    [
        (1, "Incorrect provision token supplied", True),
        (1, "Could not obtain provisioning lock", True),
        (1, "Could not decode configuration data: json: cannot unmarshal", True),
        (2, "Unknown action nope for agent choria_provision", True),
        (4, "Could not parse request data", True),
        (1, "Could not write config: no space left on device", False),
    ],
)
def test_refusals_that_no_retry_can_change_are_told_from_others(status: int, text: str, final: bool) -> None:
    assert RefusedError(status, text).final is final


def test_the_text_of_a_refusal_is_made_fit_for_a_log_line(session: Session, puppet: Puppet) -> None:
    puppet.script = lambda request: [puppet.ok(request, statuscode=1, statusmsg="a\r\nb\x1b[31m\u2028" + "x" * 1000)]

    with pytest.raises(RefusedError) as refused:
        call(session)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_second_equal_reply_is_ignored(
    session: Session, puppet: Puppet, connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    puppet.script = lambda request: [puppet.ok(request)] * 2

    call(session)
    connector.flush()
    assert call(session).data == {"message": "done"}
    assert not caplog.records


def test_a_second_different_reply_ends_the_session_before_anything_further_is_sent(
    session: Session, puppet: Puppet, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    puppet.script = lambda request: [puppet.ok(request), puppet.ok(request, data={"message": "another"})]

    call(session)
    eventually(lambda: session.conflict)
    with pytest.raises(ConflictError):
        call(session)
    assert len(puppet.requests) == 1
    digests = re.findall(r"\b[0-9a-f]{64}\b", caplog.text)
    assert len(set(digests)) == 2


def test_a_different_reply_is_noticed_long_after_the_first(
    session: Session, puppet: Puppet, eventually: Eventually
) -> None:
    seen: list[Request] = []

    def script(request: Request) -> list[bytes]:
        seen.append(request)
        return [puppet.ok(request)]

    puppet.script = script
    call(session)
    call(session)
    puppet.publish(seen[0], puppet.ok(seen[0], data={"message": "another"}))

    eventually(lambda: session.conflict)


def test_forgeries_that_fail_the_checks_do_not_end_a_session(
    session: Session, puppet: Puppet, connector: Connector
) -> None:
    puppet.script = lambda request: [puppet.ok(request), puppet.seal(request, "{}", sender="intruder"), b"hello"]

    call(session)
    connector.flush()
    assert not session.conflict


def test_a_flood_of_further_replies_is_opened_a_few_times_only(
    client: Client, puppet: Puppet, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet.script = lambda request: [puppet.ok(request)] * 200
    call(client.session(puppet.identity))
    opened = 0
    checked = Session.checked

    def counting(self: Session, *arguments: Any) -> Any:
        nonlocal opened
        opened += 1
        return checked(self, *arguments)

    monkeypatch.setattr(Session, "checked", counting)
    call(client.session(puppet.identity))
    connector.flush()
    puppet._connector.flush()
    connector.flush()
    assert 1 < opened <= 1 + 2 * rpc.SECOND_REPLIES_EXAMINED


def test_what_is_remembered_of_answered_requests_is_forgotten(
    session: Session, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "SECOND_REPLY_SECONDS", 0.0)
    for _ in range(5):
        call(session)

    assert len(client._answered) == len(client._expiries) == 1


def test_late_and_unknown_replies_are_ignored(
    session: Session, puppet: Puppet, connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Request] = []

    def silent(request: Request) -> list[bytes]:
        seen.append(request)
        return []

    puppet.script = silent
    with pytest.raises(SilenceError):
        call(session, timeout=SILENCE_SECONDS)
    puppet.publish(seen[0], puppet.ok(seen[0]))
    puppet.publish(seen[0], b"garbage")
    puppet._connector.flush()
    connector.flush()

    assert not session.conflict
    assert not caplog.records


def test_a_reply_that_was_not_read_in_time_since_this_process_stood_still_counts(
    session: Session, puppet: Puppet, connector: Connector
) -> None:
    connector.subscribe("stand.still", callback=lambda _: time.sleep(2 * SILENCE_SECONDS))

    def answer(request: Request) -> list[bytes]:
        puppet._connector.publish("stand.still")
        return [puppet.ok(request, data={"answer": "there"})]

    puppet.script = answer
    assert call(session, timeout=SILENCE_SECONDS).data == {"answer": "there"}


def test_a_lost_connection_fails_the_request_at_once(session: Session, puppet: Puppet, broker: NatsServer) -> None:
    def kill(_request: Request) -> list[bytes]:
        broker.kill()
        return []

    puppet.script = kill
    with pytest.raises((ConnectionLostError, NotConnectedError)):
        call(session, timeout=3600)


def test_an_identity_that_is_no_subject_is_never_published(client: Client) -> None:
    for identity in ("", "a b", "a.*", ">", "a..b", "a\r\nPUB x 0\r\n"):
        with pytest.raises(SubjectError):
            call(client.session(identity), timeout=SILENCE_SECONDS)


JSON_TEXT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
).flatmap(
    lambda value: st.sampled_from([json.dumps(value), json.dumps(value, indent=1), json.dumps(value, indent="\t")])
)


@given(before=st.dictionaries(st.text(max_size=3), st.integers()), data=JSON_TEXT)
def test_the_text_of_data_is_the_servers_own(before: dict[str, int], data: str) -> None:
    members = [f"{json.dumps(key)} : {value}" for key, value in before.items() if key != "data"]
    body = "{ " + " ,\n".join([*members, f'"data"\t: {data}']) + "\r\n}"

    assert RPCReply(body, {}).data_text() == data


def test_numbers_in_the_data_keep_all_their_digits() -> None:
    data = '{"big":9007199254740993,"huge":123456789012345678901234567890,"fine":0.1000000000000000055511151231257827}'

    assert rpc.opened('{"statuscode":0,"statusmsg":"OK","data":' + data + "}", {}).data_text() == data


@given(st.text(max_size=200) | JSON_TEXT)
def test_any_body_gives_a_reply_or_a_typed_error(body: str) -> None:
    with contextlib.suppress(BadReplyError, RefusedError):
        assert isinstance(rpc.opened(body, {}).data_text(), str)
