"""`make test-nfs`: versions on NFS, between two kernel clients, while the server's power fails.

One client is a trainer, the other a sampler. They swap roles with each run, and the gateway's
collector is on either of them. A publish, the load of the version before and a collection go on at
once. Writes a result, and with `--trace FILE` the trace of all file operations. Exit status 1 if a
version was partial or lost, or if anything is left."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import record
from tandem.weights import new_version_name
from tests.nfs.machines import (
    LEASE_SECONDS,
    PATH,
    PROGRAMS,
    Client,
    Kernel,
    Server,
    get_kernel,
    qemu_version,
)
from tests.support.file_trace import Operation, read_trace, write_trace
from tests.support.processes import end_at_signal

ADDRESSES = {"trainer": "10.0.77.2", "sampler": "10.0.77.3"}
_KEPT_EVERY, _DIES_EVERY = 10, 25
_CALL_SECONDS = 600.0


@dataclass
class Counts:
    publishes: int = 0
    loads: int = 0
    collections: int = 0
    killed_trainers: int = 0
    early_looks: int = 0
    too_early: int = 0
    partial: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """`restarts` are pairs of times. `offsets` lead from the clients' clocks to ours, by client."""

    counts: Counts
    restarts: list[tuple[float, float]]
    offsets: dict[str, float]
    clock_error: float
    seconds: float


class Power(threading.Thread):
    """Fails the server's power at random times, and starts it again."""

    def __init__(self, server: Server, *, seed: int, every: float) -> None:
        super().__init__(daemon=True)
        self.restarts: list[tuple[float, float]] = []
        self.failed: BaseException | None = None
        self._server, self._random, self._every = server, random.Random(seed), every
        self._ends = threading.Event()

    def run(self) -> None:
        try:
            while not self._ends.wait(self._random.expovariate(1 / self._every)):
                began = time.monotonic()
                self._server.kill()
                self._server.start()
                self.restarts.append((began, time.monotonic()))
        except BaseException as error:  # noqa: BLE001 - raised by `end`
            self.failed = error

    def end(self) -> None:
        self._ends.set()
        self.join(timeout=_CALL_SECONDS)
        if self.failed is not None:
            raise self.failed

    def stop(self) -> None:
        """End with the server killed, also while it starts."""
        self._ends.set()
        self._server.kill()
        self.join(timeout=_CALL_SECONDS)
        self._server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nfs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=10, help="that share the rounds")
    parser.add_argument("--restart-every", type=float, default=60.0, help="seconds, on average")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no round begins")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--trace", type=Path, help="a new file, such as trace.jsonl.gz")
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    if missing := [each for each in PROGRAMS if shutil.which(each, path=PATH) is None]:
        parser.error(f"{', '.join(missing)} are missing; see tests/nfs/__init__.py")
    end_at_signal()
    print(f"seed {arguments.seed}", flush=True)
    kernel = get_kernel()
    folder = Path(tempfile.mkdtemp(prefix="nfs-"))
    try:
        done = run(folder, kernel, arguments)
        trace = read_whole_trace(folder, done)
    except BaseException:
        print(f"consoles and traces are in {folder}", flush=True)
        (folder / "server.img").unlink(missing_ok=True)
        raise
    shutil.rmtree(folder)
    if arguments.trace:
        write_trace(arguments.trace, trace)
    outcomes: dict[str, int] = {}
    for each in trace:
        if isinstance(each.outcome, str) and each.outcome.startswith("E"):
            key = f"{each.name} {each.outcome}"
            outcomes[key] = outcomes.get(key, 0) + 1
    result = {
        "machine": record.machine(),
        "settings": {
            "rounds": arguments.rounds,
            "runs": arguments.runs,
            "seed": arguments.seed,
            "restart_every_seconds": arguments.restart_every,
            "lease_seconds": LEASE_SECONDS,
            "mount": "vers=4.2, hard, the kernel's defaults",
            "emulator": qemu_version(),
            "guest_kernel": kernel.version,
            "load": list(os.getloadavg()),
        },
        "nfs": {
            **vars(done.counts),
            "restarts": len(done.restarts),
            "seconds_without_server": round(sum(up - down for down, up in done.restarts), 1),
            "seconds": round(done.seconds, 1),
            "clock_error_seconds": round(done.clock_error, 4),
            "operations": sum(not each.name.startswith("call") for each in trace),
            "errors": dict(sorted(outcomes.items())),
        },
    }
    print(json.dumps(result["nfs"], indent=1), flush=True)
    if not arguments.no_save:
        print(f"Written to {record.save(result).name}")
    counts = done.counts
    return int(bool(counts.partial or counts.lost or counts.left))


