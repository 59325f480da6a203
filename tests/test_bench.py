"""The benches: that they run, count what there is, and print tables. How fast anything is says nothing here."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import bench_connector, bench_flow, bench_helper, bench_scale
from bench.bench_flow import Cell, Limits, chart
from bench.daemon import HELPERS, helper_script
from bench.table import Table
from provisioner.choria.protocol_v1 import ProtocolV1
from provisioner.simulate.envelopes_v1 import EnvelopesV1

Rows = list[dict[str, str]]


def tables(text: str) -> list[Rows]:
    """The rows of each Markdown table, by the titles of the columns; of several with one title the first counts."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            found[-1].append([cell.strip() for cell in line[2:-2].split(" | ")])
        elif found[-1]:
            found.append([])
    return [[_row(table[0], cells) for cells in table[2:]] for table in found if table]


def _row(titles: list[str], cells: list[str]) -> dict[str, str]:
    return dict(reversed(list(zip(titles, cells, strict=True))))


def test_a_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    Table("what", "how many", "s", width=6).row("apples", 3, "0.5")

    assert capsys.readouterr().out.splitlines() == [
        "",
        "| what   | how many |       s |",
        "| ------ | -------: | ------: |",
        "| apples |        3 |     0.5 |",
    ]


def test_the_connector_is_compared_with_a_bare_socket(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_connector.peer_running() as port:
        bench_connector.report(port, 0.3, threads=(1, 2))

    ((*requests, callback, queue),) = tables(capsys.readouterr().out)
    assert [row["what"] for row in requests] == ["requests of 2 kB, 1 threads", "requests of 2 kB, 2 threads"]
    for row in (*requests, callback, queue):
        assert all(row[title] not in ("", "0") for title in ("a second", "bare socket"))


def test_every_kind_of_helper_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    bench_helper.runner(1, 16)
    bench_helper.helpers(1, 1)

    runner, helpers = tables(capsys.readouterr().out)
    assert [row["threads"] for row in runner] == ["1", "4", "16"]
    assert {"sh", "plain.py", "x509.py"} <= {row["helper"] for row in helpers}


@pytest.mark.parametrize(("kind", "helper"), [("insecure", "python3 -I -S"), ("org", "sh")])
def test_the_flow_is_measured_on_each_network(kind: str, helper: str, capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell(kind=kind, helper=helper, workers=4, latency_ms=20)

    ((limits, flow),) = bench_flow.report([cell], servers=12, seconds=0.2).values()

    assert 0 < limits.at_most <= limits.bare
    assert flow.rate > 0
    assert flow.request_ms > 0
    output = capsys.readouterr().out
    assert f"Network `{kind}`, helper `{helper}`" in output
    (((row),),) = tables(output)
    assert (row["workers"], row["latency ms"], row["servers"]) == ("4", "20", "12")


def test_a_cell_has_as_many_servers_as_fit_into_its_time() -> None:
    limits = Limits(bare=30_000, at_most=30_000, request_seconds=0.001)

    def servers(limits: Limits, workers: int) -> int:
        return bench_flow.servers_for(Cell(kind="insecure", helper="sh", workers=workers, latency_ms=0), limits, 5)

    assert servers(limits, 4) == 1000
    slow = Limits(bare=30_000, at_most=300, request_seconds=0.001)
    assert servers(slow, 4) == 20
    assert servers(slow, 64) == 128


def test_the_quick_matrix_has_every_network_and_number_of_workers() -> None:
    quick, full = bench_flow.matrix(quick=True), bench_flow.matrix(quick=False)

    assert len(full) == 48
    assert set(quick) < set(full)
    assert {(cell.kind, cell.workers) for cell in quick} == {(cell.kind, cell.workers) for cell in full}


def test_the_curve_has_a_line_for_every_latency() -> None:
    limits = Limits(bare=3000, at_most=2000, request_seconds=0.001)
    flow = bench_flow.Flow(servers=10, rate=1000, cpu_ms=(1, 1, 1), request_ms=1, cycle_seconds=0.1, peak_megabytes=60)

    picture = chart(dict.fromkeys(bench_flow.matrix(quick=False), (limits, flow))).svg()

    texts = [element.text for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    for wanted in ("latency 0 ms", "latency 20 ms", "latency 100 ms"):
        assert texts.count(wanted) == 2
    assert {"1", "4", "16", "64"} < set(texts)


def test_95_percent_of_the_cycles_ended_within_a_time() -> None:
    messages = [f"provisioned in {number / 100:.2f} s" for number in range(1, 101)]

    assert bench_flow.cycle_seconds(["provisioning", *messages, "discovered 100 servers"]) == 0.95


@pytest.mark.parametrize("way", [bench_scale.REPLIES, bench_scale.EVENTS])
def test_servers_that_come_at_once_are_counted(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    (burst,) = bench_scale.bursts(way, [700])

    assert (burst.counted, burst.dropped) == (700, 0)
    assert len(burst.livez) > 10
    assert len(burst.turns) > 10
    # some of the probed servers are done with
    assert 700 < burst.waiting < 700 + bench_scale.PROBED_SERVERS
    (((row),),) = tables(capsys.readouterr().out)
    assert (row[way], row["admitted"], row["dropped"]) == ("700", "700", "0")


def test_prepared_replies_are_those_of_a_simulated_server() -> None:
    protocol = ProtocolV1(identity="bench", caller="choria=bench", ttl=60)
    request = EnvelopesV1().open(
        protocol.request(
            agent="discovery",
            target_agent="choria_provision",
            body="cGluZw==",
            request_id=protocol.new_request_id(),
            reply_to="reply",
            connected_url="",
        )
    )

    replies = list(bench_scale.pongs(request, 3))

    for index, reply in enumerate(replies):
        opened = protocol.reply(reply)
        usual = EnvelopesV1().seal(request, sender=opened.sender, body="pong", time=opened.time or time.time())
        assert reply == usual
        assert opened.sender == bench_scale.name(index)


def test_a_wave_takes_no_more_requests_than_it_must(capsys: pytest.CaptureFixture[str]) -> None:
    seen = bench_scale.wave(30, 4)

    assert seen.requests == 30 * bench_scale.REQUESTS_PER_SERVER
    assert (seen.duplicates, seen.late, seen.discoveries) == (0, 0, 1)
    # the daemon's own startup event and its discovery come on top; the last messages may still be under way
    assert seen.traffic["in_msgs"] == pytest.approx(30 * bench_scale.MESSAGES_PER_SERVER, abs=4)
    (((row),),) = tables(capsys.readouterr().out)
    assert row["servers"] == "30"
    assert row["configured twice"] == "0"


@pytest.mark.parametrize("kind", HELPERS)
def test_a_helper_takes_a_server_out_of_provisioning_mode(kind: str, tmp_path: Path) -> None:
    helper = tmp_path / "helper"
    helper.write_text(helper_script(kind))
    helper.chmod(0o755)

    answer = subprocess.run([helper], input=b"{}", stdout=subprocess.PIPE, check=True).stdout

    assert json.loads(answer) == {"configuration": {"plugin.choria.server.provision": "false"}}
