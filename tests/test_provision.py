"""The provisioning cycle of one host, over a real broker and with real helpers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from provisioner import config
from provisioner.choria import retry, rpc
from provisioner.choria.connector import Connector
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import BadReplyError, Client, RPCReply, Session
from provisioner.config import Config
from provisioner.errors import HostError, SoftError
from provisioner.host import helper_process, node
from provisioner.host.host import Host
from provisioner.host.provision import Provisioner, Success
from provisioner.host.provisioning_jwt import Verifier
from provisioner.host.server_jwt import Issuer
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from tests.certificates import Authority
from tests.conftest import PATIENCE_SECONDS, MakeConnector
from tests.puppet import Puppet
from tests.test_private_key import decrypted

FIXTURES = Path(__file__).parent / "fixtures"
CALLER = "choria=prov.example.net"
IDENTITY = "n1.example.net"
CONFIGURATION = {"plugin.choria.server.provision": "false", "identity": IDENTITY}
INVENTORY = '{"version":"0.30.0","upgradable":false,"facts":{"serial":9007199254740993,"price":1.10}}'
#: Seconds that the agents may take, before a test makes them shorter.
AGENT_TIMEOUT_SECONDS = node.AGENT_TIMEOUT_SECONDS
LOCKED = "Could not obtain provisioning lock"

Reply = Callable[[Request], list[bytes]]


class Server(Puppet):
    """A well-behaved server but for the actions that a test gives another behaviour."""

    def __init__(self, connector: Connector) -> None:
        self.behaviour: dict[str, Reply] = {}
        super().__init__(connector, IDENTITY, self._act)

    def actions(self) -> list[str]:
        return [request["action"] for request in self.requests]

    def sent(self, action: str) -> Any:
        """The data of the last request for an action."""
        return next(request["data"] for request in reversed(self.requests) if request["action"] == action)

    def refuse(self, action: str, text: str, status: int = 1) -> None:
        self.behaviour[action] = lambda request: [self.ok(request, statuscode=status, statusmsg=text, data={})]

    def reply(self, action: str, **data: Any) -> None:
        """Have every request for an action answered with these data."""
        self.behaviour[action] = lambda request: [self.ok(request, data=data)]

    def _act(self, request: Request) -> list[bytes]:
        action = json.loads(request.body)["action"]
        if action in self.behaviour:
            return self.behaviour[action](request)
        if action == "inventory":
            body = f'{{"action":"inventory","statuscode":0,"statusmsg":"OK","data":{INVENTORY}}}'
            return [self.seal(request, body)]
        return [self.ok(request)]


class Bench:
    """Everything around one cycle: a server, a helper, and the settings."""

    def __init__(self, directory: Path, server: Server, connector: Connector) -> None:
        self.directory = directory
        self.server = server
        self.client = Client(connector, ProtocolV1(identity="prov.example.net", caller=CALLER, ttl=60))
        self.metrics = Metrics("lab")
        self.shutdown = Shutdown(grace=60)
        self.config = self.configured()
        self.verifier: Verifier | None = None
        self.issuer: Issuer | None = None
        self._provisioner: Provisioner | None = None
        self.answer(configuration=CONFIGURATION)

    def configured(self, **settings: Any) -> Config:
        file = self.directory / "provisioner.yaml"
        wanted = {"helper": str(self.directory / "helper"), "token": "s3cret", "choria_insecure": True, **settings}
        file.write_text(json.dumps(wanted))
        return config.load(file)

    def helper(self, script: str) -> None:
        """Have this shell script be the helper; it finds its input in the file `input`."""
        file = self.directory / "helper"
        file.write_text(f'#!/bin/sh\ncd "{self.directory}"\ncat > input\n{script}\n')
        file.chmod(0o755)

    def answer(self, **members: Any) -> None:
        """Have a helper that answers with these members."""
        (self.directory / "answer").write_text(json.dumps(members))
        self.helper("cat answer")

    def helper_input(self) -> Any:
        return json.loads((self.directory / "input").read_bytes())

    def provision(self, discovered: float | None = None) -> Success:
        if self._provisioner is None or self._provisioner.config is not self.config:
            self._provisioner = Provisioner(
                config=self.config,
                client=self.client,
                metrics=self.metrics,
                shutdown=self.shutdown,
                verifier=self.verifier,
                issuer=self.issuer,
                discovery_timeout=2.0,
            )
        return self._provisioner.provision(Host(IDENTITY, time.monotonic() if discovered is None else discovered))

    def metric(self, line: str) -> float:
        page = self.metrics.render().decode().splitlines()
        return next(float(each.rpartition(" ")[2]) for each in page if each.startswith(f"choria_provisioner_{line}"))

    def rpc(self, name: str, label: str) -> float:
        return self.metric(f'{name}{{rpc="{label}"')


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other, and silence is noticed, within milliseconds."""
    monkeypatch.setattr(node, "RPC_BACKOFF", retry.Backoff((10,)))
    monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, -1.5))


@pytest.fixture
def bench(tmp_path: Path, broker: NatsServer, make_connector: MakeConnector) -> Bench:
    connector, other = make_connector(broker, reply_prefix=reply_prefix(CALLER)), make_connector(broker)
    assert connector.connect(PATIENCE_SECONDS)
    assert other.connect(PATIENCE_SECONDS)
    return Bench(tmp_path, Server(other), connector)


def test_a_host_is_configured_and_restarted(bench: Bench) -> None:
    assert bench.provision() is Success.PROVISIONED
    assert bench.server.actions() == ["inventory", "configure", "restart"]
    assert bench.server.sent("inventory") == {}
    assert bench.server.sent("restart") == {"token": "s3cret", "splay": 1}


