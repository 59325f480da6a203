"""The configuration file of a Choria client, read the way every Choria client reads it.

The format forgives nearly everything: unknown keys, lines that are none and values of a wrong type are passed over. The
outcome is the same here; where a value of a known key had no effect, a warning says so.
"""

from __future__ import annotations

import codecs
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from provisioner import durations
from provisioner.choria import brokers, identity
from provisioner.errors import ConfigurationError

#: The files that are tried when none is named: first these, in the user's home directory ...
HOME_FILES = (".choriarc", ".mcollective")
#: ... then these.
SYSTEM_FILES = (
    "/etc/choria/client.conf",
    "/usr/local/etc/choria/client.conf",
    "/etc/puppetlabs/mcollective/client.cfg",
)
#: Read from the current directory and all its parents, whatever the main file is.
PROJECT_FILE = "choria.conf"
#: A longer line, and all that follows it in its file, is not read by Choria.
MAX_LINE_BYTES = 64 * 1024 - 1
#: The security providers that are known here, of Choria's five.
PROVIDERS = ("file", "choria", "puppet")
#: What a file gets that names none.
DEFAULT_PROVIDER = "puppet"
#: Servers drop every request with a shorter validity.
MIN_TTL_SECONDS = 30
#: Choria refuses to wait longer for a connection.
MAX_CONNECT_TIMEOUT_SECONDS = 120.0
#: Puppet may take so long to tell where its files are.
PUPPET_SECONDS = 60.0
#: Who the provisioner is to a broker when it has a provisioning password.
PROVISIONING_USER = "provisioner"

# keys that others have to name
FILE_CERTIFICATE = "plugin.security.file.certificate"
FILE_KEY = "plugin.security.file.key"
FILE_CA = "plugin.security.file.ca"
SSLDIR = "plugin.choria.ssldir"
TOKEN_FILE = "plugin.security.choria.token_file"
SEED_FILE = "plugin.security.choria.seed_file"
CHORIA_CERTIFICATE = "plugin.security.choria.certificate"
CHORIA_KEY = "plugin.security.choria.key"
CHORIA_CA = "plugin.security.choria.ca"
CIPHER_SUITES = "plugin.security.cipher_suites"
ECC_CURVES = "plugin.security.ecc_curves"
HOSTS = "plugin.choria.middleware_hosts"
PROVIDER = "plugin.security.provider"

