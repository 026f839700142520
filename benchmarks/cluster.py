"""`make bench-cluster`: the cost of the Kubernetes launcher for 1,000 sessions, each with a trainer
and a sampler.

It runs against the unit tests' API server in memory. Time is virtual, with 20 ms for an API call.
Processor time and memory are measured without those of the simulated cluster."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
import tracemalloc
from collections import Counter
from functools import wraps

import structlog
from rich.console import Console

from benchmarks import record
from gateway.workers.launchers.kubernetes.reconcile import Reconciler
from tests.support.kubernetes.world import Gateway, running_cluster, until
from tests.support.virtual_time import run_in_virtual_time

LATENCY = 0.02
_QUIET = 600.0
_OURS = ("*/launchers/kubernetes/*", "*/pydantic/main.py")
"""Where the launcher allocates memory. Only the launcher uses pydantic here."""
_SHARED = 8
"""Workers on one claim."""


class Passes:
    """The processor time of each pass of the reconciler."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        for name in ("_tick", "_sweep", "_compare_changed"):
            setattr(Reconciler, name, self._timed(getattr(Reconciler, name)))

    def _timed(self, method):
        @wraps(method)
        def timed(*arguments):
            began = time.process_time()
            method(*arguments)
            self.seconds.append(time.process_time() - began)

        return timed

    def take(self) -> dict[str, float]:
        seconds, self.seconds = sorted(self.seconds), []
        return {
            "comparisons": len(seconds),
            "median_ms": round(1000 * seconds[len(seconds) // 2], 2),
            "longest_ms": round(1000 * seconds[-1], 2),
            "all_seconds": round(sum(seconds), 2),
        }


async def life(sessions: int, passes: Passes) -> list[dict[str, object]]:
    """Start all sessions at once, wait ten minutes, adopt them and stop them.

    The memory measurement only starts them."""
    rows: list[dict[str, object]] = []
    async with running_cluster(nodes=2 * sessions // 20 + 1, strict=False, at_once=100) as cluster:
        for node in cluster.nodes.values():
            node.devices = 64
        cluster.latency = LATENCY
        seen = 0

        def note(what: str, began: float, used: float) -> None:
            nonlocal seen
            calls = Counter(call.verb for call in cluster.calls[seen:])
            seen = len(cluster.calls)
            memory, _ = tracemalloc.get_traced_memory()
            if memory:
                ours = [tracemalloc.Filter(True, each) for each in _OURS]
                kept = tracemalloc.take_snapshot().filter_traces(ours)
                memory = sum(each.size for each in kept.statistics("filename"))
            rows.append(
                {
                    "what": what,
                    "virtual_seconds": round(cluster.now - began, 1),
                    "process_seconds": round(time.process_time() - used, 2),
                    "calls": dict(calls),
                    "calls_a_session": round(calls.total() / sessions, 2),
                    "comparing": passes.take(),
                    "launcher_mib": round(memory / 2**20, 1),
                }
            )

        first = Gateway(cluster, epoch=1, pending_timeout=3600)
        await first.open()
        names = [f"{kind}-s-{n}-0" for n in range(sessions) for kind in ("trainer", "sampler")]
        began, used = cluster.now, time.process_time()
        starts = (
            first.run(name, kind=name.partition("-")[0], group=f"train-{number // _SHARED}")
            for number, name in enumerate(names)
        )
        await asyncio.gather(*starts)
        note("all start at once", began, used)
        if tracemalloc.is_tracing():
            await first.die()
            return rows
        began, used = cluster.now, time.process_time()
        await asyncio.sleep(_QUIET)
        note("ten quiet minutes", began, used)
        await first.die()
        second = Gateway(cluster, epoch=2, pending_timeout=3600)
        began, used = cluster.now, time.process_time()
        assert len(await second.open()) == len(names)
        note("the next gateway adopts them", began, used)
        began, used = cluster.now, time.process_time()
        await asyncio.gather(*(second.launcher.stop(name) for name in names))
        await until(lambda: not cluster.owned())
        note("all end at once", began, used)
        await second.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cluster", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    console = Console(width=160)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    passes = Passes()
    results: dict[str, object] = {"machine": record.machine(), "benchmark": "cluster"}
    results["sessions"] = arguments.sessions
    for section, frames in (("time", 0), ("memory", 1)):  # tracing memory takes time
        if frames:
            tracemalloc.start(frames)
        rows = run_in_virtual_time(life(arguments.sessions, passes))
        results[section] = {"load": round(os.getloadavg()[0], 1), "rows": rows}
        console.print(results[section])
        gc.collect()
    if not arguments.no_save:
        console.print(f"Written to {record.save(results).name}")


if __name__ == "__main__":
    main()
