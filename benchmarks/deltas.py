"""Publishing deltas beside publishing whole versions: two equal runs, in turn.

Both train a model in bfloat16 by RL steps, with advantages of 1 and -1. `python -m
benchmarks.deltas` measures deltas of given shares instead."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tinker
import torch
from tinker import types

from benchmarks import publish, record
from benchmarks.gpu.speed import engine_spec
from benchmarks.gpu.workers import Bench, worker
from benchmarks.workloads import Workload, prompts
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import SamplerSettings, TrainerSettings
from tandem.stack import Stack
from tandem.v1 import common_pb2, sampler_pb2
from tandem.weights import Manifest, new_version_name, version_path
from tandem.weights.delta import PIECE_BYTES, encode
from tandem.weights.manifest import MANIFEST_NAME
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.checkpoints.publish import VersionRequest, prepare_publish
from trainer_service.checkpoints.publish import publish as publish_version
from trainer_service.compute.process_group import Assignment, join

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


# --- At a given share of changed numbers ----------------------------------------------------------

SHARES = (0.01, 0.3)
_ROUNDS, _SECONDS = 9, 110.0


async def at_shares(work: Path, *, rounds: int = _ROUNDS) -> list[dict[str, object]]:
    """Measure a whole version and deltas of 1 % and 30 % changed numbers, in turn.

    Each row has medians of the seconds from the publishing until an engine has loaded the version.
    A rank in this process publishes, and the engine is a worker."""
    bench = Bench(work=work, device="cpu:0-1", gpu=None, rounds=rounds, steps=0, say=lambda _: None)
    model = work / "model"
    write_tiny_model(model, seed=0, shape=publish.SHAPES["100 M"])
    rank = join(
        Assignment(
            rank=0,
            local_rank=0,
            on_node=1,
            size=1,
            device="cpu",
            own_cores=True,
            store_port=0,
            model_path=model,
            model_name="bench",
            training=TrainingSpec(),
            settings=TrainerSettings(device="cpu", threads=2, dtype="bfloat16"),
        )
    )
    assert isinstance(rank.backend, Fsdp2Backend)
    weights = list(rank.backend._model.parameters())
    changed = {
        share: [
            torch.where(torch.rand_like(each) < share, each * 1.0625, each).detach()
            for each in weights
        ]
        for share in SHARES
    }
    numbers = itertools.count(1)

    def published(delta_of: str = "") -> tuple[Path, Manifest]:
        name = new_version_name(run_id="s-bench:train:0", number=next(numbers))
        request = VersionRequest(
            name=name,
            path=version_path(work, name),
            run_id="s-bench:train:0",
            parent="",
            step=0,
            delta_of=delta_of,
        )
        prepare_publish(request, rank.backend)
        manifest = publish_version(request, rank)
        assert manifest is not None
        return request.path, manifest

    settings = SamplerSettings(max_num_seqs=8, kv_cache_bytes=2**26, dtype="bfloat16")
    rows: dict[str, list[tuple[float, float, int]]] = {}
    async with worker(bench, engine_spec(bench, "tiny", model, settings)) as engine:
        _, base = published()
        ways = [("whole", SHARES[-1]), *((f"{share:.0%} changed", share) for share in SHARES)]
        until = time.perf_counter() + _SECONDS
        for number in range(rounds + 1):
            if number > 2 and time.perf_counter() > until:
                break
            for name, share in ways if number % 2 else reversed(ways):
                with torch.no_grad():
                    torch._foreach_copy_(weights, changed[share])
                began = time.perf_counter()
                path, manifest = published("" if name == "whole" else base.version)
                took = time.perf_counter() - began
                version = common_pb2.WeightVersion(name=manifest.version, path=str(path))
                await engine.call("Load", sampler_pb2.LoadRequest(version=version))
                both = time.perf_counter() - began
                shutil.rmtree(path)
                assert (name != "whole") == bool(manifest.delta_of)
                if number:
                    rows.setdefault(name, []).append((took, both, manifest.written_bytes))
    whole = rows["whole"]
    return [
        {
            "version": name,
            "rounds": len(found),
            "written bytes": round(statistics.median(size for *_, size in found)),
            "publish, s": round(statistics.median(took for took, *_ in found), 3),
            "publish and load, s": round(statistics.median(both for _, both, _ in found), 3),
            "× whole": round(
                statistics.median(b / w for (_, b, _), (_, w, _) in zip(found, whole, strict=True)),
                2,
            ),
        }
        for name, found in rows.items()
    ]


def main() -> None:
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as work:
        rows = asyncio.run(at_shares(Path(work)))
    loads = [round(load[0], 2), round(os.getloadavg()[0], 2)]
    found = {"machine": record.machine(), "load": loads, "deltas": rows}
    print(json.dumps(found, indent=1), record.save(found).name)


if __name__ == "__main__":
    main()
