"""One unprovisioned server: the agents it runs, and what their calls do to it.

Knows nothing of the network: a request goes in, an answer comes out, and whoever owns the server publishes it. The
rules, texts and status codes are those of real Choria servers of version 0.30.
"""

from __future__ import annotations

import posixpath
import random
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from provisioner.simulate import csr, inputs, private_key
from provisioner.simulate.envelopes import DroppedError, Request
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.trust import Trust, UntrustedError

COLLECTIVE = "provisioning"
AGENTS = ("choria_provision", "choria_util", "discovery", "rpcutil")

ABORTED = 1
UNKNOWN_ACTION = 2
LOCKED = "Could not obtain provisioning lock"

#: How long the last caller of a locked action keeps everybody else out.
LOCK_SECONDS = 120.0
#: Between the reply to a restart and the restart, without the splay.
RESTART_SECONDS = 2
#: The splay of a restart that asks for none.
RESTART_SPLAY_SECONDS = 10
#: A shutdown waits for less than this.
SHUTDOWN_SPLAY_SECONDS = 10

_TRUE = frozenset({"1", "yes", "true", "y", "t"})
_PROVISION = "plugin.choria.server.provision"


@attrs.frozen(kw_only=True)
class Site:
    """What the servers of one site have in common, most of it from their provisioning token.

    :ivar token: the shared secret that callers must know
    :ivar jwt: text of the provisioning JWT; empty when the servers have none
    :ivar provision_by_default: the JWT says that a server without the setting is to be provisioned
    :ivar version: of the servers when they first boot
    :ivar upgradable: the JWT says that servers may be given another version
    :ivar repository: URL of the only repository that there is
    :ivar releases: the versions in it
    :ivar new_key: makes the key for a certificate
    :ivar trust: what the servers need to live in their network; None: everything will do
    """

    token: str = attrs.field(repr=False, validator=attrs.validators.min_len(1))
    jwt: str = attrs.field(default="", repr=False)
    provision_by_default: bool = True
    version: str = "0.30.0"
    upgradable: bool = False
    repository: str = ""
    releases: Collection[str] = ()
    config_file: str = "/etc/choria/server.conf"
    new_key: Callable[[], RSAPrivateKey] = csr.new_key
    trust: Trust | None = None

    @property
    def directory(self) -> str:
        """Where the servers have their files."""
        return posixpath.dirname(self.config_file)


@attrs.frozen(kw_only=True)
class Answer:
    """What a server does about a request.

    :ivar action: agent and action, such as ``rpcutil#ping``
    :ivar body: of the reply; None when there is none
    :ivar before: types of the events published before the reply
    :ivar after: types of the events published after the reply
    """

    action: str
    status: int = 0
    text: str = "OK"
    body: str | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Departure:
    """A server is on its way out.

    :ivar at: when it will be gone, on the clock of the server
    :ivar returns: it will be back at once, still unprovisioned
    :ivar provisioned: it leaves with all that it needs to live in its real network
    :ivar objection: why it cannot live there; empty: it can, or does not go there
    :ivar events: types of the events published on leaving
    """

    at: float
    returns: bool = False
    provisioned: bool = False
    objection: str = ""
    events: tuple[str, ...] = ()


