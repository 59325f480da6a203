"""The log of a daemon at work: one line per outcome, every line findable by identity and request, and hangups."""

from __future__ import annotations

import queue
import re
import signal

import pytest

from provisioner.choria.connector import Connector
from provisioner.choria.nats import Message
from provisioner.simulate.envelopes_v1 import EnvelopesV1
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server
from tests.conftest import PATIENCE_SECONDS, Eventually, StartFleet
from tests.installation import SITE, Installation


def test_a_failure_names_the_request_as_the_server_knows_it(
    installation: Installation, start_fleet: StartFleet, connector: Connector, eventually: Eventually
) -> None:
    seen: queue.SimpleQueue[Message] = queue.SimpleQueue()
    connector.subscribe("provisioning.node.>", callback=seen.put)
    connector.flush()
    start_fleet(Server(identity="n1.example.net", site=SITE, misbehaviour=Misbehaviour.ERROR_STATUS))
    installation.start()
    eventually(lambda: installation.logged("could not provision"))

    (line,) = [line for line in installation.log() if line["msg"].startswith("could not provision")]
    request = EnvelopesV1().open(seen.get(timeout=PATIENCE_SECONDS).payload)
    assert (line["identity"], line["request_id"]) == ("n1.example.net", request.id)
    assert re.match(
        r"could not provision after \d+\.\d\d s: rpcutil#inventory: refused: simulated failure$", line["msg"]
    )


def test_what_is_dropped_names_its_request(
    installation: Installation, start_fleet: StartFleet, eventually: Eventually
) -> None:
    start_fleet(Server(identity="n1.example.net", site=SITE, misbehaviour=Misbehaviour.FOREIGN_SENDER))
    installation.start()
    eventually(lambda: installation.logged("dropped a reply"))

    (line,) = [line for line in installation.log() if line["msg"].startswith("dropped a reply")]
    assert line["identity"] == "n1.example.net"
    assert line["request_id"]


def test_in_debug_mode_every_request_can_be_followed(installation: Installation, start_fleet: StartFleet) -> None:
    fleet = start_fleet(Server(identity="n1.example.net", site=SITE))
    installation.start("run", "--debug")
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)

    answered = [line for line in installation.log() if line["msg"].endswith(" was answered")]
    assert [line["msg"].split()[0] for line in answered][:2] == ["rpcutil#inventory", "choria_provision#configure"]
    assert len({line["request_id"] for line in answered}) == len(answered)
    assert {line["identity"] for line in answered} == {"n1.example.net"}


def test_a_success_is_one_line_with_its_duration(installation: Installation, start_fleet: StartFleet) -> None:
    fleet = start_fleet(Server(identity="n1.example.net", site=SITE))
    process = installation.start()
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0

    outcomes = [line for line in installation.log() if re.match(r"provisioned in \d+\.\d\d s$", line["msg"])]
    assert [(line["identity"], line["level"], "request_id" in line) for line in outcomes] == [
        ("n1.example.net", "info", False)
    ]


@pytest.mark.parametrize("level", ["info", "fatal"])
def test_a_hangup_opens_the_log_anew_and_ends_nothing(
    installation: Installation, start_fleet: StartFleet, eventually: Eventually, level: str
) -> None:
    installation.settings["loglevel"] = level
    process = installation.start()
    eventually(installation.ready)
    installation.log_file.rename(installation.directory / "provisioner.log.1")
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
    eventually(installation.log_file.exists)

    fleet = start_fleet(Server(identity="n1.example.net", site=SITE, boots_after=0.01))
    assert fleet.wait(lambda counts: counts.complete, PATIENCE_SECONDS)
    assert process.poll() is None
