"""Training beside a plain loop, sampling beside vLLM alone, and new weights from one to the other.

- `training`: forward_backward and optim_step of a trainer, by gRPC, and a plain loop on the same
  tokens, both eager and compiled: tokens per second, model FLOPs utilization, device bytes.
- `publishing`: seconds and bytes of a trainer's versions, without an engine.
- `sampling`: an engine under concurrent calls, and vLLM alone with the same prompts.
- `serving`: seconds from a step's end until the engine serves the new weights, and the difference
  of trainer's and engine's logprobs, beside that of two batches of the engine."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.alone import engine_alone, plain_loop
from benchmarks.gpu.workers import (
    LEARNING_RATE,
    SESSION,
    SIZES,
    Bench,
    Caller,
    Float32Array,
    Int64Array,
    attempt,
    elsewhere,
    forget,
    forward_backward,
    optim_step,
    parameters_of,
    publish,
    sequences_of,
    spec_of,
    torch_device,
    trainer_spec,
    trains_adapters,
    until_durable,
    worker,
)
from tandem.protocol.worker import LoraSpec, WorkerSpec
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2, sampler_pb2, trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire

_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s of NVIDIA's data sheets, by a part of the device's name."""


@dataclass
class Published:
    """A version, and the seconds to publish it and, if an engine did, to load it."""

    reply: trainer_pb2.PublishReply
    seconds: float
    loaded: float = 0.0

    @property
    def version(self) -> common_pb2.WeightVersion:
        return self.reply.version


def flops(size: str, *, tokens: int, length: int, adapters: bool) -> float:
    """Return the floating point operations of a step.

    Each parameter takes 2 forward, 2 for the gradient of the input and, unless frozen, 2 for its
    own gradient. Attention takes half of PaLM's count (arXiv 2204.02311, appendix B), because a
    token sees only earlier tokens. Recomputation, such as checkpointed blocks, counts once."""
    shape = SIZES[size]
    attention = 6 * shape.layers * shape.heads * shape.head_dim * length
    return float(tokens) * ((4 if adapters else 6) * parameters_of(size) + attention)


