"""What every command is put together from: both configuration files, the credentials, the connection, the parts."""

from __future__ import annotations

import contextlib
import enum
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from provisioner import config, exposure
from provisioner.choria import security, settings
from provisioner.choria.brokers import Broker, BrokerList
from provisioner.choria.connector import Connector
from provisioner.choria.errors import ConnectorError
from provisioner.choria.protocol import reply_prefix
from provisioner.choria.rpc import Client
from provisioner.choria.security import Security
from provisioner.choria.settings import CHORIA_KEY, FILE_KEY, SEED_FILE, TOKEN_FILE, Settings
from provisioner.config import Config
from provisioner.errors import ConfigurationError
from provisioner.exposure import GuardedFile
from provisioner.host.provision import Provisioner
from provisioner.host.provisioning_jwt import Verifier
from provisioner.host.server_jwt import Issuer
from provisioner.monitor.metrics import Metrics
from provisioner.shutdown import Shutdown

#: How often it is looked whether the connection has failed.
CHECK_SECONDS = 0.05

_T = TypeVar("_T")


@attrs.frozen(kw_only=True)
class Setup:
    """A configuration that can be worked with.

    :ivar issuer: of server JWTs; None when feature `ed25519` is off
    :ivar verifier: of provisioning JWTs; None when feature `jwt` is off
    """

    config: Config
    choria: Settings
    network: Security
    issuer: Issuer | None
    verifier: Verifier | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line each, what the operator should know although it stops nothing."""
        exposed = exposure.warnings(guarded_files(self.config, self.choria))
        return (*self.config.warnings, *self.choria.warnings, *self.network.warnings, *exposed)

    def expiries(self) -> dict[str, float]:
        """See :func:`expiries`."""
        return expiries(self.network, self.issuer)

    def brokers(self) -> BrokerList:
        """Gives the brokers."""
        choria = self.choria
        return BrokerList(choria.middleware_hosts, use_srv=choria.use_srv, srv_domain=choria.srv_domain)

    def connector(self, metrics: Metrics, brokers: Callable[[], Sequence[Broker]] | None = None) -> Connector:
        """A connection, not begun yet.

        :param brokers: gives others than those of the configuration
        """
        choria, network = self.choria, self.network
        return Connector(
            brokers or self.brokers(),
            name=choria.identity,
            reply_prefix=reply_prefix(network.protocol.caller),
            authenticate=network.authenticate,
            tls_context=network.tls_context,
            tls_always=network.tls_always,
            account=network.account,
            advise=network.advice,
            connect_timeout=choria.connect_timeout,
            metrics=metrics.connector,
        )

    def provisioner(self, connector: Connector, metrics: Metrics, shutdown: Shutdown) -> Provisioner:
        """What takes hosts through their cycle."""
        metrics.credential_expiries = self.expiries
        return Provisioner(
            config=self.config,
            client=Client(connector, self.network.protocol),
            metrics=metrics,
            shutdown=shutdown,
            verifier=self.verifier,
            issuer=self.issuer,
            discovery_timeout=self.choria.discovery_timeout,
        )


@contextlib.contextmanager
def connected(connector: Connector) -> Iterator[Connector]:
    """A connection for the length of a ``with`` block; a broker that is away is not waited for.

    :raises ProvisionerError: none of the brokers could be connected to
    """
    try:
        while not connector.connect(CHECK_SECONDS):
            if connector.failure:
                raise connector.failure
        try:
            # that the login has led to the wrong account may be told a moment later
            connector.flush()
        except ConnectorError as error:
            raise connector.failure or error from error
        yield connector
    finally:
        connector.close()


class Area(enum.StrEnum):
    """What a problem of the configuration is about."""

    CONFIGURATION = "provisioner.yaml"
    CLIENT = "choria.cfg"
    CREDENTIALS = "credentials"


@attrs.define
class Reading:
    """What could be read of a configuration, and what is wrong with it; None for what could not be read.

    :ivar problems: one line each
    """

    config: Config | None = None
    choria: Settings | None = None
    network: Security | None = None
    issuer: Issuer | None = None
    verifier: Verifier | None = None
    problems: list[tuple[Area, str]] = attrs.field(factory=list)

    def setup(self) -> Setup:
        """What the commands work with.

        :raises ConfigurationError: with all problems
        """
        setup = self.connectable()
        if self.problems or setup is None:
            raise ConfigurationError(problem for _, problem in self.problems)
        return setup

    def connectable(self) -> Setup | None:
        """What a connection can be made with, whatever else is wrong; None when not even that is there."""
        if self.config is None or self.choria is None or self.network is None:
            return None
        return Setup(
            config=self.config,
            choria=self.choria,
            network=self.network,
            issuer=self.issuer,
            verifier=self.verifier,
        )

    def attempt(self, area: Area, make: Callable[[], _T]) -> _T | None:
        """The outcome of `make`; what is wrong goes to the problems instead."""
        try:
            return make()
        except ConfigurationError as error:
            self.problems += [(area, problem) for problem in error.problems]
            return None


def load(config_file: Path, choria_file: Path | None) -> Setup:
    """Both configuration files, and the credentials that they name.

    :param choria_file: None: the user's, then the system's default file
    :raises ConfigurationError: with the problems of all
    """
    return read(config_file, choria_file).setup()


def read(config_file: Path, choria_file: Path | None) -> Reading:
    """As :func:`load`, as far as it goes."""
    reading = read_own(config_file)
    conf = reading.config
    # what insecure networks need is always checked, the rest once it is known that the network is another
    reading.choria = choria = reading.attempt(
        Area.CLIENT,
        lambda: settings.load(
            choria_file,
            insecure=conf is None or conf.choria_insecure,
            provisioning_password=conf.broker_provisioning_password if conf else "",
        ),
    )
    if conf and choria:
        reading.network = reading.attempt(
            Area.CREDENTIALS, lambda: security.choose(choria, insecure=conf.choria_insecure)
        )
    return reading


def read_own(config_file: Path) -> Reading:
    """The provisioner's own configuration, and the keys that it names."""
    # no secret of ours gets into a core file; helpers inherit the limit, and cannot raise it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reading = Reading()
    conf = reading.config = reading.attempt(Area.CONFIGURATION, lambda: config.load(config_file))
    if conf and conf.features.ed25519:
        reading.issuer = Issuer(conf)
        reading.problems += [(Area.CREDENTIALS, f"{conf.path}: {problem}") for problem in reading.issuer.problems()]
    if conf and conf.features.jwt:
        reading.verifier = reading.attempt(Area.CREDENTIALS, lambda: _verifier(conf))
    return reading


