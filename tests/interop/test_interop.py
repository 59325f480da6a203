"""The daemon provisions real servers over a real broker; being back under what it sent is the proof."""

from __future__ import annotations

import pytest

from tests.interop.conftest import MakeNetwork

KINDS = ("insecure", "x509", "org")
SECURED = ("x509", "org")
IDENTITIES = ("n1.example.net", "n2.example.net", "n3.example.net")


@pytest.mark.parametrize("kind", KINDS)
def test_all_servers_are_back_as_what_the_helper_made_of_them(make_network: MakeNetwork, kind: str) -> None:
    network = make_network(kind)
    network.start_broker()
    servers = network.start_servers(*IDENTITIES)
    with network.daemon() as daemon:
        network.wait_for_members(*servers)
        assert len(daemon.logged("provisioned in ")) == len(servers)
    assert daemon.problems == []


def test_private_keys_of_all_kinds_reach_the_servers(make_network: MakeNetwork) -> None:
    network = make_network("x509")
    network.use_helper("--private-keys")
    network.start_broker()
    servers = network.start_servers("pkcs1.example.net", "pkcs8.example.net", "ec.example.net")
    with network.daemon():
        network.wait_for_members(*servers)


def test_a_server_refuses_a_wrong_token_and_keeps_waiting(make_network: MakeNetwork) -> None:
    network = make_network("insecure")
    network.start_broker()
    (server,) = network.start_servers("n1.example.net")
    network.wait_for_waiting(server)
    right = network.settings["token"]
    network.settings["token"] = "wrong-token"
    with network.daemon() as daemon:
        network.eventually(lambda: daemon.logged("could not provision"), "the daemon tells of the failure")
        (line,) = daemon.logged("could not provision", "choria_provision#jwt")
        assert (line["level"], line["identity"]) == ("error", "n1.example.net")
        assert "wrong-token" not in daemon.log.read_text()
    assert server.is_waiting

    network.settings["token"] = right
    with network.daemon():
        network.wait_for_members(server)


def test_a_server_that_the_helper_defers_keeps_waiting(make_network: MakeNetwork) -> None:
    network = make_network("insecure")
    network.start_broker()
    (server,) = network.start_servers("n1.example.net")
    network.wait_for_waiting(server)
    network.use_helper("--answer", "defer")
    with network.daemon() as daemon:
        network.eventually(lambda: daemon.logged("configuration deferred: not now"), "the daemon tells of it")
    assert server.is_waiting

    network.use_helper()
    with network.daemon():
        network.wait_for_members(server)


def test_a_server_that_the_helper_shuts_down_ends(make_network: MakeNetwork) -> None:
    network = make_network("insecure")
    network.start_broker()
    (server,) = network.start_servers("n1.example.net")
    network.wait_for_waiting(server)
    network.use_helper("--answer", "shutdown")
    with network.daemon() as daemon:
        network.eventually(lambda: server.exit_code is not None, "the server ends")
        network.eventually(lambda: daemon.logged("shut down, as the helper wished"), "the daemon tells of it")
    assert server.exit_code == 0
    assert len(server.connections) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_servers_that_were_with_the_helper_are_provisioned_after_a_restart_of_the_broker(
    make_network: MakeNetwork, kind: str
) -> None:
    network = make_network(kind)
    network.start_broker()
    servers = network.start_servers(*IDENTITIES)
    network.gate.touch()
    with network.daemon() as daemon:
        network.eventually(lambda: all(map(network.asked, IDENTITIES)), "the helper is asked about all servers")
        network.stop_broker()
        network.eventually(lambda: daemon.logged("lost the connection"), "the daemon notices")
        network.gate.unlink()
        network.start_broker()
        network.wait_for_members(*servers)


def test_servers_that_came_while_the_broker_was_down_are_provisioned(make_network: MakeNetwork) -> None:
    network = make_network("insecure")
    servers = network.start_servers(*IDENTITIES)
    with network.daemon() as daemon:
        network.eventually(lambda: daemon.logged("cannot connect"), "the daemon notices")
        network.start_broker()
        network.wait_for_members(*servers)


@pytest.mark.parametrize("kind", SECURED)
def test_a_password_that_the_broker_does_not_know_is_named_until_the_broker_knows_it(
    make_network: MakeNetwork, kind: str
) -> None:
    network = make_network(kind)
    password = network.settings["broker_provisioning_password"]
    network.edit("broker.cfg", f"client_password = {password}", "client_password = another")
    network.start_broker()
    with network.daemon() as daemon:
        network.eventually(lambda: daemon.logged("cannot connect"), "the daemon is refused")
        assert all("broker_provisioning_password" in line["msg"] for line in daemon.logged("cannot connect"))
        assert password not in daemon.log.read_text()
        network.stop_broker()
        network.edit("broker.cfg", "client_password = another", f"client_password = {password}")
        network.start_broker()
        network.wait_for_members(*network.start_servers("n1.example.net"))


@pytest.mark.parametrize(
    ("kind", "setting"), [("x509", "plugin.security.file.ca"), ("org", "plugin.security.choria.ca")]
)
def test_a_broker_of_another_ca_is_not_trusted_until_the_file_is_replaced(
    make_network: MakeNetwork, kind: str, setting: str
) -> None:
    other = make_network("insecure")
    network = make_network(kind)
    network.start_broker()
    (server,) = network.start_servers("n1.example.net")
    mine, others = network.directory / "pki" / "ca.pem", other.directory / "pki" / "ca.pem"
    used = network.directory / "trusted.pem"
    used.write_bytes(others.read_bytes())
    network.edit("choria.cfg", f"{setting} = {mine}", f"{setting} = {used}")
    with network.daemon() as daemon:
        network.eventually(lambda: daemon.logged("cannot connect"), "the daemon does not trust the broker")
        assert all(setting in line["msg"] for line in daemon.logged("cannot connect"))
        used.write_bytes(mine.read_bytes())
        network.wait_for_members(server)