def test_all_inputs_of_configure_are_always_there(bench: Bench) -> None:
    bench.provision()

    inputs = bench.server.sent("configure")
    assert json.loads(inputs.pop("config")) == CONFIGURATION
    assert inputs == {
        "token": "s3cret",
        "ca": "",
        "certificate": "",
        "key": "",
        "ecdh_public": "",
        "ssldir": "",
        "server_jwt": "",
        "action_policies": {},
        "opa_policies": {},
    }


def test_policies_and_certificates_of_the_helper_are_passed_on(bench: Bench) -> None:
    bench.answer(
        configuration=CONFIGURATION,
        certificate="CERT",
        ca="CA",
        ssldir="/etc/choria/ssl",
        action_policies={"rpcutil.policy": "policy default deny"},
        opa_policies={"main.rego": "package x"},
    )
    bench.provision()

    inputs = bench.server.sent("configure")
    assert (inputs["certificate"], inputs["ca"], inputs["ssldir"]) == ("CERT", "CA", "/etc/choria/ssl")
    assert inputs["action_policies"] == {"rpcutil.policy": "policy default deny"}
    assert inputs["opa_policies"] == {"main.rego": "package x"}


def test_the_helper_gets_one_document_with_the_inventory_as_it_came(bench: Bench) -> None:
    bench.provision()

    given = bench.helper_input()
    assert list(given) == ["identity", "csr", "ed25519_pubkey", "inventory", "jwt"]
    assert given["inventory"] == INVENTORY, "as JSON text in which no number has lost a digit"
    assert (given["identity"], given["csr"], given["ed25519_pubkey"], given["jwt"]) == (IDENTITY, None, None, None)


def test_a_deferral_is_soft_and_nothing_is_sent(bench: Bench) -> None:
    bench.answer(Defer=True, msg="no owner yet\n")

    with pytest.raises(SoftError, match=r"^configuration deferred: no owner yet $"):
        bench.provision()
    assert bench.server.actions() == ["inventory"]
    assert bench.metric("helper_errors") == 0


def test_the_helper_can_have_a_host_shut_down(bench: Bench) -> None:
    bench.answer(shutdown=True)

    assert bench.provision() is Success.SHUT_DOWN
    assert bench.server.actions() == ["inventory", "shutdown"]
    assert bench.server.sent("shutdown") == {"token": "s3cret"}


def test_a_refused_shutdown_is_an_error(bench: Bench) -> None:
    bench.answer(shutdown=True)
    bench.server.refuse("shutdown", "Incorrect provision token supplied")

    with pytest.raises(HostError, match="choria_provision#shutdown: refused: Incorrect provision token"):
        bench.provision()


@pytest.mark.parametrize(
    "script",
    ["exit 1", "echo '{'", "true", 'echo \'{"configuration": {"registerinterval": 300}}\'', "cat answer; exit 3"],
    ids=["fails", "not JSON", "nothing", "wrong type", "answers, then fails"],
)
def test_a_helper_that_fails_costs_this_host_its_turn(bench: Bench, script: str) -> None:
    bench.helper(script)

    with pytest.raises(HostError):
        bench.provision()
    assert bench.server.actions() == ["inventory"]
    assert bench.metric("helper_errors") == 1
    assert bench.metric("helper_time_count") == 1


@pytest.mark.parametrize(
    "members",
    [
        {"configuration": {}},
        {"configuration": {"identity": IDENTITY}},
        {"configuration": {**CONFIGURATION, "plugin.choria.server.provision": "true"}},
        {"configuration": {**CONFIGURATION, "a": "b\nplugin.choria.server.provision=true"}},
        {"configuration": CONFIGURATION, "certificate": "CERT"},
        {"configuration": CONFIGURATION, "key": "KEY"},
        {"configuration": CONFIGURATION, "action_policies": {"../x.policy": "y"}},
    ],
    ids=["empty", "comes back", "provisions", "line break", "no ca", "key alone", "path"],
)
def test_what_would_fail_halfway_is_refused_before_anything_is_sent(bench: Bench, members: dict[str, Any]) -> None:
    bench.answer(**members)

    with pytest.raises(HostError):
        bench.provision()
    assert bench.server.actions() == ["inventory"]


