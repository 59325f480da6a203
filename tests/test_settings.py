"""The configuration file of a Choria client: what it means to a provisioner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import settings
from provisioner.choria.settings import Settings
from provisioner.errors import ConfigurationError

SAMPLE = Path(__file__).parent.parent / "etc" / "choria.cfg"
MINIMAL = "identity = prov.example.net\nplugin.security.provider = file\n"


@attrs.define
class Site:
    """A machine with a main file at ``etc/choria.cfg``, started in ``run``, by root unless a test says otherwise."""

    root: Path
    environ: dict[str, str] = attrs.field(factory=dict)

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def load(self, text: str | bytes | None = None, **arguments: Any) -> Settings:
        """Load ``text``, which follows lines that make it a complete file; None: what was written before."""
        if text is not None:
            self.write("etc/choria.cfg", (MINIMAL.encode() + text) if isinstance(text, bytes) else MINIMAL + text)
        return settings.load(self.root / "etc/choria.cfg", **self._arguments(arguments))

    def load_default(self) -> Settings:
        return settings.load(None, **self._arguments({}))

    def problems(self, text: str | bytes, **arguments: Any) -> list[str]:
        """The problems of a file, without the folder that they begin with."""
        with pytest.raises(ConfigurationError) as raised:
            self.load(text, **arguments)
        return [problem.replace(f"{self.root}/etc/", "") for problem in raised.value.problems]

    def warnings(self, text: str | bytes, **arguments: Any) -> list[str]:
        """The warnings about a file, without the folder that they begin with."""
        return [warning.replace(f"{self.root}/etc/", "") for warning in self.load(text, **arguments).warnings]

    def _arguments(self, changed: dict[str, Any]) -> dict[str, Any]:
        (self.root / "run").mkdir(exist_ok=True)
        usual = {
            "environ": self.environ,
            "cwd": self.root / "run",
            "uid": 0,
            "own_identity": lambda: "host.example.net",
        }
        return usual | changed


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


class TestFormat:
    @pytest.mark.parametrize(
        ("line", "value"),
        [
            ("plugin.choria.srv_domain = a", "a"),
            ("plugin.choria.srv_domain=a", "a"),
            ("  plugin.choria.srv_domain \t=\t a  ", "a"),
            ("plugin.choria.srv_domain = a = b", "a = b"),
            ("\u00a0plugin.choria.srv_domain = \u00a0a\u00a0", "\u00a0a"),
            ("plugin.choria.srv_domain = a # not a comment", "a # not a comment"),
            ('plugin.choria.srv_domain = "a"', '"a"'),
            ("plugin.choria.srv_domain = ${HOME}", "${HOME}"),
            ("plugin.choria.srv_domain = a\r", "a"),
            ("plugin.choria.srv_domain = \\", "\\"),
            ("plugin.choria.srv_domain = bücher.example", "bücher.example"),
            ("# plugin.choria.srv_domain = a", "before"),
            ("  #plugin.choria.srv_domain = a", "before"),
            ("; plugin.choria.srv_domain = a", "before"),
            ("plugin.choria.srv_domain", "before"),
            ("plugin.choria.srv_domain =", "before"),
            ("plugin.choria.srv_domain =   ", "before"),
            ("= a", "before"),
            ("PLUGIN.CHORIA.SRV_DOMAIN = a", "before"),
            ("[section]", "before"),
        ],
    )
    def test_a_line_is_read_as_choria_reads_it(self, site: Site, line: str, value: str) -> None:
        assert site.load(f"plugin.choria.srv_domain = before\n{line}\n").srv_domain == value

    def test_later_lines_win(self, site: Site) -> None:
        assert site.load("ttl = 70\nttl = 80\n").ttl == 80

    def test_a_last_line_needs_no_end(self, site: Site) -> None:
        assert site.load("ttl = 70").ttl == 70

    def test_unknown_keys_are_nobodys_business(self, site: Site) -> None:
        assert site.load("registration = x\nplugin.whatever = 1\n").warnings == ()

    def test_a_byte_order_mark_does_no_harm(self, site: Site) -> None:
        site.write("etc/choria.cfg", b"\xef\xbb\xbfidentity = other.example.net\nplugin.security.provider = file\n")
        assert site.load().identity == "other.example.net"

    def test_comments_and_unknown_keys_may_be_in_any_encoding(self, site: Site) -> None:
        assert site.load(b"# \xfcber\nplugin.x = \xfcber\nttl = 70\n").ttl == 70

    def test_a_path_may_be_in_any_encoding(self, site: Site) -> None:
        assert site.load(b"plugin.security.file.ca = /\xfc.pem\n").file_ca == "/\udcfc.pem"

    def test_a_line_of_exactly_64_kib_is_read(self, site: Site) -> None:
        value = "x" * (65535 - len("plugin.choria.srv_domain="))
        assert site.load(f"plugin.choria.srv_domain={value}\nttl = 70\n").ttl == 70

    def test_a_longer_line_ends_the_reading_of_its_file_with_a_warning(self, site: Site) -> None:
        loaded = site.load(f"ttl = 70\nx={'x' * 65534}\nttl = 80\n")
        assert loaded.ttl == 70
        assert loaded.warnings == (
            f"{site.root}/etc/choria.cfg:4: a line of over 64 KiB, it and the rest of the file are not read",
        )


class TestTypes:
    @pytest.mark.parametrize("text", ["1", "yes", "true", "Y", "t", "TRUE"])
    def test_words_that_are_true(self, site: Site, text: str) -> None:
        assert site.load(f"plugin.security.support_legacy_certificates = {text}\n").support_legacy_certificates is True

    @pytest.mark.parametrize("text", ["0", "no", "false", "N", "f", "FALSE"])
    def test_words_that_are_false(self, site: Site, text: str) -> None:
        loaded = site.load(f"plugin.choria.use_srv = {text}\n")
        assert loaded.use_srv is False
        assert loaded.warnings == ()

    @pytest.mark.parametrize("text", ["on", "ja", "2", "tru e"])
    def test_any_other_word_is_false_with_a_warning(self, site: Site, text: str) -> None:
        loaded = site.load(f"plugin.choria.use_srv = {text}\n")
        assert loaded.use_srv is False
        assert loaded.warnings == (
            (
                f"{site.root}/etc/choria.cfg:3: plugin.choria.use_srv: "
                f"given {text!r}, which is taken for false; wanted true or false"
            ),
        )

    @pytest.mark.parametrize("text", ["x", "6 0", "60s", "0x3c", "1_000", "\u0666\u0660", "9" * 5000])
    def test_a_bad_integer_leaves_the_earlier_value_with_a_warning(self, site: Site, text: str) -> None:
        loaded = site.load(f"ttl = 70\nttl = {text}\n")
        assert loaded.ttl == 70
        assert "etc/choria.cfg:4: ttl: given " in loaded.warnings[0]
        assert loaded.warnings[0].endswith(", which is ignored; wanted a whole number")

    @pytest.mark.parametrize(
        ("text", "seconds"), [("5", 5.0), ("2s", 2.0), ("1m", 60.0), ("1m30s", 90.0), ("0.001d", 86.4), ("500ms", 0.5)]
    )
    def test_a_duration_is_a_number_of_seconds_or_has_a_unit(self, site: Site, text: str, seconds: float) -> None:
        loaded = site.load(f"plugin.choria.network.connect_timeout = {text}\n")
        assert loaded.connect_timeout == pytest.approx(seconds)

    @pytest.mark.parametrize("text", ["x", "1H", "9" * 12, "-"])
    def test_a_bad_duration_is_ignored_with_a_warning(self, site: Site, text: str) -> None:
        loaded = site.load(f"plugin.choria.network.connect_timeout = {text}\n")
        assert loaded.connect_timeout == 2.0
        assert len(loaded.warnings) == 1

    def test_a_list_is_split_at_commas_and_replaces_what_was_there(self, site: Site) -> None:
        loaded = site.load("plugin.security.ecc_curves = A\nplugin.security.ecc_curves = X25519 ,CurveP256\n")
        assert loaded.ecc_curves == ("X25519", "CurveP256")

    def test_a_leading_tilde_is_the_home_folder(self, site: Site) -> None:
        site.environ["HOME"] = "/home/x"
        loaded = site.load("plugin.security.file.key = ~/~key.pem\nplugin.security.file.ca = /~ca.pem\n")
        assert (loaded.file_key, loaded.file_ca) == ("/home/x/~key.pem", "/~ca.pem")

    def test_without_a_home_a_tilde_stays(self, site: Site) -> None:
        assert site.load("plugin.security.file.key = ~/key.pem\n").file_key == "~/key.pem"


class TestKeys:
    def test_a_file_with_an_identity_and_a_provider_gets_all_defaults(self, site: Site) -> None:
        assert site.load("") == Settings(
            path=site.root / "etc/choria.cfg",
            identity="prov.example.net",
            certname="prov.example.net",
            provider="file",
            middleware_hosts=(),
            use_srv=True,
            srv_domain="",
            connect_timeout=2.0,
            nats_user="",
            nats_pass="",
            ttl=60,
            discovery_timeout=2,
        )

    def test_every_key_is_read(self, site: Site) -> None:
        loaded = site.load(
            """
            plugin.choria.middleware_hosts = a:4222, tls://b:4223
            plugin.choria.use_srv = false
            plugin.choria.srv_domain = example.net
            plugin.choria.network.connect_timeout = 5s
            plugin.choria.ssldir = /ssl
            plugin.nats.user = someone
            plugin.nats.pass = @ : / %
            plugin.security.provider = choria
            plugin.security.file.certificate = /cert
            plugin.security.file.key = /key
            plugin.security.file.ca = /ca
            plugin.security.choria.token_file = /token
            plugin.security.choria.seed_file = /seed
            plugin.security.choria.ca = /ca2
            plugin.security.choria.certificate = /cert2
            plugin.security.choria.key = /key2
            plugin.security.choria.trusted_signers = aa, bb
            plugin.security.issuer.names = one, two
            plugin.security.issuer.one.public = cc
            plugin.security.issuer.three.public = dd
            plugin.security.support_legacy_certificates = true
            plugin.security.cipher_suites = TLS_X
            plugin.security.ecc_curves = X25519
            ttl = 90
            discovery_timeout = 5
            """
        )
        assert loaded == Settings(
            path=site.root / "etc/choria.cfg",
            identity="prov.example.net",
            certname="prov.example.net",
            provider="choria",
            middleware_hosts=("a:4222", "tls://b:4223"),
            use_srv=False,
            srv_domain="example.net",
            connect_timeout=5.0,
            nats_user="someone",
            nats_pass="@ : / %",
            ttl=90,
            discovery_timeout=5,
            file_certificate="/cert",
            file_key="/key",
            file_ca="/ca",
            choria_token_file="/token",
            choria_seed_file="/seed",
            choria_ca="/ca2",
            choria_certificate="/cert2",
            choria_key="/key2",
            trusted_signers=("aa", "bb"),
            issuers={"one": "cc"},
            support_legacy_certificates=True,
            cipher_suites=("TLS_X",),
            ecc_curves=("X25519",),
            ssldir="/ssl",
        )

    @pytest.mark.parametrize(
        ("token_file", "seed_file"),
        [("/x/signer.jwt", "/x/signer.key"), ("/x/signer", "/x/signer.key"), ("/x.d/signer", "/x.d/signer.key")],
    )
    def test_the_seed_is_next_to_the_token_unless_it_is_named(
        self, site: Site, token_file: str, seed_file: str
    ) -> None:
        assert site.load(f"plugin.security.choria.token_file = {token_file}\n").choria_seed_file == seed_file

    def test_a_password_is_not_in_what_settings_look_like(self, site: Site) -> None:
        assert "hunter2" not in repr(site.load("plugin.nats.user = u\nplugin.nats.pass = hunter2\n"))


class TestEnvironment:
    def test_the_domain_of_look_ups_can_always_be_overridden(self, site: Site) -> None:
        site.environ["CHORIA_SRV_DOMAIN"] = "env.example.net"
        assert site.load("").srv_domain == "env.example.net"
        assert site.load("plugin.choria.srv_domain = file.example.net\n").srv_domain == "env.example.net"

    def test_user_and_password_are_overridden_only_where_a_file_has_them(self, site: Site) -> None:
        site.environ |= {"MCOLLECTIVE_NATS_USERNAME": "env-user", "MCOLLECTIVE_NATS_PASSWORD": "env-pass"}
        without = site.load("")
        assert (without.nats_user, without.nats_pass) == ("", "")
        loaded = site.load("plugin.nats.user = u\nplugin.nats.pass = p\n")
        assert (loaded.nats_user, loaded.nats_pass) == ("env-user", "env-pass")

    def test_federation_in_the_environment_counts(self, site: Site) -> None:
        site.environ["CHORIA_FED_COLLECTIVE"] = "one"
        assert site.warnings("") == [
            (
                "environment variable CHORIA_FED_COLLECTIVE: plugin.choria.federation.collectives: "
                "federation is not supported and ignored; brokers are those of plugin.choria.middleware_hosts"
            )
        ]


class TestSearch:
    def test_the_files_of_the_user_come_before_those_of_the_system(self) -> None:
        assert [str(path) for path in settings.default_files({"HOME": "/home/x"})] == [
            "/home/x/.choriarc",
            "/home/x/.mcollective",
            "/etc/choria/client.conf",
            "/usr/local/etc/choria/client.conf",
            "/etc/puppetlabs/mcollective/client.cfg",
        ]

    @pytest.mark.parametrize("environ", [{}, {"HOME": ""}])
    def test_without_a_home_only_the_files_of_the_system_are_tried(self, environ: dict[str, str]) -> None:
        assert [str(path) for path in settings.default_files(environ)] == list(settings.SYSTEM_FILES)

    def test_the_first_file_that_exists_is_read(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "SYSTEM_FILES", (str(site.root / "etc/a.conf"), str(site.root / "etc/b.cfg")))
        site.environ["HOME"] = str(site.root / "home")
        for name in ("etc/b.cfg", "etc/a.conf", "home/.mcollective", "home/.choriarc"):
            path = site.write(name, MINIMAL)
            assert site.load_default().path == path

    def test_no_file_at_all_is_one_clear_problem(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "SYSTEM_FILES", ("/nonexistent/a", "/nonexistent/b"))
        with pytest.raises(ConfigurationError) as raised:
            site.load_default()
        assert raised.value.problems == ("path '/nonexistent/b' does not exist, and neither do /nonexistent/a",)

    @pytest.mark.parametrize(("name", "reason"), [("absent", "No such file or directory"), ("run", "Is a directory")])
    def test_a_named_file_has_to_exist(self, site: Site, name: str, reason: str) -> None:
        (site.root / "run").mkdir()
        with pytest.raises(ConfigurationError) as raised:
            settings.load(site.root / name, environ={}, cwd=site.root)
        assert raised.value.problems == (f"{site.root / name}: {reason}",)


class TestMoreFiles:
    def test_choria_cfg_in_plugin_d_sets_keys_below_plugin_choria(self, site: Site) -> None:
        site.write("etc/plugin.d/choria.cfg", "ssldir = /plugin\nsrv_domain = plugin.example.net\n")
        loaded = site.load("plugin.choria.ssldir = /main\n")
        assert (loaded.ssldir, loaded.srv_domain) == ("/plugin", "plugin.example.net")

    def test_other_files_in_plugin_d_only_add_raw_options(self, site: Site) -> None:
        site.write("etc/plugin.d/nats.cfg", "user = u\npass = p\n")
        site.write("etc/plugin.d/security.cfg", "provider = nope\nissuer.one.public = aa\n")
        loaded = site.load("plugin.security.issuer.names = one\n")
        assert (loaded.nats_user, loaded.provider, loaded.issuers) == ("", "file", {"one": "aa"})

    @pytest.mark.parametrize("name", ["choria.conf", "choria.cfg.bak", "choria", ".cfg"])
    def test_files_of_other_names_in_plugin_d_have_no_effect(self, site: Site, name: str) -> None:
        site.write(f"etc/plugin.d/{name}", "ssldir = /plugin\n")
        assert site.load("").ssldir == ""

    def test_plugin_d_is_not_read_when_the_main_file_is_in_the_home_folder(self, site: Site) -> None:
        site.write("etc/plugin.d/choria.cfg", "ssldir = /plugin\n")
        for home in ("/", str(site.root), str(site.root / "et")):
            site.environ["HOME"] = home
            assert site.load("").ssldir == ""
        for home in ("", "/elsewhere"):
            site.environ["HOME"] = home
            assert site.load("").ssldir == "/plugin"

    def test_project_files_from_the_root_down_to_the_current_folder_come_last(self, site: Site) -> None:
        site.write("etc/plugin.d/choria.cfg", "ssldir = /plugin\n")
        site.write("choria.conf", "plugin.choria.ssldir = /outer\nttl = 70\n")
        site.write("run/choria.conf", "ttl = 80\n")
        loaded = site.load("ttl = 90\n")
        assert (loaded.ssldir, loaded.ttl) == ("/outer", 80)

    def test_a_project_file_that_cannot_be_read_is_a_problem(self, site: Site) -> None:
        (site.root / "choria.conf").mkdir()
        assert site.problems("") == [f"{site.root}/choria.conf: Is a directory"]


class TestIdentity:
    def test_the_identity_of_the_file_wins(self, site: Site) -> None:
        assert site.load("").identity == "prov.example.net"

    def test_without_one_the_machine_is_asked(self, site: Site) -> None:
        site.write("etc/choria.cfg", "plugin.security.provider = file\n")
        assert site.load().identity == "host.example.net"

    def test_an_identity_that_would_break_a_subject_is_refused(self, site: Site) -> None:
        assert site.problems("identity = a b\n") == [
            (
                "choria.cfg:3: identity: given 'a b', which holds white space or control characters, "
                "wanted a name like provisioner.example.net"
            )
        ]

    def test_an_insane_host_name_is_refused_too(self, site: Site) -> None:
        site.write("etc/choria.cfg", "plugin.security.provider = file\n")
        with pytest.raises(ConfigurationError, match=r"choria\.cfg: identity: given '', which is empty"):
            site.load(own_identity=lambda: "")


class TestCaller:
    @pytest.mark.parametrize(
        ("provider", "environ", "uid", "caller"),
        [
            ("file", {"MCOLLECTIVE_CERTNAME": "c.mcollective", "USER": "joe"}, 1000, "choria=c.mcollective"),
            ("file", {"USER": "joe"}, 0, "choria=prov.example.net"),
            ("file", {"USER": "joe"}, 1000, "choria=joe.mcollective"),
            ("file", {}, 1000, "choria=prov.example.net"),
            ("file", {"MCOLLECTIVE_CERTNAME": ""}, 0, "choria=prov.example.net"),
            ("puppet", {"MCOLLECTIVE_CERTNAME": "c.mcollective"}, 0, "choria=c.mcollective"),
            ("puppet", {"USER": "joe"}, 0, "choria=joe.mcollective"),
            ("puppet", {"USER": "joe"}, 1000, "choria=joe.mcollective"),
        ],
    )
    def test_the_caller_comes_from_who_runs_the_provisioner(
        self, site: Site, provider: str, environ: dict[str, str], uid: int, caller: str
    ) -> None:
        site.environ |= environ
        loaded = site.load(f"plugin.security.provider = {provider}\nplugin.choria.ssldir = /ssl\n", uid=uid)
        assert loaded.caller == caller

    def test_provider_puppet_without_a_user_is_refused_naming_the_key(self, site: Site) -> None:
        site.write("etc/choria.cfg", "identity = prov.example.net\n")
        with pytest.raises(ConfigurationError) as raised:
            site.load()
        assert raised.value.problems == (
            (
                f"{site.root}/etc/choria.cfg: plugin.security.provider: given 'puppet' (the default), "
                "wanted file or choria; puppet needs the environment variable USER"
            ),
        )

    def test_a_certname_that_is_no_text_is_refused(self, site: Site) -> None:
        site.environ["MCOLLECTIVE_CERTNAME"] = "\udcff"
        assert site.problems("") == [
            "environment variable MCOLLECTIVE_CERTNAME or USER: not UTF-8, wanted a name in UTF-8"
        ]


class TestProvisioning:
    def test_a_provisioning_password_replaces_user_and_password(self, site: Site) -> None:
        loaded = site.load("plugin.nats.user = u\nplugin.nats.pass = p\n", provisioning_password="@ : / %")
        assert (loaded.nats_user, loaded.nats_pass) == ("provisioner", "@ : / %")

    def test_an_insecure_network_needs_no_security_settings(self, site: Site) -> None:
        site.write("etc/choria.cfg", "identity = prov.example.net\n")
        loaded = site.load(insecure=True)
        assert (loaded.provider, loaded.caller) == ("file", "choria=prov.example.net")

    @pytest.mark.parametrize(
        "line",
        [
            "plugin.security.provider = nope",
            "plugin.security.client_anon_tls = true",
            "plugin.choria.security.request_signer.url = https://signer",
        ],
    )
    def test_on_an_insecure_network_wrong_security_settings_do_not_matter(self, site: Site, line: str) -> None:
        assert site.load(f"{line}\n", insecure=True).provider == "file"


REFUSED = {
    "plugin.security.provider = nope": ["plugin.security.provider: given 'nope', wanted file, choria or puppet"],
    "plugin.security.provider = pkcs11": ["plugin.security.provider: given 'pkcs11', wanted file, choria or puppet"],
    "ttl = 29": ["ttl: given 29, wanted at least 30: servers drop what is valid for less"],
    "plugin.choria.network.connect_timeout = 121": [
        "plugin.choria.network.connect_timeout: given 121s, wanted at most 120s"
    ],
    "plugin.choria.network.connect_timeout = 3m": [
        "plugin.choria.network.connect_timeout: given 180s, wanted at most 120s"
    ],
    "plugin.security.client_anon_tls = yes": [
        "plugin.security.client_anon_tls: given true, wanted false: a provisioner has to know its broker"
    ],
    "plugin.choria.security.request_signer.url = https://signer": [
        (
            "plugin.choria.security.request_signer.url: given a value, "
            "wanted none: requests are signed here, not by a remote signer"
        )
    ],
    "plugin.choria.security.request_signer.service = true": [
        (
            "plugin.choria.security.request_signer.service: given a value, "
            "wanted none: requests are signed here, not by a remote signer"
        )
    ],
    "plugin.choria.middleware_hosts = h": [
        (
            "plugin.choria.middleware_hosts: given 'h', which has no port, and there is no default one, "
            "wanted HOST:PORT, as in broker.example.net:4222"
        )
    ],
    "plugin.choria.middleware_hosts = a:1, b:x,": [
        (
            "plugin.choria.middleware_hosts: given 'b:x', which has a port that is not a number from 1 to 65535, "
            "wanted HOST:PORT, as in broker.example.net:4222"
        ),
        "plugin.choria.middleware_hosts: given '', which is empty, wanted HOST:PORT, as in broker.example.net:4222",
    ],
    "plugin.choria.middleware_hosts = nats://user:hunter2@h": [
        (
            "plugin.choria.middleware_hosts: given 'h', which has no port, and there is no default one, "
            "wanted HOST:PORT, as in broker.example.net:4222"
        )
    ],
}


class TestRefusals:
    @pytest.mark.parametrize(("line", "expected"), REFUSED.items(), ids=REFUSED)
    def test_what_no_provisioner_can_work_with_is_refused_with_one_line_each(
        self, site: Site, line: str, expected: list[str]
    ) -> None:
        assert site.problems(f"{line}\n") == [f"choria.cfg:3: {problem}" for problem in expected]

    def test_text_that_is_not_utf_8_is_refused_without_showing_it(self, site: Site) -> None:
        assert site.problems(b"plugin.nats.pass = \xff\n") == [
            "choria.cfg:3: plugin.nats.pass: given bytes that are not UTF-8, wanted UTF-8"
        ]

    def test_all_problems_come_at_once(self, site: Site) -> None:
        found = site.problems("".join(f"{line}\n" for line in REFUSED) + "identity = .\n")
        keys = {problem.split(": ")[1] for problem in found}
        assert keys == {line.partition(" = ")[0] for line in REFUSED} | {"identity"}

    @pytest.mark.parametrize(
        "line",
        ["ttl = 30", "plugin.choria.network.connect_timeout = 2m", "plugin.choria.security.request_signer.service = 0"],
    )
    def test_what_is_just_right_is_not_refused(self, site: Site, line: str) -> None:
        assert site.load(f"{line}\n").warnings == ()


WARNED = {
    "plugin.choria.federation.collectives = one": (
        "federation is not supported and ignored; brokers are those of plugin.choria.middleware_hosts"
    ),
    "plugin.nats.credentials = /creds": "not supported and ignored; use plugin.nats.user and plugin.nats.pass",
    "plugin.nats.user = joe": "not used, as plugin.nats.user and plugin.nats.pass are needed together",
    "plugin.choria.network.connect_timeout = 0": "given 0, which is ignored; wanted more than 0",
    "discovery_timeout = -1": "given -1, which is ignored; wanted more than 0",
    "plugin.choria.middleware_hosts = nats://joe:hunter2@h:4222": (
        "user and password in front of 'h:4222' are ignored; use plugin.nats.user and plugin.nats.pass"
    ),
    "plugin.choria.middleware_hosts = wss://h:443/x": "websockets are not supported, h port 443 is used without",
}


class TestWarnings:
    @pytest.mark.parametrize(("line", "expected"), WARNED.items(), ids=WARNED)
    def test_what_has_no_effect_is_said(self, site: Site, line: str, expected: str) -> None:
        assert site.warnings(f"{line}\n") == [f"choria.cfg:3: {line.partition(' = ')[0]}: {expected}"]

    def test_a_value_that_is_ignored_leaves_the_default(self, site: Site) -> None:
        loaded = site.load(
            "discovery_timeout = 0\nplugin.choria.network.connect_timeout = -1s\nplugin.nats.user = joe\n"
        )
        assert (loaded.discovery_timeout, loaded.connect_timeout, loaded.nats_user) == (2, 2.0, "")


class TestSample:
    def load(self, path: Path, tmp_path: Path) -> Settings:
        return settings.load(path, environ={}, cwd=tmp_path, uid=0, own_identity=lambda: "host.example.net")

    def test_the_sample_is_for_a_network_with_certificates(self, tmp_path: Path) -> None:
        loaded = self.load(SAMPLE, tmp_path)
        assert loaded.warnings == ()
        assert loaded.provider == "file"
        assert loaded.middleware_hosts == ("broker.example.net:4222",)
        assert loaded.nats_pass == ""

    def test_the_sample_shows_every_key_that_means_something(self) -> None:
        shown = set(re.findall(r"^#?([a-z_.]+) = ", SAMPLE.read_text(), re.MULTILINE))
        known = {name for name, key in settings._KEYS.items() if key.attribute}
        assert shown == known | {"identity", "plugin.security.issuer.names", "plugin.security.issuer.example.public"}

    def test_every_line_of_the_sample_may_be_uncommented(self, tmp_path: Path) -> None:
        path = tmp_path / "choria.cfg"
        path.write_text(re.sub(r"^#(?! )", "", SAMPLE.read_text(), flags=re.MULTILINE))
        loaded = self.load(path, tmp_path)
        assert loaded.warnings == ()
        assert (loaded.provider, loaded.ttl, loaded.discovery_timeout, loaded.connect_timeout) == ("choria", 60, 2, 2.0)


def findings(path: Path, content: bytes) -> tuple[str, ...]:
    """Load a file; give the problems when it is refused, else the warnings."""
    path.write_bytes(content)
    try:
        return settings.load(path, environ={}, cwd=path.parent, uid=0, own_identity=lambda: "host").warnings
    except ConfigurationError as error:
        return error.problems


def lines() -> st.SearchStrategy[bytes]:
    key = st.sampled_from(list(settings._KEYS)).map(str.encode)
    return st.lists(st.tuples(key, st.binary(max_size=12)).map(b" = ".join)).map(b"\n".join)


@given(st.binary() | lines())
def test_any_bytes_are_settings_or_one_line_problems(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assert all(map(str.isprintable, findings(tmp_path_factory.getbasetemp() / "fuzzed.cfg", content)))


@given(st.text(st.characters(codec="utf-8")))
def test_any_brokers_are_settings_or_one_line_problems(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.cfg"
    content = f"plugin.security.provider = file\nplugin.choria.middleware_hosts = {text}"
    assert all(map(str.isprintable, findings(path, content.encode())))
