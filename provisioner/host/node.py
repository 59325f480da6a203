"""The server that is being provisioned, as its RPC actions: what each sends, wants back, and how often it is tried."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from provisioner.choria.errors import ConnectionLostError, ConnectorError, PayloadTooLargeError
from provisioner.choria.retry import RPC_BACKOFF
from provisioner.choria.rpc import (
    BadReplyError,
    NobodyError,
    NoBrokerError,
    RefusedError,
    RPCError,
    RPCReply,
    Session,
    SilenceError,
)
from provisioner.config import Config
from provisioner.errors import HostError, SoftError
from provisioner.host.host import Host
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.text import printable

LOG = logging.getLogger(__name__)

#: The agent that servers run exactly while they want to be provisioned.
PROVISIONING_AGENT = "choria_provision"
#: What each agent may take for an action. A request waits that long and the discovery timeout on top, as in the Go
#: original.
AGENT_TIMEOUT_SECONDS = {PROVISIONING_AGENT: 20.0, "rpcutil": 2.0}
#: How often a wait between two tries looks whether to go on.
CHECK_SECONDS = 0.1
#: How long servers get to come back to a broker that was away: they try again with pauses that grow by half a second.
RETURN_SECONDS = 10.0
#: How long a server answers nobody else after the last request of the one who has it in work.
LOCK_SECONDS = 120.0
#: Seconds over which servers spread their restart: with 1 each restarts two seconds after its reply.
RESTART_SPLAY_SECONDS = 1
#: What a server has to sign with a new key; sent as twice as many hexadecimal digits, as the Go original does.
NONCE_BYTES = 16

_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
_HEX_SIGNATURE = re.compile(r"[0-9a-fA-F]{128}")

#: Of the curve of Ed25519: the prime, and the y coordinates of its points of order 1, 2, 4 and 8.
_FIELD = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = frozenset((1, _FIELD - 1, 0, _ORDER_8, _FIELD - _ORDER_8))

#: Failures after which the server may have heard the request.
_UNANSWERED = (SilenceError, NoBrokerError, ConnectionLostError)

_T = TypeVar("_T")


@attrs.frozen
class _Action:
    """An action and how often it is tried.

    :ivar repeat_unanswered: it is sent again even when it may be under way, since no reply came to an earlier try
    :ivar must_arrive: it is sent even when provisioning is paused meanwhile, and when replies contradict each other
    """

    agent: str
    name: str
    tries: int
    repeat_unanswered: bool = True
    must_arrive: bool = False

    @property
    def label(self) -> str:
        return f"{self.agent}#{self.name}"

    def ends_with(self, error: RPCError | ConnectorError) -> bool:
        """Whether a failed try is the last one, however many are left."""
        if isinstance(error, _UNANSWERED):
            return not self.repeat_unanswered
        return isinstance(error, PayloadTooLargeError) or (isinstance(error, RPCError) and error.final)

    def timeout(self, discovery_timeout: float) -> float:
        """Seconds to wait for a reply."""
        return AGENT_TIMEOUT_SECONDS[self.agent] + discovery_timeout


JWT = _Action(PROVISIONING_AGENT, "jwt", tries=3)
GEN25519 = _Action(PROVISIONING_AGENT, "gen25519", tries=5)
INVENTORY = _Action("rpcutil", "inventory", tries=5)
GENCSR = _Action(PROVISIONING_AGENT, "gencsr", tries=1)
RELEASE_UPDATE = _Action(PROVISIONING_AGENT, "release_update", tries=3, repeat_unanswered=False)
CONFIGURE = _Action(PROVISIONING_AGENT, "configure", tries=5)
# a server that is configured would stay locked: neither a pause nor a forged reply may prevent its restart
RESTART = _Action(PROVISIONING_AGENT, "restart", tries=3, must_arrive=True)
SHUTDOWN = _Action(PROVISIONING_AGENT, "shutdown", tries=3)

#: All that one cycle may take, and more.
_CYCLE = (JWT, GEN25519, INVENTORY, GENCSR, RELEASE_UPDATE, CONFIGURE, RESTART)


def cycle_limit(discovery_timeout: float) -> float:
    """Seconds that no cycle takes, its helper's time aside: every try may wait as long again for the broker, and then
    for servers to come back to it."""
    return sum(action.tries * 2 * (action.timeout(discovery_timeout) + RETURN_SECONDS) for action in _CYCLE)


class StepError(HostError):
    """An RPC step was given up; the text names the action and the last reason."""


class UnansweredError(StepError):
    """A step was given up without a reply: whether the server has made it is unknown."""


class StepHeldError(SoftError):
    """An RPC step was not made, or ended, for a reason that passes: a pause, or the end of the process."""


class LockedError(SoftError):
    """Another provisioner has the server in work, or had a short while ago: the former leader, mostly."""

    hold = LOCK_SECONDS


@attrs.frozen
class Token:
    """Reply of `jwt`.

    :ivar text: its provisioning JWT, unverified
    :ivar ecdh_public: its X25519 public key as 64 hexadecimal digits, good until the next call
    """

    text: str = attrs.field(repr=False)
    ecdh_public: str


@attrs.frozen
class SigningKey:
    """Reply of `gen25519`: the new Ed25519 key of the server, which it has proven to hold.

    :ivar public_key: 64 hexadecimal digits
    :ivar directory: where the server keeps it
    :ivar signature: of our nonce, 128 hexadecimal digits
    """

    public_key: str
    directory: str
    signature: str


@attrs.frozen
class Inventory:
    """Reply of `inventory`.

    :ivar text: all of it, as the JSON text that the server wrote
    :ivar version: of the server; empty when it does not say
    """

    text: str = attrs.field(repr=False)
    version: str
    upgradable: bool


@attrs.frozen
class CSR:
    """Reply of `gencsr`.

    :ivar csr: PEM
    :ivar public_key: something like PEM
    :ivar ssldir: where the server keeps its certificate
    """

    csr: str
    public_key: str
    ssldir: str


@attrs.frozen(kw_only=True)
class Node:
    """One server in provisioning mode, for one cycle. Every method raises :class:`HostError` when it gives up."""

    host: Host
    session: Session
    config: Config
    metrics: Metrics
    shutdown: Shutdown
    #: Seconds added to the time that an agent may take.
    discovery_timeout: float

    def jwt(self) -> Token:
        """Get its provisioning JWT. It makes a new key for the encryption of a private key with every call."""
        return self._call(JWT, self._with_token(), _token)

    def gen25519(self) -> SigningKey:
        """Have it make a new key to sign with, which ends the worth of any earlier one."""

        def attempt() -> SigningKey:
            nonce = secrets.token_hex(NONCE_BYTES)
            return _signing_key(self._ask(GEN25519, self._with_token(nonce=nonce)), nonce)

        return self._tries(GEN25519, attempt)

    def inventory(self) -> Inventory:
        """Get what it says about itself."""
        return self._call(INVENTORY, {}, _inventory)

    def gencsr(self) -> CSR:
        """Have it make a new key and a request for a certificate in its own name. Nothing of it is checked here."""
        return self._call(GENCSR, self._with_token(cn=self.session.identity), _csr)

    def release_update(self, repository: str, version: str) -> str:
        """Have it install another version from a repository (a URL) and restart; gives its message.

        A try without a reply is the last one: the update may be under way.
        """
        return self._call(RELEASE_UPDATE, self._with_token(repository=repository, version=version), _message)

    def configure(self, inputs: Mapping[str, Any]) -> str:
        """Have it write its configuration; gives its message."""
        return self._call(CONFIGURE, self._with_token(**inputs), _message)

    def restart(self) -> None:
        """Have it restart with the new configuration."""
        self._leave(RESTART, self._with_token(splay=RESTART_SPLAY_SECONDS))

    def shut_down(self) -> None:
        """Have it shut down for good."""
        self._leave(SHUTDOWN, self._with_token())

    def paused(self) -> str | None:
        """Why this server is to be left alone now, if so."""
        if self.config.paused:
            return "provisioning is paused"
        return "the host was let go, provisioning was paused meanwhile" if self.host.let_go else None

    def _with_token(self, **inputs: object) -> dict[str, object]:
        return {"token": self.config.token, **inputs}

    def _leave(self, action: _Action, inputs: Mapping[str, Any]) -> None:
        """An action after which the server is gone, so that its reply may never come.

        After a try that the server may have heard, silence or nobody there counts as success: a server that is about
        to leave no longer answers. If the connection broke, servers first get the time to come back.
        """
        heard = lost = False

        def attempt() -> None:
            nonlocal heard, lost
            if lost:
                self._wait_for_return(action)
            try:
                _message(self._ask(action, inputs))
            except (SilenceError, NobodyError) as error:
                if heard:
                    return
                heard = isinstance(error, SilenceError)
                raise
            except (ConnectionLostError, NoBrokerError):
                heard = lost = True
                raise

        self._tries(action, attempt)

    def _wait_for_return(self, action: _Action) -> None:
        """Give servers the time to come back to a broker that was away. As long as it is, that time does not begin."""

        def over() -> bool:
            return self._held(action) is not None

        _wait(RETURN_SECONDS, over)
        if not self.session.connected:
            _wait(action.timeout(self.discovery_timeout), lambda: self.session.connected or over())
            _wait(RETURN_SECONDS, over)

    def _call(self, action: _Action, inputs: Mapping[str, Any], opened: Callable[[RPCReply], _T]) -> _T:
        return self._tries(action, lambda: opened(self._ask(action, inputs)))

    def _ask(self, action: _Action, inputs: Mapping[str, Any]) -> RPCReply:
        with self.metrics.rpc_time[action.label].time():
            reply = self.session.call(
                action.agent,
                action.name,
                inputs,
                timeout=action.timeout(self.discovery_timeout),
                despite_conflict=action.must_arrive,
            )
        LOG.debug("%s was answered", action.label, extra=self._extra())
        return reply

    def _tries(self, action: _Action, attempt: Callable[[], _T]) -> _T:
        """Make up to `action.tries` tries with a growing pause between them."""

        def held() -> str | None:
            return self._held(action)

        self.host.at(action.label)
        tried = 0
        while True:
            # a broker that restarts must not use up the tries of every host in work
            _wait(action.timeout(self.discovery_timeout), lambda: self.session.connected or held() is not None)
            if reason := held():
                raise StepHeldError(f"{action.label} not sent: {reason}")
            tried += 1
            try:
                return attempt()
            except (RPCError, ConnectorError) as error:
                LOG.debug("%s, try %d: %s", action.label, tried, error, extra=self._extra())
                if tried == action.tries or action.ends_with(error):
                    self.metrics.rpc_errors[action.label].inc()
                    failure = _given_up(error)(f"{action.label}: {error}")
                    failure.request_id = self.session.request_id
                    raise failure from error
            _wait(RPC_BACKOFF.delay(tried), lambda: held() is not None)

    def _extra(self) -> dict[str, str]:
        return {"identity": self.session.identity, "request_id": self.session.request_id}

    def _held(self, action: _Action) -> str | None:
        """Why an action may not be made now, if so."""
        if self.shutdown.expired:
            return "the provisioner is shutting down"
        return None if action.must_arrive else self.paused()


def _given_up(error: RPCError | ConnectorError) -> type[HostError]:
    if isinstance(error, RefusedError) and error.locked:
        return LockedError
    return UnansweredError if isinstance(error, _UNANSWERED) else StepError


def _wait(seconds: float, over: Callable[[], bool]) -> None:
    """Wait for `seconds`, or until `over` says so."""
    end = time.monotonic() + seconds
    while not over() and (remaining := end - time.monotonic()) > 0:
        time.sleep(min(CHECK_SECONDS, remaining))


def _token(reply: RPCReply) -> Token:
    return Token(reply.text("jwt"), _hex(reply, "ecdh_public", _HEX_KEY))


def _signing_key(reply: RPCReply, nonce: str) -> SigningKey:
    key = SigningKey(
        public_key=_hex(reply, "public_key", _HEX_KEY),
        directory=_filled(reply, "directory"),
        signature=_hex(reply, "signature", _HEX_SIGNATURE),
    )
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.public_key))
        public.verify(bytes.fromhex(key.signature), nonce.encode())
    except (InvalidSignature, ValueError):
        raise BadReplyError("the signature in the reply is not one of the nonce by its public_key") from None
    if _is_weak(public):
        raise BadReplyError("the public_key in the reply is a weak one, for which anybody can sign")
    return key


def _is_weak(public: Ed25519PublicKey) -> bool:
    """Whether it is one of the few points, those of small order, that signatures can be made for without a key."""
    # its y coordinate, which may be written with the prime on top, without the sign of x
    return int.from_bytes(public.public_bytes_raw(), "little") % 2**255 % _FIELD in _SMALL_ORDER


def _inventory(reply: RPCReply) -> Inventory:
    version, upgradable = reply.data.get("version", ""), reply.data.get("upgradable", False)
    if not isinstance(version, str):
        raise BadReplyError("the reply lacks a valid version")
    if not isinstance(upgradable, bool):
        raise BadReplyError("the reply lacks a valid upgradable")
    return Inventory(reply.data_text(), version, upgradable)


def _csr(reply: RPCReply) -> CSR:
    return CSR(csr=reply.text("csr"), public_key=reply.text("public_key"), ssldir=reply.text("ssldir"))


def _filled(reply: RPCReply, key: str) -> str:
    text = reply.text(key)
    if not text:
        raise BadReplyError(f"the reply lacks a valid {key}")
    return text


def _hex(reply: RPCReply, key: str, pattern: re.Pattern[str]) -> str:
    text = reply.text(key)
    if not pattern.fullmatch(text):
        raise BadReplyError(f"the reply lacks a valid {key}")
    return text


def _message(reply: RPCReply) -> str:
    return printable(reply.text("message"))
