"""The server that is being provisioned, as its RPC actions: what each sends, wants back, and how often it is tried."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from provisioner.choria.connector import Connector, ConnectorError
from provisioner.choria.retry import RPC_BACKOFF
from provisioner.choria.rpc import (
    BadReplyError,
    NobodyError,
    RefusedError,
    RPCError,
    RPCReply,
    Session,
    SilenceError,
    printable,
)
from provisioner.config import Config
from provisioner.errors import HostError, SoftError
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown

LOG = logging.getLogger(__name__)

#: What each agent may take for an action. A request waits that long and the discovery timeout on top, as in the Go
#: original.
AGENT_TIMEOUT_SECONDS = {"choria_provision": 20.0, "rpcutil": 2.0}
#: How often a wait between two tries looks whether to go on.
CHECK_SECONDS = 0.1
#: Seconds over which servers spread their restart: with 1 each restarts two seconds after its reply.
RESTART_SPLAY_SECONDS = 1

_T = TypeVar("_T")


@attrs.frozen
class _Action:
    agent: str
    name: str
    tries: int

    @property
    def label(self) -> str:
        return f"{self.agent}#{self.name}"


JWT = _Action("choria_provision", "jwt", tries=3)
INVENTORY = _Action("rpcutil", "inventory", tries=5)
CONFIGURE = _Action("choria_provision", "configure", tries=5)
RESTART = _Action("choria_provision", "restart", tries=3)
SHUTDOWN = _Action("choria_provision", "shutdown", tries=3)


class StepError(HostError):
    """An RPC step was given up; the text names the action and the last reason."""


class StepHeldError(SoftError):
    """An RPC step was not made, or ended, for a reason that passes: a pause, a lock, the end of the process."""


@attrs.frozen(kw_only=True)
class Node:
    """One server in provisioning mode, for one cycle. Every method raises :class:`HostError` when it gives up."""

    session: Session
    connector: Connector
    config: Config
    metrics: Metrics
    shutdown: Shutdown
    #: Seconds added to the time that an agent may take.
    discovery_timeout: float

    def jwt(self) -> str:
        """The text of its provisioning JWT, unverified."""
        return self._call(JWT, self._with_token(), _jwt)

    def inventory(self) -> str:
        """Its inventory, as the JSON text that the server wrote."""
        return self._call(INVENTORY, {}, _inventory)

    def configure(self, inputs: Mapping[str, Any]) -> str:
        """Have it write its configuration; gives its message."""
        return self._call(CONFIGURE, self._with_token(**inputs), _message)

    def restart(self) -> None:
        """Have it restart with the new configuration. Not held back by a pause: it would stay configured, not
        restarted, and locked.
        """
        self._leave(RESTART, self._with_token(splay=RESTART_SPLAY_SECONDS), even_when_paused=True)

    def shut_down(self) -> None:
        """Have it shut down for good."""
        self._leave(SHUTDOWN, self._with_token(), even_when_paused=False)

    def _with_token(self, **inputs: object) -> dict[str, object]:
        return {"token": self.config.token, **inputs}

    def _leave(self, action: _Action, inputs: Mapping[str, Any], *, even_when_paused: bool) -> None:
        """An action after which the server is gone, so that its reply may never come.

        From the second try on silence means that an earlier try was heard, since a server that is about to leave no
        longer answers. That nobody is there means the same only after a silence: after a lost connection the server
        may just not be back yet.
        """
        silent = False
        tries = 0

        def attempt() -> None:
            nonlocal silent, tries
            tries += 1
            try:
                _message(self._ask(action, inputs))
            except (SilenceError, NobodyError) as error:
                if tries > 1 and (silent or isinstance(error, SilenceError)):
                    return
                silent = isinstance(error, SilenceError)
                raise

        self._tries(action, attempt, even_when_paused=even_when_paused)

    def _call(self, action: _Action, inputs: Mapping[str, Any], opened: Callable[[RPCReply], _T]) -> _T:
        return self._tries(action, lambda: opened(self._ask(action, inputs)), even_when_paused=False)

    def _ask(self, action: _Action, inputs: Mapping[str, Any]) -> RPCReply:
        return self.session.call(action.agent, action.name, inputs, timeout=self._timeout(action))

    def _timeout(self, action: _Action) -> float:
        return self.discovery_timeout + AGENT_TIMEOUT_SECONDS[action.agent]

    def _tries(self, action: _Action, attempt: Callable[[], _T], *, even_when_paused: bool) -> _T:
        """Make up to `action.tries` tries, each of them timed, with a growing pause between them."""

        def held() -> str | None:
            if self.shutdown.expired:
                return "the provisioner is shutting down"
            if self.config.paused and not even_when_paused:
                return "provisioning is paused"
            return None

        tried = 0
        while True:
            # a broker that restarts must not use up the tries of every host in work
            _wait(self._timeout(action), lambda: self.connector.connected or held() is not None)
            if reason := held():
                raise StepHeldError(f"{action.label} not sent: {reason}")
            tried += 1
            try:
                with self.metrics.rpc_time[action.label].time():
                    return attempt()
            except (RPCError, ConnectorError) as error:
                LOG.debug("%s, try %d: %s", action.label, tried, error, extra={"identity": self.session.identity})
                if tried == action.tries or (isinstance(error, RPCError) and error.final):
                    self.metrics.rpc_errors[action.label].inc()
                    locked = isinstance(error, RefusedError) and error.locked
                    raise (StepHeldError if locked else StepError)(f"{action.label}: {error}") from error
            _wait(RPC_BACKOFF.delay(tried), lambda: held() is not None)


def _wait(seconds: float, over: Callable[[], bool]) -> None:
    """Wait for `seconds`, or until `over` says so."""
    end = time.monotonic() + seconds
    while not over() and (remaining := end - time.monotonic()) > 0:
        time.sleep(min(CHECK_SECONDS, remaining))


def _jwt(reply: RPCReply) -> str:
    return reply.text("jwt")


def _inventory(reply: RPCReply) -> str:
    if not isinstance(reply.data.get("version", ""), str):
        raise BadReplyError("the reply lacks a valid version")
    if not isinstance(reply.data.get("upgradable", False), bool):
        raise BadReplyError("the reply lacks a valid upgradable")
    return reply.data_text()


def _message(reply: RPCReply) -> str:
    return printable(reply.text("message"))
