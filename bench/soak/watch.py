"""What is seen of a run, every few seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from bench.soak.instance import Instance
from bench.soak.nodes import Ledger, Standing
from provisioner.simulate.broker import NatsServer, NatsServerError
from tests.usage import Usage, usage


@attrs.frozen(kw_only=True)
class DaemonSample:
    """One daemon; None is what is not known, for it is not there or does not answer.

    :ivar known: hosts in its map
    :ivar queued: hosts on its work queue
    :ivar busy: workers that have a host
    :ivar leads: whether it is the one that provisions
    """

    name: str
    pid: int
    usage: Usage | None
    known: int | None = None
    queued: int | None = None
    busy: int | None = None
    leads: bool | None = None


@attrs.frozen(kw_only=True)
class Sample:
    """Everything at one moment.

    :ivar at: seconds from the start of the run
    :ivar own: what this process takes up, which has the simulated servers in it
    """

    at: float
    standing: Standing
    daemons: Sequence[DaemonSample]
    broker: Usage | None
    own: Usage | None


class Watch:
    """Takes samples, keeps them, and writes each into a file as a line of JSON."""

    def __init__(self, broker: NatsServer, instances: Sequence[Instance], ledger: Ledger, record: Path) -> None:
        self._broker = broker
        self._instances = instances
        self._ledger = ledger
        self._record = record
        self.started = time.monotonic()
        self.samples: list[Sample] = []

    def look(self) -> Sample:
        """Take a sample."""
        sample = Sample(
            at=time.monotonic() - self.started,
            standing=self._ledger.standing(),
            daemons=[_daemon(instance) for instance in self._instances],
            broker=_broker(self._broker),
            own=usage(os.getpid()),
        )
        self.samples.append(sample)
        with self._record.open("a") as record:
            record.write(json.dumps(attrs.asdict(sample)) + "\n")
        return sample


def _daemon(instance: Instance) -> DaemonSample:
    pid, taken, page = instance.process.pid, instance.usage(), instance.page()
    if page is None:
        return DaemonSample(name=instance.name, pid=pid, usage=taken)
    return DaemonSample(
        name=instance.name,
        pid=pid,
        usage=taken,
        known=page.value("waiting_nodes"),
        queued=page.value("work_queue_entries"),
        busy=page.value("busy_workers"),
        leads=bool(page.value("leader")),
    )


def _broker(broker: NatsServer) -> Usage | None:
    try:
        return usage(broker.pid)
    except NatsServerError:  # it was killed
        return None
