"""What a fleet of simulated servers keeps count of."""

from __future__ import annotations

import collections

import attrs


@attrs.define(kw_only=True)
class Counts:
    """What a fleet has seen so far.

    :ivar servers: those that can be provisioned
    :ivar misbehaving: those that cannot
    :ivar booted: servers that are up, or were
    :ivar provisioned: good servers restarted with all that they need to live in their network
    :ivar unfit: good servers restarted with something that they cannot live with
    :ivar upgraded: times a server was told to take on another version, and agreed
    :ivar gone: servers that have left for good
    :ivar shut_down: servers told to shut down
    :ivar returned: times a server came back unprovisioned from its restart
    :ivar failed: servers that refused a configure because they were to fail
    :ivar duplicate_configures: good servers' successful configures beyond the first since they booted
    :ivar discoveries: broadcasts to the discovery agent
    :ivar dropped: requests that a server did not even look at, counted for every server
    :ivar lost: replies and events that could not be published
    :ivar good_signatures: requests that the servers of the real network would take
    :ivar bad_signatures: requests that they would not take; on an insecure network nobody looks
    :ivar objections: what was wrong with the unfit servers and the bad signatures
    :ivar actions: calls carried out or refused, by agent and action such as ``rpcutil#ping``
    :ivar first_request: seconds from the start of the fleet to the first directed request, None before it
    :ivar last_restart: seconds from the start of the fleet to the latest restart that ended provisioning
    """

    servers: int = 0
    misbehaving: int = 0
    booted: int = 0
    provisioned: int = 0
    unfit: int = 0
    upgraded: int = 0
    gone: int = 0
    shut_down: int = 0
    returned: int = 0
    failed: int = 0
    duplicate_configures: int = 0
    lock_conflicts: int = 0
    discoveries: int = 0
    dropped: int = 0
    lost: int = 0
    good_signatures: int = 0
    bad_signatures: int = 0
    objections: collections.Counter[str] = attrs.field(factory=collections.Counter)
    actions: collections.Counter[str] = attrs.field(factory=collections.Counter)
    first_request: float | None = None
    last_restart: float | None = None

    @property
    def complete(self) -> bool:
        """Every good server is provisioned."""
        return self.provisioned == self.servers

    @property
    def servers_per_minute(self) -> float:
        """The rate from the first request to the latest restart; 0 while there is none."""
        took = (self.last_restart or 0.0) - (self.first_request or 0.0)
        return self.provisioned * 60 / took if took > 0 else 0.0
