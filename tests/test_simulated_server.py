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
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import lifecycle
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.simulate import csr, events, private_key
from provisioner.simulate.envelopes import DroppedError, Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.misbehaviour import INSANE_IDENTITIES, Misbehaviour, discovery_noise, payloads
from provisioner.simulate.server import LOCK_SECONDS, Answer, Server, Site
from provisioner.simulate.trust import UntrustedError

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


NewKey = Callable[[], RSAPrivateKey]


@pytest.fixture(scope="module")
def new_key() -> NewKey:
    """Keys that are at hand, since they take long to make."""
    return csr.pool(2)


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

#: Recorded from a server that is set up in another way: with facts, and not upgradable.
OTHER_SERVER = ("rpcutil inventory with facts", "release_update not enabled on node")
#: The one that is not simulated.
LEFT_OUT = "rpcutil agent_inventory"


@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_it_answers_every_recorded_request_as_the_real_server_did(new_key: NewKey) -> None:
    jwt = json.loads(matrix()[0]["reply_body"])["data"]["jwt"]
    real = site(jwt=jwt, upgradable=True, config_file="/etc/choria/server.cfg", new_key=new_key)
    target = server(site=real, wall_clock=Clock(NOW))
    other: Server = attrs.evolve(
        target,
        facts={"nested": {"a": [1, 2]}, "num": 5, "role": "web"},
        site=attrs.evolve(real, upgradable=False),
    )
    replayed = 0
    for case in matrix():
        body, name = case["request_body"], case["case"]
        if name == LEFT_OUT:
            continue
        body = body.replace("(any unencrypted key)", "AAAA")  # the recording has a placeholder
        if case["agent"] == "discovery":
            body = base64.b64encode(body.encode()).decode()
        try:
            answer = ask(
                other if name in OTHER_SERVER else target, body, agent=case["agent"], **UNUSUAL.get(name, {})
            ).body
        except DroppedError:
            answer = None
        assert comparable(answer) == comparable(case["reply_body"]), name
        replayed += 1
    assert replayed == 95


def comparable(body: str | None) -> object:
    """A reply body without what is never twice the same."""
    if body in (None, "pong"):
        return body
    document = json.loads(body or "")
    data = document["data"]
    for key, length in (("ecdh_public", 64), ("pong", 10), ("signature", 128)):
        if key in data:
            assert len(str(data[key])) == length
            data[key] = ""
    if "csr" in data:
        data["csr"] = [(name.oid, name.value) for name in x509.load_pem_x509_csr(data["csr"].encode()).subject]
        assert data["public_key"].startswith("-----BEGIN PUBLIC KEY-----\n")
    data.pop("public_key", None)
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


INPUTS = ("config", "splay", "ca", "action_policies", "opa_policies", "key", "ssldir", "nonce", "repository", "version")


@given(
    agent=st.sampled_from(["choria_provision", "rpcutil", "choria_util"]),
    action=st.sampled_from(["jwt", "gen25519", "configure", "release_update", "restart", "shutdown", "inventory"])
    | json_values,
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


def test_what_it_is_given_is_written_to_its_disk() -> None:
    target = server()
    material: dict[str, Any] = {"certificate": "C", "ca": "A", "ssldir": "/etc/choria/ssl", "server_jwt": "x.y.z"}
    configure(target, **material, action_policies={"a.policy": "p", "empty.policy": ""}, opa_policies={"b.rego": "r"})
    assert {name: text for name, text in target.files.items() if name != "/etc/choria/server.conf"} == {
        "/etc/choria/ssl/certificate.pem": "C",
        "/etc/choria/ssl/ca.pem": "A",
        "/etc/choria/server.jwt": "x.y.z",
        "/etc/choria/policies/a.policy": "p",
        "/etc/choria/policies/rego/b.rego": "r",
    }
    assert (target.config or "").splitlines()[1:] == [f"{key}={value}" for key, value in GOOD_CONFIG.items()]


@pytest.mark.parametrize("missing", ["certificate", "ca", "ssldir"])
def test_without_one_of_three_all_material_of_tls_is_ignored(missing: str) -> None:
    target = server()
    given: dict[str, Any] = {
        "certificate": "C",
        "ca": "A",
        "ssldir": "/s",
        "key": "rubbish",
        "ecdh_public": "zz",
        missing: "",
    }
    assert configure(target, **given).status == 0
    assert list(target.files) == ["/etc/choria/server.conf"]


def test_policies_replace_all_that_were_there_and_may_escape_their_folder() -> None:
    target = server()
    configure(target, action_policies={"a.policy": "p"}, opa_policies={"b.rego": "r"})
    configure(target, action_policies={"../c.policy": "p"})
    assert sorted(target.files) == ["/etc/choria/c.policy", "/etc/choria/server.conf"]


def test_what_fails_half_way_leaves_what_was_written_before() -> None:
    target = server(fails=True)
    assert configure(target, certificate="C", ca="A", ssldir="/s", server_jwt="x.y.z").status == 1
    assert sorted(target.files) == ["/etc/choria/server.jwt", "/s/ca.pem", "/s/certificate.pem"]


# --- keys


def test_every_jwt_call_makes_a_new_pair_for_private_keys_and_the_last_one_counts(new_key: NewKey) -> None:
    target = server()
    first, second = (data_of(call(target, "jwt"))["ecdh_public"] for _ in range(2))
    assert first != second
    key = new_key()
    # a wrong password seems right once in 256 times, the padding alone tells it
    refusals = {deliver(target, key, first).text for _ in range(4)}
    assert "TLS Setup Failed: could not decrypt private key: x509: decryption password incorrect" in refusals
    assert deliver(target, key, second).status == 0
    written = load_pem_private_key(target.files["/etc/choria/ssl/private.pem"].encode(), None)
    assert isinstance(written, RSAPrivateKey)
    assert written.private_numbers() == key.private_numbers()


def deliver(target: Server, key: RSAPrivateKey, public: str) -> Answer:
    """Send a private key the way that OpenSSL has it."""
    own = X25519PrivateKey.generate()
    secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(secret)).decode()
    material: dict[str, Any] = {"certificate": "C", "ca": "A", "ssldir": "/etc/choria/ssl"}
    return configure(target, key=pem, ecdh_public=own.public_key().public_bytes_raw().hex(), **material)


