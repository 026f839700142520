"""New weights from a trainer to an engine.

- `publishing`: seconds and bytes of a trainer's durable versions, without an engine.
- `serving`: seconds from the start of a publish of all parameters to an engine's first new token.
  Both are on one device. Weights come by files and by memory. The logprobs of trainer and engine
  are compared. Their difference stands beside that of two batches of the engine. Last, the engine
  sleeps and wakes beside the trainer.
- `adapters`: the same for a LoRA run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.moves import sleeps
from benchmarks.gpu.sizes import SIZES, Int64Array, parameters_of, sequences_of
from benchmarks.gpu.speed import engine_spec, sample, sample_request
from benchmarks.gpu.workers import (
    Bench,
    Caller,
    Float32Array,
    forget,
    forward_backward,
    publish,
    train_step,
    trainer_spec,
    until_durable,
    whole_training,
    worker,
)
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2, sampler_pb2, trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire

_OF_A_SWITCH = ("bytes_moved", "sleep_seconds", "wake_seconds", "switch_seconds")


@dataclass(frozen=True)
class Published:
    """A version, and the seconds to publish it and, if an engine did, to load it and to sample its
    first token."""

    reply: trainer_pb2.PublishReply
    seconds: float
    loaded: float = 0.0
    first_token: float = 0.0
    refused: str = ""

    @property
    def version(self) -> common_pb2.WeightVersion:
        return self.reply.version


async def publishing(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure a trainer's versions."""
    bench.say(f"{size}: a trainer publishes")
    sequences = sequences_of(size, count=4, length=128)
    published = []
    async with worker(bench, trainer_spec(bench, size, model)) as trainer:
        for number in range(1, bench.rounds + 2):
            await train_step(trainer, sequences)
            began = time.perf_counter()
            reply = await publish(bench, trainer, number)
            published.append(Published(reply, seconds=time.perf_counter() - began))
            forget(reply.version)
    found = _written(published[1:])
    bench.say(json.dumps(found))
    return found


def _written(versions: Sequence[Published]) -> dict[str, object]:
    """The bytes of versions, and the seconds to publish them."""
    return {
        "bytes": versions[-1].reply.bytes,
        "publish_seconds": _median(each.seconds for each in versions),
    }


def _served(versions: Sequence[Published]) -> dict[str, object]:
    """The seconds until an engine served versions and sampled a token, from its own start and from
    the start of the publish."""
    return _written(versions) | {
        "load_seconds": _median(each.loaded for each in versions),
        "published_to_served_seconds": _median(each.seconds + each.loaded for each in versions),
        "published_to_first_token_seconds": _median(
            each.seconds + each.loaded + each.first_token for each in versions
        ),
    }


def _median(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds), 3)


async def serving(bench: Bench, size: str, model: Path) -> dict[str, object]:
    return await _serving(bench, size, model, whole_training(size))


async def adapters(bench: Bench, size: str, model: Path) -> dict[str, object]:
    return await _serving(bench, size, model, TrainingSpec(lora=LoraSpec()))


async def _serving(
    bench: Bench, size: str, model: Path, training: TrainingSpec
) -> dict[str, object]:
    """Measure new weights from a trainer to an engine on the same device, and the difference of
    their logprobs.

    Weights come by files and by hand-over in memory, in turn."""
    bench.say(f"{size}: an engine serves what a trainer publishes")
    weights = 2 * parameters_of(size)
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        max_num_seqs=64,
        kv_cache_bytes=64 * 2**20,
        gpu_memory_bytes=weights + 8 * 2**30 if bench.gpu is not None else 0,
        max_lora_rank=training.rank,
    )
    files: list[Published] = []
    handed: list[Published] = []
    async with (
        worker(bench, engine_spec(bench, size, model, settings)) as engine,
        worker(bench, trainer_spec(bench, size, model, training=training)) as trainer,
    ):
        sequences = sequences_of(size, count=4, length=128)
        for number in range(2 * (bench.rounds + 1)):
            await train_step(trainer, sequences)
            handoff = bool(number % 2)
            one = await _published_and_served(bench, trainer, engine, number + 1, handoff=handoff)
            (handed if handoff else files).append(one)
        gaps = await _gaps(trainer, engine, size, version=one.version)
        moved = await sleeps(bench, engine, before=0, level=1)
    found: dict[str, object] = {
        "states": training.states,
        "files": _served(files[1:]),
        "handoff": handed[-1].refused or _served(handed[1:]),
        **gaps,
        "sleep level 1": {name: moved[name] for name in _OF_A_SWITCH},
    }
    bench.say(json.dumps(found))
    return found


async def _published_and_served(
    bench: Bench, trainer: Caller, engine: Caller, number: int, *, handoff: bool
) -> Published:
    """Publish, load and sample as a gateway does for a version without a name. Then remove the
    files."""
    began = time.perf_counter()
    reply = await publish(bench, trainer, number, handoff=handoff, early=True)
    published = time.perf_counter()
    given = reply.handoff if reply.HasField("handoff") else None
    request = sampler_pb2.LoadRequest(version=reply.version, handoff=given)
    loaded: sampler_pb2.LoadReply = await engine.call("Load", request)
    serves = time.perf_counter()
    await sample(engine, [[5, 9, 30, 41]], version=reply.version, samples=1, max_tokens=1, seed=1)
    sampled = time.perf_counter()
    await until_durable(trainer, reply)
    await trainer.release(reply.version)
    forget(reply.version)
    refused = "" if loaded.handed_off else loaded.handoff_failure or "the trainer kept no copy"
    return Published(
        reply,
        seconds=published - began,
        loaded=serves - published,
        first_token=sampled - serves,
        refused=refused,
    )


async def _gaps(
    trainer: Caller, engine: Caller, size: str, *, version: common_pb2.WeightVersion
) -> dict[str, object]:
    """Compare the logprobs of sampled tokens: the engine's, the trainer's, and the engine's
    again."""
    prompts = [each[:8].tolist() for each in sequences_of(size, count=16, length=64)]
    sampled = await sample(engine, prompts, version=version, samples=1, max_tokens=64, seed=1)
    of_trainer, again = [], []
    for prompt, (tokens, _) in zip(prompts, sampled, strict=True):
        whole = np.array([*prompt, *tokens])
        (logprobs,) = await forward_backward(trainer, [whole], forward_only=True)
        of_trainer.append(logprobs[len(prompt) - 1 :])
        again.append(await scored(engine, whole, version=version, last=len(tokens)))
    of_engine = [logprobs for _, logprobs in sampled]
    return {
        "logprob_gap": _gap(of_trainer, of_engine),
        "logprob_gap_of_the_engine_alone": _gap(again, of_engine),
    }


async def scored(
    engine: Caller, tokens: Int64Array, *, version: common_pb2.WeightVersion, last: int
) -> Float32Array:
    """Return the engine's logprobs of a prompt's last tokens, computed alone."""
    request = sample_request(tokens.tolist(), version=version, number=0, samples=1, max_tokens=1)
    request.operation_id, request.prompt_logprobs = f"score-{time.monotonic_ns()}", True
    (reply,) = await engine.sample([request])
    response = wire.SampleResponse.FromString(reply.response)
    return np.frombuffer(response.prompt_logprobs, "<f4")[-last:]


def _gap(one: Sequence[Float32Array], other: Sequence[Float32Array]) -> dict[str, float]:
    difference = np.abs(np.concatenate(one) - np.concatenate(other))
    return {"mean": float(difference.mean()), "max": float(difference.max())}
