"""What authors of helpers in Python are given: `provisioner.helper`."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import contract
from provisioner import helper as helper_module
from provisioner.contract import ANSWER_LIMIT_BYTES
from provisioner.helper import (
    Answer,
    AnswerError,
    HelperError,
    Server,
    configure,
    defer,
    fail,
    shutdown,
    try_out,
)
from provisioner.host import answer, helper_process
from provisioner.host.facts import parse
from provisioner.host.helper_process import ExitError, Output
from provisioner.host.provision import check

GUIDE = Path(__file__).parent.parent / "docs/helpers.md"
FIXTURES = Path(__file__).parent / "fixtures"
#: What real servers have said, on a network of certificates and on that of an organization.
CERTIFICATES, ORGANIZATION = FIXTURES / "v1/helper-input.json", FIXTURES / "v2/helper-input.json"
GOOD = {"plugin.choria.server.provision": "false", "loglevel": "info"}
NAME = "n1.example.net"

Decide = Callable[[Server], Answer]
#: For one who does not check types.
unchecked: Any = configure


def server(**members: Any) -> Server:
    """One that is known by some members of the input."""
    return Server({"identity": NAME, **members})


def always(*_: object, **members: Any) -> Decide:
    """Decides this, whatever the server."""
    return lambda _server: members


def nested(depth: int) -> Any:
    inner: Any = []
    for _ in range(depth):
        inner = [inner]
    return inner


def refusal(decide: Decide, document: Mapping[str, Any] | Path = CERTIFICATES) -> str:
    with pytest.raises(AnswerError) as caught:
        try_out(decide, document)
    return str(caught.value).removeprefix("the helper's answer is refused: ")


# what is known


def test_all_that_a_real_server_said_is_there() -> None:
    known = Server(json.loads(CERTIFICATES.read_text()))
    assert known.identity == "i1.lab.example"
    assert known.csr.csr.startswith("-----BEGIN CERTIFICATE REQUEST-----\n")
    assert known.csr.public_key.startswith("-----BEGIN PUBLIC KEY-----\n")
    assert known.csr.ssldir == "/etc/choria/ssl"
    assert known.inventory["main_collective"] == "provisioning"
    assert known.version == known.inventory["version"] != ""
    assert known.jwt["purpose"] == "choria_provisioning"


def test_all_that_a_server_of_an_organization_said_is_there() -> None:
    known = Server(json.loads(ORGANIZATION.read_text()))
    assert len(bytes.fromhex(known.ed25519_pubkey.public_key)) == 32
    assert len(bytes.fromhex(known.ed25519_pubkey.signature)) == 64
    assert known.ed25519_pubkey.directory == "/srv"


@pytest.mark.parametrize(("part", "feature"), [("csr", "pki"), ("ed25519_pubkey", "ed25519"), ("jwt", "jwt")])
def test_what_the_daemon_did_not_ask_for_names_the_feature(part: str, feature: str) -> None:
    with pytest.raises(HelperError) as caught:
        getattr(server(), part)
    assert str(caught.value) == f"the input has no {part}: it comes with features: {feature}: true in provisioner.yaml"


def test_an_inventory_may_lack_everything() -> None:
    assert (server().facts, server().version) == ({}, "")
    strange = server(inventory='{"facts": [1], "version": 3}')
    assert (strange.facts, strange.version) == ({}, "")


def test_facts_are_of_any_type() -> None:
    facts = {"role": "web", "cores": 8, "os": {"family": "Debian"}}
    assert server(inventory=json.dumps({"facts": facts})).facts == facts
    assert server(inventory={"facts": facts}).facts == facts


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"identity": 1}, "the input is none of the daemon's: identity: a string is wanted"),
        ({"inventory": "{"}, "the input is none of the daemon's: inventory: no text that holds JSON"),
        ({"inventory": "[]"}, "the inventory of the server is no JSON object"),
    ],
)
def test_another_input_is_an_error_that_names_the_member(members: dict[str, Any], text: str) -> None:
    with pytest.raises(HelperError) as caught:
        server(**members)
    assert str(caught.value) == text


def test_parts_of_another_kind_are_an_error_that_names_the_member() -> None:
    with pytest.raises(HelperError, match="csr: an object is wanted"):
        _ = server(csr="x").csr
    with pytest.raises(HelperError, match=r"csr\.public_key: a string is wanted"):
        _ = server(csr={"csr": "x", "ssldir": "y"}).csr


# what is answered


def test_what_was_not_given_is_not_answered() -> None:
    assert configure(GOOD, certificate="", server_claims=None) == {"configuration": GOOD}


def test_everything_can_be_answered() -> None:
    everything: dict[str, Any] = {
        "certificate": "C",
        "ca": "A",
        "key": "K",
        "ssldir": "/ssl",
        "server_claims": {
            "ou": "acme",
            "exp": 1_900_000_000,
            "collectives": ["one"],
            "pub_subjects": ["a.>"],
            "permissions": {"streams": True, "submission": True, "governor": False, "service_host": False},
        },
        "action_policies": {"rpcutil.policy": "policy default deny"},
        "opa_policies": {"default.rego": "package x"},
        "upgrade": "0.30.0",
        "msg": "welcome",
    }
    given_answer = try_out(lambda _: configure(GOOD, **everything), CERTIFICATES)
    assert given_answer == {"configuration": GOOD, **everything}
    read = answer.parse(json.dumps(given_answer).encode())
    assert read.server_claims.permissions == everything["server_claims"]["permissions"]


@pytest.mark.parametrize(
    ("decide", "wanted"),
    [
        (lambda _: defer("no owner"), {"defer": True, "msg": "no owner"}),
        (lambda _: shutdown("scrap"), {"shutdown": True, "msg": "scrap"}),
        (lambda _: shutdown(), {"shutdown": True, "msg": ""}),
    ],
)
def test_a_decision_can_be_made_anywhere(decide: Decide, wanted: Answer) -> None:
    def cautious(server: Server) -> Answer:
        try:
            return decide(server)
        except Exception:  # noqa: BLE001 - as an author may do
            return configure(GOOD)

    assert try_out(cautious, CERTIFICATES) == wanted


def test_to_fail_is_an_error() -> None:
    with pytest.raises(HelperError, match=r"^the database is away$"):
        try_out(lambda _: fail("the database is away"), CERTIFICATES)


def test_a_made_up_server_needs_no_more_than_the_helper_looks_at() -> None:
    def decide(server: Server) -> Answer:
        return configure({**GOOD, "collectives": server.facts["role"]})

    made_up = {"identity": NAME, "inventory": {"facts": {"role": "web"}}}
    assert try_out(decide, made_up)["configuration"]["collectives"] == "web"


@pytest.mark.parametrize(
    ("decide", "text"),
    [
        (lambda _: configure({}), "configuration: there is none"),
        (lambda _: unchecked("a=b"), "configuration: an object is wanted, a string came"),
        (lambda _: unchecked(GOOD, server_claims=["ou"]), "server_claims: an object is wanted, a list came"),
        (lambda _: unchecked(GOOD, upgrade=nested(5000)), "upgrade: a string is wanted, a list came"),
        (always(configuration={**GOOD, "a": 1}), "configuration.a: a string is wanted, an integer came"),
        (always(configuration={**GOOD, "a": Path("/x")}), "configuration.a: a string is wanted, a PosixPath came"),
        (always(configuration={**GOOD, "a": b"x"}), "configuration.a: a string is wanted, a bytes came"),
        (lambda _: configure({"loglevel": "info"}), "must be set to false: the node's JWT turns it on"),
        (lambda _: configure(GOOD, certificate="C"), "certificate: useless without ca"),
        (lambda _: configure(GOOD, opa_policies={"x": "y"}), "opa_policies.x: a plain file name that ends in .rego"),
        (lambda _: configure(GOOD, server_claims={"exp": float("nan")}), "NaN is no JSON"),
        (lambda _: configure(GOOD, server_claims={"ou": {1, 2}}), "server_claims.ou: a string is wanted, a set came"),
        (lambda _: configure(GOOD, server_claims={"permission": {}}), "server_claims.permission: there is no such"),
        (
            lambda _: configure(GOOD, server_claims={"permissions": {"stream": True}}),
            "permissions.stream: there is no such member, but submission, streams, governor, service_host",
        ),
        (always(configuration=GOOD, certficate="C"), "certficate: there is no such member, but defer, "),
        (lambda _: configure(GOOD, msg="x" * ANSWER_LIMIT_BYTES), f"it is longer than {ANSWER_LIMIT_BYTES} bytes"),
    ],
)  # fmt: skip
def test_what_the_daemon_would_not_take_is_refused(decide: Decide, text: str) -> None:
    assert text in refusal(decide)


@pytest.mark.parametrize(
    ("decide", "text"),
    [
        (lambda _: None, "decide returned nothing"),
        (lambda _: ["x"], "decide returned a list"),
        (lambda _: defer, "decide returned a function"),
        (lambda _: sys.exit(), "decide ended the program without an answer"),
        (lambda _: sys.exit(0), "decide ended the program without an answer"),
    ],
)
def test_a_decision_that_is_none_says_what_to_return(decide: Decide, text: str) -> None:
    with pytest.raises(HelperError) as caught:
        try_out(decide, CERTIFICATES)
    assert str(caught.value) == f"{text}: return what configure() gives"


def test_any_mapping_can_be_answered() -> None:
    layers = ChainMap({"loglevel": "debug"}, GOOD)
    claims, policies = MappingProxyType({"ou": "acme"}), MappingProxyType({"x.rego": "package x"})
    assert try_out(lambda _: configure(layers, server_claims=claims, opa_policies=policies), CERTIFICATES) == {
        "configuration": {**GOOD, "loglevel": "debug"},
        "server_claims": {"ou": "acme"},
        "opa_policies": {"x.rego": "package x"},
    }


def test_without_a_token_provisioning_must_be_off_in_words() -> None:
    made_up = {"identity": NAME}
    assert "which may turn it on, is not known" in refusal(always(configuration={"a": "b"}), made_up)
    for claims in ({"chpd": False}, {}):
        assert try_out(always(configuration={"a": "b"}), {**made_up, "jwt": claims})


def test_an_upgrade_needs_no_configuration() -> None:
    assert try_out(lambda _: configure({}, upgrade="0.30.0"), CERTIFICATES)["upgrade"] == "0.30.0"


def test_a_certificate_needs_no_directory_when_the_server_has_named_one() -> None:
    decide = always(configuration=GOOD, certificate="C", ca="A")
    assert refusal(decide, {"identity": NAME}) == "ssldir: needed with a certificate"
    assert try_out(decide, CERTIFICATES)


def test_another_identity_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    try_out(lambda _: configure({**GOOD, "identity": "n2"}), CERTIFICATES)
    assert capsys.readouterr().err.startswith("warning: configuration.identity in the helper's answer is not")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.dictionaries(
    st.sampled_from([*GOOD, "x.policy", "x.rego", "#a", ""]), st.sampled_from(["false", "1", "a\n"])
)
TEXT = st.sampled_from(["", "x"])
ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "defer": st.booleans() | JSON,
        "key": TEXT | JSON,
        "certificate": TEXT | JSON,
        "ca": TEXT | JSON,
        "ssldir": TEXT,
        "configuration": TEXTS | JSON,
        "action_policies": TEXTS | JSON,
        "opa_policies": TEXTS,
        "server_claims": st.fixed_dictionaries({}, optional={"exp": JSON, "collectives": JSON, "ou": JSON}),
    },
)


def outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except AnswerError as error:
        return str(error)
    return "taken"


@given(ANSWERS, st.sampled_from([CERTIFICATES, ORGANIZATION]))
def test_it_refuses_what_the_daemon_refuses_and_in_the_same_words(members: Answer, saved: Path) -> None:
    document = saved.read_bytes()

    def daemon() -> None:
        check(parse(document), answer.parse(json.dumps(members).encode()), upgrades=False)

    assert outcome(lambda: try_out(always(**members), saved)) == outcome(daemon)


# as a program


class Program:
    """A helper that is run as the daemon runs it."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "helper.py"
        self.command = [sys.executable, str(self.file)]

    def write(self, body: str) -> None:
        text = f"""
            from provisioner.helper import *
            GOOD = {GOOD}
            def decide(server):
            {textwrap.indent(textwrap.dedent(body).strip(), " " * 16).lstrip()}
            run(decide)
        """
        head, _, tail = textwrap.dedent(text).strip().partition("decide(server):\n")
        self.file.write_text(f"{head}decide(server):\n    {tail}\n")

    def run(self, document: bytes | None = None) -> Output:
        document = CERTIFICATES.read_bytes() if document is None else document
        return helper_process.run(self.command, document, timeout=30, cancelled=lambda: False)

    def complaint(self, document: bytes | None = None) -> str:
        """What it says when it fails, which is one line."""
        with pytest.raises(ExitError) as caught:
            self.run(document)
        assert caught.value.code == 1
        text = str(caught.value).partition("its standard error: ")[2]
        assert " | " not in text
        return text


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def test_the_answer_is_printed_for_the_daemon(program: Program) -> None:
    program.write("return configure({**GOOD, 'identity': server.identity})")
    output = program.run()
    assert answer.parse(output.stdout).configuration == {**GOOD, "identity": "i1.lab.example"}
    assert output.stderr == ""


