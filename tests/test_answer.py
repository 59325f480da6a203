"""What the helper may answer, what is refused, and that no error shows what it said."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import contract
from provisioner.contract import AnswerError
from provisioner.errors import HostError
from provisioner.host.answer import Answer, ServerClaims, parse

PREFIX = "the helper's answer is refused: "
PROVISION = "plugin.choria.server.provision"
#: the least that a node can be configured with
CONFIGURATION = {PROVISION: "false", "identity": "n1.example.net"}


def parsed(**members: object) -> Answer:
    return parse(json.dumps(members).encode())


def refusal(stdout: bytes) -> str:
    with pytest.raises(AnswerError) as caught:
        parse(stdout)
    return str(caught.value).removeprefix(PREFIX)


def checked(
    *, csr_ssldir: str | None = None, provision_default: bool | None = True, **members: Any
) -> tuple[list[str], str]:
    """The warnings, or the error."""
    given_answer = Answer(**{"configuration": CONFIGURATION, **members})
    try:
        return check(given_answer, csr_ssldir=csr_ssldir, provision_default=provision_default), ""
    except AnswerError as error:
        return [], str(error).removeprefix(PREFIX)


def check(wanted: Answer, *, csr_ssldir: str | None, provision_default: bool | None) -> list[str]:
    """The warnings."""
    return contract.check(
        attrs.asdict(wanted, recurse=False),
        identity="n1.example.net",
        csr_ssldir=csr_ssldir,
        provision_default=provision_default,
    )


def problem(**members: Any) -> str:
    return checked(**members)[1]


# reading


def test_every_key_is_read() -> None:
    assert parsed(
        defer=True,
        shutdown=True,
        msg="busy",
        key="K",
        certificate="C",
        ca="A",
        ssldir="/ssl",
        configuration={"loglevel": "info"},
        action_policies={"rpcutil.policy": "policy default deny"},
        opa_policies={"default.rego": "package x"},
        server_claims={
            "ou": "acme",
            "exp": 1_900_000_000,
            "collectives": ["one", "two"],
            "pub_subjects": ["a.>"],
            "permissions": {"streams": True, "governor": False},
        },
        upgrade="0.30.0",
    ) == Answer(
        defer=True,
        shutdown=True,
        msg="busy",
        key="K",
        certificate="C",
        ca="A",
        ssldir="/ssl",
        configuration={"loglevel": "info"},
        action_policies={"rpcutil.policy": "policy default deny"},
        opa_policies={"default.rego": "package x"},
        server_claims=ServerClaims(
            ou="acme",
            exp=1_900_000_000,
            collectives=("one", "two"),
            pub_subjects=("a.>",),
            permissions={"streams": True, "governor": False},
        ),
        upgrade="0.30.0",
    )


def test_every_key_is_optional_and_others_are_ignored() -> None:
    assert parse(b"{}") == Answer()
    assert parsed(answer=42, server_claims={"purpose": 1, "permissions": {"all": "yes"}}) == Answer()


def test_white_space_around_the_document_is_fine() -> None:
    assert parse(b'\r\n\t {"defer": true}\n\n').defer


def test_null_counts_as_absent_on_every_level() -> None:
    everything = ["defer", "msg", "configuration", "action_policies", "server_claims", "upgrade"]
    assert parsed(**dict.fromkeys(everything)) == Answer()
    assert parsed(configuration={"a": None, "b": "c"}).configuration == {"b": "c"}
    assert parsed(server_claims={"ou": None, "exp": None, "collectives": None, "permissions": None}) == Answer()
    assert parsed(server_claims={"permissions": {"streams": None}}) == Answer()


def test_keys_match_in_any_letter_case() -> None:
    assert parse(b'{"Defer": true}').defer
    assert parsed(SHUTDOWN=True, Server_Claims={"OU": "acme", "Permissions": {"Streams": True}}) == Answer(
        shutdown=True, server_claims=ServerClaims(ou="acme", permissions={"streams": True})
    )


@pytest.mark.parametrize(
    ("given_exp", "read"),
    [(0, 0), (-5, -5), (157680000, 157680000), (1.9e9, 1_900_000_000), (253_402_300_799, 253_402_300_799)],
)
def test_an_expiry_is_any_time_before_the_year_10000(given_exp: float, read: int) -> None:
    assert parsed(server_claims={"exp": given_exp}).server_claims.exp == read


def test_settings_keep_their_letter_case() -> None:
    assert parsed(configuration={"a": "1", "A": "2"}).configuration == {"a": "1", "A": "2"}


def test_of_duplicate_keys_the_last_one_wins_whatever_its_letter_case() -> None:
    assert parse(b'{"msg": "a", "msg": "b"}').msg == "b"
    assert parse(b'{"msg": "a", "MSG": "b"}').msg == "b"
    assert parse(b'{"msg": "a", "MSG": "b", "msg": "c"}').msg == "c"
    assert parse(b'{"configuration": {"a": "1", "a": "2"}}').configuration == {"a": "2"}


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (
            {"configuration": {"registerinterval": 300}},
            "configuration.registerinterval: a string is wanted, an integer came",
        ),
        ({"configuration": {"a": True}}, "configuration.a: a string is wanted, a boolean came"),
        ({"configuration": {"a": 1.5}}, "configuration.a: a string is wanted, a number came"),
        ({"configuration": {"a": ["b"]}}, "configuration.a: a string is wanted, a list came"),
        ({"configuration": "a=b"}, "configuration: an object is wanted, a string came"),
        ({"configuration": {"a b\n": 1}}, "configuration.'a b\\n': a string is wanted, an integer came"),
        ({"defer": "true"}, "defer: a boolean is wanted, a string came"),
        ({"Defer": 1}, "defer: a boolean is wanted, an integer came"),
        ({"msg": {}}, "msg: a string is wanted, an object came"),
        ({"key": 1}, "key: a string is wanted, an integer came"),
        ({"action_policies": []}, "action_policies: an object is wanted, a list came"),
        ({"opa_policies": {"x.rego": 1}}, "opa_policies.x.rego: a string is wanted, an integer came"),
        ({"server_claims": 1}, "server_claims: an object is wanted, an integer came"),
        ({"server_claims": {"exp": "1"}}, "server_claims.exp: seconds since the epoch are wanted, a string came"),
        ({"server_claims": {"exp": True}}, "server_claims.exp: seconds since the epoch are wanted, a boolean came"),
        (
            {"server_claims": {"exp": 253_402_300_800}},
            "server_claims.exp: seconds since the epoch are wanted, a time after the year 9999 came",
        ),
        ({"server_claims": {"collectives": "a"}}, "server_claims.collectives: a list is wanted, a string came"),
        ({"server_claims": {"collectives": ["", None]}}, "server_claims.collectives[1]: a string is wanted, null came"),
        ({"server_claims": {"permissions": []}}, "server_claims.permissions: an object is wanted, a list came"),
        (
            {"server_claims": {"permissions": {"streams": "yes"}}},
            "server_claims.permissions.streams: a boolean is wanted, a string came",
        ),
        ({"upgrade": 0.3}, "upgrade: a string is wanted, a number came"),
        (
            {"server_claims": {"collectives": ["\ud800"]}},
            "server_claims.collectives[0]: half of a surrogate pair, which is no text",
        ),
        ({"configuration": {" " * 200: 1}}, f"configuration.{' ' * 80!r}: a string is wanted, an integer came"),
        ({"msg": "\ud800"}, "msg: half of a surrogate pair, which is no text"),
        ({"configuration": {"\udc00": "a"}}, "a key of configuration: half of a surrogate pair, which is no text"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_an_error_that_names_the_key_and_what_came(members: dict[str, object], text: str) -> None:
    assert refusal(json.dumps(members).encode()) == text


@pytest.mark.parametrize(
    ("stdout", "text"),
    [
        (b"", "it is not one JSON document: expecting value, line 1 column 1"),
        (b" \n", "it is not one JSON document: expecting value, line 2 column 1"),
        (b"done", "it is not one JSON document: expecting value, line 1 column 1"),
        (b'{"msg": "s3cret}', "it is not one JSON document: unterminated string starting at, line 1 column 9"),
        (b'{"msg": "s3\\cret"}', "it is not one JSON document: invalid \\escape, line 1 column 12"),
        (b'{}\n{"defer": true}', "it is not one JSON document: extra data, line 2 column 1"),
        (b"{} trailing", "it is not one JSON document: extra data, line 1 column 4"),
        (b"\xef\xbb\xbf{}", "a byte order mark stands before the JSON document"),
        ("{}".encode("utf-16"), "it is not UTF-8 at byte 0"),
        (b'{"msg": "\xe9"}', "it is not UTF-8 at byte 9"),
        (b"null", "the document: an object is wanted, null came"),
        (b"[]", "the document: an object is wanted, a list came"),
        (b'"defer"', "the document: an object is wanted, a string came"),
        (b'{"x": NaN}', "NaN is no JSON"),
        (b'{"server_claims": {"exp": -Infinity}}', "-Infinity is no JSON"),
        (b'{"x": 1e999}', "a number in it is too large"),
        (b'{"x": ' + b"9" * 5000 + b"}", "a number in it has too many digits"),
        (b'{"x": ' + b"[" * 100_000, "lists and objects in it are nested too deeply"),
    ],
)
def test_anything_but_one_strict_document_is_an_error(stdout: bytes, text: str) -> None:
    assert refusal(stdout) == text


def test_answer_errors_concern_one_host() -> None:
    assert issubclass(AnswerError, HostError)


def test_the_repr_shows_no_value() -> None:
    shown = repr(parsed(msg="s3cret", key="s3cret", configuration={"a": "s3cret"}, server_claims={"ou": "s3cret"}))
    assert "s3cret" not in shown


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KEYS = """defer Shutdown msg key certificate ca ssldir configuration action_policies opa_policies server_claims upgrade
SERVER_CLAIMS ou exp collectives pub_subjects permissions streams"""
KNOWN = st.sampled_from(KEYS.split())
ANSWERS = st.dictionaries(KNOWN | st.text(), JSON | st.dictionaries(KNOWN, JSON, max_size=5), max_size=6)


@given(st.binary())
def test_any_bytes_are_an_answer_or_an_answer_error(stdout: bytes) -> None:
    with contextlib.suppress(AnswerError):
        parse(stdout)


@given(ANSWERS, st.none() | st.text(), st.none() | st.booleans())
def test_any_json_is_read_and_checked_or_an_answer_error_of_one_line(
    members: dict[str, object], csr_ssldir: str | None, provision_default: bool | None
) -> None:
    lines: list[str] = []
    try:
        read = parse(json.dumps(members).encode())
        lines = check(read, csr_ssldir=csr_ssldir, provision_default=provision_default)
    except AnswerError as error:
        lines = [str(error)]
    assert all(line.isprintable() for line in lines)


TEXTS = st.dictionaries(st.text(), st.text(), max_size=4)


@given(
    st.builds(
        Answer,
        defer=st.booleans(),
        key=st.text(max_size=2),
        certificate=st.text(max_size=2),
        ca=st.text(max_size=2),
        configuration=TEXTS,
        action_policies=TEXTS,
        opa_policies=TEXTS,
    )
)
def test_an_answer_that_passes_writes_the_lines_it_names_and_no_other(wanted: Answer) -> None:
    try:
        check(wanted, csr_ssldir=None, provision_default=False)
    except AnswerError:
        return
    if not wanted.defer:
        lines = "".join(f"{key}={value}\n" for key, value in wanted.configuration.items()).split("\n")[:-1]
        assert [line.partition("=")[::2] for line in lines] == list(wanted.configuration.items())
        assert not any("/" in name for name in (*wanted.action_policies, *wanted.opa_policies))


# checking


def test_a_good_answer_has_neither_errors_nor_warnings() -> None:
    assert checked(
        certificate="C",
        ca="A",
        key="K",
        ssldir="/ssl",
        action_policies={"rpcutil.policy": "policy default deny", "my-agent_2.policy": ""},
        opa_policies={"default.rego": "package x"},
    ) == ([], "")


@pytest.mark.parametrize("members", [{"defer": True}, {"shutdown": True}, {"defer": True, "shutdown": True}])
def test_of_an_answer_that_defers_or_shuts_down_nothing_else_is_checked(members: dict[str, Any]) -> None:
    assert checked(configuration={}, key="K", opa_policies={"../x": ""}, **members) == ([], "")


def test_an_empty_configuration_is_an_error() -> None:
    assert problem(configuration={}) == "configuration: there is none"
    assert problem(configuration={}, upgrade="0.30.0") == "configuration: there is none", "upgrades are off"


@pytest.mark.parametrize("value", ["0", "no", "false", "n", "f", "False", "NO", " false "])
@pytest.mark.parametrize("provision_default", [True, False, None])
def test_provisioning_may_be_any_false_of_chorias(value: str, provision_default: bool | None) -> None:
    assert checked(configuration={PROVISION: value}, provision_default=provision_default) == ([], "")


@pytest.mark.parametrize("value", ["true", "1", "off", "falsch", "f alse", "none"])
@pytest.mark.parametrize("provision_default", [True, False, None])
def test_provisioning_may_be_nothing_else(value: str, provision_default: bool | None) -> None:
    text = problem(configuration={PROVISION: value}, provision_default=provision_default)
    assert text == f"configuration.{PROVISION}: must be a false of Choria's: 0, no, false, n or f"


@pytest.mark.parametrize("configuration", [{"a": "b"}, {PROVISION: ""}, {PROVISION: "  "}])
def test_provisioning_may_be_unset_only_when_the_nodes_jwt_is_known_to_leave_it_off(
    configuration: dict[str, str],
) -> None:
    where = f"configuration.{PROVISION}: must be set to false: the node's JWT"
    assert checked(configuration=configuration, provision_default=False) == ([], "")
    assert problem(configuration=configuration, provision_default=True) == f"{where} turns it on"
    assert problem(configuration=configuration, provision_default=None) == (
        f"{where}, which may turn it on, is not known"
    )


@pytest.mark.parametrize("evil", ["\n", "\r", "\r\n", "\0"])
def test_line_breaks_in_the_configuration_are_an_error(evil: str) -> None:
    text = problem(configuration={**CONFIGURATION, "loglevel": f"info{evil}{PROVISION}=true"})
    assert text == "configuration.loglevel: a line break or NUL in the key or the value"
    assert "a line break or NUL" in problem(configuration={**CONFIGURATION, f"log{evil}level": "info"})


@pytest.mark.parametrize("key", ["", "#loglevel", "log=level", " loglevel", "loglevel\t", f"{PROVISION} ", "="])
def test_a_key_that_the_server_would_read_as_something_else_is_an_error(key: str) -> None:
    assert "no name of a setting" in problem(configuration={**CONFIGURATION, key: "true"})


def test_a_value_may_hold_anything_else_that_fits_on_a_line() -> None:
    assert problem(configuration={**CONFIGURATION, "a": "x = #y; ü", "empty": ""}) == ""


def test_a_line_that_would_end_the_servers_reading_is_an_error() -> None:
    fits = "x" * (64 * 1024 - 1 - len("a="))
    assert problem(configuration={**CONFIGURATION, "a": fits}) == ""
    assert problem(configuration={**CONFIGURATION, "a": fits + "x"}).startswith("configuration.a: too long")
    assert problem(configuration={**CONFIGURATION, "a": fits[1:] + "ü"}).startswith("configuration.a: too long")


@pytest.mark.parametrize(
    "name",
    ["rpcutil", "../x", "a/b", "/etc/x", "a\\b", "", ".hidden", "..", "a\n", "a\0", "a\x7f", "x" * 260, "ü" * 130],
)
def test_policies_need_plain_file_names(name: str) -> None:
    wanted = "a plain file name that ends in"
    assert f"{wanted} .policy" in problem(action_policies={f"{name}.policy" if name != "rpcutil" else name: "x"})
    assert f"{wanted} .rego" in problem(opa_policies={f"{name}.rego" if name != "rpcutil" else name: "x"})


def test_each_kind_of_policy_has_its_own_ending() -> None:
    assert problem(action_policies={"x.rego": ""}) == (
        "action_policies.x.rego: a plain file name that ends in .policy is wanted"
    )
    assert (
        problem(opa_policies={"a.policy": ""})
        == "opa_policies.a.policy: a plain file name that ends in .rego is wanted"
    )


def test_certificate_and_ca_come_together_and_with_a_directory() -> None:
    assert problem(certificate="C", ssldir="/ssl") == "certificate: useless without ca"
    assert problem(ca="A", ssldir="/ssl") == "ca: useless without certificate"
    assert problem(certificate="C", ca="A") == "ssldir: needed with a certificate"
    assert problem(certificate="C", ca="A", ssldir="/ssl") == ""
    assert problem(certificate="C", ca="A", csr_ssldir="/ssl") == ""
    assert problem(ssldir="/ssl") == ""


def test_a_key_needs_a_certificate() -> None:
    assert problem(key="K", ssldir="/ssl") == "key: useless without certificate"
    assert problem(key="K", certificate="C", ca="A", ssldir="/ssl") == ""


def test_another_identity_is_a_warning_that_does_not_show_it() -> None:
    warnings, error = checked(configuration={**CONFIGURATION, "identity": "N1.example.net"})
    assert warnings == ["configuration.identity in the helper's answer is not the identity of this node"]
    assert error == ""


@pytest.mark.parametrize("configuration", [{PROVISION: "n"}, {PROVISION: "n", "identity": " "}])
def test_no_identity_or_an_empty_one_is_no_warning(configuration: dict[str, str]) -> None:
    assert checked(configuration=configuration) == ([], "")


def test_all_problems_are_named_at_once_but_not_any_number_of_them() -> None:
    assert problem(key="K", opa_policies={"x": ""}) == (
        "opa_policies.x: a plain file name that ends in .rego is wanted; key: useless without certificate"
    )
    many = problem(configuration={f"#{i}": "" for i in range(1000)})
    assert many.endswith("; and 996 more")
    assert many.count("no name of a setting") == contract.PROBLEMS_NAMED


def test_errors_name_keys_and_never_values() -> None:
    text = problem(
        configuration={PROVISION: "s3cret", "a": "s3cret\n"}, key="s3cret", action_policies={"x": "s3cret"}, ca="s3cret"
    )
    assert len(text.split("; ")) == 5
    assert "s3cret" not in text
