"""Which brokers to connect to: the configured ones, else those that DNS names, else ``puppet:4222``."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Sequence

import attrs
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from provisioner.choria import identity
from provisioner.errors import ProvisionerError

#: How long the answer to one SRV look-up is used again.
SRV_CACHE_SECONDS = 5.0
#: How long one SRV look-up may take, all name servers and retries together.
SRV_TIMEOUT_SECONDS = 3.0
#: The names that are looked up, the second only when the first gives nothing.
SRV_NAMES = ("_mcollective-server._tcp", "_x-puppet-mcollective._tcp")

_URL = re.compile(r"(?:(?P<scheme>[a-z][a-z0-9+.-]*):)?//(?P<authority>[^/?#]*)", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"(?:\[(?P<bracketed>[^][]*)\]|(?P<plain>[^][:]*)):(?P<port>[^:]*)")
_HOST = re.compile(r"[^\s\x00-\x1f\x7f-\x9f/?#@]+")
_PORT = re.compile(r"[0-9]{1,5}")

LOG = logging.getLogger(__name__)


class AddressError(ProvisionerError):
    """A text is not the address of a broker; ``str()`` is a clause that follows it and does not hold it."""


@attrs.frozen
class Broker:
    """One address; ``str()`` gives it as a URL."""

    host: str
    port: int
    scheme: str = "nats"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


#: What Choria falls back to when nothing is configured or found.
LAST_RESORT = Broker("puppet", 4222)


def parse(address: str) -> Broker:
    """Read one address as Choria does: ``host:port`` or a URL.

    The scheme is kept; credentials, path and anything else after the port are dropped. IPv6 addresses need brackets.

    :raises AddressError: without host or port; there is no default port
    """
    scheme, _, host_and_port = _split(address)
    if not host_and_port:
        raise AddressError("is empty")
    if ":" not in host_and_port:
        raise AddressError("has no port, and there is no default one")
    match = _HOST_AND_PORT.fullmatch(host_and_port)
    if match is None:
        raise AddressError("has more than host and port (an IPv6 address needs brackets)")
    host = match["bracketed"] or match["plain"] or ""
    if not _HOST.fullmatch(host):
        raise AddressError("has no usable host name")
    if not _PORT.fullmatch(match["port"]) or not 0 < int(match["port"]) <= 65535:
        raise AddressError("has a port that is not a number from 1 to 65535")
    return Broker(host, int(match["port"]), scheme)


def has_credentials(address: str) -> bool:
    """Whether an address carries a user name or a password; Choria drops them."""
    return _split(address)[1] != ""


def without_credentials(address: str) -> str:
    """Give an address in a form that may be shown: a user name and password are left out."""
    return address.rpartition("@")[2]


def _split(address: str) -> tuple[str, str, str]:
    """Divide an address into scheme, credentials, and host with port; only a URL can have the first two."""
    url = _URL.match(address.strip())
    if url is None:
        return "nats", "", address.strip()
    credentials, _, host_and_port = url["authority"].rpartition("@")
    return (url["scheme"] or "nats").lower(), credentials, host_and_port


class BrokerList:
    """The brokers to try, found anew at every call; meant for one thread, the one that connects.

    :param hosts: configured addresses; when there are any, DNS is not asked
    :param use_srv: whether DNS may be asked
    :param srv_domain: the domain of the SRV records; empty: Facter's ``networking.domain``
    :param resolver: makes a resolver for one look-up, so that changes of ``/etc/resolv.conf`` are noticed
    :param domain_fact: gives the domain when none is configured
    :param clock: seconds, monotonic
    :raises AddressError: a configured address is not one
    """

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        use_srv: bool = True,
        srv_domain: str = "",
        resolver: Callable[[], dns.resolver.Resolver] = dns.resolver.Resolver,
        domain_fact: Callable[[], str] = lambda: identity.fact("networking.domain"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configured = tuple(parse(host) for host in hosts)
        self._use_srv = use_srv
        self._domain = srv_domain
        self._resolver = resolver
        self._domain_fact = domain_fact
        self._clock = clock
        self._cache: dict[str, tuple[float, tuple[Broker, ...]]] = {}
        self._warned = ""

    def __call__(self) -> tuple[Broker, ...]:
        """Give at least one broker, in random order, as the clients of Choria try them; never raises."""
        brokers = self._configured or (self._found() if self._use_srv else ()) or (LAST_RESORT,)
        return tuple(random.sample(brokers, len(brokers)))

    def _found(self) -> tuple[Broker, ...]:
        self._domain = (self._domain or self._domain_fact()).strip(".")
        if not self._domain:
            self._warn("plugin.choria.srv_domain is not set and Facter knows no domain")
            return ()
        reasons = []
        for name in SRV_NAMES:
            record = f"{name}.{self._domain}"
            try:
                if brokers := self._look_up(record):
                    self._warned = ""
                    return brokers
                reasons.append(f"{record}: no records")
            except dns.exception.Timeout:
                reasons.append(f"{record}: no answer")  # the exception's own text differs from time to time
            except (dns.exception.DNSException, OSError) as error:
                reasons.append(f"{record}: {str(error) or type(error).__name__}")
        self._warn("; ".join(reasons))
        return ()

    def _look_up(self, record: str) -> tuple[Broker, ...]:
        if record in self._cache and self._clock() - self._cache[record][0] < SRV_CACHE_SECONDS:
            return self._cache[record][1]
        name = dns.name.from_text(record)
        answer = self._resolver().resolve(
            name, dns.rdatatype.SRV, raise_on_no_answer=False, lifetime=SRV_TIMEOUT_SECONDS, search=False
        )
        targets = [(data.target.to_text(omit_final_dot=True), data.port) for data in answer]
        # a target that is the root says that the service does not exist
        brokers = tuple(Broker(target, port) for target, port in targets if target not in ("", ".") and port)
        self._cache[record] = (self._clock(), brokers)
        return brokers

    def _warn(self, reason: str) -> None:
        """Log a failure of the look-ups, once until it changes: a connection is tried every few seconds."""
        if reason != self._warned:
            self._warned = reason
            LOG.warning("No broker found in DNS, using %s: %s", LAST_RESORT, reason)