def test_a_deferral_is_printed_for_the_daemon(program: Program) -> None:
    program.write("defer('no owner: ü')")
    read = answer.parse(program.run().stdout)
    assert (read.defer, read.msg) == (True, "no owner: ü")


def test_what_is_printed_while_it_decides_does_not_spoil_the_answer(program: Program) -> None:
    program.write("import os; print('hm'); os.system('echo from a child'); return configure(GOOD)")
    output = program.run()
    assert answer.parse(output.stdout).configuration == GOOD
    assert set(output.stderr.split(" | ")) == {"hm", "from a child"}


def test_what_was_printed_before_does_not_spoil_the_answer(program: Program) -> None:
    program.write("return configure(GOOD)")
    program.file.write_text("print('hm')\n" + program.file.read_text())
    # as the samples do: an environment in which Python is told not to buffer has no say
    program.command.insert(1, "-I")
    output = program.run()
    assert answer.parse(output.stdout).configuration == GOOD
    assert output.stderr == "hm"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("fail('the database is away')", "the database is away"),
        ("return configure({**GOOD, 'n': server.facts['x']})", "KeyError: 'x' (line 4 of helper.py)"),
        ("open('/missing/ca.pem')", "/missing/ca.pem: No such file or directory (line 4 of helper.py)"),
        ("read_text('/missing/ca.pem')", "/missing/ca.pem: No such file or directory (line 4 of helper.py)"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines (line 4 of helper.py)"),
        ("raise AssertionError", "AssertionError (line 4 of helper.py)"),
        ("import sys; sys.exit('no role')", "no role"),
        ("return configure(GOOD, certficate='')", "TypeError: configure() got an unexpected keyword argument "),
        ("return configure({})", "the helper's answer is refused: configuration: there is none"),
        ("server.ed25519_pubkey", "the input has no ed25519_pubkey: it comes with features: ed25519: true"),
    ],
)
def test_whatever_goes_wrong_is_one_line(program: Program, body: str, text: str) -> None:
    program.write(body)
    assert program.complaint().startswith(text)


