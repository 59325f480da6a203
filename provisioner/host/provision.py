"""The provisioning cycle of one host: fetch what the helper needs to know, ask the helper, do what it says."""

from __future__ import annotations

import enum
import json
import logging
import time
from typing import Any

import attrs

from provisioner.choria.rpc import Client, printable
from provisioner.config import Config
from provisioner.errors import HostError, SoftError
from provisioner.host import answer, helper
from provisioner.host.answer import Answer, AnswerError
from provisioner.host.helper import HelperError
from provisioner.host.host import Host
from provisioner.host.node import Node
from provisioner.host.provisioning_jwt import Verifier
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown

LOG = logging.getLogger(__name__)

#: A host that waited for a worker for more than this many discovery intervals is left to be sighted again.
STALE_INTERVALS = 2


class Outcome(enum.Enum):
    """How a cycle can succeed."""

    PROVISIONED = "provisioned"
    SHUT_DOWN = "shut down, as the helper wished"
    UPGRADING = "sent to upgrade"

    @property
    def leaving(self) -> bool:
        """The server is about to leave the provisioning network: a discovery may still find it, and must not admit
        it. One that upgrades comes back, to be provisioned.
        """
        return self is not Outcome.UPGRADING


@attrs.frozen(kw_only=True)
class Provisioner:
    """Runs hosts through the cycle; what all of them share. Used by every worker at once.

    :ivar verifier: of provisioning JWTs; None when feature `jwt` is off
    :ivar discovery_timeout: seconds that a request may take on top of its agent's own time
    """

    config: Config
    client: Client
    metrics: Metrics
    shutdown: Shutdown
    verifier: Verifier | None
    discovery_timeout: float

    def provision(self, host: Host) -> Outcome:
        """Run one host through its cycle.

        :raises HostError: when it could not be provisioned in this cycle
        """
        waited = time.monotonic() - host.discovered
        if waited > STALE_INTERVALS * self.config.interval:
            raise SoftError(f"waiting too long, {waited:.0f} s, to be provisioned now; it will be sighted again")

        node = Node(
            session=self.client.session(host.identity),
            connector=self.client.connector,
            config=self.config,
            metrics=self.metrics,
            shutdown=self.shutdown,
            discovery_timeout=self.discovery_timeout,
        )
        claims = self.verifier.verify(node.jwt()) if self.verifier else None
        inventory = node.inventory()
        wanted = self._ask_helper(host, claims, inventory)

        if wanted.defer:
            raise SoftError(f"configuration deferred: {printable(wanted.msg)}")
        if wanted.shutdown:
            node.shut_down()
            return Outcome.SHUT_DOWN

        for warning in answer.check(
            wanted, identity=host.identity, csr_ssldir=None, provision_default=_default(claims)
        ):
            LOG.warning("%s", warning, extra={"identity": host.identity})
        node.configure(_inputs(wanted))
        node.restart()
        return Outcome.PROVISIONED

    def _ask_helper(self, host: Host, claims: dict[str, Any] | None, inventory: str) -> Answer:
        if self.config.paused:
            raise SoftError("helper not run: provisioning is paused")
        document = {
            "identity": host.identity,
            "csr": None,
            "ed25519_pubkey": None,
            "inventory": inventory,
            "jwt": claims,
        }
        try:
            with self.metrics.helper_time.time():
                output = helper.run(
                    self.config.helper,
                    json.dumps(document).encode(),
                    timeout=self.config.helper_timeout,
                    cancelled=lambda: self.shutdown.expired,
                )
            if output.stderr:
                LOG.debug("helper: %s", output.stderr, extra={"identity": host.identity})
            return answer.parse(output.stdout)
        except (HelperError, AnswerError):
            self.metrics.helper_errors.inc()
            raise


def _default(claims: dict[str, Any] | None) -> bool | None:
    """Whether the node goes into provisioning mode on its own accord; None when that is not known."""
    return None if claims is None else claims.get("chpd") is True


def _inputs(wanted: Answer) -> dict[str, Any]:
    """The inputs of `configure`, all always there, as the Go original sends them.

    :raises HostError: when the helper wants something that cannot be done
    """
    if wanted.key:
        raise HostError("the helper returned a private key: sending one is not available yet")
    return {
        "config": json.dumps(wanted.configuration),
        "ca": wanted.ca,
        "certificate": wanted.certificate,
        "key": "",
        "ecdh_public": "",
        "ssldir": wanted.ssldir,
        "server_jwt": "",
        "action_policies": wanted.action_policies,
        "opa_policies": wanted.opa_policies,
    }
