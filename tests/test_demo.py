"""The demo: what it shows, its helper, and the command as a whole with a real broker and a real daemon."""

from __future__ import annotations

import collections
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import provisioner.simulate
from provisioner.cli import demo, demo_progress
from provisioner.cli.demo import demo_command
from provisioner.cli.demo_progress import LiveDisplay, Page, PlainDisplay, Progress
from provisioner.monitor.metrics import Metrics
from provisioner.simulate import csr, pki
from provisioner.simulate.counts import Counts
from provisioner.simulate.networks import NETWORKS
from provisioner.simulate.trust_x509 import CertificateTrust

HELPER = Path(provisioner.simulate.__file__).with_name("sample_helper.sh")
RPCS = ("choria_provision#jwt", "choria_provision#configure")
ESCAPE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def page(**values: float) -> Page:
    return Page("".join(f'choria_provisioner_{name}{{site="demo"}} {value}\n' for name, value in values.items()))


def progress(counts: Counts | None = None, **changes: Any) -> Progress:
    defaults: dict[str, Any] = {"elapsed": 1.0, "page": Page(), "deferred": 0, "next_discovery": 30.0}
    return Progress(counts=counts or Counts(servers=9, misbehaving=1, booted=10), **{**defaults, **changes})


# --- the metrics page


def test_it_reads_the_page_that_the_daemon_serves() -> None:
    metrics = Metrics("de mo")
    metrics.provisioned.inc(3)
    metrics.rpc_time["choria_provision#jwt"].observe(0.5)
    metrics.rpc_time["choria_provision#jwt"].observe(1.5)
    read = Page(metrics.render().decode())
    assert read.value("provisioned") == 3
    assert read.value("rpc_time_count", "choria_provision#jwt") == 2
    assert read.mean("rpc_time", "choria_provision#jwt") == 1.0
    assert read.mean("helper_time") == 0.0
    assert read.lines(("provisioned", "discovered")) == ['choria_provisioner_provisioned{site="de mo"} 3']


def test_a_page_without_a_series_counts_as_zero() -> None:
    assert Page("rubbish\n").value("provisioned") == 0


# --- what is shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"next_discovery": None}, "the provisioner is starting"),
        ({"counts": Counts(servers=9, misbehaving=1, booted=4)}, "servers are booting; next discovery in 30 s"),
        ({"page": page(busy_workers=1)}, "the last ones are in work; next discovery in 30 s"),
        (
            {"counts": Counts(servers=9, misbehaving=1, booted=10, provisioned=7)},
            "2 servers wait to be found again; next discovery in 30 s",
        ),
        ({"counts": Counts(servers=9, misbehaving=1, booted=10, provisioned=9)}, "all good servers are provisioned"),
    ],
)
def test_it_says_what_it_waits_for(changes: dict[str, Any], words: str) -> None:
    assert progress(**changes).now() == words


def test_plain_lines_come_every_few_seconds() -> None:
    now, stream = 100.0, io.StringIO()
    display = PlainDisplay(stream, clock=lambda: now)
    for _ in range(21):
        display.show(progress())
        now += 0.5
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("  1 s  booted 10/10  provisioned 0/9  ")


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> Terminal:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    return Terminal()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (40, 10), (20, 5), (5, 2)])
def test_the_live_display_fits_the_terminal_and_is_drawn_over_itself(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int
) -> None:
    stream = terminal(monkeypatch, columns, lines)
    display = LiveDisplay(stream, color=True)
    display.show(progress())
    first = stream.getvalue()
    height = first.count("\n")
    assert height < lines
    for line in ESCAPE.sub("", first).splitlines():
        assert len(line) <= max(columns - 1, 10)
    display.show(progress())
    assert stream.getvalue().removeprefix(first).startswith(f"\x1b[{height}F")
    display.close()


def test_the_cursor_is_hidden_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, 80, 24)
    display = LiveDisplay(stream, color=False)
    display.show(progress())
    display.close()
    assert stream.getvalue().index("\x1b[?25l") < stream.getvalue().index("\x1b[?25h")


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for no_color, colored in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        stream = terminal(monkeypatch, 80, 24)
        demo_progress.display(stream).show(progress(Counts(servers=9, booted=10, provisioned=5, failed=1)))
        assert bool(re.search(r"\x1b\[[0-9;]*m", stream.getvalue())) is colored


def test_a_terminal_without_blocks_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, 80, 24)
    stream.encoding = "ascii"
    LiveDisplay(stream, color=False).show(progress(Counts(servers=2, provisioned=1)))
    assert stream.getvalue().isascii()