def test_the_line_is_told_wherever_the_helper_is_started_from(program: Program) -> None:
    program.write("return server.facts['x']")
    name = program.file.name
    program.command = [
        "sh",
        "-c",
        f"cd {shlex.quote(str(program.file.parent))} && {shlex.quote(sys.executable)} {name}",
    ]
    assert program.complaint() == "KeyError: 'x' (line 4 of helper.py)"


def test_a_line_is_not_longer_than_the_daemon_tells(program: Program) -> None:
    program.write("fail('x' * 100_000)")
    assert program.complaint() == "x" * 499 + "…"


@pytest.mark.parametrize(
    ("document", "text"),
    [(b"", "not JSON"), (b"hello", "not JSON"), (b"\xff", "not JSON"), (b"[]", "no JSON object"), (b"{}", "identity:")],
)
def test_an_input_that_is_none_is_told(program: Program, document: bytes, text: str) -> None:
    program.write("return configure(GOOD)")
    assert program.complaint(document).startswith(f"the input is none of the daemon's: {text}")


def test_on_a_terminal_it_says_where_an_input_comes_from(program: Program) -> None:
    program.write("return configure(GOOD)")
    ours, terminal = pty.openpty()
    try:
        done = subprocess.run(program.command, stdin=terminal, capture_output=True, text=True, timeout=30, check=False)
    finally:
        os.close(ours)
        os.close(terminal)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the input comes on standard input: add <FILE" in done.stderr


