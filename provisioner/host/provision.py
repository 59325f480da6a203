"""The provisioning cycle of one host: fetch what the helper needs to know, ask the helper, do what it says."""

from __future__ import annotations

import enum
import json
import logging
import time
from typing import Any

import attrs

from provisioner import contract
from provisioner.choria.rpc import Client
from provisioner.config import Config
from provisioner.contract import AnswerError
from provisioner.errors import DeferredError, HostError, SoftError
from provisioner.host import answer, csr, helper_process, private_key, upgrades
from provisioner.host.answer import Answer
from provisioner.host.facts import Facts
from provisioner.host.helper_process import HelperError
from provisioner.host.host import Host
from provisioner.host.node import CSR, Node, UnansweredError
from provisioner.host.provisioning_jwt import Verifier
from provisioner.host.server_jwt import Issuer
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown
from provisioner.text import masked, printable

LOG = logging.getLogger(__name__)

#: The step that is no request to the server.
HELPER = "helper"
#: A host that no discovery has found for more than this many intervals when its turn comes is left to be sighted again.
STALE_INTERVALS = 2


class Success(enum.Enum):
    """How a cycle can succeed."""

    PROVISIONED = "provisioned"
    SHUT_DOWN = "shut down, as the helper wished"
    UPGRADING = "sent to upgrade"

    @property
    def leaving(self) -> bool:
        """The server is about to leave the provisioning network: a discovery may still find it, and must not admit
        it. One that upgrades comes back, to be provisioned.
        """
        return self is not Success.UPGRADING


@attrs.frozen(kw_only=True)
class Provisioner:
    """Runs hosts through the cycle; what all of them share. Used by every worker at once.

    :ivar verifier: of provisioning JWTs; None when feature `jwt` is off
    :ivar issuer: of server JWTs; None when feature `ed25519` is off
    :ivar discovery_timeout: seconds that a request may take on top of its agent's own time
    """

    config: Config
    client: Client
    metrics: Metrics
    shutdown: Shutdown
    verifier: Verifier | None
    issuer: Issuer | None = None
    discovery_timeout: float
    _attempts: upgrades.Attempts = attrs.field(factory=upgrades.Attempts, init=False)

    def provision(self, host: Host) -> Success:
        """Run one host through its cycle.

        :raises HostError: when it could not be provisioned in this cycle
        """
        unseen = time.monotonic() - host.discovered
        if unseen > STALE_INTERVALS * self.config.interval:
            raise SoftError(f"waited too long: not seen for {unseen:.0f} s; it is taken when it is sighted again")

        node = self.node(host)
        facts = self.fetch(node)
        if reason := node.paused():
            raise SoftError(f"helper not run: {reason}")
        host.at(HELPER)
        return self.apply(node, facts, self.ask_helper(facts))

    def node(self, host: Host) -> Node:
        """The server of a host, for one cycle."""
        return Node(
            host=host,
            session=self.client.session(host.identity),
            config=self.config,
            metrics=self.metrics,
            shutdown=self.shutdown,
            discovery_timeout=self.discovery_timeout,
        )

    def fetch(self, node: Node) -> Facts:
        """Ask a server all that the helper needs to know. It makes new keys for that.

        :raises HostError: when one of the answers does not come, or is not to be believed
        """
        token = node.jwt() if self.verifier else None
        claims = self.verifier.verify(token.text) if self.verifier and token else None
        signing_key = node.gen25519() if self.issuer else None
        inventory = node.inventory()
        return Facts(
            identity=node.host.identity,
            token=token,
            claims=claims,
            signing_key=signing_key,
            inventory=inventory,
            csr=self._csr(node) if self.config.features.pki else None,
        )

    def ask_helper(self, facts: Facts) -> Answer:
        """Ask the helper what is to become of a server.

        :raises HostError: when it fails, or what it says cannot be understood
        """
        hidden = secrets(self.config, facts)
        try:
            with self.metrics.helper_time.time():
                output = helper_process.run(
                    self.config.helper,
                    facts.document(),
                    timeout=self.config.helper_timeout,
                    cancelled=lambda: self.shutdown.expired,
                    secrets=hidden,
                )
            if output.stderr:
                LOG.debug("helper: %s", output.stderr, extra={"identity": facts.identity})
            wanted = answer.parse(output.stdout)
        except (HelperError, AnswerError):
            self.metrics.helper_errors.inc()
            raise
        return attrs.evolve(wanted, msg=masked(wanted.msg, hidden))

    def apply(self, node: Node, facts: Facts, wanted: Answer) -> Success:
        """Do to a server what the helper wants.

        :raises HostError: when that must not be done, or fails
        """
        if wanted.defer:
            raise DeferredError(f"configuration deferred: {printable(wanted.msg)}")
        if wanted.shutdown:
            node.shut_down()
            return Success.SHUT_DOWN

        for warning in check(facts, wanted, upgrades=self.config.features.upgrades):
            LOG.warning("%s", warning, extra={"identity": facts.identity})
        configuration = inputs(facts, wanted, self.issuer)
        if self._upgrade(node, facts, wanted.upgrade):
            return Success.UPGRADING
        check_configured(wanted)
        node.configure(configuration)
        node.restart()
        return Success.PROVISIONED

    def _csr(self, node: Node) -> CSR:
        request = node.gencsr()
        checked = csr.validate(request.csr, identity=node.host.identity, deny_list=self.config.cert_deny_list)
        return attrs.evolve(request, csr=checked)

    def _upgrade(self, node: Node, facts: Facts, target: str) -> bool:
        """Send the server to the version that the helper named, if any; False when it is to be configured as it is."""
        try:
            return self._release_update(node, facts, target)
        except SoftError:
            raise
        except HostError as error:
            if not self.config.upgrades_optional:
                raise
            LOG.warning("configured without an upgrade: %s", error, extra={"identity": facts.identity})
            return False

    def _release_update(self, node: Node, facts: Facts, target: str) -> bool:
        version = facts.inventory.version
        if not upgrade_due(self.config, facts, target):
            if target:
                self._attempts.arrived(facts.identity, target)
            return False
        self._attempts.check(facts.identity, version=version, target=target)
        LOG.info("upgrading from %s to %s", printable(version), target, extra={"identity": facts.identity})
        try:
            node.release_update(self.config.upgrades_repository, target)
        except UnansweredError:
            # the update may be under way all the same: its reply does not come when it takes long
            self._attempts.add(facts.identity, target)
            raise
        self._attempts.add(facts.identity, target)
        return True


