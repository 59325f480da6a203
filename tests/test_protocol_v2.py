"""The envelopes of protocol 2, against bytes recorded from real servers and the Go original."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria.protocol import ProtocolError, Reply
from provisioner.choria.protocol_v2 import ProtocolV2

FIXTURES = Path(__file__).parent / "fixtures" / "v2"
WIRE = FIXTURES / "wire"
SIGNER = json.loads((FIXTURES / "keys.json").read_text())["signer"]
TOKEN = (FIXTURES / "tokens" / "signer.jwt").read_text()
CALLER = "provisioner_signer"
KEY = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SIGNER["seed"]))
ERRORS: dict[str, Any] = json.loads((WIRE / "errors" / "errors.json").read_text())

REQUESTS = sorted(path.name for path in WIRE.glob("*-request.bin"))
BY_GO = [name for name in REQUESTS if not name.startswith("10-")]
REPLIES = sorted(path.name for path in WIRE.glob("*-reply.bin"))


def sign(request: bytes) -> tuple[str, str]:
    return base64.b64encode(KEY.sign(request)).decode(), TOKEN


def protocol(now: int = 0) -> ProtocolV2:
    return ProtocolV2(identity=CALLER, caller=CALLER, ttl=60, sign=sign, clock_ns=lambda: now)


def layers(payload: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    transport = json.loads(payload)
    secure = json.loads(base64.b64decode(transport["data"]))
    return transport, secure, json.loads(base64.b64decode(secure["request"]))


@pytest.mark.parametrize("name", BY_GO)
def test_a_request_is_byte_for_byte_the_recorded_one(name: str) -> None:
    recorded = (WIRE / name).read_bytes()
    transport, _, request = layers(recorded)

    made = protocol(request["time"]).request(
        agent=request["agent"],
        target_agent=request["filter"]["agent"][0],
        body=base64.b64decode(request["message"]).decode(),
        request_id=request["id"],
        reply_to=transport["headers"]["reply"],
        connected_url=transport["headers"]["trace"][0][0],
    )

    assert made == recorded


@pytest.mark.parametrize("name", REQUESTS)
def test_the_signature_of_a_recorded_request_verifies(name: str) -> None:
    _, secure, _ = layers((WIRE / name).read_bytes())
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(SIGNER["public"]))
    public.verify(base64.b64decode(secure["signature"]), base64.b64decode(secure["request"]))
    assert secure["caller"] == TOKEN


@pytest.mark.parametrize("name", REPLIES)
def test_a_recorded_reply_opens(name: str) -> None:
    recorded = json.loads((WIRE / name).with_suffix(".json").read_text())
    reply = protocol().reply((WIRE / name).read_bytes())

    assert reply.request_id == recorded["inner"]["request"]
    assert reply.sender == recorded["inner"]["sender"]
    assert reply.transport_sender == recorded["transport"]["headers"]["sender"]
    assert reply.agent == recorded["inner"]["agent"]
    assert reply.body == recorded["message"]
    assert reply.time == recorded["inner"]["time"] / 10**9


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_a_recorded_refusal_opens(name: str) -> None:
    reply = protocol().reply((WIRE / ERRORS[name]["reply_file"]).read_bytes())
    assert json.loads(reply.body) == ERRORS[name]["reply_message"]


def test_request_ids_are_fit_for_subjects_and_differ() -> None:
    ids = {protocol().new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(request_id.isalnum() for request_id in ids)


def test_a_discovery_body_that_is_base64_already_gets_a_second_layer() -> None:
    payload = protocol().request(
        agent="discovery",
        target_agent="choria_provision",
        body="cGluZw==",
        request_id="1",
        reply_to="r",
        connected_url="",
    )
    request = layers(payload)[2]
    assert request["message"] == "Y0dsdVp3PT0="
    assert request["filter"]["agent"] == ["choria_provision"]


def test_everything_is_ascii_and_the_body_utf_8() -> None:
    payload = protocol().request(
        agent="rpcutil", target_agent="rpcutil", body="grüße", request_id="1", reply_to="r", connected_url="ü"
    )
    assert payload.isascii()
    assert base64.b64decode(layers(payload)[2]["message"]).decode() == "grüße"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def enveloped(
    transport: dict[str, Any] | None = None, secure: dict[str, Any] | None = None, reply: dict[str, Any] | None = None
) -> bytes:
    """A good reply, but for the members that are given; the hash fits."""
    inner = {
        "protocol": "io.choria.protocol.v2.reply",
        "message": base64.b64encode(b"pong").decode(),
        "request": "1",
        "sender": "n1",
        "agent": "discovery",
        "time": 1,
    }
    hashed = json.dumps(inner | (reply or {})).encode()
    layer = {
        "protocol": "io.choria.protocol.v2.secure_reply",
        "reply": base64.b64encode(hashed).decode(),
        "hash": base64.b64encode(hashlib.sha256(hashed).digest()).decode(),
    }
    data = base64.b64encode(json.dumps(layer | (secure or {})).encode()).decode()
    outer = {"protocol": "io.choria.protocol.v2.transport", "data": data, "headers": {"sender": "n1"}}
    return json.dumps(outer | (transport or {})).encode()


@pytest.mark.parametrize("time", [None, "1", 1.5, True, -1, 10**400])
def test_a_reply_without_a_time_of_any_use_opens(time: Any) -> None:
    assert protocol().reply(enveloped(reply={"time": time})).time is None


def test_a_reply_made_here_opens() -> None:
    assert protocol().reply(enveloped()) == Reply(
        request_id="1", sender="n1", transport_sender="n1", agent="discovery", body="pong", time=1e-9
    )


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xfe{\x00}\x00", "the transport is not JSON"),
        (b"[" * 100_000, "the transport is not JSON"),
        (b"[]", "the transport is not an object"),
        (enveloped(transport={"protocol": "choria:transport:1"}), "the transport is not of protocol"),
        (enveloped(transport={"data": "*"}), "the data of the transport is not base64"),
        (enveloped(transport={"data": "ü"}), "the data of the transport is not base64"),
        (enveloped(transport={"headers": []}), "the transport lacks a valid headers"),
        (enveloped(transport={"headers": {}}), "the headers lacks a valid sender"),
        (enveloped(secure={"hash": "0" * 44}), "the hash of the reply does not match its contents"),
        (enveloped(secure={"hash": None}), "the secure reply lacks a valid hash"),
        (enveloped(secure={"reply": "e30="}), "the hash of the reply does not match its contents"),
        (enveloped(reply={"message": "gA=="}), "the message of the reply is not UTF-8"),
        (enveloped(reply={"message": "pong!"}), "the message of the reply is not base64"),
        (enveloped(reply={"request": 1}), "the reply lacks a valid request"),
        (enveloped(reply={"sender": None}), "the reply lacks a valid sender"),
        (enveloped(reply={"agent": {}}), "the reply lacks a valid agent"),
    ],
)
def test_what_is_no_reply_is_refused_for_its_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        protocol().reply(payload)
    assert str(raised.value).startswith(reason)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol().reply(payload)


@given(
    st.dictionaries(st.sampled_from(["protocol", "data", "headers"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from(["protocol", "reply", "hash"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from(["protocol", "message", "request", "sender", "agent"]), JSON, max_size=2),
)
def test_any_value_in_any_place_gives_a_reply_or_the_typed_error(
    transport: dict[str, Any], secure: dict[str, Any], reply: dict[str, Any]
) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(protocol().reply(enveloped(transport, secure, reply)), Reply)
