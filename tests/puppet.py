"""A server that replies just what a test wants, byte for byte if need be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from provisioner.choria.connector import Connector
from provisioner.choria.nats import Message
from provisioner.simulate.envelopes import Request
from provisioner.simulate.envelopes_v1 import EnvelopesV1

Script = Callable[[Request], Sequence[bytes]]


class Puppet:
    """Answers the requests to one identity by a script, which the test may change at any time.

    :ivar requests: all that came, their bodies opened, in order
    """

    def __init__(self, connector: Connector, identity: str, script: Script | None = None) -> None:
        self.identity = identity
        self.script = script or (lambda request: [self.ok(request)])
        self.requests: list[Any] = []
        self._came = threading.Condition()
        self._reader: threading.Thread | None = None  # which runs the script
        self._connector = connector
        self._subscription = connector.subscribe(f"provisioning.node.{identity}", callback=self._receive)
        connector.flush()

    def leave(self) -> None:
        """Be gone: the broker then says that nobody is there.

        Within the script, which may not wait for the broker, it says so no later than it passes on what comes next.
        """
        self._connector.unsubscribe(self._subscription)
        if threading.current_thread() is not self._reader:
            self._connector.flush()

    def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.requests) >= count, 30)

    def publish(self, request: Request, payload: bytes) -> None:
        """Publish a reply out of turn."""
        self._connector.publish(request.reply_to, payload=payload)

    def ok(self, request: Request, **changes: Any) -> bytes:
        """A good reply; `changes` are members of its body."""
        body = {"action": "x", "statuscode": 0, "statusmsg": "OK", "data": {"message": "done"}}
        return self.seal(request, json.dumps({**body, **changes}))

    def seal(self, request: Request, body: str, *, sender: str = "", **changes: Any) -> bytes:
        """A reply with this body; `changes` are members of the request that it answers."""
        envelopes = EnvelopesV1()
        return envelopes.seal(
            attrs.evolve(request, **changes), sender=sender or self.identity, body=body, time=request.time
        )

    def _receive(self, message: Message) -> None:
        request = EnvelopesV1().open(message.payload)
        self._reader = threading.current_thread()
        payloads = self.script(request)
        with self._came:
            self.requests.append(json.loads(request.body))
            self._came.notify_all()
        for payload in payloads:
            self.publish(request, payload)