def run(folder: Path, kernel: Kernel, arguments: argparse.Namespace) -> Done:
    port = random.randint(20_000, 60_000)
    with ExitStack() as machines:
        starter = machines.enter_context(ThreadPoolExecutor(1))
        server = Server(kernel, folder, "server", port, starter)
        clients = [Client(kernel, folder, name, port, starter) for name in ADDRESSES]
        for each in (server, *clients):
            machines.callback(each.kill)
        server.make_disk(gigabytes=4)
        server.start()
        for each in clients:
            each.start(ADDRESSES[each.name])
        for each in clients:
            each.wait_ready()
        error = max(each.measure_clock() for each in clients)
        power = Power(server, seed=arguments.seed, every=arguments.restart_every)
        began, counts = time.monotonic(), Counts()
        power.start()
        machines.callback(power.stop)
        kept: list[str] = []
        per_run = -(-arguments.rounds // arguments.runs)
        for number in range(arguments.runs):
            rounds = min(per_run, arguments.rounds - counts.publishes)
            until = began + 60 * arguments.minutes
            if rounds > 0 and time.monotonic() < until:
                kept += train(clients, counts, number=number, rounds=rounds, until=until)
                print(
                    f"{time.monotonic() - began:6.0f} s  {counts.publishes} publishes, "
                    f"{len(power.restarts)} restarts, {len(counts.partial)} partial, "
                    f"{len(counts.lost)} lost",
                    flush=True,
                )
        power.end()
        for name in kept:
            for each in clients:
                check(counts.lost, name, ask(each, "load", name=name))
        seconds = time.monotonic() - began
        for each in clients:
            each.call("end", seconds=_CALL_SECONDS)
    offsets = {each.name: each.offset for each in clients}
    return Done(counts, power.restarts, offsets, error, seconds)


def train(
    clients: list[Client], counts: Counts, *, number: int, rounds: int, until: float
) -> list[str]:
    """Do the rounds of one run. Return its kept versions."""
    trainer, sampler = clients[number % 2], clients[(number + 1) % 2]
    gateway = clients[number // 2 % 2]
    run_id, kept, name = f"s-{number}:train:0", [], ""
    published: dict[str, object] = {}
    collection: Future | None = None
    for step in range(rounds + 1):
        ends = step == rounds or time.monotonic() > until
        coming = "" if ends else new_version_name(run_id=run_id, number=step)
        if coming and step % 2:
            counts.early_looks += 1
            counts.too_early += not ask(sampler, "peek", name=coming)
        publishing = trainer.begin("publish", name=coming) if coming else None
        if name:
            keep = step % _KEPT_EVERY == 0
            kept += [name] * keep
            ask(gateway, "serve", name=name, keep=keep)
            found = ask(sampler, "load", name=name)
            check(counts.partial, name, found, published[name])
            counts.loads += 1
            if collection is not None:
                answer(collection)
            collection = gateway.begin("collect", run_id=run_id)
            counts.collections += 1
        if publishing is not None:
            published[coming] = answer(publishing)
            counts.publishes += 1
        if coming and step % _DIES_EVERY == _DIES_EVERY - 1:
            dying = new_version_name(run_id=run_id, number=step)
            ask(trainer, "publish", name=dying, die=True)
            counts.killed_trainers += 1
        name = coming
        if ends:
            break
    if collection is not None:
        answer(collection)
    for each in kept:
        check(counts.lost, each, ask(sampler, "load", name=each), published[each])
    left = set(ask(gateway, "collect", run_id=run_id, ended=True))
    here = {each.rpartition("/")[2] for each in kept}
    counts.lost += sorted(here - left)
    counts.left += sorted(left - here)
    if trashed := ask(gateway, "trash"):
        counts.left.append(f"{trashed} folders in the trash")
    return kept


def check(failures: list[str], name: str, found: dict, published: object = None) -> None:
    if "failed" in found or (published is not None and found != published):
        failures.append(f"{name}: {found}")


def ask(client: Client, call: str, **arguments: object):
    return client.call(call, seconds=_CALL_SECONDS, **arguments)


def answer(future: Future):
    return future.result(timeout=_CALL_SECONDS)


def read_whole_trace(folder: Path, done: Done) -> list[Operation]:
    """Return both clients' operations and the server's restarts, in the order of their ends.

    Times are in seconds since the first operation."""
    found = [Operation("server", down, up, "restart") for down, up in done.restarts]
    for name, offset in done.offsets.items():
        for each in read_trace(folder / "out" / f"{name}.jsonl"):
            found.append(replace(each, began=each.began + offset, ended=each.ended + offset))
    first = min(each.began for each in found)
    found = [
        replace(each, began=round(each.began - first, 4), ended=round(each.ended - first, 4))
        for each in found
    ]
    return sorted(found, key=lambda each: each.ended)


if __name__ == "__main__":
    sys.exit(main())
