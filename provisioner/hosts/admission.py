"""Keeps out the hosts that the configuration does not want to be provisioned here."""

from __future__ import annotations

import logging

from provisioner.config import Config
from provisioner.monitor.metrics import Metrics

LOG = logging.getLogger(__name__)

#: Refused identities that are remembered, so that each is told of once. Further ones are only counted.
TOLD_HOSTS = 10_000


class Admission:
    """The lists ``allow`` and ``deny``, for every sighting. Used by the main thread and the listener at once."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        # grows only; two threads that add the same identity tell of it twice, at worst
        self._told: set[str] = set()

    def permits(self, identity: str) -> bool:
        """Whether a host may be provisioned here. A refusal is counted, and told of when it is the first one."""
        reason = self._config.reason_refused(identity)
        if reason is None:
            return True
        self._metrics.refused.inc()
        if identity not in self._told and len(self._told) < TOLD_HOSTS:
            self._told.add(identity)
            LOG.info("refused: %s", reason, extra={"identity": identity})
            if len(self._told) == TOLD_HOSTS:
                LOG.warning("refused %d hosts: further ones are only counted", TOLD_HOSTS)
        return False