def test_a_delivered_key_takes_the_place_of_the_request_for_a_certificate(new_key: NewKey) -> None:
    target = server(site=site(new_key=new_key))
    call(target, "gencsr")
    assert "/etc/choria/ssl/csr.pem" in target.files
    deliver(target, new_key(), data_of(call(target, "jwt"))["ecdh_public"])
    assert "/etc/choria/ssl/csr.pem" not in target.files


@pytest.mark.parametrize("kind", ["pkcs1", "pkcs8"])
def test_a_key_that_real_servers_decrypt_is_decrypted_to_the_same(kind: str) -> None:
    vector = json.loads((FIXTURES / "v1" / "ecdh-vector.json").read_text())
    own = X25519PrivateKey.from_private_bytes(bytes.fromhex(vector["server_private"]))
    text = private_key.decrypt(vector[f"{kind}_encrypted_pem"], own=own, other_public=vector["provisioner_public"])
    assert text == vector[f"{kind}_plain_pem"].replace(" PRIVATE", " RSA PRIVATE").replace("RSA RSA", "RSA")


PAIR = X25519PrivateKey.generate()
#: The same in every run, for it is part of the names of tests.
OTHER = X25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw().hex()
ENCRYPTED = "-----BEGIN X-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: {}\n\n{}\n-----END X-----\n"
IV = "00" * 16


@pytest.mark.parametrize(
    ("pem", "public", "text"),
    [
        ("x", "zz", "encoding/hex: invalid byte: U+007A 'z'"),
        ("x", "abc", "encoding/hex: odd length hex string"),
        ("x", "aabb", "crypto/ecdh: invalid public key"),
        ("x", "00" * 32, "crypto/ecdh: bad X25519 remote ECDH input: low order point"),
        ("x", OTHER, "bad key received"),
        ("-----BEGIN X-----\n!\n-----END X-----\n", OTHER, "bad key received"),
        ("-----BEGIN X-----\nAAAA\n-----END X-----\n", OTHER, "key is not encrypted"),
        (ENCRYPTED.format(f"DES-CBC,{IV}", "AAAA"), OTHER, "x509: unknown encryption mode"),
        (ENCRYPTED.format("AES-256-CBC,00", "AAAA"), OTHER, "x509: incorrect IV size"),
        (
            ENCRYPTED.format(f"AES-256-CBC,{IV}", "AAAA"),
            OTHER,
            "x509: encrypted PEM data is not a multiple of the block size",
        ),
    ],
)
def test_a_key_that_cannot_be_decrypted_is_refused_in_the_words_of_go(pem: str, public: str, text: str) -> None:
    with pytest.raises(private_key.UndecryptableError) as caught:
        private_key.decrypt(pem, own=PAIR, other_public=public)
    assert str(caught.value) == text


@given(st.text(max_size=200), st.text(max_size=70))
def test_any_key_is_decrypted_or_refused(pem: str, public: str) -> None:
    with pytest.raises(private_key.UndecryptableError):
        private_key.decrypt(pem, own=PAIR, other_public=public)


def test_gen25519_proves_a_new_key_every_time_and_makes_an_earlier_token_worthless() -> None:
    target = server()
    configure(target, server_jwt="x.y.z")
    first, second = (data_of(call(target, "gen25519", nonce="abc123")) for _ in range(2))
    assert first["public_key"] != second["public_key"]
    for reply in (first, second):
        assert reply["directory"] == "/etc/choria"
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(reply["public_key"]))
        public.verify(bytes.fromhex(reply["signature"]), b"abc123")
    assert "/etc/choria/server.jwt" not in target.files
    seed = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(target.files["/etc/choria/server.seed"]))
    assert seed.public_key().public_bytes_raw().hex() == second["public_key"]


