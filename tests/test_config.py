"""The provisioner's own configuration file: what it means, and what is said about a wrong one."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import config
from provisioner.config import Config, Features
from provisioner.errors import ConfigurationError

SAMPLE = Path(__file__).parent.parent / "etc" / "provisioner.yaml"
HEX_KEY = "e72cba5268b34627b75c5ceae9449ad16d62f15f862c30d4e0e7d2588e2e6259"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "provisioner.yaml"


def load(file: Path, text: str | bytes) -> Config:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return config.load(file)


def problems(file: Path, text: str | bytes) -> list[str]:
    """The problems of a file, without the path they all begin with."""
    with pytest.raises(ConfigurationError) as raised:
        load(file, text)
    assert all(problem.startswith(f"{file}:") for problem in raised.value.problems)
    return [problem.removeprefix(f"{file}:") for problem in raised.value.problems]


class TestDefaults:
    def test_a_file_with_a_helper_alone_gets_all_defaults(self, file: Path) -> None:
        loaded = load(file, "helper: /usr/bin/helper\n")
        assert loaded.path == file
        assert loaded.helper == ("/usr/bin/helper",)
        assert loaded.workers == os.cpu_count()
        assert loaded.interval == 60
        assert loaded.logfile == "stdout"
        assert loaded.loglevel == "info"
        assert loaded.token == ""
        assert loaded.lifecycle_component == "provision_mode_server"
        assert loaded.choria_insecure is False
        assert loaded.site == ""
        assert loaded.monitor_port == 0
        assert loaded.monitor_address == ""
        assert loaded.broker_provisioning_password == ""
        assert [pattern.pattern for pattern in loaded.cert_deny_list] == [
            r"\.privileged.mcollective$",
            r"\.privileged.choria$",
            r"\.mcollective$",
            r"\.choria$",
        ]
        assert (loaded.jwt_verify_cert, loaded.jwt_signing_key, loaded.jwt_signing_token) == ("", "", "")
        assert loaded.server_jwt_validity == 365 * 86400
        assert loaded.rego_policy == ""
        assert loaded.leader_election is False
        assert (loaded.upgrades_repository, loaded.upgrades_optional) == ("", False)
        assert loaded.features == Features(pki=False, jwt=False, ed25519=False, upgrades=False)
        assert loaded.helper_timeout == 10
        assert loaded.shutdown_grace == 20
        assert loaded.log_format is None
        assert loaded.retry_backoff is True
        assert (loaded.allow, loaded.deny) == ((), ())
        assert loaded.warnings == ()

    def test_zero_workers_are_as_many_as_there_are_cores(self, file: Path) -> None:
        assert load(file, "helper: h\nworkers: 0\n").workers == os.cpu_count()

    @pytest.mark.parametrize("key", [name for name in attrs.fields_dict(Config) if name in config._SCHEMA])
    def test_a_key_without_a_value_counts_as_missing(self, file: Path, key: str) -> None:
        if key in ("helper", "interval"):  # helper is needed, and an empty interval is refused
            assert len(problems(file, f"site: x\n{key}:\n")) == 1 + (key == "interval")
            return
        empty, without = load(file, f"helper: h\n{key}:\n"), load(file, "helper: h\n")
        assert getattr(empty, key) == getattr(without, key)

    @pytest.mark.parametrize(
        ("key", "default"),
        [("logfile", "stdout"), ("loglevel", "info"), ("lifecycle_component", "provision_mode_server")],
    )
    def test_an_empty_string_is_the_default_where_the_go_original_has_it_so(
        self, file: Path, key: str, default: str
    ) -> None:
        assert getattr(load(file, f'helper: h\n{key}: ""\n'), key) == default


class TestValues:
    def test_every_key_is_read(self, file: Path) -> None:
        loaded = load(
            file,
            f"""
            workers: 4
            interval: 5m
            logfile: /var/log/provisioner.log
            loglevel: debug
            helper: /usr/bin/helper --ca 'my ca' "a b" c\\ d
            token: s3cret
            lifecycle_component: other
            choria_insecure: true
            site: testing
            monitor_port: 8080
            broker_provisioning_password: "@ : / %"
            cert_deny_list: [a, b]
            jwt_verify_cert: {HEX_KEY}
            jwt_signing_key: /key
            jwt_signing_token: /token
            server_jwt_validity: 2w
            rego_policy: /rego
            leader_election: true
            upgrades_repository: https://updates.example.net/choria
            upgrades_optional: true
            features: {{ed25519: true, upgrades: true}}
            broker_port: 4222
            helper_timeout: 500ms
            shutdown_grace: 0s
            monitor_address: 127.0.0.1
            log_format: text
            retry_backoff: false
            allow: [c]
            deny: [/d/, e]
            """,
        )
        values = attrs.asdict(loaded, filter=lambda field, _: not field.name.startswith("_"), recurse=False)
        for name in ("cert_deny_list", "allow", "deny"):
            values[name] = [pattern.pattern for pattern in values[name]]
        assert values == {
            "path": file,
            "warnings": (),
            "unknown_keys": frozenset(),
            "workers": 4,
            "interval": 300,
            "logfile": "/var/log/provisioner.log",
            "loglevel": "debug",
            "helper": ("/usr/bin/helper", "--ca", "my ca", "a b", "c d"),
            "token": "s3cret",
            "lifecycle_component": "other",
            "choria_insecure": True,
            "site": "testing",
            "monitor_port": 8080,
            "broker_provisioning_password": "@ : / %",
            "cert_deny_list": ["a", "b"],
            "jwt_verify_cert": HEX_KEY,
            "jwt_signing_key": "/key",
            "jwt_signing_token": "/token",
            "server_jwt_validity": 14 * 86400,
            "rego_policy": "/rego",
            "leader_election": True,
            "upgrades_repository": "https://updates.example.net/choria",
            "upgrades_optional": True,
            "features": Features(pki=False, jwt=True, ed25519=True, upgrades=True),
            "helper_timeout": 0.5,
            "shutdown_grace": 0,
            "monitor_address": "127.0.0.1",
            "log_format": "text",
            "retry_backoff": False,
            "allow": ["c"],
            "deny": ["d", "e"],
        }

    @pytest.mark.parametrize("text", ["on", "yes", "true", "True", "TRUE", "y", "Y"])
    def test_a_feature_is_switched_on_by_any_boolean_of_yaml_1_1(self, file: Path, text: str) -> None:
        assert load(file, f"helper: h\nfeatures: {{jwt: {text}}}\njwt_verify_cert: {HEX_KEY}\n").features.jwt is True

    @pytest.mark.parametrize("text", ["off", "no", "false", "n", "N", ""])
    def test_a_feature_is_switched_off_by_any_boolean_of_yaml_1_1(self, file: Path, text: str) -> None:
        assert load(file, f"helper: h\nfeatures:\n  jwt: {text}\n").features.jwt is False

    def test_the_feature_ed25519_switches_jwt_on(self, file: Path) -> None:
        loaded = load(
            file, f"helper: h\nfeatures: {{ed25519: true}}\njwt_verify_cert: {HEX_KEY}\njwt_signing_key: /seed\n"
        )
        assert loaded.features == Features(jwt=True, ed25519=True)

    def test_the_key_that_tokens_are_verified_with_may_be_an_existing_file(self, file: Path) -> None:
        loaded = load(file, f"helper: h\nfeatures: {{jwt: true}}\njwt_verify_cert: {file}\n")
        assert loaded.jwt_verify_cert == str(file)

    def test_without_the_feature_jwt_its_file_need_not_exist(self, file: Path) -> None:
        assert load(file, "helper: h\njwt_verify_cert: /nonexistent\n").jwt_verify_cert == "/nonexistent"

    def test_optional_upgrades_need_no_repository(self, file: Path) -> None:
        assert load(file, "helper: h\nfeatures: {upgrades: true}\nupgrades_optional: true\n").features.upgrades is True

    def test_a_date_is_a_string_to_the_go_original(self, file: Path) -> None:
        assert load(file, "helper: h\ntoken: 2024-01-01\n").token == "2024-01-01"

    def test_a_month_is_taken_with_a_warning(self, file: Path) -> None:
        loaded = load(file, "helper: h\ninterval: 1M\n")
        assert loaded.interval == 30 * 86400
        assert loaded.warnings == (
            f"{file}:2: interval: given the string '1M', which is a month of 30 days; a minute is 1m",
        )

    def test_an_interval_may_be_a_day(self, file: Path) -> None:
        assert load(file, "helper: h\ninterval: 1d\n").interval == 86400

    def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(self, file: Path) -> None:
        assert load(file, b"\xef\xbb\xbfhelper: h\r\nsite: x\r\n").site == "x"

    def test_an_anchor_may_be_used_again(self, file: Path) -> None:
        assert load(file, "helper: h\ntoken: &secret x\nbroker_provisioning_password: *secret\n").token == "x"


class TestDenyList:
    @pytest.mark.parametrize(
        ("pattern", "name", "denied"),
        [
            (r"^[[:alpha:]]+\.mcollective$", "rip.mcollective", True),
            (r"^[[:alpha:]]+\.mcollective$", "rip2.mcollective", False),
            (r"/\.choria\z/", "rip.choria", True),
            (r"/\.choria\z/", "rip.choria.example.net", False),
            (r"^\pL+$", "köln", True),
            (r"(?i)ADMIN", "an-admin", True),
            ("/", "a/b", True),
        ],
    )
    def test_a_pattern_means_what_it_means_in_re2(self, file: Path, pattern: str, name: str, denied: bool) -> None:
        loaded = load(file, f"helper: h\ncert_deny_list: ['{pattern}']\n")
        assert any(pattern.search(name) for pattern in loaded.cert_deny_list) is denied

    def test_an_empty_list_means_the_default_one(self, file: Path) -> None:
        assert len(load(file, "helper: h\ncert_deny_list: []\n").cert_deny_list) == len(config.DEFAULT_DENY_LIST)


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("line", "warning"),
        [
            ("worker: 4", "worker: unknown key, ignored; did you mean workers?"),
            ("features: {jtw: true}", "features.jtw: unknown key, ignored; did you mean features.jwt?"),
            ("jwt: true", "jwt: unknown key, ignored; did you mean features.jwt?"),
            ("management: {name: x}", "management: unknown key, ignored"),
            ("1: x", "1: unknown key, ignored"),
            ("'a\\n b': x", "'a\\\\n b': unknown key, ignored"),
            ("Site: x", "Site: read as site, which is how to write it"),
            ("features: {JWT: false}", "features.JWT: read as features.jwt, which is how to write it"),
        ],
    )
    def test_a_key_that_is_not_known_is_a_warning_with_the_nearest_one(
        self, file: Path, line: str, warning: str
    ) -> None:
        loaded = load(file, f"helper: h\n{line}\n")
        assert loaded.warnings == (f"{file}:2: {warning}",)
        assert loaded.unknown_keys == {text for text in loaded.warnings if "unknown key" in text}

    def test_keys_are_taken_in_any_letter_case_as_the_go_original_does(self, file: Path) -> None:
        loaded = load(file, f"Helper: h\nFEATURES: {{Jwt: true}}\nJwt_Verify_Cert: {HEX_KEY}\n")
        assert loaded.helper == ("h",)
        assert loaded.features.jwt is True

    def test_a_misspelt_key_is_named_among_the_problems_that_it_causes(self, file: Path) -> None:
        assert problems(file, "helpr: h\n") == [
            "1: helpr: unknown key, ignored; did you mean helper?",
            " helper: given nothing, wanted the command line of the helper",
        ]


WRONG_FILES = {
    "an empty file": ("", [" given an empty file, wanted at least the key helper"]),
    "only comments": ("# x\n", [" given an empty file, wanted at least the key helper"]),
    "a list": ("- a\n- b\n", ["1: given a list, wanted keys, as in helper: /path"]),
    "a text": ("helper\n", ["1: given a string (not shown), wanted keys, as in helper: /path"]),
    "a tab": ("helper: h\nfeatures:\n\tjwt: true\n", ["3: given a tab, wanted spaces"]),
    "bad UTF-8": (b"helper: h\nsite: \xff\n", ["2: given bytes that are not UTF-8, wanted UTF-8"]),
    "a control character": ("helper: h\nsite: \x07\n", ["2: given a control character, wanted text"]),
    "an open quote": ("helper: h\nsite: 'x\n", ["2: given a quote that is never closed, wanted it closed"]),
    "an open bracket": (
        "helper: h\ncert_deny_list: [a\n",
        ["2: not YAML: expected ',' or ']', but got '<stream end>'"],
    ),
    "a colon too many": (
        "helper: h\nsite: a: b\n",
        ["2: given a colon where none can be, wanted text with a colon in quotes"],
    ),
    "a second document": ("helper: h\n---\nsite: x\n", ["2: given a second document after ---, wanted one"]),
    "endless nesting": ("[" * 2000, [" given brackets in brackets without end, wanted a mapping"]),
    "a merge key": ("helper: h\n<<: {site: x}\n", ["2: given a key that is no name, wanted one like workers"]),
    "a list as a key": ("helper: h\n? [a]\n: b\n", ["2: given a key that is no name, wanted one like workers"]),
    "a duplicate key": ("helper: h\nsite: a\nsite: b\n", ["3: site: given twice, first in line 2, wanted once"]),
    "a duplicate feature": (
        "helper: h\nfeatures:\n  pki: false\n  PKI: true\n",
        ["4: features.PKI: given twice, first in line 3, wanted once"],
    ),
    "no helper": ("site: x\n", [" helper: given nothing, wanted the command line of the helper"]),
    "an empty helper": ("helper: ''\n", ["1: helper: given nothing, wanted the command line of the helper"]),
    "a helper with an open quote": (
        'helper: /h "a b\n',
        ["1: helper: given a string (not shown), wanted a command line as in a shell, its quotes closed"],
    ),
    "a helper that is a list": ("helper: [/h, x]\n", ["1: helper: given a list, wanted a string"]),
    "workers as a string": (
        'helper: h\nworkers: "4"\n',
        ["2: workers: given the string '4', wanted a whole number from 0, without quotes"],
    ),
    "workers below zero": (
        "helper: h\nworkers: -1\n",
        ["2: workers: given the number -1, wanted a whole number from 0, without quotes"],
    ),
    "workers with a fraction": (
        "helper: h\nworkers: 1.5\n",
        ["2: workers: given the number 1.5, wanted a whole number from 0, without quotes"],
    ),
    "workers in octal": (
        "helper: h\nworkers: 010\n",
        ["2: workers: given the number 010, wanted a whole number from 0, without quotes"],
    ),
    "a port that is none": (
        "helper: h\nmonitor_port: 65536\n",
        ["2: monitor_port: given the number 65536, wanted a whole number from 0 to 65535, without quotes"],
    ),
    "interval 1:30": (
        "helper: h\ninterval: 1:30\n",
        ["2: interval: given the number 1:30, wanted a duration, as in 90s, 5m, 1h30m or 1d"],
    ),
    "interval 90": (
        "helper: h\ninterval: 90\n",
        ["2: interval: given the number 90, wanted a number with a unit, as in 90s, 5m, 1h30m or 1d"],
    ),
    "interval '90'": (
        "helper: h\ninterval: '90'\n",
        ["2: interval: given the string '90', wanted a number with a unit, as in 90s, 5m, 1h30m or 1d"],
    ),
    "interval 1H": (
        "helper: h\ninterval: 1H\n",
        ["2: interval: given the string '1H', wanted a duration, as in 90s, 5m, 1h30m or 1d"],
    ),
    "interval ''": (
        "helper: h\ninterval: ''\n",
        ["2: interval: given the string '', wanted a duration, as in 90s, 5m, 1h30m or 1d"],
    ),
    "interval without a value": (
        "helper: h\ninterval:\n",
        ["2: interval: given nothing, wanted a duration, as in 90s, 5m, 1h30m or 1d"],
    ),
    "interval 59s": ("helper: h\ninterval: 59s\n", ["2: interval: given the string '59s', wanted 1m or more"]),
    "a validity of nothing": (
        "helper: h\nserver_jwt_validity: 0s\n",
        ["2: server_jwt_validity: given the string '0s', wanted more than 0"],
    ),
    "a grace below zero": (
        "helper: h\nshutdown_grace: -1s\n",
        ["2: shutdown_grace: given the string '-1s', wanted 0s or more"],
    ),
    "a numeric token": (
        "helper: h\ntoken: 123\n",
        ["2: token: given a number (not shown), wanted a string: put it in quotes"],
    ),
    "a boolean token": (
        "helper: h\ntoken: yes\n",
        ["2: token: given a boolean (not shown), wanted a string: put it in quotes"],
    ),
    "a list as a password": (
        "helper: h\nbroker_provisioning_password: [x]\n",
        ["2: broker_provisioning_password: given a list, wanted a string"],
    ),
    "a boolean as a string": (
        "helper: h\nchoria_insecure: 'yes'\n",
        ["2: choria_insecure: given the string 'yes', wanted true or false, without quotes"],
    ),
    "a boolean as a number": (
        "helper: h\nleader_election: 1\n",
        ["2: leader_election: given the number 1, wanted true or false, without quotes"],
    ),
    "an unknown level": (
        "helper: h\nloglevel: INFO\n",
        ["2: loglevel: given the string 'INFO', wanted one of debug, info, warn, error, fatal"],
    ),
    "an unknown format": (
        "helper: h\nlog_format: xml\n",
        ["2: log_format: given the string 'xml', wanted one of json, text"],
    ),
    "a component with a wildcard": (
        "helper: h\nlifecycle_component: a.*\n",
        [
            (
                "2: lifecycle_component: given the string 'a.*', "
                "wanted one part of a subject: no dots, no > and *, no white space"
            )
        ],
    ),
    "a URL without a scheme": (
        "helper: h\nupgrades_repository: updates.example.net\n",
        [
            (
                "2: upgrades_repository: given the string 'updates.example.net', "
                "wanted a URL that starts with https:// or http://"
            )
        ],
    ),
    "a URL with an open bracket": (
        "helper: h\nupgrades_repository: 'http://['\n",
        ["2: upgrades_repository: given the string 'http://[', wanted a URL that starts with https:// or http://"],
    ),
    "a string as the deny list": (
        "helper: h\ncert_deny_list: x\n",
        ["2: cert_deny_list: given the string 'x', wanted a list"],
    ),
    "wrong deny patterns": (
        "helper: h\ncert_deny_list:\n  - (\n  - ''\n  - 5\n  - (?=x)\n",
        [
            "3: cert_deny_list: given the string '(', wanted an RE2 pattern (missing ))",
            "4: cert_deny_list: given the string '', wanted a pattern (an empty one is in every name)",
            "5: cert_deny_list: given the number 5, wanted a string: put it in quotes",
            "6: cert_deny_list: given the string '(?=x)', wanted an RE2 pattern (invalid perl operator)",
        ],
    ),
    "features as a list": (
        "helper: h\nfeatures: [jwt]\n",
        ["2: features: given a list, wanted a mapping, as in features: {pki: true}"],
    ),
    "a feature as a string": (
        "helper: h\nfeatures: {upgrades: 'on'}\n",
        ["2: features.upgrades: given the string 'on', wanted true or false, without quotes"],
    ),
    "jwt without a key": (
        "helper: h\nfeatures:\n  jwt: true\n",
        ["3: jwt_verify_cert: given nothing, wanted a file or 64 hex digits for features.jwt"],
    ),
    "jwt with a missing file": (
        "helper: h\nfeatures: {jwt: true}\njwt_verify_cert: /nonexistent\n",
        ["3: jwt_verify_cert: given '/nonexistent', which is no file, wanted a file or 64 hex digits"],
    ),
    "jwt with 63 digits": (
        f"helper: h\nfeatures: {{jwt: true}}\njwt_verify_cert: {'a' * 63}\n",
        [f"3: jwt_verify_cert: given '{'a' * 60}...', which is no file, wanted a file or 64 hex digits"],
    ),
    "jwt with a name no file can have": (
        f"helper: h\nfeatures: {{jwt: true}}\njwt_verify_cert: {'a' * 300}\n",
        [f"3: jwt_verify_cert: given '{'a' * 60}...', which is no file, wanted a file or 64 hex digits"],
    ),
    "ed25519 without keys": (
        "helper: h\nfeatures:\n  ed25519: true\n",
        [
            "3: jwt_verify_cert: given nothing, wanted a file or 64 hex digits for features.ed25519",
            "3: jwt_signing_key: given nothing, wanted a file for features.ed25519",
        ],
    ),
    "pki with ed25519": (
        f"helper: h\njwt_signing_key: k\njwt_verify_cert: {HEX_KEY}\nfeatures: {{pki: true, ed25519: true}}\n",
        ["4: features.pki: given true together with features.ed25519, wanted only one of them"],
    ),
    "upgrades without a repository": (
        "helper: h\nfeatures:\n  upgrades: true\n",
        ["3: upgrades_repository: given nothing, wanted a URL for features.upgrades, or upgrades_optional: true"],
    ),
    "a broken escape": (
        'helper: h\nsite: "\\ud800"\n',
        ["2: site: given the string '\\ud800', wanted text of valid characters"],
    ),
    "a zero byte": (
        'helper: "h\\0"\n',
        ["1: helper: given a string (not shown), wanted text of valid characters"],
    ),
    "an unknown tag": (
        "helper: h\nsite: !foo x\n",
        ["2: site: given the tagged value x, wanted a string: put it in quotes"],
    ),
}


class TestProblems:
    @pytest.mark.parametrize(("text", "expected"), WRONG_FILES.values(), ids=WRONG_FILES)
    def test_a_wrong_file_gives_one_clear_line_for_each_problem(
        self, file: Path, text: str | bytes, expected: list[str]
    ) -> None:
        assert problems(file, text) == expected

    def test_all_problems_come_at_once_in_the_order_of_the_file(self, file: Path) -> None:
        text = "workers: x\ninterval: 1\ntoken: 1\nworker: 1\nfeatures: {jwt: 1, pki: 'x'}\nloglevel: x\n"
        keys = ["1: workers", "2: interval", "3: token", "4: worker", "5: features.jwt", "5: features.pki"]
        found = problems(file, text)
        assert [problem.rpartition(": ")[0].split(": given")[0].split(": unknown")[0] for problem in found] == [
            *keys,
            "6: loglevel",
            " helper",
        ]

    def test_a_missing_file_gives_one_clear_line(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError) as raised:
            config.load(tmp_path / "absent.yaml")
        assert raised.value.problems == (f"{tmp_path}/absent.yaml: No such file or directory",)

    def test_a_folder_gives_one_clear_line(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError) as raised:
            config.load(tmp_path)
        assert raised.value.problems == (f"{tmp_path}: Is a directory",)


class TestSecrets:
    @pytest.mark.parametrize("key", ["token", "broker_provisioning_password"])
    @pytest.mark.parametrize(
        "text",
        [
            "*hunter2",
            "@hunter2",
            "%hunter2",
            "!hunter2",
            "!hunter2!x y",
            "&hunter2 &hunter2 x",
            "'hunter2",
            "[hunter2]",
            "{hunter2: 1}",
            "hunter2: x",
            "!!int hunter2",
            "'hunter2' x",
            '"hunter2\\q"',
            "\thunter2",
        ],
    )
    def test_a_wrong_secret_is_never_shown(self, file: Path, key: str, text: str) -> None:
        assert "hunter2" not in " ".join(problems(file, f"site: 1\n{key}: {text}\n"))

    @pytest.mark.parametrize("text", ["token:hunter2", "{token:hunter2}", "token:hunter2: x", "'token: hunter2': x"])
    def test_a_secret_without_a_space_before_it_is_not_shown(self, file: Path, text: str) -> None:
        assert "hunter2" not in " ".join(problems(file, text))

    def test_a_secret_is_not_in_the_traceback_of_a_wrong_file(self, file: Path) -> None:
        file.write_text("token: 'hunter2' x\n")
        try:
            config.load(file)
        except ConfigurationError:
            shown = traceback.format_exc()
        assert "hunter2" not in shown

    def test_a_secret_is_not_in_what_a_configuration_looks_like(self, file: Path) -> None:
        loaded = load(file, "helper: h\ntoken: hunter2\nbroker_provisioning_password: hunter3\n")
        assert "hunter" not in repr(loaded)


class Clock:
    """In the place of the module `time`; it stands still at a time that the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def at(self, now: float, question: Callable[[], bool]) -> bool:
        """The answer at that time, which it then is."""
        self.now = now
        return question()