def test_the_identity_of_another_node_in_the_configuration_is_warned_of(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.answer(configuration={**CONFIGURATION, "identity": "n2.example.net"})
    bench.provision()

    assert "configuration.identity" in caplog.text


def test_a_host_that_waited_too_long_is_left_to_be_sighted_again(bench: Bench) -> None:
    with pytest.raises(SoftError, match="waited too long: not seen for"):
        bench.provision(discovered=time.monotonic() - 2 * bench.config.interval - 1)
    assert bench.server.requests == []
    assert bench.provision(discovered=time.monotonic() - 2 * bench.config.interval + 10) is Success.PROVISIONED


class TestRetries:
    """How often a step is tried, and what ends the tries."""

    def test_a_step_is_tried_again_after_failures(self, bench: Bench) -> None:
        replies = iter([[], [b"garbage"]])
        bench.server.behaviour["inventory"] = lambda request: next(
            replies, [bench.server.ok(request, data={"version": "1"})]
        )

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions() == ["inventory"] * 3 + ["configure", "restart"]
        assert bench.rpc("rpc_time_count", "rpcutil#inventory") == 3
        assert bench.rpc("rpc_errors", "rpcutil#inventory") == 0

    @pytest.mark.parametrize(("action", "tries"), [("inventory", 5), ("configure", 5), ("restart", 3)])
    def test_it_is_given_up_after_so_many_tries(self, bench: Bench, action: str, tries: int) -> None:
        bench.server.refuse(action, "Could not write config: no space left on device")

        with pytest.raises(HostError, match=f"#{action}: refused: Could not write config"):
            bench.provision()
        assert bench.server.actions().count(action) == tries
        label = f"{'rpcutil' if action == 'inventory' else 'choria_provision'}#{action}"
        assert bench.rpc("rpc_errors", label) == 1, "once for the step, not for every try"
        assert bench.rpc("rpc_time_count", label) == tries

    @pytest.mark.parametrize(
        ("text", "status"), [("Incorrect provision token supplied", 1), ("Unknown action configure", 2)]
    )
    def test_a_refusal_that_no_retry_can_change_ends_the_tries(self, bench: Bench, text: str, status: int) -> None:
        bench.server.refuse("configure", text, status)

        with pytest.raises(HostError) as refused:
            bench.provision()
        assert not isinstance(refused.value, SoftError)
        assert bench.server.actions().count("configure") == 1

    def test_a_lock_is_soft_and_left_to_the_next_cycle(self, bench: Bench) -> None:
        bench.server.refuse("configure", LOCKED)

        with pytest.raises(SoftError, match=LOCKED):
            bench.provision()
        assert bench.server.actions().count("configure") == 1
        assert bench.rpc("rpc_errors", "choria_provision#configure") == 1

    def test_nobody_there_is_one_failed_try(self, bench: Bench) -> None:
        bench.server.leave()

        with pytest.raises(HostError, match="no server of this identity"):
            bench.provision()
        assert bench.rpc("rpc_time_count", "rpcutil#inventory") == 5

    @pytest.mark.parametrize("field", [{}, {"message": 5}, {"message": None}])
    def test_a_reply_without_its_field_fails_the_try(self, bench: Bench, field: dict[str, Any]) -> None:
        bench.server.behaviour["configure"] = lambda request: [bench.server.ok(request, data=field)]

        with pytest.raises(HostError, match="configure: the reply lacks a valid message"):
            bench.provision()
        assert "restart" not in bench.server.actions()

    def test_two_different_replies_end_the_cycle_before_the_next_step(self, bench: Bench) -> None:
        bench.server.behaviour["inventory"] = lambda request: [
            bench.server.ok(request, data={"version": version}) for version in ("1", "2")
        ]

        with pytest.raises(HostError, match="different replies"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]

    def test_a_server_that_is_configured_is_restarted_despite_different_replies(self, bench: Bench) -> None:
        def contradict(request: Request) -> list[bytes]:
            replies = [bench.server.ok(request, data={"message": text}) for text in ("one", "two")]
            for reply in replies:
                bench.server.publish(request, reply)
            time.sleep(0.2)  # both arrive before the next step
            return []

        bench.server.behaviour["configure"] = contradict
        assert bench.provision() is Success.PROVISIONED

    def test_pausing_between_tries_ends_them(self, bench: Bench) -> None:
        def pause(_request: Request) -> list[bytes]:
            bench.config.pause()
            return []

        bench.server.behaviour["inventory"] = pause
        with pytest.raises(SoftError, match="inventory not sent: provisioning is paused"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]
        assert bench.rpc("rpc_errors", "rpcutil#inventory") == 0

    def test_nothing_is_sent_and_no_helper_run_while_paused(self, bench: Bench) -> None:
        bench.config.pause()
        with pytest.raises(SoftError, match="paused"):
            bench.provision()
        assert bench.server.requests == []

    def test_a_pause_before_the_helper_keeps_it_from_running(self, bench: Bench) -> None:
        def pause(request: Request) -> list[bytes]:
            bench.config.pause()
            return [bench.server.ok(request, data={"version": "1"})]

        bench.server.behaviour["inventory"] = pause
        with pytest.raises(SoftError, match="helper not run"):
            bench.provision()
        assert not (bench.directory / "input").exists()

    def test_a_configured_host_is_restarted_even_when_paused(self, bench: Bench) -> None:
        def pause(request: Request) -> list[bytes]:
            bench.config.pause()
            return [bench.server.ok(request)]

        bench.server.behaviour["configure"] = pause
        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions()[-1] == "restart"

    def test_a_host_is_not_shut_down_when_the_pause_began_while_the_helper_ran(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = helper_process.run

        def pausing(*arguments: Any, **options: Any) -> helper_process.Output:
            bench.config.pause()
            return run(*arguments, **options)

        monkeypatch.setattr(helper_process, "run", pausing)
        bench.answer(shutdown=True)

        with pytest.raises(SoftError, match="shutdown not sent: provisioning is paused"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]

    def test_the_end_of_the_grace_time_ends_the_tries(self, bench: Bench) -> None:
        def leave(_request: Request) -> list[bytes]:
            bench.shutdown.request()
            bench.shutdown.request()
            return []

        bench.server.behaviour["inventory"] = leave
        with pytest.raises(SoftError, match="shutting down"):
            bench.provision()

    def test_within_the_grace_time_a_host_in_work_goes_on_retries_included(self, bench: Bench) -> None:
        def leave(request: Request) -> list[bytes]:
            if not bench.shutdown.requested:
                bench.shutdown.request()
                return []
            return [bench.server.ok(request, data={"version": "1"})]

        bench.server.behaviour["inventory"] = leave
        assert bench.provision() is Success.PROVISIONED

    def test_a_request_may_take_the_time_of_its_agent_and_the_discovery_timeout(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", AGENT_TIMEOUT_SECONDS)
        timeouts: dict[str, float] = {}
        call = Session.call

        def noting(
            self: Session, agent: str, action: str, data: Mapping[str, Any], *, timeout: float, **options: Any
        ) -> RPCReply:
            timeouts[f"{agent}#{action}"] = timeout
            return call(self, agent, action, data, timeout=timeout, **options)

        monkeypatch.setattr(Session, "call", noting)
        bench.provision()
        assert timeouts == {
            "rpcutil#inventory": 4.0,
            "choria_provision#configure": 22.0,
            "choria_provision#restart": 22.0,
        }

    def test_what_the_broker_finds_too_large_is_not_tried_again(self, bench: Bench) -> None:
        bench.answer(
            configuration=CONFIGURATION,
            opa_policies={f"{number}.rego": "x" * 100_000 for number in range(9)},
        )

        with pytest.raises(HostError, match="configure: the message has"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]
        assert bench.rpc("rpc_time_count", "choria_provision#configure") == 1
        assert bench.rpc("rpc_errors", "choria_provision#configure") == 1

    @pytest.mark.usefixtures("quick_retries")
    def test_a_broker_that_restarts_does_not_use_up_the_tries(self, bench: Bench, broker: NatsServer) -> None:
        def kill(_request: Request) -> list[bytes]:
            del bench.server.behaviour["inventory"]
            broker.restart()
            return []

        bench.server.behaviour["inventory"] = kill
        monotonic_timeouts = dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, PATIENCE_SECONDS)
        node.AGENT_TIMEOUT_SECONDS.update(monotonic_timeouts)
        assert bench.provision() is Success.PROVISIONED


class TestLeaving:
    """A restart or shutdown that worked but whose reply was lost."""

    def lose_the_reply(self, bench: Bench, action: str, then: Callable[[], None]) -> None:
        def lose(_request: Request) -> list[bytes]:
            then()
            return []

        bench.server.behaviour[action] = lose

    def test_silence_on_the_repeat_means_that_it_was_heard(self, bench: Bench) -> None:
        self.lose_the_reply(bench, "restart", lambda: None)

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions().count("restart") == 2

    def test_nobody_there_after_a_silence_means_that_it_has_left(self, bench: Bench) -> None:
        self.lose_the_reply(bench, "restart", bench.server.leave)

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions().count("restart") == 1
        assert bench.rpc("rpc_time_count", "choria_provision#restart") == 2
        assert bench.rpc("rpc_errors", "choria_provision#restart") == 0

    def test_the_same_goes_for_a_shutdown(self, bench: Bench) -> None:
        bench.answer(shutdown=True)
        self.lose_the_reply(bench, "shutdown", lambda: None)

        assert bench.provision() is Success.SHUT_DOWN

    def test_nobody_there_from_the_first_try_on_is_a_failure(self, bench: Bench) -> None:
        def gone(request: Request) -> list[bytes]:
            bench.server.leave()
            return [bench.server.ok(request)]

        bench.server.behaviour["configure"] = gone
        with pytest.raises(HostError, match="restart: no server of this identity"):
            bench.provision()

    @pytest.mark.usefixtures("quick_retries")
    def test_nobody_there_once_servers_had_time_to_come_back_to_the_broker_means_that_it_has_left(
        self, bench: Bench, broker: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node, "RETURN_SECONDS", 0.5)

        def break_off() -> None:
            bench.server.leave()
            broker.restart()

        self.lose_the_reply(bench, "restart", break_off)

        assert bench.provision() is Success.PROVISIONED
        assert bench.rpc("rpc_errors", "choria_provision#restart") == 0

    @pytest.mark.usefixtures("quick_retries")
    def test_a_server_that_comes_back_to_the_broker_is_told_again(
        self, bench: Bench, broker: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node, "RETURN_SECONDS", 3.0)  # more than a server needs, with these retries
        monkeypatch.setattr(node, "AGENT_TIMEOUT_SECONDS", dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, PATIENCE_SECONDS))

        def break_off(_request: Request) -> list[bytes]:
            del bench.server.behaviour["restart"]
            broker.restart()
            return []

        bench.server.behaviour["restart"] = break_off
        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions().count("restart") == 2

    def test_a_silence_while_the_broker_is_frozen_proves_nothing(
        self, bench: Bench, broker: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node, "RETURN_SECONDS", 0.0)
        monkeypatch.setattr(rpc, "CONNECTION_PROOF_SECONDS", 0.1)

        self.lose_the_reply(bench, "restart", broker.pause)
        try:
            with pytest.raises(HostError, match=r"restart: .*the broker does not answer either"):
                bench.provision()
        finally:
            broker.resume()

    def test_a_refused_restart_is_an_error(self, bench: Bench) -> None:
        bench.server.refuse(
            "restart", "Configuration /etc/choria/server.conf enables provisioning, restart cannot continue"
        )

        with pytest.raises(HostError, match="enables provisioning"):
            bench.provision()


class TestProvisioningJWT:
    """Feature jwt: who may be provisioned at all is in the server's token."""

    @pytest.fixture
    def key(self) -> rsa.RSAPrivateKey:
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)

    @pytest.fixture
    def bench(self, bench: Bench, key: rsa.RSAPrivateKey) -> Bench:
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (bench.directory / "signer.pem").write_bytes(public)
        bench.config = bench.configured(features={"jwt": True}, jwt_verify_cert=str(bench.directory / "signer.pem"))
        bench.verifier = Verifier(bench.config.jwt_verify_cert)
        return bench

    def offer(self, bench: Bench, token: Any) -> None:
        bench.server.behaviour["jwt"] = lambda request: [
            bench.server.ok(request, data={"jwt": token, "ecdh_public": "09" * 32})
        ]

    def test_its_claims_reach_the_helper(self, bench: Bench, key: rsa.RSAPrivateKey) -> None:
        claims = {"purpose": "choria_provisioning", "cht": "s3cret", "chpd": True, "extensions": {"a": [1, 2]}}
        self.offer(bench, jwt.encode(claims, key, algorithm="RS256") + "\n")

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions() == ["jwt", "inventory", "configure", "restart"]
        assert bench.server.sent("jwt") == {"token": "s3cret"}
        assert bench.helper_input()["jwt"] == claims

    def test_one_of_another_signer_ends_the_cycle(self, bench: Bench) -> None:
        other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.offer(bench, jwt.encode({"purpose": "choria_provisioning"}, other, algorithm="RS256"))

        with pytest.raises(HostError, match="provisioning JWT"):
            bench.provision()
        assert bench.server.actions() == ["jwt"]

    @pytest.mark.parametrize("token", [5, None, ["a"], {"a": 1}, True])
    def test_one_that_is_no_text_fails_the_try(self, bench: Bench, token: Any) -> None:
        self.offer(bench, token)

        with pytest.raises(HostError, match="#jwt: the reply lacks a valid jwt"):
            bench.provision()
        assert bench.server.actions() == ["jwt"] * 3

    def test_a_node_that_provisions_by_default_may_come_without_the_setting_only_if_it_does_not(
        self, bench: Bench, key: rsa.RSAPrivateKey
    ) -> None:
        bench.answer(configuration={"identity": IDENTITY})
        claims = {"purpose": "choria_provisioning", "chpd": False}
        self.offer(bench, jwt.encode(claims, key, algorithm="RS256"))
        assert bench.provision() is Success.PROVISIONED

        self.offer(bench, jwt.encode(claims | {"chpd": True}, key, algorithm="RS256"))
        with pytest.raises(HostError, match=r"plugin\.choria\.server\.provision"):
            bench.provision()