def training(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure a trainer, and, if all parameters are trained, a plain loop, eager and compiled."""
    adapters = trains_adapters(size)
    sequences = sequences_of(size, count=8, length=2048 if bench.gpu is not None else 128)
    length = len(sequences[0]) - 1
    tokens = len(sequences) * length
    work = flops(size, tokens=tokens, length=length, adapters=adapters)
    found: dict[str, object] = {
        "trains": "adapters" if adapters else "all parameters",
        "tokens": tokens,
        "learning_rate": LEARNING_RATE,
    }
    for compiled in (False, True):
        name = "compiled trainer" if compiled else "trainer"
        bench.say(f"{size}: a {name} computes {tokens} tokens a step")
        found[name] = attempt(
            bench,
            asyncio.run,
            _trainer(bench, size, model, sequences, work=work, compiled=compiled),
        )
        bench.say(f"{name}: {json.dumps(found[name])}")
    for compiled in () if adapters else (False, True):
        name = "compiled plain loop" if compiled else "plain loop"
        found[name] = attempt(
            bench,
            _plain_loop,
            bench,
            model,
            sequences,
            work=work,
            compiled=compiled,
        )
        bench.say(f"{name}: {json.dumps(found[name])}")
    return found


async def _trainer(
    bench: Bench,
    size: str,
    model: Path,
    sequences: Sequence[Int64Array],
    *,
    work: float,
    compiled: bool,
) -> dict[str, object]:
    """Measure steps of a trainer after the first two. Compilation at first counts as its start."""
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    spec = trainer_spec(bench, size, model, compile="on" if compiled else "off")
    seconds, began = [], time.perf_counter()
    async with worker(bench, spec) as trainer:
        started = time.perf_counter() - began
        for _ in range(bench.rounds + 2):
            began = time.perf_counter()
            await forward_backward(trainer, sequences)
            await optim_step(trainer)
            seconds.append(time.perf_counter() - began)
        about = await trainer.describe()
        used = bench.used_bytes(trainer.pid) - before
    return {
        **_speed(bench, seconds[2:], sequences, work),
        "device_bytes": used,
        "start_seconds": round(started, 1),
        "first_step_seconds": round(seconds[0], 3),
        "micro_batch_tokens": about.micro_batch_tokens,
        "checkpointing": about.memory.checkpointing,
        "packs": about.packs,
    }


def _plain_loop(
    bench: Bench, model: Path, sequences: Sequence[Int64Array], *, work: float, compiled: bool
) -> dict[str, object]:
    seconds, peak = elsewhere(
        bench, plain_loop, model, torch_device(bench), sequences,
        rows=2, rounds=bench.rounds, compiled=compiled,
    )  # fmt: skip
    return {**_speed(bench, seconds, sequences, work), "device_bytes": peak}


async def publishing(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure a trainer's versions."""
    bench.say(f"{size}: a trainer publishes")
    sequences = sequences_of(size, count=4, length=128)
    published = []
    async with worker(bench, trainer_spec(bench, size, model)) as trainer:
        for number in range(1, bench.rounds + 2):
            published.append(await _next_version(bench, trainer, sequences, number))
            forget(published[-1].version)
    found = _written(published[1:])
    bench.say(json.dumps(found))
    return found


async def _next_version(
    bench: Bench,
    trainer: Caller,
    sequences: Sequence[Int64Array],
    number: int,
    *,
    handoff: bool = False,
) -> Published:
    await forward_backward(trainer, sequences)
    await optim_step(trainer)
    began = time.perf_counter()
    reply = await publish(bench, trainer, number, handoff=handoff)
    return Published(reply, seconds=time.perf_counter() - began)


def _written(versions: Sequence[Published]) -> dict[str, object]:
    """The bytes of versions, and the seconds to publish them."""
    return {
        "bytes": versions[-1].reply.bytes,
        "publish_seconds": _median(each.seconds for each in versions),
    }


def _served(versions: Sequence[Published]) -> dict[str, object]:
    """The seconds until an engine served them, alone and with the publishing."""
    if not versions:
        return {}
    return {
        "load_seconds": _median(each.loaded for each in versions),
        "published_to_served_seconds": _median(each.seconds + each.loaded for each in versions),
    }


def _median(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds), 3)


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
    """Measure new weights from a trainer to an engine on the same device, and the difference of
    their logprobs.

    Weights come by files and by hand-over in memory, in turn.
    """
    bench.say(f"{size}: an engine serves what a trainer publishes")
    weights = 2 * parameters_of(size)
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        max_num_seqs=64,
        kv_cache_bytes=64 * 2**20,
        gpu_memory_bytes=weights + 8 * 2**30 if bench.gpu is not None else 0,
        max_lora_rank=LoraSpec().rank if trains_adapters(size) else 0,
    )
    sequences = sequences_of(size, count=4, length=128)
    published, handed = [], []
    refused = ""
    async with (
        worker(bench, engine_spec(bench, size, model, settings)) as engine,
        worker(bench, trainer_spec(bench, size, model)) as trainer,
    ):

        async def load(one: Published) -> sampler_pb2.LoadReply:
            kept = one.reply.HasField("handoff")
            handoff = one.reply.handoff if kept else None
            request = sampler_pb2.LoadRequest(version=one.version, handoff=handoff)
            began = time.perf_counter()
            reply: sampler_pb2.LoadReply = await engine.call("Load", request)
            one.loaded = time.perf_counter() - began
            return reply

        for number in range(1, bench.rounds + 2):
            published.append(await _next_version(bench, trainer, sequences, number))
            await load(published[-1])
            forget(published[-1].version)
            handed.append(
                await _next_version(bench, trainer, sequences, 1000 + number, handoff=True)
            )
            version = handed[-1].version
            taken = await load(handed[-1])
            await until_durable(trainer, handed[-1].reply)
            await trainer.release(version)
            forget(version)
            if not taken.handed_off:
                refused = taken.handoff_failure or "the trainer kept no copy"
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
        "files": _written(published[1:]) | _served(published[1:]),
        "handoff": refused or _served(handed[1:]),
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
    """Sample all prompts at once. Return tokens and logprobs of each prompt's first sample."""
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
    """Return the engine's logprobs of a prompt's last tokens, computed alone."""
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


def engine_spec(bench: Bench, size: str, model: Path, settings: SamplerSettings) -> WorkerSpec:
    return spec_of(bench, model, worker_id=f"sampler-{size}", kind="sampler", sampler=settings)


def _speed(
    bench: Bench, seconds: Sequence[float], sequences: Sequence[Int64Array], work: float
) -> dict[str, float | int]:
    median, tokens = statistics.median(seconds), sum(len(each) - 1 for each in sequences)
    found: dict[str, float | int] = {"tokens_per_second": round(tokens / median)}
    name = bench.gpu.name if bench.gpu is not None else ""
    peak = next((peak for part, peak in _PEAK.items() if part in name), None)
    return found | ({"mfu": round(work / median / peak, 3)} if peak else {})


def _gap(one: Sequence[Float32Array], other: Sequence[Float32Array]) -> dict[str, float]:
    difference = np.abs(np.concatenate(one) - np.concatenate(other))
    return {"mean": float(difference.mean()), "max": float(difference.max())}
