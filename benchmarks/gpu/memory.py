"""The memory of trainers beside their plan.

A trainer computes two micro-batches of the planned size and a step, twice. Then its plan's device
bytes are compared with the peaks of its tensors and of torch's reservation."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from benchmarks.gpu.sizes import is_large, sequences_of
from benchmarks.gpu.workers import (
    Bench,
    attempt,
    train_step,
    trainer_spec,
    worker,
)
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.v1 import trainer_pb2

_ALL = {
    "kept": (TrainingSpec(), "off"),
    "checkpointed": (TrainingSpec(), "on"),
    "LoRA": (TrainingSpec(lora=LoraSpec()), "off"),
    "bfloat16 states": (TrainingSpec(states="bfloat16"), "off"),
    "moments on the host": (TrainingSpec(offload="moments"), "off"),
    "weights on the host": (TrainingSpec(offload="weights"), "off"),
}
_LARGE = {
    "LoRA": (TrainingSpec(lora=LoraSpec()), "off"),
    "LoRA, checkpointed": (TrainingSpec(lora=LoraSpec()), "on"),
    "LoRA, weights on the host": (TrainingSpec(lora=LoraSpec(), offload="weights"), "on"),
    "bfloat16 states": (TrainingSpec(states="bfloat16"), "on"),
}
"""The training, and the setting of checkpointing."""


def memory(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure each possible way to train a size."""
    found: dict[str, object] = {}
    for way, (training, checkpointing) in (_LARGE if is_large(size) else _ALL).items():
        bench.say(f"{size}: the memory of a trainer, {way}")
        found[way] = attempt(
            bench,
            bench.run,
            partial(_planned_and_taken, bench, size, model, training, checkpointing),
        )
        bench.say(json.dumps(found[way]))
    return found


async def _planned_and_taken(
    bench: Bench, size: str, model: Path, training: TrainingSpec, checkpointing: str
) -> dict[str, object]:
    length, tokens = (4096, 8192) if bench.gpu is not None else (64, 128)
    spec = trainer_spec(
        bench,
        size,
        model,
        training=training,
        checkpointing=checkpointing,
        micro_batch_tokens=tokens,
    )
    async with worker(bench, spec) as trainer:
        for _ in range(2):
            sequences = sequences_of(size, count=2 * tokens // length, length=length)
            await train_step(trainer, sequences)
        about = await trainer.describe()
    return compared(about)


def compared(about: trainer_pb2.DescribeTrainerReply) -> dict[str, object]:
    """Return a trainer's planned and used memory, and the plan in percent of the use."""
    plan = about.memory
    planned = sum(plan.device.values())
    found: dict[str, object] = {
        "micro_batch_tokens": about.micro_batch_tokens,
        "planned": dict(plan.device),
        "planned_on_host": dict(plan.host),
        "planned_bytes": planned,
    }
    if about.peak_allocated_bytes:
        found |= {
            "peak_allocated_bytes": about.peak_allocated_bytes,
            "peak_reserved_bytes": about.peak_reserved_bytes,
            "planned_percent_of_allocated": round(100 * planned / about.peak_allocated_bytes, 1),
            "planned_percent_of_reserved": round(100 * planned / about.peak_reserved_bytes, 1),
        }
    return found
