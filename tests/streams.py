"""A broker with Choria Streams: its two accounts, the bucket of the leader election, and candidates of the Go original.

Real JetStream answers. The bucket is in the `choria` account; who is in the `provisioning` account reaches as much of
it as a Choria broker lets him: the settings of the bucket, and the one key, which can be written and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import attrs

from provisioner.choria import tls
from provisioner.choria.brokers import Broker
from provisioner.choria.connector import Connector
from provisioner.choria.retry import CAMPAIGN_BACKOFF
from provisioner.errors import ProvisionerError
from provisioner.monitor.metrics import ConnectorMetrics
from provisioner.simulate.broker import NatsServer
from tests.conftest import PATIENCE_SECONDS

STREAM = "KV_CHORIA_LEADER_ELECTION"
KEY = "$KV.CHORIA_LEADER_ELECTION.provisioner"
#: Where the provisioning account has them.
INFO_SUBJECT = f"choria.streams.STREAM.INFO.{STREAM}"
KEY_SUBJECT = f"choria.streams.{KEY}"

PASSWORD = "s3cret"
#: Of a provisioner, and of the unprovisioned servers, who are in the same account.
LOGIN = {"user": "provisioner", "pass": PASSWORD}
SERVERS_LOGIN = {"user": "servers", "pass": PASSWORD}
#: Of those who operate the broker.
CHORIA_LOGIN = {"user": "choria", "pass": PASSWORD}

#: What Choria's broker makes the bucket with, `max_age` in nanoseconds.
SETTINGS: dict[str, Any] = {
    "name": STREAM,
    "description": "Choria Leader Election Bucket",
    "subjects": ["$KV.CHORIA_LEADER_ELECTION.>"],
    "retention": "limits",
    "max_age": 60_000_000_000,
    "max_msgs_per_subject": 1,
    "max_msg_size": 1024,
    "discard": "new",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 60_000_000_000,
    "allow_direct": True,
    "deny_delete": True,
    "allow_rollup_hdrs": True,
}

#: How long it takes the bucket's broker to answer, at most.
CALL_SECONDS = 10.0


class Streams:
    """The broker, from the beginning of a ``with`` block to its end; there is no bucket at first.

    :param directory: for what it stores, which outlives a restart
    :param enabled: whether Choria Streams is
    :ivar server: the broker
    :ivar admin: a connection in the choria account, which comes back after a restart
    """

    def __init__(self, directory: Path, *, enabled: bool = True) -> None:
        self._directory = directory
        self.server = NatsServer(_configuration(directory, enabled=enabled))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self.server.close)
            self.server.start()
            self.admin = connector(self.server, CHORIA_LOGIN)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.admin.close()
        self.server.close()

    def enable(self) -> None:
        """Have Choria Streams be enabled from the next start of the server on."""
        self.server.config = _configuration(self._directory, enabled=True)

    def make_bucket(self, lifetime: float = 60.0, **settings: Any) -> None:
        """Make the bucket as Choria's broker does.

        :param lifetime: seconds, of a key
        :param settings: of its stream, instead of those in :data:`SETTINGS`
        """
        self._call("STREAM.CREATE", _settings(lifetime) | settings)

    def change_bucket(self, lifetime: float) -> None:
        self._call("STREAM.UPDATE", _settings(lifetime))

    def delete_bucket(self) -> None:
        self._call("STREAM.DELETE")

    def evict(self) -> int:
        """Do to the leader what `choria election evict` does; gives the sequence of the mark that is left."""
        reply = self.admin.request(KEY, headers={"KV-Operation": "DEL"}, timeout=CALL_SECONDS)
        return int(json.loads(reply.payload)["seq"])

    def write(self, value: bytes = b"somebody", key: str = KEY) -> int:
        """Set a key, whatever its sequence is; gives the new one."""
        reply = self.admin.request(key, payload=value, timeout=CALL_SECONDS)
        return int(json.loads(reply.payload)["seq"])

    def sequence(self) -> int:
        """That of the key; 0 when there is none."""
        try:
            reply = self._call("STREAM.MSG.GET", {"last_by_subj": KEY})
        except LookupError:
            return 0
        return int(reply["message"]["seq"])

    def _call(self, what: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream.

        :raises LookupError: with its error
        """
        payload = json.dumps(request).encode() if request else b""
        reply = self.admin.request(f"$JS.API.{what}.{STREAM}", payload=payload, timeout=CALL_SECONDS).payload
        content: dict[str, Any] = json.loads(reply)
        if "error" in content:
            raise LookupError(content["error"])
        return content


def connector(server: NatsServer, login: dict[str, str]) -> Connector:
    """A connection to a broker with users, made already."""
    broker = Broker(server.host, server.port)
    made = Connector(
        lambda: [broker],
        name=login["user"],
        reply_prefix=f"test.{uuid.uuid4().hex}",
        authenticate=lambda _: login,
        tls_context=tls.system_trust_context,
        metrics=ConnectorMetrics(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(made.close)
        assert made.connect(PATIENCE_SECONDS), made.last_error
        stack.pop_all()
    return made


def _settings(lifetime: float) -> dict[str, Any]:
    age = int(lifetime * 1e9)
    return SETTINGS | {"max_age": age, "duplicate_window": min(age, SETTINGS["duplicate_window"])}


def _configuration(directory: Path, *, enabled: bool) -> str:
    """Of a nats-server."""
    return f"""
        {f'jetstream: {{ store_dir: "{directory}" }}' if enabled else ""}
        accounts: {{
          choria: {{
            {"jetstream: enabled" if enabled else ""}
            users: [{{ user: choria, password: {PASSWORD} }}]
            exports: [
              {{ service: "$JS.API.STREAM.INFO.{STREAM}", accounts: [provisioning] }}
              {{ service: "{KEY}", accounts: [provisioning] }}
            ]
          }}
          provisioning: {{
            users: [{{ user: provisioner, password: {PASSWORD} }}, {{ user: servers, password: {PASSWORD} }}]
            imports: [
              {{ service: {{ account: choria, subject: "$JS.API.STREAM.INFO.{STREAM}" }}, to: "{INFO_SUBJECT}" }}
              {{ service: {{ account: choria, subject: "{KEY}" }} }}
              {{ service: {{ account: choria, subject: "{KEY}" }}, to: "{KEY_SUBJECT}" }}
            ]
          }}
        }}
    """


@attrs.define
class Original:
    """A candidate of the Go original: claims a key that is not there, and leads as long as each of its writes is good.

    :ivar write: sets the key, if it has the given sequence; gives the new one
    :ivar sleep: for a number of seconds
    :ivar random: a number in [0, 1), anew at each call
    :ivar leads: it provisions
    """

    write: Callable[[int], int]
    sleep: Callable[[float], None]
    random: Callable[[], float] = random.random
    leads: bool = False
    _own: int = 0
    _tries: int = 0

    def run(self) -> None:
        """Campaign until `sleep` raises something."""
        self.sleep(self.random() * 5)
        while True:
            self._campaign()
            self.sleep(attrs.evolve(CAMPAIGN_BACKOFF, random=self.random).delay(self._tries))

    def _campaign(self) -> None:
        elected = self._own > 0
        try:
            self._own = self.write(self._own)
        except ProvisionerError:
            self._own, self.leads = 0, False
            self._tries += not elected
        else:
            self._tries = 0
            if elected and not self.leads:
                self.sleep(0.2)
                self.leads = True
