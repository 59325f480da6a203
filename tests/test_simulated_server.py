"""One simulated server, without a network: it must be as strict, as lax and as silent as a real one."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import lifecycle
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.simulate import events
from provisioner.simulate.envelopes import DroppedError, Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.misbehaviour import INSANE_IDENTITIES, Misbehaviour, discovery_noise, payloads
from provisioner.simulate.server import LOCK_SECONDS, Answer, Server, Site

FIXTURES = Path(__file__).parent / "fixtures"
NOW = 1795989719.0
RECORDED = ("discovery", "jwt", "inventory", "gencsr", "configure", "restart", "shutdown")
GOOD_CONFIG = {"plugin.choria.server.provision": "false", "loglevel": "info"}


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@functools.cache
def matrix() -> list[dict[str, Any]]:
    """96 requests to a real server, in order, and what it said."""
    cases: list[dict[str, Any]] = json.loads((FIXTURES / "agents" / "rpc-matrix.json").read_text())
    return cases


def recorded(name: str) -> bytes:
    return (FIXTURES / "v1" / "insecure" / f"{name}.json").read_bytes()


def site(**settings: Any) -> Site:
    return Site(**{"token": "s3cret", "jwt": "a.b.c", **settings})


def server(**settings: Any) -> Server:
    defaults: dict[str, Any] = {"identity": "s1.lab", "site": site(), "clock": Clock(0), "wall_clock": Clock(NOW)}
    return Server(**{**defaults, **settings})


def envelope(**changes: Any) -> dict[str, Any]:
    filters: dict[str, list[object]] = {
        "fact": [],
        "cf_class": [],
        "agent": ["choria_provision"],
        "identity": [],
        "compound": [],
    }
    return {
        "requestid": "ddf63eed2dfa4db2bc433e7993ab64d8",
        "senderid": "prov.example.net",
        "callerid": "choria=prov.example.net",
        "collective": "provisioning",
        "agent": "choria_provision",
        "ttl": 60,
        "time": int(NOW),
        "filter": filters,
        **changes,
    }


def payload(
    envelope: Mapping[str, Any],
    message: object = "e30=",
    *,
    request: Mapping[str, Any] | None = None,
    secure: Mapping[str, Any] | None = None,
    transport: Mapping[str, Any] | None = None,
) -> bytes:
    inner = {"protocol": "choria:request:1", "message": message, "envelope": envelope, **(request or {})}
    signed = {
        "protocol": "choria:secure:request:1",
        "message": json.dumps(inner, indent=2),
        "signature": "insecure",
        "pubcert": "insecure",
        **(secure or {}),
    }
    data = base64.b64encode(json.dumps(signed).encode()).decode()
    headers = {"mc_sender": "prov.example.net", "reply-to": "provisioning.reply.abc.def"}
    return json.dumps(
        {"protocol": "choria:transport:1", "data": data, "headers": headers, **(transport or {})}
    ).encode()


def ask(target: Server, message: str, *, agent: str = "choria_provision", **changes: Any) -> Answer:
    request = EnvelopesV1().open(payload(envelope(agent=agent, **changes), message))
    return target.answer(request)


def call(target: Server, action: str, /, *, agent: str = "choria_provision", caller: str = "", **data: Any) -> Answer:
    changes = {"callerid": caller} if caller else {}
    body = {"agent": agent, "action": action, "data": {"token": "s3cret", **data}}
    return ask(target, json.dumps(body), agent=agent, **changes)


def configure(target: Server, config: Mapping[str, object] = GOOD_CONFIG, **data: Any) -> Answer:
    return call(target, "configure", config=json.dumps(config), **data)


def data_of(answer: Answer) -> dict[str, Any]:
    assert answer.body is not None
    data: dict[str, Any] = json.loads(answer.body)["data"]
    return data


# --- what a real server said


#: How the requests of some recorded cases differ from an ordinary one.
UNUSUAL: Mapping[str, Mapping[str, Any]] = {
    "lock held by other caller": {"callerid": "choria=other.example.net"},
    "lock held by same caller other sender": {"senderid": "other.example.net"},
    "ttl expired": {"time": int(NOW) - 60},
    "time in the future 120s": {"time": int(NOW) + 120},
    "agent filter mismatch": {"filter": {**envelope()["filter"], "agent": ["package"]}},
    "identity filter mismatch": {"filter": {**envelope()["filter"], "identity": ["s2.lab"]}},
    "collective mismatch": {"collective": "mcollective"},
}

#: Not simulated, or recorded from a server set up in another way.
LEFT_OUT = ("gen25519 ", "gencsr ", "reprovision ", "release_update ", "rpcutil agent_inventory", "configure key ")
REPLAYED = [
    case
    for case in matrix()
    if not case["case"].startswith(LEFT_OUT) or case["case"].endswith(("without ecdh_public", "is ignored"))
]


def test_it_answers_every_recorded_request_as_the_real_server_did() -> None:
    jwt = json.loads(matrix()[0]["reply_body"])["data"]["jwt"]
    real = site(jwt=jwt, upgradable=True, config_file="/etc/choria/server.cfg")
    target = server(site=real, wall_clock=Clock(NOW))
    for case in REPLAYED:
        body = case["request_body"]
        if case["agent"] == "discovery":
            body = base64.b64encode(body.encode()).decode()
        if case["case"] == "rpcutil inventory with facts":
            replayed: Server = attrs.evolve(
                target,
                facts={"nested": {"a": [1, 2]}, "num": 5, "role": "web"},
                site=attrs.evolve(real, upgradable=False),
            )
        else:
            replayed = target
        try:
            answer = ask(replayed, body, agent=case["agent"], **UNUSUAL.get(case["case"], {})).body
        except DroppedError:
            answer = None
        assert comparable(answer) == comparable(case["reply_body"]), case["case"]
    assert len(REPLAYED) > 65


def comparable(body: str | None) -> object:
    """A reply body without what is never twice the same."""
    if body in (None, "pong"):
        return body
    document = json.loads(body or "")
    for key, length in (("ecdh_public", 64), ("pong", 10)):
        if key in document["data"]:
            assert len(str(document["data"][key])) == length
            document["data"][key] = ""
    return document


@pytest.mark.parametrize("name", RECORDED)
def test_it_reads_the_requests_that_the_go_provisioner_sent(name: str) -> None:
    request = EnvelopesV1().open(recorded(f"{name}-request"))
    assert (request.sender, request.caller) == ("provisioner.lab.example", "choria=provisioner.lab.example")
    assert request.reply_to == f"provisioning.reply.01472937f055ec65f3170338e25170cb.{request.id}"
    if name == "discovery":
        assert (request.agent, request.body) == ("discovery", b"ping")
    else:
        assert json.loads(request.body)["action"] == name


@pytest.mark.parametrize("name", RECORDED)
def test_its_replies_are_those_of_real_servers_byte_for_byte(name: str) -> None:
    request = EnvelopesV1().open(recorded(f"{name}-request"))
    real = json.loads(recorded(f"{name}-reply"))
    reply = json.loads(json.loads(base64.b64decode(real["data"]))["message"])
    sealed = EnvelopesV1().seal(request, sender="i1.lab.example", body=reply["message"], time=reply["envelope"]["time"])
    ours = json.loads(sealed)
    assert (ours["protocol"], ours["data"]) == (real["protocol"], real["data"])
    assert ours["headers"]["mc_sender"] == real["headers"]["mc_sender"]


def test_client_and_server_understand_each_other() -> None:
    client = ProtocolV1(identity="prov.example.net", caller="choria=prov.example.net", ttl=60, clock=Clock(NOW))
    sent = client.request(
        agent="rpcutil",
        target_agent="rpcutil",
        body='{"agent":"rpcutil","action":"ping","data":{}}',
        request_id="f" * 32,
        reply_to="provisioning.reply.x.y",
        connected_url="nats://localhost:4222",
    )
    request = EnvelopesV1().open(sent)
    answer = server().answer(request)
    reply = client.reply(EnvelopesV1().seal(request, sender="s1.lab", body=answer.body or "", time=NOW))
    assert (reply.request_id, reply.sender, reply.transport_sender) == ("f" * 32, "s1.lab", "s1.lab")
    assert json.loads(reply.body)["data"] == {"pong": int(NOW)}


# --- what a server does not even look at


def without(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


FILTERS = envelope()["filter"]
UNREADABLE: Mapping[str, Callable[[], bytes]] = {
    "no JSON": lambda: b"PING",
    "no UTF-8": lambda: b"\xff" + payload(envelope()),
    "no object": lambda: b"[]",
    "nested too deep": lambda: b"[" * 100_000,
    "transport of another version": lambda: payload(envelope(), transport={"protocol": "choria:transport:2"}),
    "data not base64": lambda: payload(envelope(), transport={"data": "!!"}),
    "data not a string": lambda: payload(envelope(), transport={"data": 5}),
    "no headers": lambda: payload(envelope(), transport={"headers": None}),
    "no reply subject": lambda: payload(envelope(), transport={"headers": {"mc_sender": "x"}}),
    "no transport sender": lambda: payload(envelope(), transport={"headers": {"reply-to": "x"}}),
    "secure request of another protocol": lambda: payload(envelope(), secure={"protocol": "choria:secure:reply:1"}),
    "empty signature": lambda: payload(envelope(), secure={"signature": ""}),
    "no certificate": lambda: payload(envelope(), secure={"pubcert": None}),
    "request of another protocol": lambda: payload(envelope(), request={"protocol": "choria:reply:1"}),
    "empty message": lambda: payload(envelope(), message=""),
    "message not a string": lambda: payload(envelope(), message={}),
    "no envelope": lambda: payload(envelope(), request={"envelope": []}),
    "request id of 31 characters": lambda: payload(envelope(requestid="d" * 31)),
    "request id of 33 characters": lambda: payload(envelope(requestid="d" * 33)),
    "no sender": lambda: payload(without(envelope(), "senderid")),
    "no caller": lambda: payload(without(envelope(), "callerid")),
    "empty agent": lambda: payload(envelope(agent="")),
    "ttl of 29": lambda: payload(envelope(ttl=29)),
    "ttl a string": lambda: payload(envelope(ttl="60")),
    "ttl a fraction": lambda: payload(envelope(ttl=60.5)),
    "ttl a boolean": lambda: payload(envelope(ttl=True)),
    "time in nanoseconds beyond 64 bits": lambda: payload(envelope(time=10**400)),
    "filter null": lambda: payload(envelope(filter=None)),
    "filter without compound": lambda: payload(envelope(filter=without(FILTERS, "compound"))),
    "filter with a null list": lambda: payload(envelope(filter={**FILTERS, "fact": None})),
    "filter with a fact that is a string": lambda: payload(envelope(filter={**FILTERS, "fact": ["x"]})),
    "filter with an identity that is a number": lambda: payload(envelope(filter={**FILTERS, "identity": [1]})),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_it_drops_what_has_not_the_shape_of_a_request(what: str) -> None:
    with pytest.raises(DroppedError):
        EnvelopesV1().open(UNREADABLE[what]())


def test_the_agent_filter_may_be_empty_or_absent() -> None:
    for filters in ({**FILTERS, "agent": []}, without(FILTERS, "agent")):
        assert ask(server(), "cGluZw==", agent="discovery", filter=filters).body == "pong"


@pytest.mark.parametrize("age", [-59, 0, 59])
def test_the_clocks_may_differ_by_less_than_the_ttl(age: int) -> None:
    assert ask(server(), "cGluZw==", agent="discovery", time=int(NOW) - age).body == "pong"


@pytest.mark.parametrize("age", [-61, -60, 60, 61])
def test_beyond_the_ttl_it_is_silent(age: int) -> None:
    with pytest.raises(DroppedError, match="future"):
        ask(server(), "cGluZw==", agent="discovery", time=int(NOW) - age)


@pytest.mark.parametrize("kind", ["fact", "cf_class", "compound"])
def test_it_matches_no_filter_on_facts_or_classes(kind: str) -> None:
    entry: object = {"fact": "a", "operator": "==", "value": "b"} if kind == "fact" else "x"
    with pytest.raises(DroppedError, match="filter"):
        ask(server(), "cGluZw==", agent="discovery", filter={**FILTERS, kind: [entry]})


def test_the_checks_come_in_the_order_of_a_real_server() -> None:
    wrong: dict[str, Any] = {
        "agent": "nosuch",
        "time": 0,
        "collective": "x",
        "filter": {**FILTERS, "agent": ["nosuch"]},
    }
    for right, reason in (
        ({"filter": FILTERS}, "filter"),
        ({"collective": "provisioning"}, "collective"),
        ({"time": int(NOW)}, "too old"),
        ({"agent": "rpcutil"}, "agent"),
    ):
        with pytest.raises(DroppedError, match=reason):
            ask(server(), "e30=", **wrong)
        wrong |= right
    assert ask(server(), "e30=", **wrong).status == 2


def test_a_bare_ping_is_lost_since_it_is_valid_base64() -> None:
    assert ask(server(), "ping", agent="discovery").body is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_nothing_from_the_network_does_more_than_being_dropped(noise: bytes) -> None:
    with pytest.raises(DroppedError):
        EnvelopesV1().open(noise)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys((*envelope(), "message", "signature"), json_values)),
)
def test_a_request_with_a_wrong_member_is_read_or_dropped(changes: dict[str, Any]) -> None:
    message = changes.pop("message", "e30=")
    secure = {"signature": changes.pop("signature")} if "signature" in changes else {}
    try:
        request = EnvelopesV1().open(payload(envelope(**changes), message, secure=secure))
        server().answer(request)
    except DroppedError:
        pass


INPUTS = ("config", "splay", "ca", "action_policies", "opa_policies", "key", "ssldir")


@given(
    agent=st.sampled_from(["choria_provision", "rpcutil", "choria_util"]),
    action=st.sampled_from(["jwt", "configure", "restart", "shutdown", "inventory", "ping"]) | json_values,
    data=json_values | st.fixed_dictionaries({"token": st.just("s3cret")}, optional=dict.fromkeys(INPUTS, json_values)),
)
def test_any_body_gets_a_proper_reply_or_none(agent: str, action: object, data: object) -> None:
    answer = ask(server(), json.dumps({"action": action, "data": data}), agent=agent)
    if answer.body is not None:
        reply = json.loads(answer.body)
        assert sorted(reply) == ["action", "data", "statuscode", "statusmsg"]
        assert reply["statuscode"] in (0, 1, 2, 4)
        assert reply["statuscode"] == 0 or reply["data"] == {}


# --- the lock


def test_a_locked_action_keeps_others_out_for_two_minutes() -> None:
    clock = Clock(1000)
    target = server(clock=clock)
    assert call(target, "jwt").status == 0
    clock.now += LOCK_SECONDS - 1
    assert call(target, "jwt", caller="choria=b").text == "Could not obtain provisioning lock"
    clock.now += 1
    assert call(target, "jwt", caller="choria=b").status == 0
    assert call(target, "jwt").text == "Could not obtain provisioning lock"


def test_every_locked_call_of_the_holder_extends_the_lock() -> None:
    clock = Clock(1000)
    target = server(clock=clock)
    call(target, "jwt")
    clock.now += LOCK_SECONDS - 1
    configure(target)
    clock.now += LOCK_SECONDS - 1
    assert call(target, "jwt", caller="choria=b").status == 1


def test_a_refused_call_does_not_extend_the_lock() -> None:
    clock = Clock(1000)
    target = server(clock=clock)
    call(target, "jwt")
    clock.now += LOCK_SECONDS - 1
    call(target, "jwt", caller="choria=b")
    clock.now += 1
    assert call(target, "jwt", caller="choria=b").status == 0


def test_a_wrong_token_or_wrong_types_still_take_the_lock() -> None:
    for data in ({"token": "wrong"}, {"token": 5}):
        target = server()
        assert call(target, "jwt", caller="choria=b", **data).status in (1, 4)
        assert call(target, "jwt").text == "Could not obtain provisioning lock"


def test_inventory_restart_and_shutdown_ignore_the_lock() -> None:
    target = server(draw=lambda _below: 5)
    configure(target, caller="choria=b")
    assert call(target, "inventory", agent="rpcutil").status == 0
    assert call(target, "restart", splay=1).status == 0
    target.boot()
    configure(target, caller="choria=b")
    assert call(target, "shutdown").status == 0


def test_the_lock_is_gone_when_the_server_was_restarted() -> None:
    target = server()
    call(target, "jwt", caller="choria=b")
    target.boot()
    assert call(target, "jwt").status == 0


# --- configure


def test_configure_publishes_its_event_before_the_reply() -> None:
    answer = configure(server())
    assert (answer.status, answer.before, answer.after) == (0, ("provisioned",), ())


def test_configure_can_be_repeated_and_that_is_counted() -> None:
    target = server()
    configure(target)
    assert configure(target).status == 0
    assert target.configures == 2


def test_a_wrong_policy_name_is_found_when_the_configuration_is_written_already() -> None:
    target = server()
    answer = configure(target, action_policies={"rpcutil": "x"})
    assert (answer.status, answer.before, target.configures) == (1, (), 0)
    assert call(target, "restart", splay=1).status == 0


def test_a_key_cannot_be_delivered_to_a_server_that_made_no_key_pair() -> None:
    answer = configure(server(), key="k", ecdh_public="00" * 32, certificate="c", ca="c", ssldir="/d")
    assert answer.text == "TLS Setup Failed: could not decrypt private key: private key not set"


def test_a_server_without_a_provisioning_jwt_says_so() -> None:
    assert call(server(site=site(jwt="")), "jwt").text == "No Provisioning JWT file has been configured"


def test_a_server_can_fail_its_first_configure_only() -> None:
    target = server(fails=True)
    assert configure(target).text.startswith("Could not write config: ")
    assert target.config is None
    assert configure(target).status == 0


def test_a_server_can_fail_for_some_time_after_its_first_configure() -> None:
    clock = Clock(50)
    target = server(fails=True, fails_seconds=15, clock=clock)
    assert configure(target).status == 1
    clock.now += 14.9
    assert configure(target).status == 1
    clock.now += 0.1
    assert configure(target).status == 0


# --- restart and shutdown


def test_a_configured_server_restarts_two_seconds_after_its_answer() -> None:
    clock = Clock(100)
    target = server(clock=clock)
    configure(target)
    answer = call(target, "restart", splay=1)
    assert data_of(answer) == {"message": "Restarting Choria Server after 2s"}
    assert answer.after == ("shutdown",)
    assert target.departure is not None
    assert (target.departure.at, target.departure.provisioned, target.departure.returns) == (102, True, False)


def test_without_a_splay_the_restart_takes_up_to_eleven_seconds() -> None:
    drawn: list[int] = []

    def draw(below: int) -> int:
        drawn.append(below)
        return below - 1

    for data in ({}, {"splay": 0}, {"splay": None}):
        target = server(draw=draw)
        configure(target)
        assert data_of(call(target, "restart", **data)) == {"message": "Restarting Choria Server after 11s"}
    assert drawn == [10, 10, 10]


def test_while_it_restarts_it_is_silent_to_its_provisioner_and_nobody_else() -> None:
    target = server()
    configure(target)
    call(target, "restart", splay=1)
    for action in ("restart", "jwt", "configure", "shutdown", "nosuch"):
        assert call(target, action).body is None
    assert call(target, "inventory", agent="rpcutil").status == 0
    assert ask(target, "cGluZw==", agent="discovery").body == "pong"
    assert target.configures == 1


@pytest.mark.parametrize("value", ["false", "False", "0", "no", "rubbish"])
def test_any_value_that_is_not_true_ends_provisioning(value: str) -> None:
    target = server()
    configure(target, {"plugin.choria.server.provision": value})
    call(target, "restart", splay=1)
    assert target.departure is not None
    assert target.departure.provisioned


@pytest.mark.parametrize("value", ["true", "TRUE", "1", "yes", "y", "t"])
def test_a_configuration_that_enables_provisioning_cannot_be_restarted_with(value: str) -> None:
    target = server()
    configure(target, {"plugin.choria.server.provision": value})
    answer = call(target, "restart", splay=1)
    assert answer.text == "Configuration /etc/choria/server.conf enables provisioning, restart cannot continue"
    assert target.departure is None


@pytest.mark.parametrize("config", [{}, {"loglevel": "info"}, {"plugin.choria.server.provision": ""}])
@pytest.mark.parametrize("default", [True, False])
def test_without_the_setting_the_provisioning_jwt_decides_whether_it_comes_back(
    config: dict[str, str], default: bool
) -> None:
    target = server(site=site(provision_by_default=default))
    configure(target, config)
    assert call(target, "restart", splay=1).status == 0
    assert target.departure is not None
    assert (target.departure.returns, target.departure.provisioned) == (default, not default)


def test_a_value_with_a_line_break_injects_settings() -> None:
    target = server()
    configure(target, {"plugin.choria.server.provision": "false", "identity": "x\nplugin.choria.server.provision=1"})
    assert "enables provisioning" in call(target, "restart", splay=1).text


def test_a_negative_splay_kills_the_server() -> None:
    clock = Clock(7)
    target = server(clock=clock)
    configure(target)
    assert call(target, "restart", splay=-1).body is None
    assert target.departure is not None
    assert (target.departure.at, target.departure.provisioned) == (7, False)


def test_a_server_that_shuts_down_says_when_and_publishes_its_event_on_leaving() -> None:
    clock = Clock(10)
    target = server(clock=clock, draw=lambda below: below - 1)
    answer = call(target, "shutdown")
    assert data_of(answer) == {"message": "Shutting Choria Server down after 9s"}
    assert answer.after == ()
    assert target.departure is not None
    assert (target.departure.at, target.departure.events, target.departure.provisioned) == (19, ("shutdown",), False)


def test_a_server_that_shuts_down_at_once_is_gone_before_it_answers() -> None:
    clock = Clock(10)
    target = server(clock=clock, draw=lambda _below: 0)
    assert call(target, "shutdown").body is None
    assert target.departure is not None
    assert (target.departure.at, target.departure.events) == (10, ())


# --- events and misbehaviour


@pytest.mark.parametrize("event", ["startup", "provisioned", "shutdown"])
def test_its_events_are_those_of_real_servers(event: str) -> None:
    now = json.loads(real_event(event))["data"]["timestamp"]
    ours = json.loads(events.payload(event, identity="n1.lab.example", version="0.29.4", now=now))
    real = json.loads(real_event(event))
    for document in (ours, real):
        assert document["id"] == document["data"]["id"]
        document["id"] = document["data"]["id"] = ""
    assert ours == real
    assert events.subject(event) == f"choria.lifecycle.event.{event}.provision_mode_server"


def test_its_startup_event_is_understood_by_the_provisioner() -> None:
    event = lifecycle.parse(events.payload("startup", identity="s1.lab", version="1", now=NOW))
    assert (event.type, event.identity) == ("startup", "s1.lab")


def real_event(event: str) -> bytes:
    return (FIXTURES / "v1" / "lifecycle" / f"server-{event}.json").read_bytes()


@pytest.fixture
def opened() -> Request:
    return EnvelopesV1().open(payload(envelope()))


def misbehave(way: Misbehaviour, request: Request) -> list[bytes]:
    body = json.dumps({"action": "jwt", "statuscode": 0, "statusmsg": "OK", "data": {}})
    return payloads(way, EnvelopesV1(), request, sender="s1.lab", body=body, time=NOW)


@pytest.mark.parametrize("way", Misbehaviour)
def test_every_misbehaviour_fits_into_a_message_and_has_a_right_hash_if_any(way: Misbehaviour, opened: Request) -> None:
    for message in misbehave(way, opened):
        assert len(message) < 1024 * 1024
        if way is not Misbehaviour.GARBAGE:
            secure = json.loads(base64.b64decode(json.loads(message)["data"]))
            assert base64.b64decode(secure["hash"]) == hashlib.sha256(secure["message"].encode()).digest()


def test_the_two_different_replies_differ_in_their_body_alone(opened: Request) -> None:
    client = ProtocolV1(identity="p", caller="choria=p", ttl=60)
    first, second = (client.reply(message) for message in misbehave(Misbehaviour.TWICE_DIFFERENT, opened))
    assert first.body != second.body
    assert attrs.evolve(first, body="") == attrs.evolve(second, body="")


def test_only_a_server_that_repeats_itself_is_good_all_the_same() -> None:
    assert [way for way in Misbehaviour if server(misbehaviour=way).good] == [Misbehaviour.TWICE]
    assert server().good


def test_the_noise_in_a_discovery_holds_every_insane_identity(opened: Request) -> None:
    client = ProtocolV1(identity="p", caller="choria=p", ttl=60)
    *pongs, odd, null = discovery_noise(EnvelopesV1(), opened, time=NOW)
    assert [client.reply(pong).transport_sender for pong in pongs] == list(INSANE_IDENTITIES)
    assert client.reply(odd).body == "not a pong"
    assert null == b"null"
