"""Training beside a plain loop, and sampling beside vLLM alone.

- `training`: forward_backward and optim_step of a trainer, by gRPC, compiled and eager: tokens per
  second, model FLOPs utilization, device bytes.
- `plain`: a plain loop on the same tokens.
- `sampling`: an engine under concurrent calls, and vLLM alone with the same prompts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.alone import engine_alone, plain_loop
from benchmarks.gpu.sizes import (
    PEAK,
    SIZES,
    Int64Array,
    flops,
    is_large,
    sequences_of,
)
from benchmarks.gpu.workers import (
    LEARNING_RATE,
    SESSION,
    Bench,
    Caller,
    Float32Array,
    attempt,
    elsewhere,
    spec_of,
    torch_device,
    train_step,
    trainer_spec,
    worker,
)
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2, sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire

_BATCHES = {"1.5B": ((8, 2048), (4, 4096)), "4B": ((1, 16_384),)}
"""The sequences of a step, and their tokens, on a GPU."""
_OTHER_BATCHES = ((8, 2048),)
_ON_CORES = ((8, 128), (4, 256))
_WAYS = {"compiled trainer": "on", "trainer": "off"}


def training(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure a trainer, compiled and, if all parameters are trained, eager."""
    batches = _batches(bench, size)
    found: dict[str, object] = {
        "trains": "adapters" if is_large(size) else "all parameters",
        "learning_rate": LEARNING_RATE,
    }
    for name, compiled in _WAYS.items():
        if is_large(size) and compiled == "off":
            continue
        bench.say(f"{size}: a {name} computes batches of {', '.join(map(_name, batches))}")
        found[name] = attempt(
            bench, bench.run, partial(_trainer, bench, size, model, batches, compiled)
        )
        bench.say(f"{name}: {json.dumps(found[name])}")
    return found