def test_pipes_and_dumb_terminals_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(demo_progress.display(io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(demo_progress.display(Terminal()), PlainDisplay)


def test_a_difference_between_metrics_and_servers_is_named() -> None:
    counts = Counts(servers=9, provisioned=9)
    counts.actions["choria_provision#jwt"] = 9
    assert demo_progress.disagreements(progress(counts, page=page(provisioned=8)), RPCS) == [
        "servers provisioned: 8 by the provisioner's metrics, 9 by the servers' count",
        "choria_provision#jwt requests: 0 by the provisioner's metrics, 9 by the servers' count",
    ]


@pytest.mark.parametrize(("errors", "rest"), [(14, ""), (15, ", 1 others")])
def test_the_summary_fits_its_lines_and_explains_the_errors(errors: int, rest: str) -> None:
    counts = Counts(servers=199, misbehaving=1, booted=200, provisioned=199, failed=4)
    text = f"""choria_provisioner_provision_errors{{site="demo"}} {errors}
choria_provisioner_rpc_errors{{rpc="choria_provision#jwt",site="demo"}} 2"""
    lines = list(demo_progress.summary(progress(counts, page=Page(text), deferred=8), RPCS))
    assert f"  errors                {errors}  8 for deferrals, 4 for failures, 2 for misbehaviour{rest}" in lines
    assert max(map(len, lines)) <= 90


# --- the helper


def ask_helper(notes: Path, document: object, *more: str) -> subprocess.CompletedProcess[str]:
    text = document if isinstance(document, str) else json.dumps(document)
    return subprocess.run(["sh", HELPER, notes, *more], input=text, capture_output=True, text=True, check=False)


def known(**facts: str) -> dict[str, object]:
    inventory = json.dumps({"agents": [], "facts": facts}, separators=(",", ":"))
    return {"identity": "web1.example.net", "csr": None, "inventory": inventory, "jwt": None}


def test_the_helper_configures_by_what_it_was_told(tmp_path: Path) -> None:
    answer = ask_helper(tmp_path, known(role="web", approval="granted"))
    configuration = json.loads(answer.stdout)["configuration"]
    assert configuration["plugin.choria.server.provision"] == "false"
    assert (configuration["identity"], configuration["collectives"]) == ("web1.example.net", "choria,web")


def test_the_helper_defers_a_server_whose_approval_is_pending_once(tmp_path: Path) -> None:
    first, second = (ask_helper(tmp_path, known(role="db", approval="pending")) for _ in range(2))
    assert json.loads(first.stdout)["defer"] is True
    assert "configuration" in json.loads(second.stdout)
    assert [note.name for note in tmp_path.iterdir()] == ["web1.example.net"]


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{}",
        {**known(role="web", approval="pending"), "identity": "../../etc/passwd"},
        {**known(role="web", approval="pending"), "identity": 'a"b'},
        known(role="web"),
        known(role='we\\b"', approval="granted"),
    ],
)
def test_the_helper_refuses_what_it_does_not_understand(tmp_path: Path, document: object) -> None:
    answer = ask_helper(tmp_path, document)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_for_an_organization_the_helper_names_its_issuer_and_the_files_of_the_server(tmp_path: Path) -> None:
    key = {"public_key": "aa", "directory": "/etc/choria", "signature": "bb"}
    document = {**known(role="db", approval="granted"), "ed25519_pubkey": key}
    answer = json.loads(ask_helper(tmp_path, document, "0f" * 32).stdout)
    assert answer["server_claims"] == {"permissions": {"submission": True, "streams": True}}
    assert {key: value for key, value in answer["configuration"].items() if ".security." in key} == {
        "plugin.security.provider": "choria",
        "plugin.security.issuer.names": "choria",
        "plugin.security.issuer.choria.public": "0f" * 32,
        "plugin.security.choria.token_file": "/etc/choria/server.jwt",
        "plugin.security.choria.seed_file": "/etc/choria/server.seed",
    }
    for directory in ('/etc/"', "", "/a b"):
        document["ed25519_pubkey"] = {**key, "directory": directory}
        assert ask_helper(tmp_path, document, "0f" * 32).returncode == 1
    assert ask_helper(tmp_path, known(role="db", approval="granted"), "0f" * 32).returncode == 1


# --- the helper that signs


class Signer:
    """Runs the helper for networks with certificates."""

    def __init__(self, directory: Path) -> None:
        self.notes = directory / "notes"
        self.notes.mkdir()
        self.authority = pki.authority()
        self.key = csr.new_key()
        self._files = directory / "ca.pem", directory / "ca-key.pem"
        self._files[0].write_text(pki.pem(self.authority.certificate))
        self._files[1].write_text(pki.key_pem(self.authority.key))

    def known(self, **changes: object) -> dict[str, object]:
        subject = {"c": "", "l": "", "o": "", "ou": "", "cn": "web1.example.net"}
        request = {"csr": csr.request(self.key, subject), "public_key": "", "ssldir": "/etc/choria/ssl"}
        return {**known(role="web", approval="granted"), "csr": request, **changes}

    def ask(self, document: object) -> subprocess.CompletedProcess[str]:
        helper = HELPER.with_name("sample_helper_x509.py")
        command: list[str | Path] = [sys.executable, "-I", helper, self.notes, *self._files]
        return subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=False)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path)


def test_the_signing_helper_gives_a_certificate_that_its_server_can_live_with(signer: Signer) -> None:
    answer = json.loads(signer.ask(signer.known()).stdout)
    assert (answer["configuration"]["collectives"], answer["ssldir"]) == ("choria,web", "/etc/choria/ssl")
    files = {"certificate": answer["certificate"], "ca": answer["ca"], "private": csr.private_pem(signer.key)}
    CertificateTrust(signer.authority.certificate).check_server(
        answer["configuration"],
        {f"/etc/choria/ssl/{name}.pem": text for name, text in files.items()},
        identity="web1.example.net",
    )


