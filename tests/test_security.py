"""Getting onto a secured network: every refusal is told with its cause and its setting, and heals when that does."""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner import lifetimes
from provisioner.choria import tls
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.credentials import CredentialsError
from provisioner.choria.errors import AccountError, AuthorizationError, ConnectFailedError
from provisioner.choria.security import Insecure, choose
from provisioner.choria.settings import Settings
from provisioner.simulate.broker import NatsServer
from tests.certificates import Authority, Files
from tests.conftest import PATIENCE_SECONDS, Eventually, MakeConnector, StartBroker
from tests.fake_broker import FakeBroker, Peer
from tests.networks import (
    IDENTITY,
    PASSWORD,
    Member,
    X509Network,
    accounts_configuration,
    tls_configuration,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("quick_retries")

ISSUER = Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> X509Network:
    return X509Network.make(tmp_path_factory.mktemp("network"))


@pytest.fixture
def network(made: X509Network, tmp_path: Path) -> X509Network:
    """A network whose provisioner's files may be changed."""
    own = Files(tmp_path / "own.pem", tmp_path / "own.key")
    own.replace(made.own)
    return attrs.evolve(made, own=own)


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    """An authority that nobody on the network trusts."""
    return Authority(tmp_path, "Other CA")


class MakeMember(Protocol):
    def __call__(self, server: NatsServer, settings: Settings, *, host: str = "localhost") -> Connector: ...


@pytest.fixture
def join(make_connector: MakeConnector) -> MakeMember:
    """Makes connectors to a broker that act by some settings."""

    def make(server: NatsServer, settings: Settings, *, host: str = "localhost") -> Connector:
        chosen = choose(settings, insecure=False)
        return make_connector(
            Broker(host, server.port),
            authenticate=chosen.authenticate,
            tls_context=chosen.tls_context,
            tls_always=chosen.tls_always,
            account=chosen.account,
            advise=chosen.advice,
        )

    return make


def failure(connector: Connector) -> str:
    """What the log says about the one broker."""
    connector.connect(0)
    wait_until(lambda: connector.failure)
    assert isinstance(connector.failure, ConnectFailedError)
    return str(next(iter(connector.failure.causes.values())))


class TestX509:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    def test_a_member_gets_into_the_account_of_the_unprovisioned_servers(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember, host: str
    ) -> None:
        connector = join(start_broker(network.configuration()), network.settings(), host=host)
        assert connector.connect(PATIENCE_SECONDS)
        assert connector.server_info["remote_account"] == "provisioning"

    def test_a_server_without_accounts_will_do(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(tls_configuration(network.broker, ca=network.authority.certificate))
        connector = join(server, network.settings())
        assert connector.connect(PATIENCE_SECONDS)
        assert connector.server_info["remote_account"] == "$G"

    def test_a_limit_to_one_suite_and_curve_is_kept(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        suite = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
        more = f'cipher_suites: ["{suite}"], curve_preferences: ["CurveP384"]'
        server = start_broker(tls_configuration(network.broker, ca=network.authority.certificate, more=more))
        settings = network.settings(cipher_suites=(suite,), ecc_curves=("CurveP384",))
        assert join(server, settings).connect(PATIENCE_SECONDS)

        others = network.settings(ecc_curves=("CurveP256",))
        assert "refuses TLS with us" in failure(join(server, others))

    def test_a_wrong_password_and_then_the_right_one(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(network.configuration(password="another"))
        connector = join(server, network.settings())
        assert failure(connector) == (
            "the broker refuses the login: Authorization Violation; check broker_provisioning_password"
        )
        server.config = network.configuration()
        server.restart()
        assert connector.connect(PATIENCE_SECONDS)

    def test_no_password_leads_to_another_account_which_does_not_count(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        connector = join(start_broker(network.configuration()), network.settings(nats_user="", nats_pass=""))
        assert failure(connector) == (
            "the broker has put us into account 'choria', wanted 'provisioning'; no unprovisioned server is there: "
            "check that broker_provisioning_password is set"
        )
        assert not connector.connected

    def test_an_authority_that_is_not_the_brokers_and_then_the_right_one(
        self, network: X509Network, other: Authority, start_broker: StartBroker, join: MakeMember, tmp_path: Path
    ) -> None:
        ca = tmp_path / "ca.pem"
        ca.write_bytes(other.certificate.read_bytes())
        connector = join(start_broker(network.configuration()), network.settings(file_ca=str(ca)))
        text = failure(connector)
        assert text.startswith("the certificate of localhost is not to be trusted: unable to get local issuer")
        assert text.endswith(f"; check plugin.security.file.ca ({ca})")
        ca.write_bytes(network.authority.certificate.read_bytes())
        assert connector.connect(PATIENCE_SECONDS)

    def test_the_systems_authorities_do_not_count(
        self,
        network: X509Network,
        other: Authority,
        start_broker: StartBroker,
        join: MakeMember,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(network.authority.certificate))
        server = start_broker(network.configuration())
        assert "not to be trusted" in failure(join(server, network.settings(file_ca=str(other.certificate))))

    def test_a_broker_of_another_name_and_then_of_the_right_one(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        wrong = network.authority.issue("elsewhere", hosts=("elsewhere.example.net",))
        server = start_broker(network.configuration(wrong))
        connector = join(server, network.settings())
        text = failure(connector)
        assert "not valid for 'localhost'" in text
        assert "check plugin.choria.middleware_hosts" in text
        server.config = network.configuration()
        server.restart()
        assert connector.connect(PATIENCE_SECONDS)

    def test_a_common_name_alone_only_counts_where_that_is_allowed(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(network.configuration(network.authority.issue("localhost")))
        assert "check plugin.choria.middleware_hosts" in failure(join(server, network.settings()))
        legacy = network.settings(support_legacy_certificates=True)
        assert join(server, legacy).connect(PATIENCE_SECONDS)

    @pytest.mark.parametrize(
        ("days", "cause", "advice"),
        [
            ((-2, -1), "certificate has expired", "the broker needs a new one, or this machine's clock is ahead"),
            ((2 / 1440, 1), "certificate is not yet valid", "check this machine's clock, and the broker's"),
        ],
        ids=["expired", "clock two minutes off"],
    )
    def test_a_brokers_certificate_out_of_its_time(
        self,
        network: X509Network,
        start_broker: StartBroker,
        join: MakeMember,
        days: tuple[float, float],
        cause: str,
        advice: str,
    ) -> None:
        files = network.authority.issue("untimely", hosts=("localhost",), days=days)
        text = failure(join(start_broker(network.configuration(files)), network.settings()))
        assert text == f"the certificate of localhost is not to be trusted: {cause}; {advice}"

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_a_broker_that_refuses_our_certificate_until_it_is_replaced(
        self,
        network: X509Network,
        other: Authority,
        start_broker: StartBroker,
        join: MakeMember,
        version: ssl.TLSVersion,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        original = tls.network_context

        def limited(*arguments: Any, **options: Any) -> ssl.SSLContext:
            context = original(*arguments, **options)
            context.maximum_version = version
            return context

        monkeypatch.setattr(tls, "network_context", limited)
        right = Files(network.own.certificate.with_name("right.pem"), network.own.key.with_name("right.key"))
        right.replace(network.own)
        network.own.replace(other.issue("stranger", rsa_key=True))
        connector = join(start_broker(network.configuration()), network.settings())
        text = failure(connector)
        assert text.startswith("the broker refuses TLS with us: ")
        assert text.endswith(f"; check plugin.security.file.certificate ({network.own.certificate})")
        network.own.replace(right)
        assert connector.connect(PATIENCE_SECONDS)

    def test_a_broker_in_clear(self, network: X509Network, start_broker: StartBroker, join: MakeMember) -> None:
        assert failure(join(start_broker(accounts_configuration()), network.settings())) == (
            "the broker offers no TLS; check plugin.choria.middleware_hosts, "
            "and whether plugin.security.provider is right for this network"
        )

    def test_files_that_are_gone_until_they_are_back(
        self, network: X509Network, start_broker: StartBroker, join: MakeMember
    ) -> None:
        connector = join(start_broker(network.configuration()), network.settings())
        data = network.own.key.read_bytes()
        network.own.key.unlink()
        assert failure(connector) == f"plugin.security.file.key: {network.own.key}: No such file or directory"
        network.own.key.write_bytes(data)
        assert connector.connect(PATIENCE_SECONDS)

    def test_a_key_that_is_another_ones_until_it_is_right(
        self, network: X509Network, other: Authority, start_broker: StartBroker, join: MakeMember
    ) -> None:
        connector = join(start_broker(network.configuration()), network.settings())
        data = network.own.key.read_bytes()
        network.own.key.write_bytes(other.issue("another", rsa_key=True).key.read_bytes())
        text = failure(connector)
        assert text.startswith(f"plugin.security.file.certificate: {network.own.certificate}: not to be used for TLS")
        assert "mismatch" in text
        network.own.key.write_bytes(data)
        assert connector.connect(PATIENCE_SECONDS)

    def test_an_encrypted_key_is_refused_without_asking_anybody(self, network: X509Network) -> None:
        chosen = choose(network.settings(), insecure=False)
        network.own.replace(network.authority.issue("encrypted", rsa_key=True, encrypted=True))
        with pytest.raises(CredentialsError, match="not to be used for TLS"):
            chosen.tls_context()


class TestOrganization:
    @pytest.fixture
    def member(self, tmp_path: Path) -> Member:
        return Member.make(tmp_path, issuer=ISSUER)

    def test_a_member_gets_in_without_a_certificate(
        self, made: X509Network, member: Member, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(f"{tls_configuration(made.broker)}\n{accounts_configuration()}")
        connector = join(server, member.settings(choria_ca=str(made.authority.certificate)))
        assert connector.connect(PATIENCE_SECONDS)
        assert connector.server_info["remote_account"] == "provisioning"

    def test_and_with_one_where_the_broker_wants_it(
        self, made: X509Network, member: Member, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(made.configuration())
        without = failure(join(server, member.settings(choria_ca=str(made.authority.certificate))))
        assert without.startswith("the broker refuses TLS with us: ")
        assert without.endswith("; check plugin.security.choria.certificate (not set)")
        having = member.settings(
            choria_ca=str(made.authority.certificate),
            choria_certificate=str(made.own.certificate),
            choria_key=str(made.own.key),
        )
        assert join(server, having).connect(PATIENCE_SECONDS)

    def test_without_an_authority_any_broker_is_believed(
        self, other: Authority, member: Member, start_broker: StartBroker, join: MakeMember
    ) -> None:
        files = other.issue("somewhere", hosts=("elsewhere.example.net",), days=(-2, -1))
        server = start_broker(f"{tls_configuration(files)}\n{accounts_configuration()}")
        assert join(server, member.settings()).connect(PATIENCE_SECONDS)

    def test_a_refused_login_names_password_and_token(
        self, made: X509Network, member: Member, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(f"{tls_configuration(made.broker)}\n{accounts_configuration('another')}")
        assert failure(join(server, member.settings())) == (
            "the broker refuses the login: Authorization Violation; check broker_provisioning_password "
            f"and plugin.security.choria.token_file ({member.token})"
        )

    def test_a_token_that_has_expired_meanwhile_is_named_as_the_cause(self, member: Member) -> None:
        now = [time.time()]
        chosen = choose(member.settings(), insecure=False, clock=lambda: now[0])
        now[0] += 100 * 86400
        text = chosen.advice(AuthorizationError("refused"))
        assert text.startswith(f"check plugin.security.choria.token_file ({member.token}), which is expired since 20")

    def test_another_user_leads_to_another_account_which_does_not_count(
        self, made: X509Network, member: Member, start_broker: StartBroker, join: MakeMember
    ) -> None:
        server = start_broker(f"{tls_configuration(made.broker)}\n{accounts_configuration()}")
        assert "'choria', wanted 'provisioning'" in failure(
            join(server, member.settings(nats_user="other", nats_pass="other"))
        )

    def test_a_broker_in_clear(self, member: Member, start_broker: StartBroker, join: MakeMember) -> None:
        assert "offers no TLS" in failure(join(start_broker(), member.settings()))


class TestAccount:
    """Brokers tell the account in an INFO of their own, which may come at any time."""

    def test_one_that_turns_out_wrong_later_on_ends_the_connection(
        self, make_connector: MakeConnector, eventually: Eventually, caplog: pytest.LogCaptureFixture
    ) -> None:
        def script(peer: Peer) -> None:
            peer.greet()
            peer.send(b'INFO {"connect_info": true, "remote_account": "choria"}\r\n')
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake, account="provisioning", advise=lambda _: "look there")
            connector.connect(PATIENCE_SECONDS)
            eventually(lambda: connector.connections > 1)
            assert isinstance(connector.failure, AccountError)
            connector.close()
        assert "account 'choria', wanted 'provisioning'; look there" in caplog.text

    @pytest.mark.parametrize(
        ("told", "wanted"), [("provisioning", "provisioning"), ("$G", "provisioning"), ("", "provisioning"), ("x", "")]
    )
    def test_the_right_one_or_none_or_any_where_none_is_asked_for_is_fine(
        self, make_connector: MakeConnector, told: str, wanted: str, eventually: Eventually
    ) -> None:
        def script(peer: Peer) -> None:
            peer.greet()
            peer.info(remote_account=told, seen=True)
            peer.wait_until_left()

        with FakeBroker(script) as fake:
            connector = make_connector(fake, account=wanted)
            assert connector.connect(PATIENCE_SECONDS)
            eventually(lambda: connector.server_info.get("seen"))
            assert connector.connected
            connector.close()


class TestInsecure:
    def test_needs_no_files_and_sends_the_password(self) -> None:
        settings = Settings(
            path=Path("choria.cfg"), identity=IDENTITY, certname=IDENTITY, nats_user="provisioner", nats_pass=PASSWORD
        )
        chosen = choose(settings, insecure=True)
        assert isinstance(chosen, Insecure)
        assert chosen.authenticate({"nonce": "x"}) == {"user": "provisioner", "pass": PASSWORD}
        assert chosen.expiries() == {}
        assert not chosen.tls_always
        assert chosen.protocol.caller == f"choria={IDENTITY}"


class TestReminder:
    DAY = 86400.0

    def test_it_warns_once_a_day_of_what_expires_within_thirty(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        expiries = {"token": 32.5 * self.DAY, "certificate": 99 * self.DAY}
        remind = lifetimes.Reminder(lambda: expiries, clock=lambda: now[0], now=lambda: now[0])
        told = {}
        for hour in range(35 * 24):
            now[0] = hour * 3600.0
            caplog.clear()
            remind()
            if caplog.messages:
                told[hour] = caplog.messages
        assert [hour / 24 for hour in told] == list(range(3, 35)), "at the start there was nothing to tell"
        assert told[72] == ["the token of this provisioner expires on 1970-02-02T12:00:00+00:00"]
        assert told[34 * 24] == ["the token of this provisioner has expired, on 1970-02-02T12:00:00+00:00"]
