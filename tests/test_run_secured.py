"""The `run` command on secured networks: a real process, a real broker with TLS and accounts."""

from __future__ import annotations

import datetime
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner.simulate.broker import NatsServer
from tests.conftest import PATIENCE_SECONDS, Eventually, StartBroker
from tests.installation import Installation
from tests.networks import (
    IDENTITY,
    PASSWORD,
    Member,
    X509Network,
    accounts_configuration,
    tls_configuration,
)

EXPIRY = re.compile(r'choria_provisioner_credential_expiry_timestamp_seconds\{credential="(\w+)",site="lab"\} (\d+)')


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> X509Network:
    return X509Network.make(tmp_path_factory.mktemp("network"))


@pytest.fixture
def broker(network: X509Network, start_broker: StartBroker) -> NatsServer:
    return start_broker(network.configuration())


@pytest.fixture
def installation(network: X509Network, tmp_path: Path, broker: NatsServer) -> Iterator[Installation]:
    """On a network with certificates."""
    with Installation(tmp_path, broker.url) as installation:
        installation.settings |= {"choria_insecure": False, "broker_provisioning_password": PASSWORD}
        installation.choria = f"""
            identity = {IDENTITY}
            plugin.choria.middleware_hosts = localhost:{broker.port}
            plugin.security.provider = file
            plugin.security.file.certificate = {network.own.certificate}
            plugin.security.file.key = {network.own.key}
            plugin.security.file.ca = {network.authority.certificate}
        """
        yield installation


def warnings(installation: Installation) -> list[str]:
    return [line["msg"] for line in installation.log() if line["level"] in ("warn", "warning")]


def expiries(installation: Installation) -> dict[str, int]:
    return {kind: int(expiry) for kind, expiry in EXPIRY.findall(installation.get("/metrics")[1])}


def test_it_gets_onto_a_network_with_certificates_and_tells_when_its_own_expires(
    installation: Installation, eventually: Eventually
) -> None:
    process = installation.start()
    eventually(installation.ready)
    (kind, expiry), *others = expiries(installation).items()
    assert (kind, others) == ("certificate", [])
    assert 59 < (expiry - time.time()) / 86400 < 61
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert PASSWORD not in installation.log_file.read_text()


def test_it_gets_onto_a_network_of_an_organization(
    installation: Installation, network: X509Network, start_broker: StartBroker, tmp_path: Path, eventually: Eventually
) -> None:
    member = Member.make(tmp_path, issuer=Ed25519PrivateKey.generate(), exp=int(time.time() + 20.5 * 86400))
    server = start_broker(f"{tls_configuration(network.broker)}\n{accounts_configuration()}")
    installation.choria = f"""
        identity = {IDENTITY}
        plugin.choria.middleware_hosts = localhost:{server.port}
        plugin.security.provider = choria
        plugin.security.choria.token_file = {member.token}
        plugin.security.choria.seed_file = {member.seed}
    """
    process = installation.start()
    eventually(installation.ready)
    assert list(expiries(installation)) == ["token"]
    expiry, unverified = sorted(warnings(installation), reverse=True)
    assert "expires on 20" in expiry
    assert "plugin.security.choria.ca" in unverified
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
    log = installation.log_file.read_text()
    for secret in (PASSWORD, member.token.read_text(), member.seed.read_text()):
        assert secret not in log


def test_a_wrong_password_is_told_in_one_line_and_the_right_one_heals(
    installation: Installation, broker: NatsServer, network: X509Network, eventually: Eventually
) -> None:
    broker.config = network.configuration(password="another")
    broker.restart()
    process = installation.start()
    eventually(lambda: installation.log_file.exists() and "broker_provisioning_password" in str(warnings(installation)))
    assert all(line.endswith("; check broker_provisioning_password") for line in warnings(installation)[-1:])
    assert not installation.ready()
    broker.config = network.configuration()
    broker.restart()
    eventually(installation.ready)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_problems_of_credentials_are_told_along_with_those_of_the_files(
    installation: Installation, tmp_path: Path
) -> None:
    installation.settings |= {
        "features": {"jwt": True, "ed25519": True},
        "jwt_verify_cert": "09" * 32,
        **dict.fromkeys(("jwt_signing_key", "jwt_signing_token"), str(tmp_path / "missing")),
    }
    installation.choria = re.sub(r"(file\.(?:key|ca) = ).*", rf"\1{tmp_path}/missing", installation.choria)
    process = installation.start()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    *signing, key, ca = errors.splitlines()
    yaml, cfg = (f"{installation.directory}/{name}" for name in ("provisioner.yaml", "choria.cfg"))
    assert signing == [
        f"{yaml}: {setting}: {tmp_path}/missing: No such file or directory"
        for setting in ("jwt_signing_key", "jwt_signing_token")
    ]
    assert key == f"{cfg}: plugin.security.file.key: {tmp_path}/missing: No such file or directory"
    assert ca == f"{cfg}: plugin.security.file.ca: {tmp_path}/missing: No such file or directory"


def test_a_certificate_that_is_not_valid_yet_is_told_of_and_heals_by_itself(
    installation: Installation, network: X509Network, eventually: Eventually
) -> None:
    soon = datetime.timedelta(seconds=4) / datetime.timedelta(days=1)
    files = network.authority.issue("future", rsa_key=True, days=(soon, 1))
    installation.choria = installation.choria.replace(str(network.own.certificate), str(files.certificate)).replace(
        str(network.own.key), str(files.key)
    )
    process = installation.start()
    eventually(installation.ready)
    early = [line for line in warnings(installation) if "not valid before 20" in line]
    assert len(early) == 1
    assert f"plugin.security.file.certificate ({files.certificate})" in early[0]
    assert any("cannot connect" in line for line in warnings(installation))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