class TestPausing:
    def test_a_configuration_starts_out_running_and_can_be_paused_resumed_and_flipped(self, file: Path) -> None:
        loaded = load(file, "helper: h\n")
        seen = [loaded.paused]
        for step in (loaded.pause, loaded.pause, loaded.resume, loaded.flip, loaded.flip):
            step()
            seen.append(loaded.paused)
        assert seen == [False, True, True, False, True, False]

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr(config, "time", clock)
        return clock

    def test_it_is_paused_by_itself_when_what_it_was_resumed_for_is_over(self, file: Path, clock: Clock) -> None:
        loaded = load(file, "helper: h\n")
        loaded.resume(until=1010.0)
        seen = [clock.at(now, lambda: loaded.paused) for now in (1000.0, 1009.9, 1010.0, 1e9)]
        assert seen == [False, False, True, True]

    @pytest.mark.parametrize("until", [999.0, 1000.0])
    def test_it_is_not_resumed_by_what_is_over_already(self, file: Path, clock: Clock, until: float) -> None:
        loaded = load(file, "helper: h\n")
        loaded.resume(until=until)
        assert clock.at(1000.0, lambda: loaded.paused)

    def test_the_last_word_counts(self, file: Path, clock: Clock) -> None:
        loaded = load(file, "helper: h\n")
        loaded.resume(until=1010.0)
        loaded.resume(until=1020.0)
        assert not clock.at(1015.0, lambda: loaded.paused)
        loaded.pause()
        assert clock.at(1015.0, lambda: loaded.paused)
        loaded.flip()
        assert not clock.at(1e9, lambda: loaded.paused), "resumed until further notice"
        loaded.resume(until=1020.0)
        loaded.flip()
        assert not clock.at(1e9, lambda: loaded.paused), "it was paused by itself"

    def test_flips_of_many_threads_are_all_counted(self, file: Path) -> None:
        loaded = load(file, "helper: h\n")
        usual = sys.getswitchinterval()

        def flip_often() -> None:
            for _ in range(2001):
                loaded.flip()

        threads = [threading.Thread(target=flip_often) for _ in range(5)]
        sys.setswitchinterval(1e-6)  # without a lock, some flips would be lost now
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(usual)
        assert loaded.paused

    def test_nothing_else_can_be_changed(self, file: Path) -> None:
        loaded = load(file, "helper: h\n")
        with pytest.raises(attrs.exceptions.FrozenAttributeError):
            loaded.workers = 5