class TestPKI:
    """Feature pki: the helper gets a checked request for a certificate, the server what the helper makes of it."""

    @pytest.fixture
    def bench(self, bench: Bench) -> Bench:
        bench.config = bench.configured(features={"pki": True})
        self.offer(bench, IDENTITY)
        return bench

    def offer(self, bench: Bench, common_name: str, **changes: Any) -> str:
        """Have the server ask for a certificate with this name; gives the request."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = x509.CertificateSigningRequestBuilder().subject_name(name)
        request = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
        csr = request.public_bytes(serialization.Encoding.PEM).decode()
        bench.server.reply("gencsr", **{"csr": csr, "public_key": "PUB", "ssldir": "/etc/choria/ssl", **changes})
        return csr

    def test_the_helper_gets_the_request_and_the_server_the_certificate(self, bench: Bench) -> None:
        csr = self.offer(bench, IDENTITY)
        bench.answer(configuration=CONFIGURATION, certificate="CERT", ca="CA", ssldir="/elsewhere")

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions() == ["inventory", "gencsr", "configure", "restart"]
        assert bench.server.sent("gencsr") == {"token": "s3cret", "cn": IDENTITY}
        assert bench.helper_input()["csr"] == {"csr": csr, "public_key": "PUB", "ssldir": "/etc/choria/ssl"}
        inputs = bench.server.sent("configure")
        assert (inputs["certificate"], inputs["ca"]) == ("CERT", "CA")
        assert inputs["ssldir"] == "/etc/choria/ssl", "that of the request counts, not the helper's"

    def test_only_the_block_that_was_checked_reaches_the_helper(self, bench: Bench) -> None:
        csr = self.offer(bench, IDENTITY)
        self.offer(bench, IDENTITY, csr=f"\ufeffsome text\n{csr}\nmore")
        bench.provision()

        assert bench.helper_input()["csr"]["csr"] == csr

    def test_the_directory_of_the_helper_counts_when_the_request_names_none(self, bench: Bench) -> None:
        self.offer(bench, IDENTITY, ssldir="")
        bench.answer(configuration=CONFIGURATION, certificate="CERT", ca="CA", ssldir="/elsewhere")
        bench.provision()

        assert bench.server.sent("configure")["ssldir"] == "/elsewhere"

    @pytest.mark.parametrize("name", ["n2.example.net", "root.mcollective"])
    def test_a_request_for_another_name_never_reaches_the_helper(self, bench: Bench, name: str) -> None:
        self.offer(bench, name)

        with pytest.raises(HostError, match="signing request"):
            bench.provision()
        assert bench.server.actions() == ["inventory", "gencsr"]
        assert not (bench.directory / "input").exists()

    def test_the_configured_deny_list_counts(self, bench: Bench) -> None:
        bench.config = bench.configured(features={"pki": True}, cert_deny_list=[r"^n1\."])

        with pytest.raises(HostError, match="cert_deny_list"):
            bench.provision()

    @pytest.mark.parametrize("field", ["csr", "public_key", "ssldir"])
    @pytest.mark.parametrize("value", [None, 5, ["x"], {"x": "y"}, True])
    def test_there_is_one_try_and_every_field_must_be_text(self, bench: Bench, field: str, value: Any) -> None:
        self.offer(bench, IDENTITY, **{field: value})

        with pytest.raises(HostError, match=f"#gencsr: the reply lacks a valid {field}"):
            bench.provision()
        assert bench.server.actions() == ["inventory", "gencsr"]
        assert bench.rpc("rpc_errors", "choria_provision#gencsr") == 1


class TestPrivateKey:
    """The helper may make the server's key: it travels encrypted for this server, or not at all."""

    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path)

    def answer(self, bench: Bench, authority: Authority, **members: Any) -> str:
        files = authority.issue(IDENTITY)
        key, certificate, ca = (file.read_text() for file in (files.key, files.certificate, authority.certificate))
        known = {"key": key, "certificate": certificate, "ca": ca, "ssldir": "/etc/choria/ssl"}
        bench.answer(configuration=CONFIGURATION, **{**known, **members})
        return key

    @pytest.fixture
    def with_jwt(self, bench: Bench) -> Bench:
        signer = ed25519.Ed25519PrivateKey.generate()
        public = signer.public_key().public_bytes_raw().hex()
        bench.config = bench.configured(features={"jwt": True}, jwt_verify_cert=public)
        bench.verifier = Verifier(public)
        self.token = jwt.encode({"purpose": "choria_provisioning"}, signer, algorithm="EdDSA")
        return bench

    def test_it_is_encrypted_for_the_last_key_that_the_server_made(self, with_jwt: Bench, authority: Authority) -> None:
        bench, made = with_jwt, list[x25519.X25519PrivateKey]()

        def jwt_reply(request: Request) -> list[bytes]:
            made.append(x25519.X25519PrivateKey.generate())
            public = made[-1].public_key().public_bytes_raw().hex()
            # the first reply is not good enough, but the server has a new key from then on
            token = self.token if len(made) > 1 else 5
            return [bench.server.ok(request, data={"jwt": token, "ecdh_public": public})]

        bench.server.behaviour["jwt"] = jwt_reply
        key = self.answer(bench, authority)

        assert bench.provision() is Success.PROVISIONED
        inputs = bench.server.sent("configure")
        secret = made[1].exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(inputs["ecdh_public"])))
        received = serialization.load_der_private_key(decrypted(inputs["key"], secret), None)
        sent = serialization.load_pem_private_key(key.encode(), None)
        assert isinstance(received, ec.EllipticCurvePrivateKey)
        assert received.public_key() == sent.public_key()

    @pytest.mark.parametrize("public", ["", "09", "zz" * 32, 5, None])
    def test_a_key_of_the_server_that_is_none_fails_the_try(self, with_jwt: Bench, public: Any) -> None:
        with_jwt.server.reply("jwt", jwt=self.token, ecdh_public=public)

        with pytest.raises(HostError, match="#jwt: the reply lacks a valid ecdh_public"):
            with_jwt.provision()

    def test_a_weak_key_of_the_server_is_not_used(self, with_jwt: Bench, authority: Authority) -> None:
        with_jwt.server.reply("jwt", jwt=self.token, ecdh_public="00" * 32)
        self.answer(with_jwt, authority)

        with pytest.raises(HostError, match="weak"):
            with_jwt.provision()
        assert "configure" not in with_jwt.server.actions()

    def test_without_a_key_of_the_server_it_is_not_sent(self, bench: Bench, authority: Authority) -> None:
        key = self.answer(bench, authority)

        with pytest.raises(HostError, match=r"features\.jwt") as refused:
            bench.provision()
        assert key.splitlines()[1] not in str(refused.value)
        assert bench.server.actions() == ["inventory"]

    def test_it_must_be_that_of_the_certificate(self, with_jwt: Bench, authority: Authority) -> None:
        with_jwt.server.reply("jwt", jwt=self.token, ecdh_public="09" * 32)
        other = authority.issue("n2.example.net").certificate.read_text()
        self.answer(with_jwt, authority, certificate=other)

        with pytest.raises(HostError, match="another key"):
            with_jwt.provision()
        assert "configure" not in with_jwt.server.actions()