def _verifier(conf: Config) -> Verifier:
    try:
        return Verifier(conf.jwt_verify_cert)
    except ConfigurationError as error:
        raise ConfigurationError(f"{conf.path}: {problem}" for problem in error.problems) from error


def expiries(network: Security | None, issuer: Issuer | None) -> dict[str, float]:
    """When our credentials expire, by their kind, in seconds since the epoch; of those that there are."""
    return {**(network.expiries() if network else {}), **(issuer.expiries() if issuer else {})}


def guarded_files(conf: Config, choria: Settings) -> list[GuardedFile]:
    """The files that hold secrets, or decide what is done, in this configuration."""
    files = [
        GuardedFile("", str(conf.path), exposure.SECRET),
        GuardedFile("", str(choria.path), exposure.TRUSTED),
        GuardedFile("helper", shutil.which(conf.helper[0]) or "", exposure.TRUSTED),
    ]
    if conf.features.ed25519:
        files.append(GuardedFile("jwt_signing_key", conf.jwt_signing_key, exposure.KEY))
        files.append(GuardedFile("jwt_signing_token", conf.jwt_signing_token, exposure.KEY))
    if conf.choria_insecure:
        return files
    if choria.provider == "choria":
        files.append(GuardedFile(SEED_FILE, choria.choria_seed_file, exposure.KEY))
        files.append(GuardedFile(TOKEN_FILE, choria.choria_token_file, exposure.KEY))
        files.append(GuardedFile(CHORIA_KEY, choria.choria_key, exposure.KEY))
    else:
        # Puppet shares its keys with its group
        limit = exposure.SECRET if choria.provider == "puppet" else exposure.KEY
        files.append(GuardedFile(FILE_KEY, choria.file_key, limit))
    return files