class TestGoFiles:
    """Files as the Go original's own documentation and packages have them."""

    def test_the_packaged_file_loads_without_a_warning(self, file: Path) -> None:
        loaded = load(
            file,
            "---\nworkers: 4\ninterval: 5m\nlogfile: '/var/log/choria-provisioner.log'\nloglevel: info\n"
            "helper: /etc/choria-provisioner/helper\ntoken: toomanysecrets\nchoria_insecure: true\nsite: TEST\n"
            "monitor_port: 8080\n\nfeatures:\n  pki: true\n",
        )
        assert loaded.warnings == ()
        assert loaded.features == Features(pki=True)

    def test_a_file_for_an_organization_issuer_loads_without_a_warning(self, file: Path) -> None:
        loaded = load(
            file,
            "workers: 4\ninterval: 1m\nlogfile: /dev/stdout\nloglevel: warn\nhelper: /helper.rb\ntoken: s3cret\n"
            f"site: testing\nbroker_provisioning_password: s3cret\njwt_verify_cert: {HEX_KEY}\n"
            "jwt_signing_key: /signer.seed\njwt_signing_token: /signer.jwt\n"
            "features:\n  jwt: true\n  ed25519: true\n",
        )
        assert loaded.warnings == ()


class TestSample:
    def test_the_sample_loads_with_all_defaults_and_without_a_warning(self) -> None:
        loaded = config.load(SAMPLE)
        assert loaded.warnings == ()
        assert loaded.token == ""
        assert loaded.choria_insecure is False
        assert loaded.features == Features()

    def test_the_sample_shows_every_key(self) -> None:
        shown = set(re.findall(r"^ *#?([a-z0-9_]+):", SAMPLE.read_text(), re.MULTILINE))
        known = {*config._SCHEMA, *config._FEATURES} - {"broker_port"}
        assert shown == known

    def test_every_line_of_the_sample_may_be_uncommented(self, file: Path) -> None:
        loaded = load(file, re.sub(r"^#(?! )|^#(?=  - )", "", SAMPLE.read_text(), flags=re.MULTILINE))
        default = config.load(SAMPLE)
        assert loaded.warnings == ()
        examples = {
            "jwt_verify_cert",
            "jwt_signing_key",
            "jwt_signing_token",
            "upgrades_repository",
            "log_format",
            "allow",
            "deny",
        }
        for field in attrs.fields(Config):
            if field.name not in {*examples, "path", "cert_deny_list", "_lock"}:
                assert getattr(loaded, field.name) == getattr(default, field.name), field.name
        assert [pattern.pattern for pattern in loaded.cert_deny_list] == list(config.DEFAULT_DENY_LIST)