@pytest.mark.parametrize(
    ("body", "begin", "end"),
    [
        ("return server.facts['x']", "Traceback (most recent call last):", "KeyError: 'x' (line 4 of helper.py)\r\n"),
        ("fail('the database is away')", "the database", " is away\r\n"),
    ],
)
def test_on_a_terminal_only_an_unexpected_exception_is_told_with_its_traceback(
    program: Program, body: str, begin: str, end: str
) -> None:
    program.write(body)
    ours, terminal = pty.openpty()
    with CERTIFICATES.open("rb") as saved:
        subprocess.run(
            program.command, stdin=saved, stdout=subprocess.DEVNULL, stderr=terminal, timeout=30, check=False
        )
    os.close(terminal)
    told = os.read(ours, 65536).decode()
    os.close(ours)
    assert told.startswith(begin)
    assert told.endswith(end)


def test_it_starts_with_next_to_nothing_but_json() -> None:
    code = "import sys, json, os; before = set(sys.modules); sys.path.append(sys.argv[1]); import provisioner.helper; "
    code += "print(*sorted(set(sys.modules) - before))"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, check=True)
    ours = {"provisioner", "provisioner.contract", "provisioner.errors", "provisioner.helper"}
    assert set(done.stdout.split()) - ours <= {"__future__", "collections.abc", "math"}