def test_the_signing_helper_defers_once(signer: Signer) -> None:
    document = signer.known(inventory=known(role="db", approval="pending")["inventory"])
    first, second = (json.loads(signer.ask(document).stdout) for _ in range(2))
    assert first["defer"] is True
    assert second["certificate"].startswith("-----BEGIN CERTIFICATE-----")
    assert [note.name for note in signer.notes.iterdir()] == ["web1.example.net"]


@pytest.mark.parametrize(
    "changes", [{"identity": "../x"}, {"csr": None}, {"inventory": "{}"}, {"csr": {"csr": "x", "ssldir": "/s"}}]
)
def test_the_signing_helper_refuses_what_it_does_not_understand(signer: Signer, changes: dict[str, object]) -> None:
    answer = signer.ask(signer.known(**changes))
    assert (answer.returncode, answer.stdout) == (1, "")
    assert len(answer.stderr.splitlines()) == 1
    assert list(signer.notes.iterdir()) == []


# --- the command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo makes its directory; one with a space in its name, as some have."""
    home = tmp_path / "temporary files"
    home.mkdir()
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr("tempfile.tempdir", None)
    return home


@pytest.mark.parametrize(
    ("kind", "proof"),
    [
        ("insecure", ""),
        ("x509", "proved fit            19  their certificates are of the CA, for their names, and fit their keys"),
        ("org", "proved fit            19  their tokens verify by the broker's rules, and fit their seeds"),
    ],
)
def test_it_provisions_everything_agrees_and_cleans_up(
    kind: str, proof: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what is deferred or fails comes back after a minute only
    monkeypatch.setattr(demo, "_unusual", lambda _count: (0, 0))
    result = CliRunner().invoke(demo_command, ["--network", kind, "--servers", "20", "--seconds-to-boot", "1"])
    assert result.exit_code == 0, result.output
    assert "All 19 good servers are provisioned." in result.output
    found = re.findall(r"(?:found by event|by discovery) +(\d+)", result.output)
    assert sum(map(int, found)) == 20
    assert 'choria_provisioner_provisioned{site="demo"} 19' in result.output
    assert proof in result.output
    signed = re.findall(r"signed requests +(\d+)", result.output)
    assert bool(signed) is (kind != "insecure")
    assert all(int(number) > 19 * 5 for number in signed)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("counted", ["unfit", "bad_signatures"])
def test_what_would_not_do_on_a_real_network_is_a_failure_at_once(counted: str, tmp_path: Path) -> None:
    network = NETWORKS["insecure"](tmp_path)
    fleet = network.fleet("nats://127.0.0.1:1", [])
    watch = demo._Watch(network, fleet, demo._Daemon(network), started=0.0, limit=math.inf)
    counts = Counts(servers=9, objections=collections.Counter({"it is wrong": 2}))
    setattr(counts, counted, 2)
    with pytest.raises(demo.DemoError, match=r"it is wrong \(2 times\)"):
        watch.over(progress(counts))


def test_what_was_not_provisioned_in_time_is_a_failure_whose_logs_are_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PATIENCE_SECONDS", 0.0)
    result = CliRunner().invoke(demo_command, ["--servers", "5", "--seconds-to-boot", "0"])
    assert result.exit_code == 1
    assert "The demo failed: 0 of 4 good servers are provisioned after" in result.output
    (kept,) = home.iterdir()
    assert f"kept in {kept}" in result.output
    assert (kept / "provisioner.yaml").exists()


def test_a_daemon_that_does_not_start_is_a_failure_with_its_own_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "WORKERS", -1)
    result = CliRunner().invoke(demo_command, ["--servers", "5"])
    assert result.exit_code == 1
    assert "the provisioner ended with exit code 1: " in result.output
    assert "workers" in result.output
    assert list(home.iterdir()) != []


def test_without_a_broker_to_start_it_says_what_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(home / "python"))
    result = CliRunner().invoke(demo_command, ["--servers", "5"])
    assert result.exit_code == 1
    assert "nats-server" in result.output


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_everything_and_leaves_nothing(home: Path, signum: int, code: int) -> None:
    command = [sys.executable, "-m", "provisioner", "demo", "--servers", "5"]
    environment = {**os.environ, "TMPDIR": str(home)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            while "the provisioner is starting" not in process.stdout.readline():
                assert process.poll() is None
            children = list(descendants(process.pid))
        finally:
            process.send_signal(signum)
        rest = process.stdout.read()
    assert process.returncode == code
    assert rest.endswith("Interrupted: everything was stopped.\n")
    assert len(children) >= 2, "broker and daemon"
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert list(home.iterdir()) == []


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def test_the_help_has_an_example() -> None:
    result = CliRunner().invoke(demo_command, ["--help"])
    assert result.exit_code == 0
    assert "choria-provisioner demo --servers 1000" in result.output