class TestEd25519:
    """Feature ed25519: the server proves that it holds a new key, and gets a JWT for it."""

    @pytest.fixture
    def bench(self, bench: Bench) -> Bench:
        self.organization = ed25519.Ed25519PrivateKey.generate()
        public = self.organization.public_key().public_bytes_raw().hex()
        (bench.directory / "seed").write_text(self.organization.private_bytes_raw().hex())
        bench.config = bench.configured(
            features={"ed25519": True}, jwt_verify_cert=public, jwt_signing_key=str(bench.directory / "seed")
        )
        bench.verifier, bench.issuer = Verifier(public), Issuer(bench.config)
        token = jwt.encode({"purpose": "choria_provisioning"}, self.organization, algorithm="EdDSA")
        bench.server.reply("jwt", jwt=token, ecdh_public="09" * 32)
        self.key = ed25519.Ed25519PrivateKey.generate()
        bench.server.behaviour["gen25519"] = lambda request: [bench.server.ok(request, data=self.proof(request))]
        return bench

    def proof(self, request: Request, **changes: Any) -> dict[str, Any]:
        nonce = json.loads(request.body)["data"]["nonce"]
        return {
            "public_key": self.key.public_key().public_bytes_raw().hex(),
            "directory": "/etc/choria",
            "signature": self.key.sign(nonce.encode()).hex(),
            **changes,
        }

    def nonces(self, bench: Bench) -> list[str]:
        return [request["data"]["nonce"] for request in bench.server.requests if request["action"] == "gen25519"]

    def test_the_server_gets_a_jwt_for_the_key_that_it_made(self, bench: Bench) -> None:
        bench.answer(configuration=CONFIGURATION | {"collectives": "one, two"}, server_claims={"ou": "acme"})

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions() == ["jwt", "gen25519", "inventory", "configure", "restart"]
        public = self.key.public_key().public_bytes_raw().hex()
        claims = jwt.decode(
            bench.server.sent("configure")["server_jwt"], self.organization.public_key(), algorithms=["EdDSA"]
        )
        assert (claims["identity"], claims["public_key"]) == (IDENTITY, public)
        assert (claims["collectives"], claims["ou"]) == (["one", "two"], "acme")

    def test_the_helper_gets_the_key_and_its_proof(self, bench: Bench) -> None:
        bench.provision()

        given = bench.helper_input()["ed25519_pubkey"]
        (nonce,) = self.nonces(bench)
        assert given == {
            "public_key": self.key.public_key().public_bytes_raw().hex(),
            "directory": "/etc/choria",
            "signature": self.key.sign(nonce.encode()).hex(),
        }
        assert len(bytes.fromhex(nonce)) == 16

    @pytest.mark.parametrize(
        "change",
        [
            {"signature": "00" * 64},
            {"public_key": ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()},
            {"public_key": "09"},
            {"public_key": None},
            {"public_key": "zz" * 32},
            {"signature": "00" * 63},
            {"signature": 5},
            {"directory": ""},
            {"directory": ["/"]},
        ],
    )
    def test_a_proof_that_is_none_fails_the_try(self, bench: Bench, change: dict[str, Any]) -> None:
        bench.server.behaviour["gen25519"] = lambda request: [
            bench.server.ok(request, data=self.proof(request, **change))
        ]

        with pytest.raises(HostError, match=r"#gen25519: the (reply lacks a valid|signature in the reply)"):
            bench.provision()
        assert bench.server.actions() == ["jwt", *["gen25519"] * 5]
        assert len(set(self.nonces(bench))) == 5, "a new nonce for every try"

    def test_a_proof_of_an_earlier_nonce_is_none(self, bench: Bench) -> None:
        bench.provision()
        old = bench.helper_input()["ed25519_pubkey"]
        bench.server.reply("gen25519", **old)

        with pytest.raises(HostError, match="is not one of the nonce"):
            bench.provision()

    def test_the_key_of_the_last_try_counts(self, bench: Bench) -> None:
        first = self.key

        def fail_once(request: Request) -> list[bytes]:
            if self.key is first:
                self.key = ed25519.Ed25519PrivateKey.generate()
                return []
            return [bench.server.ok(request, data=self.proof(request))]

        bench.server.behaviour["gen25519"] = fail_once
        bench.provision()
        claims = jwt.decode(bench.server.sent("configure")["server_jwt"], options={"verify_signature": False})
        assert claims["public_key"] == self.key.public_key().public_bytes_raw().hex()

    def test_a_signing_key_that_is_gone_ends_the_cycle_before_anything_is_sent(self, bench: Bench) -> None:
        (bench.directory / "seed").unlink()

        with pytest.raises(HostError, match="jwt_signing_key"):
            bench.provision()
        assert "configure" not in bench.server.actions()

    def test_no_jwt_reaches_the_log(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        bench.provision()

        for secret in (bench.server.sent("configure")["server_jwt"], self.organization.private_bytes_raw().hex()):
            assert secret not in caplog.text


class TestUpgrades:
    """Feature upgrades: the helper names a version, and a server of another one is sent there first."""

    REPOSITORY = "https://example.net/choria"
    SETTINGS: Mapping[str, Any] = {"features": {"upgrades": True}, "upgrades_repository": REPOSITORY}

    @pytest.fixture
    def bench(self, bench: Bench) -> Bench:
        bench.config = bench.configured(**self.SETTINGS)
        bench.server.reply("inventory", version="0.29.4", upgradable=True)
        bench.answer(configuration=CONFIGURATION, upgrade="0.30.0")
        return bench

    def optional(self, bench: Bench, **settings: Any) -> None:
        bench.config = bench.configured(**{**self.SETTINGS, "upgrades_optional": True, **settings})

    def test_it_is_sent_there_and_not_configured(self, bench: Bench) -> None:
        assert bench.provision() is Success.UPGRADING
        assert bench.server.actions() == ["inventory", "release_update"]
        assert bench.server.sent("release_update") == {
            "token": "s3cret",
            "repository": self.REPOSITORY,
            "version": "0.30.0",
        }

    def test_the_same_version_is_configured(self, bench: Bench) -> None:
        bench.answer(configuration=CONFIGURATION, upgrade="0.29.04")

        assert bench.provision() is Success.PROVISIONED
        assert bench.server.actions() == ["inventory", "configure", "restart"]

    def test_an_answer_may_name_the_version_alone(self, bench: Bench) -> None:
        bench.answer(upgrade="0.30.0")

        assert bench.provision() is Success.UPGRADING

    def test_but_not_when_it_has_that_version(self, bench: Bench) -> None:
        bench.answer(upgrade="0.29.4")

        with pytest.raises(HostError, match="configuration: there is none"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]

    def test_nor_when_the_feature_is_off(self, bench: Bench) -> None:
        bench.config = bench.configured()
        bench.answer(upgrade="0.30.0")

        with pytest.raises(HostError, match="configuration: there is none"):
            bench.provision()

    def test_the_rest_of_the_answer_is_checked_all_the_same(self, bench: Bench) -> None:
        bench.answer(configuration=CONFIGURATION | {"a": "b\nc"}, upgrade="0.30.0")

        with pytest.raises(HostError, match="line break"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]

    def test_with_the_feature_off_the_version_is_ignored(self, bench: Bench) -> None:
        bench.config = bench.configured()

        assert bench.provision() is Success.PROVISIONED
        assert "release_update" not in bench.server.actions()

    @pytest.mark.parametrize(
        "inventory", [{"version": "0.29.4", "upgradable": False}, {"version": "0.29.4"}, {"upgradable": True}]
    )
    def test_a_server_that_cannot_is_an_error_unless_upgrades_are_optional(
        self, bench: Bench, inventory: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        bench.server.reply("inventory", **inventory)
        with pytest.raises(HostError, match="cannot upgrade"):
            bench.provision()
        assert bench.server.actions() == ["inventory"]

        self.optional(bench)
        assert bench.provision() is Success.PROVISIONED
        assert "cannot upgrade" in caplog.text
        assert "release_update" not in bench.server.actions()

    def test_without_a_repository_it_is_configured_where_that_is_optional(self, bench: Bench) -> None:
        self.optional(bench, upgrades_repository="")

        assert bench.provision() is Success.PROVISIONED

    @pytest.mark.parametrize("field", [{"version": 5}, {"upgradable": "yes"}, {"upgradable": None}])
    def test_an_inventory_of_the_wrong_types_fails_the_try(self, bench: Bench, field: dict[str, Any]) -> None:
        bench.server.reply("inventory", **field)

        with pytest.raises(HostError, match="#inventory: the reply lacks a valid"):
            bench.provision()

    def test_a_failed_upgrade_is_tried_three_times(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        text = "Update to version 0.30.0 failed, release rolled back: release 0.30.0 not found"
        bench.server.refuse("release_update", text)
        with pytest.raises(HostError, match=f"#release_update: refused: {text}"):
            bench.provision()
        assert bench.server.actions() == ["inventory", *["release_update"] * 3]
        assert bench.rpc("rpc_errors", "choria_provision#release_update") == 1

        self.optional(bench)
        assert bench.provision() is Success.PROVISIONED
        assert "configured without an upgrade" in caplog.text

    def test_upgrades_without_a_reply_count_as_tried(self, bench: Bench) -> None:
        bench.server.behaviour["release_update"] = lambda _request: []
        for _ in range(2):
            with pytest.raises(HostError, match="release_update: no reply"):
                bench.provision()
        with pytest.raises(HostError, match="after 2 upgrades to"):
            bench.provision()
        assert bench.server.actions().count("release_update") == 2

    def test_an_upgrade_without_a_reply_is_not_repeated(self, bench: Bench) -> None:
        bench.server.behaviour["release_update"] = lambda _request: []

        with pytest.raises(HostError, match="#release_update: no reply"):
            bench.provision()
        assert bench.server.actions() == ["inventory", "release_update"], "it may be under way"

    @pytest.mark.usefixtures("quick_retries")
    def test_nor_is_one_whose_connection_was_lost(self, bench: Bench, broker: NatsServer) -> None:
        restart = threading.Thread(target=broker.restart, name="restart-broker")

        def kill(_request: Request) -> list[bytes]:
            restart.start()
            return []

        bench.server.behaviour["release_update"] = kill
        node.AGENT_TIMEOUT_SECONDS.update(dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, PATIENCE_SECONDS))
        with pytest.raises(HostError, match="release_update"):
            bench.provision()
        restart.join()
        assert bench.server.actions() == ["inventory", "release_update"]

    def test_a_locked_server_is_left_alone_even_if_upgrades_are_optional(self, bench: Bench) -> None:
        self.optional(bench)
        bench.server.refuse("release_update", LOCKED)

        with pytest.raises(SoftError, match=LOCKED):
            bench.provision()
        assert "configure" not in bench.server.actions()

    def test_an_upgrade_that_changes_nothing_ends_after_the_second_time(self, bench: Bench) -> None:
        assert [bench.provision(), bench.provision()] == [Success.UPGRADING] * 2

        for _ in range(2):
            with pytest.raises(HostError, match=r"after 2 upgrades to 0\.30\.0 the server still runs 0\.29\.4"):
                bench.provision()
        assert bench.server.actions().count("release_update") == 2
        assert "configure" not in bench.server.actions()

    def test_after_an_upgrade_that_worked_it_is_configured(self, bench: Bench) -> None:
        assert bench.provision() is Success.UPGRADING
        bench.server.reply("inventory", version="0.30.0", upgradable=True)

        assert bench.provision() is Success.PROVISIONED


class TestReplies:
    """What is read from a reply: all of it in the right form, or the try fails."""

    OPENERS = (node._token, node._inventory, node._csr, lambda reply: node._signing_key(reply, "nonce"))
    FIELDS = ("jwt", "ecdh_public", "version", "upgradable", "csr", "public_key", "ssldir", "directory", "signature")

    @given(
        st.dictionaries(
            st.sampled_from(FIELDS),
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text()
            | st.lists(st.text())
            | st.from_regex("[0-9a-f]{64}|[0-9a-f]{128}", fullmatch=True),
        )
    )
    def test_any_data(self, data: dict[str, Any]) -> None:
        reply = RPCReply(json.dumps({"data": data}), data)
        for opener in self.OPENERS:
            with contextlib.suppress(BadReplyError):
                opener(reply)

    def test_the_recorded_proof_of_a_real_server(self) -> None:
        request, reply = (
            json.loads(json.loads((FIXTURES / "v2" / "wire" / f"03-gen25519-{kind}.json").read_text())["message"])
            for kind in ("request", "reply")
        )
        given_to_helper = json.loads((FIXTURES / "v2" / "helper-input.json").read_text())["ed25519_pubkey"]

        key = node._signing_key(RPCReply(json.dumps(reply), reply["data"]), request["data"]["nonce"])
        assert attrs.asdict(key) == given_to_helper


def test_no_secret_reaches_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    bench.answer(configuration={**CONFIGURATION, "password": "hunter2"}, action_policies={"x.policy": "hunter2"})
    bench.provision()
    bench.server.refuse("configure", "Could not write config")
    with pytest.raises(HostError):
        bench.provision()

    for secret in ("s3cret", "hunter2"):
        assert secret not in caplog.text