# as it is documented


def documented(language: str) -> list[str]:
    """The programs in the documentation that are of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_shell_script_of_the_guide_is_one_that_the_daemon_takes() -> None:
    (script,) = documented("sh")
    document = CERTIFICATES.read_bytes()
    output = helper_process.run(["/bin/sh", "-c", script], document, timeout=30, cancelled=lambda: False)
    assert check(parse(document), answer.parse(output.stdout), upgrades=False) == []


def test_the_programs_of_the_guide_do_what_it_says(tmp_path: Path, program: Program) -> None:
    decides, tests = documented("python")
    program.file.write_text(decides)
    members = json.loads(CERTIFICATES.read_text()) | {"inventory": json.dumps({"facts": {"role": "web"}})}
    (tmp_path / "web1.json").write_text(json.dumps(members))
    read = answer.parse(program.run((tmp_path / "web1.json").read_bytes()).stdout)
    assert read.configuration["collectives"] == "mcollective,web"
    assert sum(1 for line in decides.splitlines() if line) <= 10

    names = re.findall(r"^def (test_\w+)", tests, re.MULTILINE)
    (tmp_path / "tests.py").write_text(tests + "".join(f"{name}()\n" for name in names))
    done = subprocess.run([sys.executable, "tests.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (len(names), done.returncode, done.stderr) == (2, 0, "")


def test_the_docstring_has_a_program_that_works(program: Program) -> None:
    assert helper_module.__doc__ is not None
    lines = [line for line in helper_module.__doc__.splitlines() if line.startswith("    ") or not line]
    program.file.write_text(textwrap.dedent("\n".join(lines)))
    assert answer.parse(program.run().stdout).configuration == GOOD


def test_the_guide_knows_everything_that_the_module_has() -> None:
    text = GUIDE.read_text()
    assert [name for name in helper_module.__all__ if name not in text and name not in ("CSR", "SigningKey")] == []
    members = attrs.fields_dict(answer.Answer) | attrs.fields_dict(answer.ServerClaims)
    assert [name for name in (*members, *contract.PERMISSIONS) if f"`{name}`" not in text] == []
    assert {name for names in helper_module._MEMBERS.values() for name in names} == {*members, *contract.PERMISSIONS}
