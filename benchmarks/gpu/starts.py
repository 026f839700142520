"""Starts of trainers and engines from idle processes, of a model that the machine has seen.

A first start in a new process compiles and caches code. Then the launcher makes an idle process,
which becomes the worker."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.gpu.sizes import SIZES, parameters_of
from benchmarks.gpu.speed import engine_spec
from benchmarks.gpu.workers import Bench, trainer_spec
from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.worker import WorkerSpec
from tandem.settings.workers import SamplerSettings

_MOST_ROUNDS = 2


async def starts(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure the seconds from the request of a worker until it serves."""
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        kv_cache_bytes=64 * 2**20,
        gpu_memory_bytes=2 * parameters_of(size) + 16 * 2**30 if bench.gpu is not None else 0,
    )
    return {
        "engine": await _started(bench, engine_spec(bench, size, model, settings)),
        "trainer": await _started(bench, trainer_spec(bench, size, model)),
    }


async def _started(bench: Bench, spec: WorkerSpec) -> dict[str, object]:
    from benchmarks.starts import start, wait_until_idle_process  # needs the SDK

    bench.say(f"a {spec.kind} starts in a new process, and in idle ones")
    without = ProcessLauncher(data_dir=bench.work)
    try:
        first = await start(without, spec)
    finally:
        await without.close()
    idle = []
    for number in range(min(bench.rounds, _MOST_ROUNDS)):
        launcher = ProcessLauncher(data_dir=bench.work, pool={spec.kind: 1})
        try:
            await wait_until_idle_process(launcher, spec.kind)
            again = spec.model_copy(update={"worker_id": f"{spec.worker_id}-idle-{number}"})
            idle.append(await start(launcher, again))
        finally:
            await launcher.close()
    ready = [each["ready"] for each in idle]
    found: dict[str, object] = {
        "new_process_seconds": round(first["ready"], 2),
        "idle_process_seconds": round(statistics.median(ready), 2),
        "longest_idle_process_seconds": round(max(ready), 2),
        "parts": idle[-1],
    }
    bench.say(json.dumps(found))
    return found
