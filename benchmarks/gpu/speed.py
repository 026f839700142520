"""Training beside a plain loop, sampling beside vLLM alone, and new weights from one to the other.

One after the other on the one device, each with nothing beside it but what it is measured with:

- `training`: forward_backward and optim_step of a real trainer, by gRPC as a gateway calls it, and
  a plain loop on the same tokens, eager and compiled; tokens per second, model FLOPs utilization,
  bytes of the device;
- `sampling`: a real engine under concurrent calls, and vLLM alone with the same prompts;
- `serving`: trainer and engine at once; seconds from a step's end until the engine serves the new
  weights, and the logprobs of both on the same tokens, beside the engine's own from one batch to
  another.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.gpu.alone import engine_alone, plain_loop
from benchmarks.gpu.workers import (
    RUN,
    SESSION,
    SIZES,
    Bench,
    Caller,
    Float32Array,
    Int64Array,
    elsewhere,
    forward_backward,
    optim_step,
    publish,
    sequences_of,
    spec_of,
    torch_device,
    worker,
)
from tandem.demo.tiny_model import tensor_shapes
from tandem.v1 import common_pb2, sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tandem.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.worker_settings import SamplerSettings, TrainerSettings

ADAPTERS_FROM = 4e9
"""Parameters: of larger models one device trains adapters alone."""

_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s that NVIDIA's data sheets name, by a part of the device's name."""


def parameters_of(size: str) -> int:
    return sum(math.prod(sizes) for sizes in tensor_shapes(SIZES[size]).values())


def flops(size: str, *, tokens: int, length: int, adapters: bool) -> float:
    """Return the floating point operations of a step: of each parameter 2 forward, 2 for the
    gradient of what comes in, and 2 for its own, which frozen ones do not have; and those of
    attention, not halved for its mask (PaLM, arXiv 2204.02311, appendix B)."""
    shape = SIZES[size]
    attention = 12 * shape.layers * shape.heads * shape.head_dim * length
    return float(tokens) * ((4 if adapters else 6) * parameters_of(size) + attention)


