"""`make bench-joint`: batches of LoRA runs of one base model in one pass, beside a pass for each.

One trainer's rank in this process, with two threads. Both ways take turns with the same batches.
Processor seconds tell more than seconds on a busy machine."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks import record
from benchmarks.shared_lora import SHAPE
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.support.local_trainer import batch_of, make_rank
from tests.support.trainer_worker import datum, request
from trainer_service.batches.validation import Batch
from trainer_service.compute.joint import JointBatch, forward_backward_together
from trainer_service.compute.trainer import RankTrainer

_THREADS = 2
_BATCHES = ((4, 8), (8, 16), (16, 19))
"""Sequences of each run, and tokens of each sequence."""


def batch(run: RankTrainer, *, sequences: int, tokens: int, seed: int) -> Batch:
    random = np.random.default_rng(seed)
    data = [
        datum(random.integers(3, 98, tokens).tolist(), weights=np.ones(tokens))
        for _ in range(sequences)
    ]
    return batch_of(run, request(data))


def joint(run: RankTrainer, given: Batch) -> JointBatch:
    found = run.joint_batch(given)
    assert found is not None, "the batch needs a pass of its own"
    return found


def measure(model: Path, *, runs: int, rounds: int) -> list[dict[str, object]]:
    first = make_rank(model, LoraSpec(rank=8, seed=0), parallel=_THREADS)
    others = [
        first.share(TrainingSpec(lora=LoraSpec(rank=8, seed=n)), run=n) for n in range(1, runs)
    ]
    trainers = [first, *others]
    rows: list[dict[str, object]] = []
    for sequences, tokens in _BATCHES:
        batches = [
            batch(run, sequences=sequences, tokens=tokens, seed=seed)
            for seed, run in enumerate(trainers)
        ]

        def each_alone(batches: list[Batch] = batches) -> None:
            for run, given in zip(trainers, batches, strict=True):
                run.backend.activate()
                run.forward_backward(given)

        def in_one_pass(batches: list[Batch] = batches) -> None:
            together = [joint(run, given) for run, given in zip(trainers, batches, strict=True)]
            assert forward_backward_together(together) is not None

        found: dict[str, list[tuple[float, float]]] = {"alone": [], "one pass": []}
        for _ in range(rounds + 1):
            found["alone"].append(_timed(each_alone))
            found["one pass"].append(_timed(in_one_pass))
        ratios = [
            alone[1] / together[1]
            for alone, together in zip(found["alone"][1:], found["one pass"][1:], strict=True)
        ]
        rows.append(
            {
                "runs": runs,
                "sequences": sequences,
                "tokens": tokens,
                **{
                    f"{way}, {unit}": round(statistics.median(t[index] for t in times[1:]), 3)
                    for way, times in found.items()
                    for index, unit in enumerate(("s", "processor s"))
                },
                "× processor time": round(statistics.median(ratios), 2),
            }
        )
    return rows


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    began, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_passes", description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(_THREADS)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model(model, seed=0, shape=SHAPE)
        rows = measure(model, runs=arguments.runs, rounds=arguments.rounds)
    results = {"machine": record.machine(), "benchmark": "joint_passes", "rows": rows}
    console.print_json(json.dumps(rows))
    if not arguments.no_save:
        console.print(f"written to {record.save(results).name}")


if __name__ == "__main__":
    main()
