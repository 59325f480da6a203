"""The provisioning cycle of one host, over a real broker and with real helpers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from provisioner import config
from provisioner.choria import retry
from provisioner.choria.connector import Connector
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.choria.rpc import Client
from provisioner.config import Config
from provisioner.errors import HostError, SoftError
from provisioner.host import node
from provisioner.host.host import Host
from provisioner.host.provision import Outcome, Provisioner
from provisioner.host.provisioning_jwt import Verifier
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.envelopes import Request
from tests.conftest import PATIENCE_SECONDS, MakeConnector
from tests.puppet import Puppet

CALLER = "choria=prov.example.net"
IDENTITY = "n1.example.net"
CONFIGURATION = {"plugin.choria.server.provision": "false", "identity": IDENTITY}
INVENTORY = '{"version":"0.30.0","upgradable":false,"facts":{"serial":9007199254740993,"price":1.10}}'
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

    def provision(self, discovered: float | None = None) -> Outcome:
        provisioner = Provisioner(
            config=self.config,
            client=self.client,
            metrics=self.metrics,
            shutdown=self.shutdown,
            verifier=self.verifier,
            discovery_timeout=2.0,
        )
        return provisioner.provision(Host(IDENTITY, time.monotonic() if discovered is None else discovered))

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
    assert bench.provision() is Outcome.PROVISIONED
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

    assert bench.provision() is Outcome.SHUT_DOWN
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


def test_a_private_key_is_never_sent_in_clear(bench: Bench) -> None:
    bench.answer(configuration=CONFIGURATION, certificate="C", ca="A", ssldir="/s", key="PRIVATE")

    with pytest.raises(HostError, match="private key") as refused:
        bench.provision()
    assert "PRIVATE" not in str(refused.value)
    assert bench.server.actions() == ["inventory"]


def test_the_identity_of_another_node_in_the_configuration_is_warned_of(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.answer(configuration={**CONFIGURATION, "identity": "n2.example.net"})
    bench.provision()

    assert "configuration.identity" in caplog.text


def test_a_host_that_waited_too_long_is_left_to_be_sighted_again(bench: Bench) -> None:
    with pytest.raises(SoftError, match="waiting too long"):
        bench.provision(discovered=time.monotonic() - 2 * bench.config.interval - 1)
    assert bench.server.requests == []
    assert bench.provision(discovered=time.monotonic() - 2 * bench.config.interval + 10) is Outcome.PROVISIONED


class TestRetries:
    """How often a step is tried, and what ends the tries."""

    def test_a_step_is_tried_again_after_failures(self, bench: Bench) -> None:
        replies = iter([[], [b"garbage"]])
        bench.server.behaviour["inventory"] = lambda request: next(
            replies, [bench.server.ok(request, data={"version": "1"})]
        )

        assert bench.provision() is Outcome.PROVISIONED
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
        assert bench.provision() is Outcome.PROVISIONED
        assert bench.server.actions()[-1] == "restart"

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
        assert bench.provision() is Outcome.PROVISIONED

    @pytest.mark.usefixtures("quick_retries")
    def test_a_broker_that_restarts_does_not_use_up_the_tries(self, bench: Bench, broker: NatsServer) -> None:
        def kill(_request: Request) -> list[bytes]:
            del bench.server.behaviour["inventory"]
            threading.Thread(target=broker.restart, name="restart-broker").start()
            return []

        bench.server.behaviour["inventory"] = kill
        monotonic_timeouts = dict.fromkeys(node.AGENT_TIMEOUT_SECONDS, PATIENCE_SECONDS)
        node.AGENT_TIMEOUT_SECONDS.update(monotonic_timeouts)
        assert bench.provision() is Outcome.PROVISIONED


class TestLeaving:
    """A restart or shutdown that worked but whose reply was lost."""

    def lose_the_reply(self, bench: Bench, action: str, then: Callable[[], None]) -> None:
        def lose(_request: Request) -> list[bytes]:
            then()
            return []

        bench.server.behaviour[action] = lose

    def test_silence_on_the_repeat_means_that_it_was_heard(self, bench: Bench) -> None:
        self.lose_the_reply(bench, "restart", lambda: None)

        assert bench.provision() is Outcome.PROVISIONED
        assert bench.server.actions().count("restart") == 2

    def test_nobody_there_after_a_silence_means_that_it_has_left(self, bench: Bench) -> None:
        leaver = threading.Thread(target=bench.server.leave, name="leaver")
        self.lose_the_reply(bench, "restart", leaver.start)

        assert bench.provision() is Outcome.PROVISIONED
        assert bench.server.actions().count("restart") == 1
        assert bench.rpc("rpc_time_count", "choria_provision#restart") == 2
        assert bench.rpc("rpc_errors", "choria_provision#restart") == 0

    def test_the_same_goes_for_a_shutdown(self, bench: Bench) -> None:
        bench.answer(shutdown=True)
        self.lose_the_reply(bench, "shutdown", lambda: None)

        assert bench.provision() is Outcome.SHUT_DOWN

    def test_nobody_there_from_the_first_try_on_is_a_failure(self, bench: Bench) -> None:
        def gone(request: Request) -> list[bytes]:
            threading.Thread(target=bench.server.leave, name="leaver").start()
            time.sleep(0.2)  # the reply must find its way before the server is known to have left
            return [bench.server.ok(request)]

        bench.server.behaviour["configure"] = gone
        with pytest.raises(HostError, match="restart: no server of this identity"):
            bench.provision()

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

        assert bench.provision() is Outcome.PROVISIONED
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
        assert bench.provision() is Outcome.PROVISIONED

        self.offer(bench, jwt.encode(claims | {"chpd": True}, key, algorithm="RS256"))
        with pytest.raises(HostError, match=r"plugin\.choria\.server\.provision"):
            bench.provision()


def test_no_secret_reaches_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    bench.answer(configuration={**CONFIGURATION, "password": "hunter2"}, action_policies={"x.policy": "hunter2"})
    bench.provision()
    bench.server.refuse("configure", "Could not write config")
    with pytest.raises(HostError):
        bench.provision()

    for secret in ("s3cret", "hunter2"):
        assert secret not in caplog.text