async def training(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure a trainer, and a plain loop where all parameters are trained."""
    adapters = parameters_of(size) > ADAPTERS_FROM
    sequences = sequences_of(size, count=8, length=2048 if bench.gpu is not None else 128)
    length = len(sequences[0]) - 1
    tokens = len(sequences) * length
    work = flops(size, tokens=tokens, length=length, adapters=adapters)
    bench.say(f"{size}: a trainer computes {tokens} tokens a step")
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    seconds = []
    async with worker(bench, trainer_spec(bench, size, model)) as trainer:
        for _ in range(bench.rounds + 2):
            began = time.perf_counter()
            await forward_backward(trainer, sequences)
            await optim_step(trainer)
            seconds.append(time.perf_counter() - began)
        used = bench.used_bytes(trainer.pid) - before
    found: dict[str, object] = {
        "trains": "adapters" if adapters else "all parameters",
        "tokens": tokens,
        "trainer": _speed(bench, seconds[2:], tokens, work) | {"device_bytes": used},
    }
    bench.say(json.dumps(found["trainer"]))
    for compiled in (False, True):
        if adapters:
            break
        name = "compiled plain loop" if compiled else "plain loop"
        seconds, peak = elsewhere(
            bench, plain_loop, model, torch_device(bench), sequences,
            rows=2, rounds=bench.rounds, compiled=compiled,
        )  # fmt: skip
        row = _speed(bench, seconds, tokens, work) | {"device_bytes": peak}
        found[name] = row
        bench.say(f"{name}: {json.dumps(row)}")
    return found


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


async def serving(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure how new weights come from a trainer to an engine on the same device, whole, as a
    delta and handed over in memory in turn, and how far apart their logprobs are."""
    bench.say(f"{size}: an engine serves what a trainer publishes")
    weights = 2 * parameters_of(size)
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        max_num_seqs=64,
        kv_cache_bytes=64 * 2**20,
        gpu_memory_bytes=weights + 8 * 2**30 if bench.gpu is not None else 0,
    )
    sequences = sequences_of(size, count=4, length=128)
    published, loaded, both, of_delta, handed, of_handoff = [], [], [], [], [], []
    refused = ""
    async with (
        worker(bench, engine_spec(bench, size, model, settings)) as engine,
        worker(bench, trainer_spec(bench, size, model)) as trainer,
    ):
        for number in range(1, bench.rounds + 2):
            await forward_backward(trainer, sequences)
            await optim_step(trainer)
            began = time.perf_counter()
            version = (await publish(bench, trainer, number)).version
            written = time.perf_counter()
            reply = await engine.call("Load", sampler_pb2.LoadRequest(version=version))
            ended = time.perf_counter()
            published.append(written - began)
            loaded.append(ended - written)
            both.append(ended - began)
            await forward_backward(trainer, sequences)
            await optim_step(trainer)
            began = time.perf_counter()
            delta = await publish(bench, trainer, 1000 + number, delta_of=version.name)
            await engine.call("Load", sampler_pb2.LoadRequest(version=delta.version))
            of_delta.append(time.perf_counter() - began)
            await forward_backward(trainer, sequences)
            await optim_step(trainer)
            began = time.perf_counter()
            kept = await publish(bench, trainer, 2000 + number, handoff=True)
            written, version = time.perf_counter(), kept.version
            handoff = kept.handoff if kept.HasField("handoff") else None
            request = sampler_pb2.LoadRequest(version=version, handoff=handoff)
            taken = await engine.call("Load", request)
            ended = time.perf_counter()
            handed.append(ended - written)
            of_handoff.append(ended - began)
            if not taken.handed_off:
                refused = taken.handoff_failure or "the trainer had no room for a copy"
        prompts = [each[:8].tolist() for each in sequences_of(size, count=16, length=64)]
        sampled = await sample(engine, prompts, version=version, samples=1, max_tokens=64, seed=1)
        of_trainer, again = [], []
        for prompt, (tokens, _) in zip(prompts, sampled, strict=True):
            whole = np.array([*prompt, *tokens])
            (logprobs,) = await forward_backward(trainer, [whole], forward_only=True)
            of_trainer.append(logprobs[len(prompt) - 1 :])
            again.append(await scored(engine, whole, version=version, last=len(tokens)))
    of_engine = [logprobs for _, logprobs in sampled]
    found: dict[str, object] = {
        "bytes": reply.bytes,
        "publish_seconds": round(statistics.median(published[1:]), 3),
        "load_seconds": round(statistics.median(loaded[1:]), 3),
        "published_to_served_seconds": round(statistics.median(both[1:]), 3),
        "delta_to_served_seconds": round(statistics.median(of_delta[1:]), 3),
        "handoff": refused
        or {
            "load_seconds": round(statistics.median(handed[1:]), 3),
            "published_to_served_seconds": round(statistics.median(of_handoff[1:]), 3),
        },
        "logprob_gap": _gap(of_trainer, of_engine),
        "logprob_gap_of_the_engine_alone": _gap(again, of_engine),
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
    """Sample all prompts at once. Return the tokens of each prompt's first sample, with their
    logprobs."""
    requests = [
        _sample_request(
            prompt, version=version, number=seed + number, samples=samples, max_tokens=max_tokens
        )
        for number, prompt in enumerate(prompts)
    ]
    replies = await engine.sample(requests)
    first = [wire.SampleResponse.FromString(reply.response).sequences[0] for reply in replies]
    return [
        (np.frombuffer(each.tokens, "<i4"), np.frombuffer(each.logprobs, "<f4")) for each in first
    ]


async def scored(
    engine: Caller, tokens: Int64Array, *, version: common_pb2.WeightVersion, last: int
) -> Float32Array:
    """Return the engine's logprobs of the last tokens of a prompt, computed with nothing else."""
    request = _sample_request(tokens.tolist(), version=version, number=0, samples=1, max_tokens=1)
    request.operation_id, request.prompt_logprobs = f"score-{time.monotonic_ns()}", True
    (reply,) = await engine.sample([request])
    response = wire.SampleResponse.FromString(reply.response)
    return np.frombuffer(response.prompt_logprobs, "<f4")[-last:]


def _sample_request(
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


def trainer_spec(bench: Bench, size: str, model: Path) -> WorkerSpec:
    adapters = parameters_of(size) > ADAPTERS_FROM
    return spec_of(
        bench,
        model,
        worker_id=f"trainer-{size}",
        kind="trainer",
        run_id=RUN,
        trainer=TrainerSettings(),
        training=TrainingSpec(lora=LoraSpec() if adapters else None),
    )


def engine_spec(bench: Bench, size: str, model: Path, settings: SamplerSettings) -> WorkerSpec:
    return spec_of(bench, model, worker_id=f"sampler-{size}", kind="sampler", sampler=settings)


def _speed(
    bench: Bench, seconds: Sequence[float], tokens: int, work: float
) -> dict[str, float | int]:
    median = statistics.median(seconds)
    found: dict[str, float | int] = {"tokens_per_second": round(tokens / median)}
    name = bench.gpu.name if bench.gpu is not None else ""
    peak = next((peak for part, peak in _PEAK.items() if part in name), None)
    return found | ({"mfu": round(work / median / peak, 3)} if peak else {})


def _gap(one: Sequence[Float32Array], other: Sequence[Float32Array]) -> dict[str, float]:
    difference = np.abs(np.concatenate(one) - np.concatenate(other))
    return {"mean": float(difference.mean()), "max": float(difference.max())}
