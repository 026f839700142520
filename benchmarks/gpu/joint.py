"""LoRA runs of one trainer in joint passes, beside one run with all their tokens."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.sizes import Int64Array, sequences_of
from benchmarks.gpu.workers import (
    Bench,
    Caller,
    forward_backward,
    optim_step,
    trainer_spec,
    worker,
)
from tandem.protocol.worker import LoraSpec, TrainingSpec

_WARM_UP = 2


async def joint(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure batches of many runs that come at once, in turn with one run's batch of them all."""
    runs, count, length = (64, 2, 512) if bench.gpu is not None else (4, 2, 64)
    bench.say(f"{size}: {runs} LoRA runs share a trainer")
    all_sequences = sequences_of(size, count=runs * count, length=length)
    training = TrainingSpec(lora=LoraSpec())
    spec = trainer_spec(bench, size, model, training=training, checkpointing="off")
    async with worker(bench, spec) as first:
        callers, began = [first], time.perf_counter()
        for number in range(1, runs):
            lora = LoraSpec(seed=number)
            callers.append(await first.add_run(number, TrainingSpec(lora=lora)))
        found: dict[str, object] = {
            "runs": runs,
            "rank": LoraSpec().rank,
            "tokens_of_a_run": count * length,
            "add_run_seconds": round((time.perf_counter() - began) / (runs - 1), 4),
        }
        batches = [all_sequences[number::runs] for number in range(runs)]
        together, alone = [], []
        for _ in range(bench.rounds + _WARM_UP):
            together.append(await _timed(callers, batches))
            alone.append(await _timed([first], [all_sequences]))
        passes = _joint_passes(first.log_path)
        found["device_bytes"] = bench.used_bytes(first.pid)
    if not passes:
        raise RuntimeError("the trainer computed no joint pass")
    found["runs_in_a_pass"] = round(statistics.mean(passes), 1)
    found |= _beside(together[_WARM_UP:], alone[_WARM_UP:], tokens=runs * count * length)
    bench.say(json.dumps(found))
    return found


async def _timed(
    callers: Sequence[Caller], batches: Sequence[Sequence[Int64Array]]
) -> tuple[float, float]:
    """Return the seconds of all runs' batches, and of all runs' steps."""
    began = time.perf_counter()
    await asyncio.gather(*map(forward_backward, callers, batches))
    computed = time.perf_counter()
    await asyncio.gather(*map(optim_step, callers))
    return computed - began, time.perf_counter() - computed


def _beside(
    together: Sequence[tuple[float, float]], alone: Sequence[tuple[float, float]], *, tokens: int
) -> dict[str, object]:
    passes, steps = (statistics.median(each) for each in zip(*together, strict=True))
    one_pass, one_step = (statistics.median(each) for each in zip(*alone, strict=True))
    return {
        "tokens_per_second": round(tokens / passes),
        "one_run_tokens_per_second": round(tokens / one_pass),
        "of_one_run": round(one_pass / passes, 3),
        "of_one_run_with_steps": round((one_pass + one_step) / (passes + steps), 3),
        "steps_seconds": round(steps, 4),
    }


def _joint_passes(log: Path) -> list[int]:
    """Return the runs of each joint pass in a trainer's log."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["runs"] for line in lines if line["event"] == "joint_pass"]
