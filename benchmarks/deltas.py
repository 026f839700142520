"""Publishing deltas beside publishing whole versions: two equal runs, in turn.

Both train a model in bfloat16 by RL steps, with advantages of 1 and -1."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tinker
from tinker import types

from benchmarks.workloads import Workload, prompts
from tandem.demo.tiny_model import TinyShape
from tandem.stack import Stack
from tandem.weights import Manifest, version_path
from tandem.weights.delta import PIECE_BYTES, encode
from tandem.weights.manifest import MANIFEST_NAME

SHAPE = TinyShape(hidden=512, layers=12, ffn=2048, heads=8, head_dim=64)
"""50 M parameters."""
RATES = (1e-6, 1e-5)
SETTINGS = {"sampler_dtype": "bfloat16"}
_ASKS = {"tandem.dtype": "bfloat16"}
_WARMUP, _STEPS = 5, 10
_BATCH = Workload(requests=16, samples=2, max_tokens=16)


@dataclass
class _Run:
    client: tinker.TrainingClient
    stack: Stack

    def publish(self) -> tuple[float, tinker.SamplingClient]:
        """Return the seconds until the new weights are served, and their client."""
        started = time.perf_counter()
        sampler = self.client.save_weights_and_get_sampling_client().result()
        return time.perf_counter() - started, sampler

    def newest(self) -> tuple[Path, Manifest]:
        run_id = self.client.get_info().model_id
        with self.stack.client() as client:
            runs = client.get("status").json()["runs"]
        name = next(run["weight_version"] for run in runs if run["id"] == run_id)
        path = version_path(self.stack.data_dir, name)
        return path, Manifest.model_validate_json((path / MANIFEST_NAME).read_bytes())

    def step(self, data: list[types.Datum], rate: float) -> None:
        self.client.forward_backward(data, "importance_sampling")
        self.client.optim_step(types.AdamParams(learning_rate=rate)).result()


def whole_and_delta(
    stack: Stack, service: tinker.ServiceClient, *, rate: float
) -> dict[str, object]:
    """Return medians over the steps that wrote a delta, and the changed bytes after one step and
    all."""
    whole, delta = (
        _Run(
            service.create_lora_training_client(
                "bench/model:full", user_metadata={**_ASKS, "tandem.delta": asked}
            ).result(),
            stack,
        )
        for asked in ("off", "auto")
    )
    sampler = whole.publish()[1]
    for number in range(_WARMUP):
        data = _rl_batch(sampler, seed=number)
        for run in (whole, delta):
            run.step(data, rate)
    delta.publish()
    sampler, (base, manifest) = whole.publish()[1], whole.newest()
    seconds: list[tuple[float, float]] = []
    patches: list[int] = []
    for number in range(_STEPS):
        data = _rl_batch(sampler, seed=_WARMUP + number)
        took = {}
        for run in (whole, delta) if number % 2 else (delta, whole):
            run.step(data, rate)
            took[run is delta], sampler = run.publish()
        patches.append(_patch_bytes(base, whole.newest()[0]))
        if delta.newest()[1].delta_of:
            seconds.append((took[False], took[True]))
    ratios = [ours / theirs for theirs, ours in seconds]
    size = manifest.bytes
    return {
        "learning rate": rate,
        "bytes, whole": size,
        "delta of 1 step": f"{patches[0] / size:.1%}",
        f"delta of {_STEPS} steps": f"{patches[-1] / size:.1%}",
        "deltas written": f"{len(seconds)} of {_STEPS}",
        "served whole, s": round(statistics.median(each for each, _ in seconds), 3),
        "served delta, s": round(statistics.median(each for _, each in seconds), 3),
        "delta / whole": round(statistics.median(ratios), 3),
    }


def _rl_batch(sampler: tinker.SamplingClient, *, seed: int) -> list[types.Datum]:
    params = types.SamplingParams(max_tokens=_BATCH.max_tokens, seed=seed, stop=[])
    asked = [
        (prompt, sampler.sample(types.ModelInput.from_ints(prompt), _BATCH.samples, params))
        for prompt in prompts(_BATCH)
    ]
    advantages = random.Random(seed)
    return [
        _datum(prompt, sample.tokens, sample.logprobs or [], advantages.choice((-1.0, 1.0)))
        for prompt, answer in asked
        for sample in answer.result().sequences
    ]


def _datum(
    prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
) -> types.Datum:
    before = len(prompt) - 1
    inputs: dict[str, tuple[list[int] | list[float], Literal["int64", "float32"]]] = {
        "target_tokens": ([*prompt[1:], *tokens], "int64"),
        "logprobs": ([0.0] * before + logprobs, "float32"),
        "advantages": ([0.0] * before + [advantage] * len(tokens), "float32"),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            name: types.TensorData(data=values, dtype=dtype, shape=[len(values)])
            for name, (values, dtype) in inputs.items()
        },
    )


def _patch_bytes(base: Path, path: Path) -> int:
    """Return the bytes of the difference between two whole versions."""
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        old, new = (np.fromfile(each / file.name, np.uint8) for each in (base, path))
        for start in range(0, new.size, PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            total += sum(len(part) for part in encode(old[piece], new[piece], start=start))
    return total
