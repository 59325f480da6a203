"""Protocol 2 as simulated servers speak it, against what real ones were sent and said."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria.protocol_v2 import ProtocolV2
from provisioner.simulate import tokens
from provisioner.simulate.envelopes import DroppedError, Request
from provisioner.simulate.envelopes_v2 import EnvelopesV2
from provisioner.simulate.server import Answer, Server, Site
from provisioner.simulate.trust_organization import OrganizationTrust

FIXTURES = Path(__file__).parent / "fixtures" / "v2"
KEYS: dict[str, Any] = json.loads((FIXTURES / "keys.json").read_text())
REFERENCE: float = KEYS["reference_time"]
NOW_NS = 1795989719_000000000
RECORDED = ("01-discovery", "02-jwt", "03-gen25519", "04-inventory", "05-configure", "06-restart")


def recorded(name: str) -> bytes:
    return (FIXTURES / "wire" / f"{name}.bin").read_bytes()


def details(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FIXTURES / "wire" / f"{name}.json").read_text())
    return document


def b64(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def inner(**changes: Any) -> dict[str, Any]:
    return {
        "protocol": "io.choria.protocol.v2.request",
        "message": b64("{}"),
        "id": "3MncDrzFvvkdRFeWnwvkxvUzfUM",
        "sender": "prov.example.net",
        "caller": "provisioner_signer",
        "collective": "provisioning",
        "agent": "choria_provision",
        "ttl": 60,
        "time": NOW_NS,
        "filter": {"fact": [], "cf_class": [], "agent": ["choria_provision"], "identity": [], "compound": []},
        **changes,
    }


def payload(
    request: Mapping[str, Any], *, secure: Mapping[str, Any] | None = None, transport: Mapping[str, Any] | None = None
) -> bytes:
    signed = {
        "protocol": "io.choria.protocol.v2.secure_request",
        "request": b64(json.dumps(request)),
        "signature": b64("anything"),
        "caller": "not a token",
        **(secure or {}),
    }
    return json.dumps(
        {
            "protocol": "io.choria.protocol.v2.transport",
            "data": b64(json.dumps(signed)),
            "headers": {"reply": "provisioning.reply.abc.def", "sender": "prov.example.net"},
            **(transport or {}),
        }
    ).encode()


def server(now: float = NOW_NS / 10**9) -> Server:
    return Server(identity="s1.org.lab", site=Site(token="s3cret", jwt="a.b.c"), wall_clock=lambda: now)


def ask(request: Mapping[str, Any]) -> Answer:
    return server().answer(EnvelopesV2().open(payload(request)))


def discovery(message: str = "cGluZw==", **changes: Any) -> Answer:
    return ask(inner(agent="discovery", message=b64(message), **changes))


# --- what real ones were sent and said


@pytest.mark.parametrize("name", RECORDED)
def test_it_reads_the_requests_that_the_go_provisioner_sent(name: str) -> None:
    known = details(f"{name}-request")
    request = EnvelopesV2().open(recorded(f"{name}-request"))
    assert request.reply_to == known["transport"]["headers"]["reply"]
    for key in ("id", "sender", "caller", "collective", "agent", "ttl", "filter"):
        assert getattr(request, key) == known["inner"][key]
    assert request.time == pytest.approx(known["inner"]["time"] / 10**9, abs=1e-6)
    assert request.body.decode() == ("ping" if name == "01-discovery" else known["message"])
    assert request.objection is None


@pytest.mark.parametrize("name", [*RECORDED, "10-shutdown"])
def test_their_signatures_are_those_of_the_provisioner(name: str) -> None:
    trust = OrganizationTrust(KEYS["issuer"]["public"], clock=lambda: REFERENCE)
    assert EnvelopesV2(trust.check_request).open(recorded(f"{name}-request")).objection == ""


@pytest.mark.parametrize("name", [*RECORDED, "10-shutdown"])
def test_its_replies_are_those_of_real_servers_byte_for_byte(name: str) -> None:
    request = EnvelopesV2().open(recorded(f"{name}-request"))
    known, real = details(f"{name}-reply"), json.loads(recorded(f"{name}-reply"))
    # exact to the nanosecond, which a float is not
    time = cast(float, Fraction(known["inner"]["time"], 10**9))
    sealed = json.loads(EnvelopesV2().seal(request, sender=known["inner"]["sender"], body=known["message"], time=time))
    assert (sealed["protocol"], sealed["data"]) == (real["protocol"], real["data"])
    assert sealed["headers"] == {"sender": known["transport"]["headers"]["sender"]}


def test_it_refuses_in_the_words_of_real_servers() -> None:
    cases: dict[str, dict[str, Any]] = json.loads((FIXTURES / "wire" / "errors" / "errors.json").read_text())
    site = Site(token=KEYS["provision_token"], jwt="a.b.c", config_file="/srv/server.conf")
    target = Server(identity="s1.org.lab", site=site, wall_clock=lambda: NOW_NS / 10**9)
    target.files[site.config_file] = "plugin.choria.server.provision=1\n"
    for name, case in cases.items():
        request = inner(message=b64(case["request_body"]), sender=case["request_sender"])
        answer = target.answer(EnvelopesV2().open(payload(request)))
        assert json.loads(answer.body or "") == case["reply_message"], name


def test_client_and_server_understand_each_other_and_the_signature_is_verified() -> None:
    issuer, key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    token = tokens.chain_issuer("prov", issuer=issuer, public=tokens.hexadecimal(key))
    envelopes = EnvelopesV2(OrganizationTrust(tokens.hexadecimal(issuer)).check_request)

    def sent(caller: str, sign: Callable[[bytes], bytes]) -> Request:
        client = ProtocolV2(
            identity="prov.example.net", caller=caller, ttl=60, sign=lambda signed: (b64(sign(signed)), token)
        )
        return envelopes.open(
            client.request(
                agent="rpcutil",
                target_agent="rpcutil",
                body='{"agent":"rpcutil","action":"ping","data":{}}',
                request_id="abc",
                reply_to="provisioning.reply.x.y",
                connected_url="nats://localhost:4222",
            )
        )

    request = sent("prov", key.sign)
    assert request.objection == ""
    assert sent("other", key.sign).objection == "the token is not the caller's"
    assert sent("prov", issuer.sign).objection == "the signature does not verify with the key of the caller's token"
    target = attrs.evolve(server(), wall_clock=lambda: request.time)
    reply = ProtocolV2(identity="prov", caller="prov", ttl=60, sign=lambda _: ("", "")).reply(
        envelopes.seal(request, sender="s1.org.lab", body=target.answer(request).body or "", time=request.time)
    )
    assert (reply.request_id, reply.sender, reply.transport_sender) == ("abc", "s1.org.lab", "s1.org.lab")
    assert json.loads(reply.body)["data"] == {"pong": int(request.time)}


# --- what a server does not even look at


def without(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


FILTERS = inner()["filter"]
UNREADABLE: Mapping[str, Callable[[], bytes]] = {
    "no JSON": lambda: b"PING",
    "protocol 1": lambda: payload(inner(), transport={"protocol": "choria:transport:1"}),
    "no reply subject": lambda: payload(inner(), transport={"headers": {"sender": "x"}}),
    "empty transport sender": lambda: payload(inner(), transport={"headers": {"reply": "x", "sender": ""}}),
    "no headers": lambda: payload(inner(), transport={"headers": None}),
    "data not base64": lambda: payload(inner(), transport={"data": "!!"}),
    "secure reply": lambda: payload(inner(), secure={"protocol": "io.choria.protocol.v2.secure_reply"}),
    "empty signature": lambda: payload(inner(), secure={"signature": ""}),
    "signature not base64": lambda: payload(inner(), secure={"signature": "insecure!"}),
    "empty caller token": lambda: payload(inner(), secure={"caller": ""}),
    "no caller token": lambda: payload(inner(), secure={"caller": None}),
    "request as it stands": lambda: payload(inner(), secure={"request": json.dumps(inner())}),
    "message not base64": lambda: payload(inner(message="{}")),
    "empty id": lambda: payload(inner(id="")),
    "no sender": lambda: payload(without(inner(), "sender")),
    "empty caller": lambda: payload(inner(caller="")),
    "no agent": lambda: payload(without(inner(), "agent")),
    "ttl of 0": lambda: payload(inner(ttl=0)),
    "ttl a string": lambda: payload(inner(ttl="60")),
    "time a float": lambda: payload(inner(time=1.8e18)),
    "time beyond 64 bits": lambda: payload(inner(time=2**64)),
    "filter null": lambda: payload(inner(filter=None)),
    "filter empty": lambda: payload(inner(filter={})),
    "filter without fact": lambda: payload(inner(filter=without(FILTERS, "fact"))),
    "filter with a null list": lambda: payload(inner(filter={**FILTERS, "identity": None})),
    "discovery of one layer": lambda: payload(inner(agent="discovery", message=b64("ping!"))),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_it_drops_what_has_not_the_shape_of_a_request(what: str) -> None:
    with pytest.raises(DroppedError):
        EnvelopesV2().open(UNREADABLE[what]())


def test_what_may_be_missing_may_be_missing() -> None:
    assert discovery().body == "pong"
    assert ask(without(inner(agent="discovery", message=b64("cGluZw==")), "filter")).body == "pong"
    assert discovery(id="x", ttl=1, filter=without(FILTERS, "agent")).body == "pong"


def test_nobody_looks_at_signature_token_and_caller() -> None:
    assert discovery(caller="anybody").body == "pong"


@pytest.mark.parametrize("age", [-61, -60, 60, 61])
def test_beyond_the_ttl_it_is_silent(age: int) -> None:
    with pytest.raises(DroppedError, match="future"):
        discovery(time=NOW_NS - age * 10**9)


@pytest.mark.parametrize(("age", "ttl"), [(-59, 60), (59, 60), (-119, 120), (119, 120)])
def test_the_clocks_may_differ_by_less_than_the_ttl(age: int, ttl: int) -> None:
    assert discovery(time=NOW_NS - age * 10**9, ttl=ttl).body == "pong"


def test_a_time_in_seconds_is_too_old() -> None:
    with pytest.raises(DroppedError, match="too old"):
        discovery(time=NOW_NS // 10**9)


def test_a_ping_in_one_layer_of_base64_gets_no_answer() -> None:
    assert discovery("ping").body is None


def test_another_collective_or_agent_gets_no_answer() -> None:
    for changes in ({"collective": "choria"}, {"filter": {**FILTERS, "agent": ["package"]}}):
        with pytest.raises(DroppedError):
            discovery(**changes)
    with pytest.raises(DroppedError, match="agent"):
        ask(inner(agent="nosuch"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda within: st.lists(within, max_size=4) | st.dictionaries(st.text(max_size=10), within, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_nothing_from_the_network_does_more_than_being_dropped(noise: bytes) -> None:
    with pytest.raises(DroppedError):
        EnvelopesV2().open(noise)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(inner(), json_values)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("signature", "caller"), json_values)),
)
def test_a_request_with_a_wrong_member_is_read_and_judged_or_dropped(
    changes: dict[str, Any], secure: dict[str, Any]
) -> None:
    trust = OrganizationTrust(KEYS["issuer"]["public"])
    try:
        request = EnvelopesV2(trust.check_request).open(payload(inner(**changes), secure=secure))
        assert request.objection
        server().answer(request)
    except DroppedError:
        pass
