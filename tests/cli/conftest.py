"""Runs the commands in this process, against real brokers of all kinds of networks with simulated servers."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from provisioner import cli, logs
from provisioner.choria.connector import Connector
from provisioner.host.host import Host
from provisioner.simulate.broker import NatsServer
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.networks import NETWORKS, Network
from provisioner.simulate.server import Server

FACTS = {"role": "web", "approval": "granted"}


@attrs.frozen
class Done:
    """What a command has left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command, and leaves the process as it was."""

    def start(*arguments: object) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main([str(argument) for argument in arguments], prog_name="choria-provisioner")
        done = Done(int(leaving.value.code or 0), *capfd.readouterr())
        assert "Traceback" not in done.out + done.err
        return done

    with _process_as_it_was():
        yield start


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    hooks = [
        (module, name, getattr(module, name))
        for module, name in (
            (sys, "excepthook"),
            (sys, "unraisablehook"),
            (threading, "excepthook"),
            (warnings, "showwarning"),
        )
    ]
    loggers = [logging.getLogger(name) for name in ("", Connector.__module__, Host.__module__.rpartition(".")[0])]
    levels = [logger.level for logger in loggers]
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for module, name, hook in hooks:
        setattr(module, name, hook)
    for handler in [each for each in logging.getLogger().handlers if isinstance(each, logs.Handler)]:
        logging.getLogger().removeHandler(handler)
        handler.close()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for number, handler_before in signals.items():
        signal.signal(number, handler_before)


@attrs.define
class Place:
    """A network whose broker is up, and the configuration of a provisioner for it.

    :ivar settings: of `provisioner.yaml`, beyond what the network needs
    """

    network: Network
    broker: NatsServer
    settings: dict[str, Any] = attrs.field(factory=dict)
    client: dict[str, str] = attrs.field(factory=dict)
    _stack: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

    @property
    def config(self) -> Path:
        """Write `provisioner.yaml` and `choria.cfg`, and give the first."""
        file, client = self.network.configure(self.broker.url, **self.settings)
        with client.open("a") as lines:
            lines.writelines(f"{key} = {value}\n" for key, value in self.client.items())
        return file

    @property
    def files(self) -> tuple[object, ...]:
        """The options that name them."""
        return "--config", self.config, "--choria-config", self.network.directory / "choria.cfg"

    def server(self, identity: str, **settings: Any) -> Server:
        """A server of this network, with facts that the sample helper likes."""
        site = self.network.site(self.broker.url, **settings.pop("site", {}))
        return Server(identity=identity, site=site, **{"facts": FACTS, **settings})

    def fleet(self, *servers: Server, **settings: Any) -> Fleet:
        """Start servers, which end with the test."""
        fleet = self.network.fleet(self.broker.url, servers, **settings)
        self._stack.enter_context(fleet)
        return fleet

    def helper(self, script: str) -> Path:
        """Have a shell script be the helper."""
        file = self.network.directory / "helper"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        self.settings["helper"] = str(file)
        return file

    def answer(self, **members: Any) -> None:
        """Have a helper that answers with these members."""
        (self.network.directory / "answer").write_text(json.dumps(members))
        self.helper(f"cat > /dev/null; cat {self.network.directory}/answer")

    def close(self) -> None:
        """End what the test has started."""
        self._stack.close()


Enter = Callable[[str], Place]


@pytest.fixture(scope="session")
def _networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, tuple[Network, NatsServer]]]:
    """All kinds of networks, made when the first test needs one."""
    with contextlib.ExitStack() as stack:
        yield _Networks(tmp_path_factory, stack)


class _Networks(dict[str, tuple[Network, NatsServer]]):
    def __init__(self, paths: pytest.TempPathFactory, stack: contextlib.ExitStack) -> None:
        self._paths = paths
        self._stack = stack
        super().__init__()

    def __missing__(self, kind: str) -> tuple[Network, NatsServer]:
        network = NETWORKS[kind](self._paths.mktemp(kind))
        self[kind] = network, self._stack.enter_context(NatsServer(network.broker))
        return self[kind]


@pytest.fixture
def enter(_networks: Mapping[str, tuple[Network, NatsServer]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    """Gives the network of a kind, without any servers."""
    with contextlib.ExitStack() as stack:

        def place(kind: str) -> Place:
            network, broker = _networks[kind]
            for name, value in network.environment.items():
                monkeypatch.setenv(name, value)
            place = Place(network, broker)
            stack.callback(place.close)
            return place

        yield place


@pytest.fixture
def insecure(enter: Enter) -> Place:
    """An insecure network, where everything is quick."""
    return enter("insecure")