def secrets(conf: Config, facts: Facts) -> set[str]:
    """What must be masked in all that a helper says for people: it may quote whatever it knows."""
    texts = (conf.token, conf.broker_provisioning_password, facts.secret)
    # half of a surrogate pair in a token is no text, and cannot come out of a helper
    return {text.encode(errors="replace").decode() for text in texts}


def check(facts: Facts, wanted: Answer, *, upgrades: bool) -> list[str]:
    """Check the helper's answer for what would make the server fail half-way, or be lost.

    :param upgrades: whether a version to upgrade to is heeded
    :returns: warnings, one line each
    :raises AnswerError: names what is wrong
    """
    return contract.check(
        attrs.asdict(wanted, recurse=False),
        identity=facts.identity,
        csr_ssldir=facts.ssldir,
        provision_default=facts.provision_default,
        upgrades=upgrades,
    )


def check_configured(wanted: Answer) -> None:
    """Check that there is something to configure a server with that is not upgraded first.

    :raises AnswerError: when there is not
    """
    if not wanted.configuration:
        raise AnswerError(contract.NO_CONFIGURATION)


def upgrade_due(conf: Config, facts: Facts, target: str) -> bool:
    """Whether a server has to be sent to another version before it is configured.

    :param target: the version that the helper named; empty when it named none
    :raises UpgradeError: it should be sent there and cannot
    """
    if not (conf.features.upgrades and target):
        return False
    return upgrades.is_due(
        version=facts.inventory.version,
        upgradable=facts.inventory.upgradable,
        target=target,
        repository=conf.upgrades_repository,
    )


def inputs(facts: Facts, wanted: Answer, issuer: Issuer | None) -> dict[str, Any]:
    """The inputs of `configure`, all always there, as the Go original sends them.

    :raises HostError: when a JWT cannot be signed, or the helper's private key cannot be sent
    """
    server_jwt = key = ecdh_public = ""
    if issuer and facts.signing_key:
        server_jwt = issuer.issue(
            identity=facts.identity,
            public_key=facts.signing_key.public_key,
            configuration=wanted.configuration,
            wanted=wanted.server_claims,
        )
    if wanted.key:
        server_public = facts.token.ecdh_public if facts.token else ""
        key, ecdh_public = private_key.encrypt(wanted.key, certificate=wanted.certificate, server_public=server_public)
    return {
        "config": json.dumps(wanted.configuration),
        "ca": wanted.ca,
        "certificate": wanted.certificate,
        "key": key,
        "ecdh_public": ecdh_public,
        "ssldir": facts.ssldir or wanted.ssldir,
        "server_jwt": server_jwt,
        "action_policies": wanted.action_policies,
        "opa_policies": wanted.opa_policies,
    }