def plain(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure a plain loop on the trainer's first batch, compiled and eager."""
    sequences = _batches(bench, size)[0]
    found: dict[str, object] = {}
    for name, compiled in {"compiled plain loop": True, "plain loop": False}.items():
        found[name] = attempt(bench, _plain_loop, bench, size, model, sequences, compiled=compiled)
        bench.say(f"{name}: {json.dumps(found[name])}")
    return found


def _batches(bench: Bench, size: str) -> list[list[Int64Array]]:
    shapes = _BATCHES.get(size, _OTHER_BATCHES) if bench.gpu is not None else _ON_CORES
    return [sequences_of(size, count=count, length=length) for count, length in shapes]


async def _trainer(
    bench: Bench, size: str, model: Path, batches: Sequence[Sequence[Int64Array]], compiled: str
) -> dict[str, object]:
    """Measure steps of a trainer after the first two of each batch. Compilation counts as its
    start."""
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    training = TrainingSpec(lora=LoraSpec() if is_large(size) else None)
    spec = trainer_spec(bench, size, model, training=training, compile=compiled)
    found: dict[str, object] = {}
    began = time.perf_counter()
    async with worker(bench, spec) as trainer:
        found["start_seconds"] = round(time.perf_counter() - began, 1)
        for sequences in batches:
            seconds = []
            for _ in range(bench.rounds + 2):
                began = time.perf_counter()
                await train_step(trainer, sequences)
                seconds.append(time.perf_counter() - began)
            found[_name(sequences)] = {
                **_speed(bench, size, seconds[2:], sequences),
                "first_step_seconds": round(seconds[0], 3),
            }
        about = await trainer.describe()
        found["device_bytes"] = bench.used_bytes(trainer.pid) - before
    return found | {
        "micro_batch_tokens": about.micro_batch_tokens,
        "checkpointing": about.memory.checkpointing,
        "packs": about.packs,
    }


def _name(sequences: Sequence[Int64Array]) -> str:
    return f"{len(sequences[0]) - 1} tokens"


def _plain_loop(
    bench: Bench, size: str, model: Path, sequences: Sequence[Int64Array], *, compiled: bool
) -> dict[str, object]:
    seconds, peak = elsewhere(
        bench, plain_loop, model, torch_device(bench), sequences,
        rows=2, rounds=bench.rounds, compiled=compiled,
    )  # fmt: skip
    return {_name(sequences): _speed(bench, size, seconds, sequences), "device_bytes": peak}


async def sampling(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure an engine under concurrent calls, and vLLM alone."""
    count, samples, max_tokens, length = (64, 8, 256, 128) if bench.gpu else (16, 2, 16, 32)
    prompts = [each.tolist() for each in sequences_of(size, count=count, length=length)]
    share = 0.6
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        max_num_seqs=count * samples,
        kv_cache_bytes=256 * 2**20,
        gpu_memory_utilization=share,
    )
    bench.say(f"{size}: an engine answers {count} × {samples} × {max_tokens} tokens")
    seconds = []
    async with worker(bench, engine_spec(bench, size, model, settings)) as engine:
        base = common_pb2.WeightVersion(name="base/bench", path=str(model))
        for round_ in range(bench.rounds + 1):
            began = time.perf_counter()
            await sample(
                engine, prompts, version=base, samples=samples, max_tokens=max_tokens,
                seed=round_ * 10_000,
            )  # fmt: skip
            seconds.append(time.perf_counter() - began)
    alone = elsewhere(
        bench, engine_alone, model, torch_device(bench), prompts, samples=samples,
        max_tokens=max_tokens, max_num_seqs=count * samples, memory_share=share,
        rounds=bench.rounds,
    )  # fmt: skip
    tokens = count * samples * max_tokens
    ours, theirs = (round(tokens / statistics.median(each)) for each in (seconds[1:], alone))
    found: dict[str, object] = {
        "tokens_per_second": ours,
        "vllm_alone_tokens_per_second": theirs,
        "of_vllm_alone": round(ours / theirs, 3),
    }
    bench.say(json.dumps(found))
    return found


async def sample(
    engine: Caller,
    prompts: Sequence[list[int]],
    *,
    version: common_pb2.WeightVersion,
    samples: int,
    max_tokens: int,
    seed: int,
) -> list[tuple[Int64Array, Float32Array]]:
    """Sample all prompts at once. Return tokens and logprobs of each prompt's first sample."""
    requests = [
        sample_request(
            prompt, version=version, number=seed + number, samples=samples, max_tokens=max_tokens
        )
        for number, prompt in enumerate(prompts)
    ]
    replies = await engine.sample(requests)
    first = [wire.SampleResponse.FromString(reply.response).sequences[0] for reply in replies]
    return [
        (np.frombuffer(each.tokens, "<i4"), np.frombuffer(each.logprobs, "<f4")) for each in first
    ]


def sample_request(
    prompt: Sequence[int],
    *,
    version: common_pb2.WeightVersion,
    number: int,
    samples: int,
    max_tokens: int,
) -> sampler_pb2.SampleRequest:
    return sampler_pb2.SampleRequest(
        operation_id=f"sample-{number}",
        session_id=SESSION,
        seq_id=number,
        version=version,
        prompt_tokens=np.asarray(prompt, "<i4").tobytes(),
        num_samples=samples,
        # No token stops: given, and none named.
        params=sampler_pb2.SamplingParams(
            max_tokens=max_tokens, seed=number, temperature=1.0, top_k=-1, top_p=1.0,
            stop_given=True,
        ),
    )  # fmt: skip


def engine_spec(bench: Bench, size: str, model: Path, settings: SamplerSettings) -> WorkerSpec:
    return spec_of(bench, model, worker_id=f"sampler-{size}", kind="sampler", sampler=settings)


def _speed(
    bench: Bench, size: str, seconds: Sequence[float], sequences: Sequence[Int64Array]
) -> dict[str, float | int]:
    median, length = statistics.median(seconds), len(sequences[0]) - 1
    tokens = len(sequences) * length
    work = flops(size, tokens=tokens, length=length, adapters=is_large(size))
    found: dict[str, float | int] = {"tokens_per_second": round(tokens / median)}
    name = bench.gpu.name if bench.gpu is not None else ""
    peak = next((peak for part, peak in PEAK.items() if part in name), None)
    return found | ({"mfu": round(work / median / peak, 3)} if peak else {})