@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_gencsr_signs_a_request_for_any_name_with_a_key_that_stays_on_the_server(new_key: NewKey) -> None:
    target = server(site=site(new_key=new_key))
    for name in ("s1.lab", "n" * 200, 'a "b"/c', "\ud800"):
        reply = data_of(call(target, "gencsr", cn=name, ST="State"))
        request = x509.load_pem_x509_csr(reply["csr"].encode())
        assert request.is_signature_valid
        assert [part.value for part in request.subject] == [name.encode(errors="replace").decode()]
        assert reply["ssldir"] == "/etc/choria/ssl"
        key = load_pem_private_key(target.files["/etc/choria/ssl/private.pem"].encode(), None)
        assert key.public_key() == request.public_key()
        assert target.files["/etc/choria/ssl/csr.pem"] == reply["csr"]


# --- upgrades

REPOSITORY = "https://releases.example.net/choria"


def upgradable(**settings: Any) -> Server:
    return server(site=site(upgradable=True, repository=REPOSITORY, releases={"0.31.0"}), **settings)


def upgrade(target: Server, version: str = "0.31.0") -> Answer:
    return call(target, "release_update", repository=REPOSITORY, version=version)


def version(target: Server) -> object:
    return data_of(call(target, "inventory", agent="rpcutil"))["version"]


def test_an_upgrade_takes_effect_with_the_restart_after_which_it_waits_again() -> None:
    clock = Clock(100)
    target = upgradable(clock=clock)
    answer = upgrade(target)
    assert data_of(answer) == {"message": "Restarting Choria Server after 2s"}
    assert (answer.before, answer.after) == (("upgraded",), ("shutdown",))
    assert (version(target), target.next_version) == ("0.30.0", "0.31.0")
    assert target.departure is not None
    assert (target.departure.at, target.departure.returns, target.departure.provisioned) == (102, True, False)
    assert call(target, "jwt").body is None
    target.boot()
    assert version(target) == "0.31.0"


def test_an_upgrade_can_succeed_in_words_alone() -> None:
    target = upgradable(stuck=True)
    assert upgrade(target).status == 0
    target.boot()
    assert version(target) == "0.30.0"


def test_an_upgrade_to_what_is_not_there_is_rolled_back() -> None:
    target = upgradable()
    answer = upgrade(target, "9.9.9")
    assert answer.text.startswith("Update to version 9.9.9 failed, release rolled back: release 9.9.9 not found: ")
    assert target.departure is None


def test_that_upgrades_are_forbidden_is_said_before_the_token_is_looked_at() -> None:
    answer = call(server(), "release_update", token="wrong")
    assert answer.text == "Version updates is not enabled in the configuration"


# --- restart and shutdown


class Picky:
    """A network that a server can live in only if its configuration says so."""

    def check_request(self, signed: bytes, *, signature: str, proof: str, caller: str) -> str:
        raise NotImplementedError

    def check_server(self, settings: Mapping[str, str], files: Mapping[str, str], *, identity: str) -> None:
        if settings.get("fit") != "yes" or f"{identity}.proof" not in files:
            raise UntrustedError("not fit")


@pytest.mark.parametrize(
    ("config", "proof", "objection"),
    [
        ({"fit": "yes"}, "s1.lab.proof", ""),
        ({"fit": "yes", "identity": "other.lab"}, "other.lab.proof", ""),
        ({"fit": "yes", "identity": "other.lab"}, "s1.lab.proof", "not fit"),
        ({}, "s1.lab.proof", "not fit"),
    ],
)
def test_a_restart_shows_whether_the_server_can_live_in_its_network(
    config: dict[str, str], proof: str, objection: str
) -> None:
    target = server(site=site(trust=Picky()))
    target.files[proof] = ""
    configure(target, {**GOOD_CONFIG, **config})
    assert call(target, "restart", splay=1).status == 0
    assert target.departure is not None
    assert (target.departure.objection, target.departure.provisioned) == (objection, not objection)
    assert not target.departure.returns


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


def test_its_upgraded_event_is_that_of_the_go_original() -> None:
    real = json.loads((FIXTURES / "agents" / "lifecycle-gen-upgraded-cloudevent.json").read_bytes())
    now = real["data"]["timestamp"]
    ours = json.loads(
        events.payload("upgraded", identity="node1.example.net", version="0.29.0", now=now, new_version="0.30.0")
    )
    for document in (ours, real):
        assert document["id"] == document["data"]["id"]
        document["id"] = document["data"]["id"] = ""
    assert ours == real


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
