"""An hour of arriving servers and of faults, and whether the daemons stand it: see --help."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click

from bench.soak.faults import Faults, Hands, plan
from bench.soak.instance import Instance
from bench.soak.nodes import Arrivals, Ledger
from bench.soak.picture import chart, table
from bench.soak.run import Run
from bench.soak.verdicts import verdicts
from bench.soak.watch import Sample, Watch
from provisioner.simulate.fleet import Fleet
from provisioner.simulate.server import Server
from tests.faults.proxy import Proxy
from tests.streams import SERVERS_LOGIN, Streams

NAMES = ("alpha", "beta")
SAMPLE_SECONDS = 3.0
#: How often a line says how it goes.
TELL_SECONDS = 30.0
#: What a server may need that boots just before the last fault ends: it is found within a minute, may be deferred or
#: fail and is found again a minute later, and a daemon that is no more may hold its lock for two.
DRAIN_SECONDS = 300.0


@attrs.frozen(kw_only=True)
class Plan:
    """What is to be run.

    :ivar seconds: how long servers arrive and things go wrong
    :ivar rate: servers that arrive a second
    :ivar daemons: how many; more than one elect their leader
    :ivar seed: decides about all that is left to chance
    :ivar out: the directory for all that is seen
    """

    seconds: float
    rate: float
    daemons: int
    seed: int
    out: Path

    def title(self, seconds: float) -> str:
        """Say in a line what was run, or is to be, for so long."""
        daemons = "one daemon" if self.daemons == 1 else f"{self.daemons} daemons"
        return f"Soak of {seconds / 60:.3g} minutes: {daemons}, {self.rate:g} servers a second, seed {self.seed}"


@click.command()
@click.option("--minutes", default=60.0, show_default=True, type=click.FloatRange(0.5), help="How long servers arrive.")
@click.option("--rate", default=80.0, show_default=True, type=click.FloatRange(0.5), help="Servers a second.")
@click.option("--daemons", default=2, show_default=True, type=click.IntRange(1, len(NAMES)), help="Two: an election.")
@click.option("--seed", type=int, help="Decides what goes wrong and when; by chance without it.")
@click.option("--out", default="build/soak", show_default=True, type=click.Path(path_type=Path, file_okay=False))
def main(minutes: float, rate: float, daemons: int, seed: int | None, out: Path) -> None:
    """Have servers arrive and the daemons provision them while things go wrong.

    Broker and daemons are real, the servers are simulated. Faults come by chance: the broker dies or freezes, a link
    to it is cut, slow or dead, a daemon is stopped, killed or told to leave, helpers fail, events come in storms.
    Ctrl-C ends it early, in good order. At the end it is waited until the last good server is provisioned. What was
    seen is left in the directory OUT. The exit code is 0 when every rule holds that could be judged.
    """
    seed = random.randrange(10**6) if seed is None else seed
    todo = Plan(seconds=minutes * 60, rate=rate, daemons=daemons, seed=seed, out=out)
    out.mkdir(parents=True, exist_ok=True)
    for earlier in out.iterdir():
        earlier.unlink()
    logging.basicConfig(filename=out / "servers.log", format="%(asctime)s %(message)s", level=logging.WARNING)
    with _interruption() as interrupted, tempfile.TemporaryDirectory(prefix="soak-") as directory:
        good = _sum_up(_run(todo, Path(directory), interrupted), out)
    sys.exit(0 if good else 1)


def _run(todo: Plan, directory: Path, interrupted: threading.Event) -> Run:
    """Set everything up, have it run, and tear it down."""
    going_wrong = plan(todo.seed, todo.seconds, daemons=todo.daemons)
    click.echo(f"{todo.title(todo.seconds)}, {len(going_wrong)} faults")
    ledger = Ledger()
    with contextlib.ExitStack() as stack:
        streams = stack.enter_context(Streams(directory / "streams"))
        streams.make_bucket()
        broker = streams.server

        def connect(servers: Sequence[Server]) -> Fleet:
            return Fleet(broker.url, servers, login=SERVERS_LOGIN)

        instances = []
        for name in NAMES[: todo.daemons]:
            proxy = stack.enter_context(Proxy(broker.host, broker.port))
            kept_log = todo.out / f"{name}.log.gz"
            instance = Instance(directory, name, proxy, elected=todo.daemons > 1, kept_log=kept_log)
            instances.append(stack.enter_context(instance))
            instance.begin()
        arrivals = Arrivals(connect, ledger, rate=todo.rate, seed=todo.seed)
        stack.callback(arrivals.stop)
        faults = Faults(going_wrong, Hands(broker, instances, ledger, connect), todo.out / "faults.jsonl")
        stack.callback(faults.stop)
        watch = Watch(broker, instances, ledger, todo.out / "samples.jsonl")
        loaded = _watch(todo, arrivals, faults, watch, instances, interrupted)
        return Run(
            title=todo.title(loaded),
            started=watch.started,
            loaded=loaded,
            samples=watch.samples,
            instances=instances,
            ledger=ledger,
            happened=faults.happened(),
            reason=faults.reason,
        )


def _watch(
    todo: Plan,
    arrivals: Arrivals,
    faults: Faults,
    watch: Watch,
    instances: Sequence[Instance],
    interrupted: threading.Event,
) -> float:
    """See it through, from the first server to the end of the last daemon.

    :return: for how many seconds servers arrived
    """
    tell = _Teller().tell
    arrivals.start()
    faults.start()
    while (sample := watch.look()).at < todo.seconds and not interrupted.is_set():
        _attend(instances)
        tell(sample)
        interrupted.wait(SAMPLE_SECONDS)
    arrivals.end()
    faults.stop()
    click.echo(f"waiting for the last servers, for {DRAIN_SECONDS:.0f} s at most")
    give_up = time.monotonic() + DRAIN_SECONDS
    while not arrivals.ended and time.monotonic() < give_up:
        time.sleep(SAMPLE_SECONDS)
        _attend(instances)
        tell(watch.look())
    for instance in instances:
        instance.leave()
        instance.log_watch.look()
    return sample.at


def _attend(instances: Sequence[Instance]) -> None:
    for instance in instances:
        instance.revive()
        instance.log_watch.look()


class _Teller:
    """Says now and then how it goes."""

    def __init__(self) -> None:
        self._due = 0.0

    def tell(self, sample: Sample) -> None:
        if sample.at < self._due:
            return
        self._due = sample.at + TELL_SECONDS
        standing, daemons = sample.standing, []
        for daemon in sample.daemons:
            memory = f"{daemon.usage.rss_bytes / 1e6:.0f} MB" if daemon.usage else "not there"
            daemons.append(f"{daemon.name} {memory}{' leads' if daemon.leads else ''}")
        click.echo(
            f"{sample.at / 60:5.1f} min  arrived {standing.arrived:,}  provisioned {standing.provisioned:,}  "
            f"waiting {standing.waiting:,}, the longest for {standing.oldest:.0f} s  twice {standing.duplicates}  "
            f"{', '.join(daemons)}"
        )


def _sum_up(run: Run, out: Path) -> bool:
    """Write down all that is left to be said, show the summary, and say whether no rule was broken."""
    (out / "soak.svg").write_text(chart(run).svg())
    with (out / "duplicates.jsonl").open("w") as record:
        for duplicate, reason in run.duplicates():
            times = {"first": duplicate.first - run.started, "second": duplicate.second - run.started}
            record.write(json.dumps({**attrs.asdict(duplicate), **times, "reason": reason}) + "\n")
    with (out / "defects.log").open("w") as record:
        record.writelines(f"{line}\n" for instance in run.instances for line in instance.log_watch.defects)
    judged = verdicts(run)
    summary = "\n".join([run.title, "", table(run), "", *map(str, judged), ""])
    (out / "summary.txt").write_text(summary)
    click.echo(f"\n{summary}\nIn {out}: {', '.join(sorted(file.name for file in out.iterdir()))}")
    return all(verdict.holds is not False for verdict in judged)


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one has its usual effect."""
    interrupted = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in signals]

    def restore() -> None:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)

    def note(*_: object) -> None:
        interrupted.set()
        restore()

    for each in signals:
        signal.signal(each, note)
    try:
        yield interrupted
    finally:
        restore()


if __name__ == "__main__":
    main()