@attrs.define(eq=False, kw_only=True)
class Server:
    """One server. Not thread-safe: one thread at a time may touch it.

    :ivar misbehaviour: how it abuses the network when it should answer
    :ivar fails: its first configure is refused, as by a disk that is full
    :ivar fails_seconds: how long after its first configure that lasts; 0 means that the next one works
    :ivar stuck: an upgrade succeeds in its words alone, its version stays what it is
    :ivar boots_after: seconds after the start of its fleet; 0 means that it has been up for long
    :ivar version: what it runs since it booted
    :ivar next_version: what it will run when it boots again
    :ivar started: when it booted, by its wall clock
    :ivar files: what it has on its disk, which outlives a restart, by full name
    :ivar configures: how often it was configured since it booted
    :ivar failures: how often a configure was refused because the server was to fail
    :ivar departure: set once it has been told to restart or to shut down
    """

    identity: str
    site: Site
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    misbehaviour: Misbehaviour | None = None
    fails: bool = False
    fails_seconds: float = 0.0
    stuck: bool = False
    boots_after: float = 0.0
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    #: Draws an integer from 0 to below its argument.
    draw: Callable[[int], int] = random.randrange

    version: str = attrs.field(init=False)
    next_version: str = attrs.field(init=False)
    started: float = attrs.field(default=0.0, init=False)
    files: dict[str, str] = attrs.field(factory=dict, init=False, repr=False)
    configures: int = attrs.field(default=0, init=False)
    failures: int = attrs.field(default=0, init=False)
    departure: Departure | None = attrs.field(default=None, init=False)
    _exchange: X25519PrivateKey | None = attrs.field(default=None, init=False, repr=False)
    _lock_holder: str = attrs.field(default="", init=False)
    _locked_until: float = attrs.field(default=0.0, init=False)
    _fails_until: float = attrs.field(default=0.0, init=False)

    @property
    def good(self) -> bool:
        """It can be provisioned, if not at the first attempt."""
        return self.misbehaviour in (None, Misbehaviour.TWICE)

    @version.default
    @next_version.default
    def _version_of_the_site(self) -> str:
        return self.site.version

    @property
    def config(self) -> str | None:
        """Text of its configuration file; None when there is none."""
        return self.files.get(self.site.config_file)

    def boot(self) -> None:
        """Start anew: what was only in memory is gone, the files are still there."""
        self.version = self.next_version
        self.started = self.wall_clock()
        self.configures = 0
        self.departure = None
        self._exchange = None
        self._lock_holder = ""

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for.

        :raises DroppedError: when the request is not for this server, or is not fit to be looked at
        """
        self._check(request)
        if request.agent == "discovery":
            return Answer(action="discovery", body="pong" if request.body == b"ping" else None)
        if request.agent == "choria_provision" and self.departure:
            return Answer(action="choria_provision")
        return self._call(request)

    def _check(self, request: Request) -> None:
        filters = request.filter
        if not set(filters["agent"]) <= set(AGENTS):
            raise DroppedError("a filter on an agent that is not here")
        if filters["identity"] and self.identity not in filters["identity"]:
            raise DroppedError("a filter on another identity")
        if filters["fact"] or filters["cf_class"] or filters["compound"]:
            raise DroppedError("a filter on facts or classes, of which nothing matches here")
        if request.collective != COLLECTIVE:
            raise DroppedError("an unknown collective")
        if abs(self.wall_clock() - request.time) >= request.ttl:
            raise DroppedError("too old, or from the future")
        if request.agent not in AGENTS:
            raise DroppedError("an unknown agent")

    def _call(self, request: Request) -> Answer:
        name = ""
        try:
            call = inputs.call(request.body)
            name = call.action
            action = _ACTIONS.get((request.agent, name))
            if action is None:
                raise inputs.RefusedError(UNKNOWN_ACTION, f"Unknown action {name} for agent {request.agent}")
            if action.locked:
                self._lock(f"{request.sender}.{request.caller}")
            if action.refusal and (refusal := action.refusal(self)):
                raise inputs.RefusedError(ABORTED, refusal)
            given = inputs.read(call, agent=request.agent, struct=action.struct, kinds=action.inputs)
            if "token" in action.inputs and given["token"] != self.site.token:
                raise inputs.RefusedError(ABORTED, "Incorrect provision token supplied")
            done = action.run(self, given)
        except inputs.RefusedError as refusal:
            return _answer(request.agent, name, _Done(data={}), status=refusal.status, text=refusal.text)
        return _answer(request.agent, name, done)

    def _lock(self, caller: str) -> None:
        now = self.clock()
        if self._lock_holder not in ("", caller) and now < self._locked_until:
            raise inputs.RefusedError(ABORTED, LOCKED)
        self._lock_holder, self._locked_until = caller, now + LOCK_SECONDS

    def _jwt(self, _given: Mapping[str, Any]) -> _Done:
        if not self.site.jwt:
            raise inputs.RefusedError(ABORTED, "No Provisioning JWT file has been configured")
        self._exchange = X25519PrivateKey.generate()
        return _Done(data={"jwt": self.site.jwt, "ecdh_public": self._exchange.public_key().public_bytes_raw().hex()})

    def _gen25519(self, given: Mapping[str, Any]) -> _Done:
        directory, key = self.site.directory, Ed25519PrivateKey.generate()
        # a token for an earlier key would be worthless
        self.files.pop(posixpath.join(directory, "server.jwt"), None)
        self.files[posixpath.join(directory, "server.seed")] = key.private_bytes_raw().hex()
        signature = key.sign(given["nonce"].encode(errors="replace")).hex()
        public = key.public_key().public_bytes_raw().hex()
        return _Done(data={"public_key": public, "directory": directory, "signature": signature})

    def _gencsr(self, given: Mapping[str, Any]) -> _Done:
        ssldir, key = posixpath.join(self.site.directory, "ssl"), self.site.new_key()
        request = csr.request(key, {**given, "cn": given["cn"] or self.identity})
        self.files[posixpath.join(ssldir, "private.pem")] = csr.private_pem(key)
        self.files[posixpath.join(ssldir, "csr.pem")] = request
        return _Done(data={"csr": request, "public_key": csr.public_pem(key), "ssldir": ssldir})

    def _configure(self, given: Mapping[str, Any]) -> _Done:
        """What fails half-way leaves what was written before it."""
        if not given["config"]:
            text = "Did not receive any configuration to write, cannot write a empty configuration file"
            raise inputs.RefusedError(ABORTED, text)
        if given["key"] and not given["ecdh_public"]:
            raise inputs.RefusedError(ABORTED, "EDCH Public Key not supplied while providing a private key")
        settings = inputs.settings(given["config"])
        if all(given[part] for part in ("certificate", "ca", "ssldir")):
            self._write_tls(given)
        if given["server_jwt"]:
            self.files[posixpath.join(self.site.directory, "server.jwt")] = given["server_jwt"]
        self._fail_at_first()
        lines = ["# written by the provisioner", *(f"{key}={value}" for key, value in settings.items())]
        self.files[self.site.config_file] = "".join(f"{line}\n" for line in lines)
        self._write_policies("policies", given["action_policies"], ".policy", "Action Policies")
        self._write_policies("policies/rego", given["opa_policies"], ".rego", "Open Policy Agent Policies")
        self.configures += 1
        return _Done(data={"message": f"Wrote {len(lines)} lines to {self.site.config_file}"}, before=("provisioned",))

    def _write_tls(self, given: Mapping[str, Any]) -> None:
        ssldir = given["ssldir"]
        self.files[posixpath.join(ssldir, "certificate.pem")] = given["certificate"]
        self.files[posixpath.join(ssldir, "ca.pem")] = given["ca"]
        if given["key"]:
            try:
                key = private_key.decrypt(given["key"], own=self._exchange, other_public=given["ecdh_public"])
            except private_key.UndecryptableError as error:
                text = f"TLS Setup Failed: could not decrypt private key: {error}"
                raise inputs.RefusedError(ABORTED, text) from None
            self.files[posixpath.join(ssldir, "private.pem")] = key
            self.files.pop(posixpath.join(ssldir, "csr.pem"), None)

    def _write_policies(self, folder: str, policies: Mapping[str, str], extension: str, what: str) -> None:
        for name in policies:
            if not name.endswith(extension):
                expected = f'expected "{name}" to have {extension} extension'
                raise inputs.RefusedError(ABORTED, f"Could not save {what}: {expected}")
        directory = posixpath.join(self.site.directory, folder)
        if policies:
            for name in [name for name in self.files if name.startswith(f"{directory}/")]:
                del self.files[name]
        for name, text in policies.items():
            if text:
                # names are not looked at, so that one with dots in it gets out of the folder
                self.files[posixpath.normpath(posixpath.join(directory, name))] = text

    def _fail_at_first(self) -> None:
        if not self.fails:
            return
        now = self.clock()
        if not self.failures:
            self._fails_until = now + self.fails_seconds
        if not self.failures or now < self._fails_until:
            self.failures += 1
            text = f"Could not write config: write {self.site.config_file}: no space left on device"
            raise inputs.RefusedError(ABORTED, text)

    def _restart(self, given: Mapping[str, Any]) -> _Done:
        file, splay = self.site.config_file, given["splay"] or RESTART_SPLAY_SECONDS
        if self.config is None:
            why = f"open {file}: no such file or directory"
            text = f"Configuration {file} could not be parsed, restart cannot continue: {why}"
            raise inputs.RefusedError(ABORTED, text)
        settings = _settings(self.config)
        provision = settings.get(_PROVISION, "")
        if provision.lower() in _TRUE:
            text = f"Configuration {file} enables provisioning, restart cannot continue"
            raise inputs.RefusedError(ABORTED, text)
        if splay < 0:
            self.departure = Departure(at=self.clock())
            return _Done(data=None)
        seconds = RESTART_SECONDS + self.draw(splay)
        at = self.clock() + seconds
        if not provision and self.site.provision_by_default:
            self.departure = Departure(at=at, returns=True)
        else:
            objection = self._objection(settings)
            self.departure = Departure(at=at, provisioned=not objection, objection=objection)
        return _Done(data={"message": f"Restarting Choria Server after {seconds}s"}, after=("shutdown",))

    def _objection(self, settings: Mapping[str, str]) -> str:
        """Say why it cannot live in its network, nothing when it can."""
        if self.site.trust:
            try:
                self.site.trust.check_server(settings, self.files, identity=settings.get("identity", self.identity))
            except UntrustedError as error:
                return str(error)
        return ""

    def _release_update(self, given: Mapping[str, Any]) -> _Done:
        version = given["version"]
        if trouble := self._update_trouble(given["repository"], version):
            raise inputs.RefusedError(ABORTED, f"Update to version {version} failed, release rolled back: {trouble}")
        if not self.stuck:
            self.next_version = version
        self.departure = Departure(at=self.clock() + RESTART_SECONDS, returns=True)
        text = f"Restarting Choria Server after {RESTART_SECONDS}s"
        return _Done(data={"message": text}, before=("upgraded",), after=("shutdown",))

    def _update_trouble(self, repository: str, version: str) -> str:
        """Say why an update fails, nothing when it works."""
        if not repository:
            return "invalid updater configuration: no source repo given, please use SourceRepo()"
        release = f"{repository}/{version}/linux/amd64/release.json"
        if repository != self.site.repository:
            why = f"dial tcp {urllib.parse.urlsplit(repository).netloc}: connect: connection refused"
            return f'release {version} not found: could not download release spec: Get "{release}": {why}'
        if version not in self.site.releases:
            return f"release {version} not found: could not fetch release from {release}: 404 Not Found"
        return ""

    def _no_update(self) -> str:
        return "" if self.site.upgradable else "Version updates is not enabled in the configuration"

    def _reprovision(self, _given: Mapping[str, Any]) -> _Done:
        text = "Server is already in provisioning mode, cannot enable provisioning mode again"
        raise inputs.RefusedError(ABORTED, text)

    def _shutdown(self, _given: Mapping[str, Any]) -> _Done:
        seconds = self.draw(SHUTDOWN_SPLAY_SECONDS)
        if seconds == 0:
            self.departure = Departure(at=self.clock())
            return _Done(data=None)
        self.departure = Departure(at=self.clock() + seconds, events=("shutdown",))
        return _Done(data={"message": f"Shutting Choria Server down after {seconds}s"})

    def _inventory(self, _given: Mapping[str, Any]) -> _Done:
        return _Done(
            data={
                "agents": AGENTS,
                "classes": [],
                "collectives": [COLLECTIVE],
                "data_plugins": [],
                "facts": self.facts,
                "machines": [],
                "main_collective": COLLECTIVE,
                "version": self.version,
                "upgradable": self.site.upgradable,
            }
        )

    def _daemon_stats(self, _given: Mapping[str, Any]) -> _Done:
        """Without the counters of requests, which nobody asks for here."""
        return _Done(
            data={
                "agents": AGENTS,
                "configfile": self.site.config_file,
                "pid": 1,
                "starttime": int(self.started),
                "threads": [],
                "version": self.version,
            }
        )

    def _ping(self, _given: Mapping[str, Any]) -> _Done:
        return _Done(data={"pong": int(self.wall_clock())})


@attrs.frozen(kw_only=True)
class _Done:
    """An action was carried out; without data the process was gone before it could reply."""

    data: Mapping[str, Any] | None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class _Action:
    """How an action is called.

    :ivar struct: what a real server names in complaints about the types of inputs
    :ivar refusal: a reason not to carry it out that counts before the inputs do, if there is one
    """

    run: Callable[[Server, Mapping[str, Any]], _Done]
    struct: str
    inputs: Mapping[str, str]
    locked: bool = False
    refusal: Callable[[Server], str] | None = None


_CONFIGURE_TEXTS = ("token", "config", "certificate", "ca", "ssldir", "key", "ecdh_public", "server_jwt")
_CONFIGURE_MAPS = ("action_policies", "opa_policies")

_ACTIONS: Mapping[tuple[str, str], _Action] = {
    ("choria_provision", "jwt"): _Action(
        run=Server._jwt, struct="JWTRequest", inputs={"token": inputs.TEXT}, locked=True
    ),
    ("choria_provision", "gen25519"): _Action(
        run=Server._gen25519,
        struct="ED25519Request",
        inputs=dict.fromkeys(("token", "nonce"), inputs.TEXT),
        locked=True,
    ),
    ("choria_provision", "gencsr"): _Action(
        run=Server._gencsr,
        struct="CSRRequest",
        inputs=dict.fromkeys(("token", "cn", "c", "l", "o", "ou", "st"), inputs.TEXT),
        locked=True,
    ),
    ("choria_provision", "release_update"): _Action(
        run=Server._release_update,
        struct="ReleaseUpdateRequest",
        inputs=dict.fromkeys(("token", "repository", "version"), inputs.TEXT),
        locked=True,
        refusal=Server._no_update,
    ),
    ("choria_provision", "reprovision"): _Action(run=Server._reprovision, struct="ReprovisionRequest", inputs={}),
    ("choria_provision", "configure"): _Action(
        run=Server._configure,
        struct="ConfigureRequest",
        inputs=dict.fromkeys(_CONFIGURE_TEXTS, inputs.TEXT) | dict.fromkeys(_CONFIGURE_MAPS, inputs.TEXTS),
        locked=True,
    ),
    ("choria_provision", "restart"): _Action(
        run=Server._restart, struct="RestartRequest", inputs={"token": inputs.TEXT, "splay": inputs.INTEGER}
    ),
    ("choria_provision", "shutdown"): _Action(
        run=Server._shutdown, struct="ShutdownRequest", inputs={"token": inputs.TEXT}
    ),
    ("rpcutil", "inventory"): _Action(run=Server._inventory, struct="InventoryRequest", inputs={}),
    ("rpcutil", "daemon_stats"): _Action(run=Server._daemon_stats, struct="DaemonStatsRequest", inputs={}),
    ("rpcutil", "ping"): _Action(run=Server._ping, struct="PingRequest", inputs={}),
}


def _answer(agent: str, action: str, done: _Done, *, status: int = 0, text: str = "OK") -> Answer:
    body = None
    if done.data is not None:
        body = inputs.encode({"action": action, "statuscode": status, "statusmsg": text, "data": done.data})
    return Answer(action=f"{agent}#{action}", status=status, text=text, body=body, before=done.before, after=done.after)


def _settings(text: str) -> Mapping[str, str]:
    """Read a configuration file as a server does, so that a value with a line break has the effect it really has."""
    settings = {}
    for line in text.split("\n"):
        key, separator, value = line.strip().partition("=")
        if separator and key and value and not key.startswith("#"):
            settings[key.rstrip()] = value.lstrip()
    return settings
