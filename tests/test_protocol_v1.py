"""The envelopes of protocol 1, against bytes recorded from real servers and the Go original."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria.protocol import ProtocolError, Reply
from provisioner.choria.protocol_v1 import ProtocolV1

FIXTURES = Path(__file__).parent / "fixtures" / "v1"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
IDENTITY = "provisioner.lab.example"
CALLER = f"choria={IDENTITY}"

REQUESTS = sorted(
    name for name in EXPECTED if name.startswith(("insecure/", "insecure-key/")) and name.endswith("-request.json")
)
REPLIES = sorted(
    name
    for name in EXPECTED
    if name.startswith(("insecure/", "insecure-key/", "x509/", "x509-key/")) and name.endswith("-reply.json")
)


def protocol(now: float = 0.0) -> ProtocolV1:
    return ProtocolV1(identity=IDENTITY, caller=CALLER, ttl=60, clock=lambda: now)


def layers(payload: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    transport = json.loads(payload)
    secure = json.loads(base64.b64decode(transport["data"]))
    return transport, secure, json.loads(secure["message"])


def opened(payload: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The layers without those members that hold the next layer as text, whose white space and key order are free."""
    transport, secure, request = layers(payload)
    del transport["data"], secure["message"]
    return transport, secure, request


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_every_layer_of_the_recorded_one(name: str) -> None:
    recorded = (FIXTURES / name).read_bytes()
    transport, _, request = layers(recorded)
    envelope = request["envelope"]

    made = protocol(envelope["time"]).request(
        agent=envelope["agent"],
        target_agent=envelope["filter"]["agent"][0],
        body=request["message"],
        request_id=envelope["requestid"],
        reply_to=transport["headers"]["reply-to"],
        connected_url=transport["headers"]["seen-by"][0][0],
    )

    assert opened(made) == opened(recorded)


@pytest.mark.parametrize("name", REPLIES)
def test_a_recorded_reply_opens(name: str) -> None:
    expected = EXPECTED[name]
    reply = protocol().reply((FIXTURES / name).read_bytes())

    assert reply.request_id == expected["envelope"]["requestid"]
    assert reply.sender == reply.transport_sender == expected["envelope"]["senderid"]
    assert reply.agent == expected["envelope"]["agent"]
    assert reply.time == expected["envelope"]["time"]
    body = reply.body if reply.body == "pong" else json.loads(reply.body)
    assert body == expected["body"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bad/reply-bad-hash.json", "hash"),
        ("bad/transport-data-not-base64.json", "base64"),
        ("bad/transport-unknown-protocol.json", "protocol choria:transport:1"),
    ],
)
def test_a_damaged_reply_is_refused_for_its_reason(name: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        protocol().reply((FIXTURES / name).read_bytes())


def test_request_ids_have_the_length_that_servers_insist_on_and_differ() -> None:
    ids = {protocol().new_request_id() for _ in range(100)}

    assert len(ids) == 100
    assert {len(request_id) for request_id in ids} == {32}


def test_time_is_in_whole_seconds_and_everything_is_ascii() -> None:
    payload = protocol(1795988886.9).request(
        agent="rpcutil", target_agent="rpcutil", body="grüße", request_id="1" * 32, reply_to="r", connected_url="u"
    )

    assert payload.isascii()
    request = layers(payload)[2]
    assert request["envelope"]["time"] == 1795988886
    assert request["message"] == "grüße"


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol().reply(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def enveloped(transport: Any, secure: Any, reply: Any) -> bytes:
    """A reply whose members are replaced by what is given, with a hash that fits."""
    message = json.dumps({"protocol": "choria:reply:1", "message": "pong"} | reply)
    digest = base64.b64encode(hashlib.sha256(message.encode()).digest()).decode()
    layer = json.dumps({"protocol": "choria:secure:reply:1", "message": message, "hash": digest} | secure)
    data = base64.b64encode(layer.encode()).decode()
    return json.dumps(
        {"protocol": "choria:transport:1", "data": data, "headers": {"mc_sender": "n1"}} | transport
    ).encode()


@given(
    st.dictionaries(st.sampled_from(["protocol", "data", "headers"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from(["protocol", "message", "hash"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from(["protocol", "message", "envelope"]), JSON, max_size=2),
)
def test_any_value_in_any_place_gives_a_reply_or_the_typed_error(transport: Any, secure: Any, reply: Any) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(protocol().reply(enveloped(transport, secure, reply)), Reply)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"protocol":"choria:transport:1","data":' + b"9" * 5000 + b"}",
        b'{"protocol":"choria:transport:1","data":"gA==","headers":{}}',
    ],
    ids=["utf-16", "byte order mark", "deep lists", "deep objects", "huge number", "data not UTF-8"],
)
def test_awkward_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol().reply(payload)


def test_a_lone_surrogate_in_the_reply_is_no_crash() -> None:
    with pytest.raises(ProtocolError, match="not JSON"):
        protocol().reply(enveloped({}, {"message": "\ud800"}, {}))