# white space in a regular expression of Go: nothing beyond ASCII
_BLANKS = "\t\n\f\r "
_TRUE = {"1", "yes", "true", "y", "t"}
_FALSE = {"0", "no", "false", "n", "f"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_SECONDS = re.compile(r"[0-9]{1,9}")


@attrs.frozen(kw_only=True)
class Settings:
    """What a Choria client configuration says, as far as it means something to a provisioner.

    The files that are named here are not opened. Times are in seconds.

    :ivar path: the main file
    :ivar certname: the name behind the caller id in protocol 1; not what is in the certificate
    :ivar issuers: public keys, hex, of the organization issuers by their names
    :ivar warnings: one line each, what the operator should know although it stops nothing
    """

    path: Path
    identity: str
    certname: str
    provider: str = DEFAULT_PROVIDER
    middleware_hosts: tuple[str, ...] = ()
    use_srv: bool = True
    srv_domain: str = ""
    connect_timeout: float = 2.0
    nats_user: str = ""
    nats_pass: str = attrs.field(default="", repr=False)
    ttl: int = 60
    discovery_timeout: int = 2
    file_certificate: str = ""
    file_key: str = ""
    file_ca: str = ""
    choria_token_file: str = ""
    choria_seed_file: str = ""
    choria_ca: str = ""
    choria_certificate: str = ""
    choria_key: str = ""
    trusted_signers: tuple[str, ...] = ()
    issuers: Mapping[str, str] = attrs.field(factory=dict)
    support_legacy_certificates: bool = False
    cipher_suites: tuple[str, ...] = ()
    ecc_curves: tuple[str, ...] = ()
    ssldir: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def caller(self) -> str:
        """The caller id of protocol 1. (With provider ``choria`` it is a claim of the token instead.)"""
        return f"choria={self.certname}"

    @property
    def login(self) -> Mapping[str, str]:
        """The members of CONNECT with user and password; none unless there are both."""
        both = self.nats_user and self.nats_pass
        return {"user": self.nats_user, "pass": self.nats_pass} if both else {}


def load(
    path: Path | None,
    *,
    insecure: bool = False,
    provisioning_password: str = "",
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    uid: int | None = None,
    own_identity: Callable[[], str] = identity.own_identity,
) -> Settings:
    """Read the configuration: the main file, then ``plugin.d`` next to it, then the project files, each over the last.

    :param path: the main file; None: the first that exists of :func:`default_files`
    :param insecure: unsigned protocol 1; the security provider becomes ``file`` and nothing of it is needed
    :param provisioning_password: when not empty, replaces user and password for the broker
    :param cwd: where the search for project files starts; None: the current directory
    :param uid: the effective user id; None: this process's
    :param own_identity: finds the identity when the files name none
    :raises ConfigurationError: with all problems: files that cannot be read, values that no provisioner can work with
    """
    try:
        main = (path or _first_existing(environ)).absolute()
        reading = _Reading(main, environ)
        for source in _sources(main, cwd or Path.cwd(), environ):
            _read(source, reading)
    except OSError as error:
        raise ConfigurationError([f"{error.filename or 'the current directory'}: {error.strerror or error}"]) from error
    _read_environment(reading)
    if insecure:
        reading.values[PROVIDER] = "file"
    else:
        _check_security(reading)
    if provisioning_password:
        reading.values |= {_USER: PROVISIONING_USER, _PASSWORD: provisioning_password}
    _check_connection(reading)
    own = _identity(reading, own_identity)
    uid = os.geteuid() if uid is None else uid
    certname = _certname(reading, own, uid)
    if reading.values.get(PROVIDER, DEFAULT_PROVIDER) == "puppet" and not reading.problems:
        _take_puppets_files(reading, certname, uid)
    if reading.problems:
        raise ConfigurationError(reading.problems)
    reading.values.setdefault(SEED_FILE, _default_seed_file(reading.values.get(TOKEN_FILE, "")))
    attributes = {key.attribute: reading.values[name] for name, key in _KEYS.items() if name in reading.values}
    attributes.pop("", None)
    warnings = tuple(reading.warnings)
    return Settings(
        path=main, identity=own, certname=certname, issuers=_issuers(reading), warnings=warnings, **attributes
    )


def default_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """List where a Choria client looks for its configuration, first choice first."""
    home = environ.get("HOME", "")
    homes = [Path(home, name) for name in HOME_FILES] if home else []
    return (*homes, *(Path(name) for name in SYSTEM_FILES))


def _first_existing(environ: Mapping[str, str]) -> Path:
    candidates = default_files(environ)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    others = ", ".join(str(candidate) for candidate in candidates[:-1])
    raise ConfigurationError([f"path '{candidates[-1]}' does not exist, and neither do {others}"])


@attrs.frozen
class _Source:
    """One file to read; its keys get a prefix, and only a typed one can set more than raw options."""

    path: Path
    prefix: str = ""
    typed: bool = True


def _sources(main: Path, cwd: Path, environ: Mapping[str, str]) -> Iterator[_Source]:
    yield _Source(main)
    home = environ.get("HOME", "")
    # a comparison of plain texts, as in Choria: HOME=/ does away with plugin.d everywhere
    if not (home and str(main).startswith(home)):
        directory = main.parent / "plugin.d"
        names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
        for plugin in (name.removesuffix(".cfg") for name in names if name.endswith(".cfg")):
            yield _Source(directory / f"{plugin}.cfg", prefix=f"plugin.{plugin}.", typed=plugin == "choria")
    for directory in reversed((cwd.absolute(), *cwd.absolute().parents)):
        if (directory / PROJECT_FILE).exists():
            yield _Source(directory / PROJECT_FILE)


class _UnfitError(Exception):
    """A value of a wrong type; the text says what would be right.

    :ivar outcome: what Choria takes it for; None: it passes over it, and what was set before stays
    """

    def __init__(self, wanted: str, outcome: bool | None = None) -> None:
        super().__init__(wanted)
        self.outcome = outcome


def _text(text: str, _home: str) -> str:
    return text


def _path(text: str, home: str) -> str:
    text = text.strip()
    return home + text[1:] if home and text.startswith("~") else text


def _list(text: str, _home: str) -> tuple[str, ...]:
    return tuple(element.strip() for element in text.split(","))


def _boolean(text: str, _home: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise _UnfitError("true or false", outcome=False)
    return word in _TRUE


def _integer(text: str, _home: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _UnfitError("a whole number")
    return int(text)


def _duration(text: str, _home: str) -> float:
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        return durations.parse(text)
    except durations.DurationError as error:
        raise _UnfitError(str(error)) from error


@attrs.frozen
class _Key:
    """How one key is read.

    :ivar attribute: its name in :class:`Settings`; empty: it only gives a problem or a warning
    :ivar environment: a variable that has the last word: where a file sets the key, or, when ``always``, in any case
    """

    attribute: str
    convert: Callable[[str, str], Any]
    environment: str = ""
    always: bool = False


_IDENTITY = "identity"
_TTL = "ttl"
_DISCOVERY_TIMEOUT = "discovery_timeout"
_CONNECT_TIMEOUT = "plugin.choria.network.connect_timeout"
_FEDERATION = "plugin.choria.federation.collectives"
_REQUEST_SIGNER = "plugin.choria.security.request_signer."
_USER = "plugin.nats.user"
_PASSWORD = "plugin.nats.pass"
_CREDENTIALS = "plugin.nats.credentials"
_CLIENT_ANON_TLS = "plugin.security.client_anon_tls"
_LEGACY_CERTIFICATES = "plugin.security.support_legacy_certificates"
_ISSUERS = "plugin.security.issuer.names"

_KEYS: dict[str, _Key] = {
    _IDENTITY: _Key("", _text),
    _TTL: _Key("ttl", _integer),
    _DISCOVERY_TIMEOUT: _Key("discovery_timeout", _integer),
    HOSTS: _Key("middleware_hosts", _list),
    "plugin.choria.use_srv": _Key("use_srv", _boolean),
    "plugin.choria.srv_domain": _Key("srv_domain", _text, environment="CHORIA_SRV_DOMAIN", always=True),
    _CONNECT_TIMEOUT: _Key("connect_timeout", _duration),
    SSLDIR: _Key("ssldir", _path),
    _FEDERATION: _Key("", _list, environment="CHORIA_FED_COLLECTIVE", always=True),
    f"{_REQUEST_SIGNER}url": _Key("", _text),
    f"{_REQUEST_SIGNER}service": _Key("", _boolean),
    f"{_REQUEST_SIGNER}token_file": _Key("", _path),
    f"{_REQUEST_SIGNER}seed_file": _Key("", _path),
    _USER: _Key("nats_user", _text, environment="MCOLLECTIVE_NATS_USERNAME"),
    _PASSWORD: _Key("nats_pass", _text, environment="MCOLLECTIVE_NATS_PASSWORD"),
    _CREDENTIALS: _Key("", _text, environment="MCOLLECTIVE_NATS_CREDENTIALS"),
    PROVIDER: _Key("provider", _text),
    FILE_CERTIFICATE: _Key("file_certificate", _path),
    FILE_KEY: _Key("file_key", _path),
    FILE_CA: _Key("file_ca", _path),
    TOKEN_FILE: _Key("choria_token_file", _path),
    SEED_FILE: _Key("choria_seed_file", _path),
    CHORIA_CA: _Key("choria_ca", _path),
    CHORIA_CERTIFICATE: _Key("choria_certificate", _path),
    CHORIA_KEY: _Key("choria_key", _path),
    "plugin.security.choria.trusted_signers": _Key("trusted_signers", _list),
    _ISSUERS: _Key("", _list),
    _LEGACY_CERTIFICATES: _Key("support_legacy_certificates", _boolean),
    CIPHER_SUITES: _Key("cipher_suites", _list),
    ECC_CURVES: _Key("ecc_curves", _list),
    _CLIENT_ANON_TLS: _Key("", _boolean),
}


@attrs.define
class _Reading:
    """What the files have said so far.

    :ivar raw: the texts of all keys, unknown ones included
    :ivar values: the values of the keys of :data:`_KEYS`
    :ivar origins: where each of them was set, as a message begins
    """

    main: Path
    environ: Mapping[str, str]
    raw: dict[str, str] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    origins: dict[str, str] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    warnings: list[str] = attrs.field(factory=list)

    def set(self, name: str, text: str, origin: str) -> None:
        """Give a known key a value, unless the text is none."""
        key = _KEYS[name]
        if key.convert is not _path and not _is_unicode(text):
            self.problems.append(f"{origin}: {name}: given bytes that are not UTF-8, wanted UTF-8")
            return
        try:
            self.values[name] = key.convert(text, self.environ.get("HOME", ""))
        except _UnfitError as error:
            if error.outcome is None:
                self.warnings.append(f"{origin}: {name}: given {_shown(text)}, which is ignored; wanted {error}")
                return
            self.values[name] = error.outcome
            self.warnings.append(f"{origin}: {name}: given {_shown(text)}, which is taken for false; wanted {error}")
        self.origins[name] = origin

    def problem(self, name: str, given: str, wanted: str) -> None:
        self.problems.append(f"{self._where(name)}: given {given}, wanted {wanted}")

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(f"{self._where(name)}: {text}")

    def _where(self, name: str) -> str:
        return f"{self.origins.get(name, self.main)}: {name}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(source: _Source, reading: _Reading) -> None:
    data = source.path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(data.split(b"\n"), 1):
        origin = f"{source.path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            reading.warnings.append(f"{origin}: a line of over 64 KiB, it and the rest of the file are not read")
            return
        name, _, text = line.decode(errors="surrogateescape").strip().partition("=")
        name, text = name.rstrip(_BLANKS), text.lstrip(_BLANKS)
        if name.startswith("#") or not name or not text:
            continue
        reading.raw[source.prefix + name] = text
        if source.typed and source.prefix + name in _KEYS:
            reading.set(source.prefix + name, text, origin)


def _read_environment(reading: _Reading) -> None:
    for name, key in _KEYS.items():
        if key.environment in reading.environ and (key.always or name in reading.values):
            reading.set(name, reading.environ[key.environment], f"environment variable {key.environment}")


def _check_security(reading: _Reading) -> None:
    provider = reading.values.get(PROVIDER, DEFAULT_PROVIDER)
    if provider not in PROVIDERS:
        reading.problem(PROVIDER, repr(provider), "file, choria or puppet")
    if reading.values.get(_CLIENT_ANON_TLS):
        reading.problem(_CLIENT_ANON_TLS, "true", "false: a provisioner has to know its broker")
    for name in _KEYS:
        if name.startswith(_REQUEST_SIGNER) and reading.values.get(name):
            reading.problem(name, "a value", "none: requests are signed here, not by a remote signer")


def _check_connection(reading: _Reading) -> None:
    values = reading.values
    for address in values.get(HOSTS, ()):
        _check_address(address, reading)
    if values.get(_TTL, MIN_TTL_SECONDS) < MIN_TTL_SECONDS:
        reading.problem(_TTL, str(values[_TTL]), f"at least {MIN_TTL_SECONDS}: servers drop what is valid for less")
    if values.get(_CONNECT_TIMEOUT, 0.0) > MAX_CONNECT_TIMEOUT_SECONDS:
        reading.problem(_CONNECT_TIMEOUT, f"{values[_CONNECT_TIMEOUT]:g}s", "at most 120s")
    for name in (_CONNECT_TIMEOUT, _DISCOVERY_TIMEOUT):
        if values.get(name, 1) <= 0:
            reading.warn(name, f"given {values.pop(name):g}, which is ignored; wanted more than 0")
    if bool(values.get(_USER)) != bool(values.get(_PASSWORD)):
        values |= {_USER: "", _PASSWORD: ""}
        reading.warn(_USER, f"not used, as {_USER} and {_PASSWORD} are needed together")
    if values.get(_CREDENTIALS):
        reading.warn(_CREDENTIALS, f"not supported and ignored; use {_USER} and {_PASSWORD}")
    if any(values.get(_FEDERATION, ())):
        reading.warn(_FEDERATION, f"federation is not supported and ignored; brokers are those of {HOSTS}")


def _check_address(address: str, reading: _Reading) -> None:
    shown = _shown(brokers.without_credentials(address))
    try:
        broker = brokers.parse(address)
    except brokers.AddressError as error:
        reading.problem(HOSTS, f"{shown}, which {error}", "HOST:PORT, as in broker.example.net:4222")
        return
    if brokers.has_credentials(address):
        reading.warn(HOSTS, f"user and password in front of {shown} are ignored; use {_USER} and {_PASSWORD}")
    if broker.scheme in ("ws", "wss"):
        reading.warn(HOSTS, f"websockets are not supported, {broker.host} port {broker.port} is used without")


def _identity(reading: _Reading, own_identity: Callable[[], str]) -> str:
    name: str = reading.values.get(_IDENTITY) or own_identity()
    if reason := identity.reason_insane(name):
        reading.problem(_IDENTITY, f"{_shown(name)}, which {reason}", "a name like provisioner.example.net")
    return name


def _certname(reading: _Reading, own: str, uid: int) -> str:
    """Find the name behind the caller id; Choria makes it from the user who runs it, not from the certificate."""
    override = reading.environ.get("MCOLLECTIVE_CERTNAME")
    user = reading.environ.get("USER")
    puppet = reading.values.get(PROVIDER, DEFAULT_PROVIDER) == "puppet"
    if puppet and not override and not user:
        reading.problem(
            PROVIDER, "'puppet' (the default)", "file or choria; puppet needs the environment variable USER"
        )
    name = override or (f"{user}.mcollective" if user and (puppet or uid != 0) else own)
    if not _is_unicode(name):
        reading.problems.append("environment variable MCOLLECTIVE_CERTNAME or USER: not UTF-8, wanted a name in UTF-8")
    return name


def _take_puppets_files(reading: _Reading, certname: str, uid: int) -> None:
    """Name the files as Puppet does, in its own directory unless another one is configured."""
    directory = reading.values.get(SSLDIR, "")
    if not directory and uid == 0:
        directory = _puppet_ssldir()
    elif not directory and (home := reading.environ.get("HOME")):
        directory = f"{home}/.puppetlabs/etc/puppet/ssl"
    if not directory:
        reading.problem(SSLDIR, "nothing", f"a directory, since {PROVIDER} is puppet and Puppet's own was not found")
    reading.values |= {
        SSLDIR: directory,
        FILE_CERTIFICATE: f"{directory}/certs/{certname}.pem",
        FILE_KEY: f"{directory}/private_keys/{certname}.pem",
        FILE_CA: f"{directory}/certs/ca.pem",
        _LEGACY_CERTIFICATES: True,
    }


def _puppet_ssldir() -> str:
    """Where Puppet says that it is for root; empty when it does not say."""
    command = ("puppet", "config", "print", "ssldir")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PUPPET_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return os.fsdecode(done.stdout).strip()


def _default_seed_file(token_file: str) -> str:
    return re.sub(r"\.[^./]*$", "", token_file) + ".key" if token_file else ""


def _issuers(reading: _Reading) -> dict[str, str]:
    """Collect the keys of the named issuers; each sits under a key of its own, that no list of keys can hold."""
    publics = {
        name: reading.raw.get(f"plugin.security.issuer.{name}.public") for name in reading.values.get(_ISSUERS, ())
    }
    return {name: public for name, public in publics.items() if public}