def findings(file: Path, content: bytes) -> tuple[str, ...]:
    """Load a file; give the problems when it is refused, else the warnings."""
    file.write_bytes(content)
    try:
        return config.load(file).warnings
    except ConfigurationError as error:
        return error.problems


SCALARS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=10),
    st.sampled_from(
        ["1:30", "on", "~", "1M", "-1", "0x10", "1e3", ".inf", "2024-13-45", "!!int x", "!!bool [a]", "'", "<<"]
    ),
)


@given(st.binary())
def test_any_bytes_are_a_configuration_or_one_line_problems(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    assert all(map(str.isprintable, findings(tmp_path_factory.getbasetemp() / "fuzzed.yaml", content)))


@given(st.lists(st.tuples(st.sampled_from([*config._SCHEMA, "features:\n  jwt", "? a\n"]), SCALARS), max_size=5))
def test_any_values_are_a_configuration_or_one_line_problems(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]]
) -> None:
    text = "helper: h\n" + "".join(f"{key}: {value}\n" for key, value in lines)
    assert all(map(str.isprintable, findings(tmp_path_factory.getbasetemp() / "fuzzed.yaml", text.encode())))


def test_loading_logs_nothing(file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG):
        problems(file, "helper: h\ncert_deny_list: ['(']\nworker: 1\n")
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
