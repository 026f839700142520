"""Memory of a trainer on a CPU: `make bench-memory`.

It measures forward_backward by vocabulary and length, ways of training beside their memory plan,
and loading by number of ranks. Each number is a process's peak of anonymous memory, less the amount
before. `whole` keeps all logits of a micro-batch."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import record

if TYPE_CHECKING:
    import torch.distributed as dist

_MIB = 2**20
VOCABULARIES = (4_096, 32_768, 151_936, 262_144)
LENGTHS = (1_024, 4_096, 16_384, 32_768)
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
WAYS: list[tuple[str, int, dict[str, object], bool]] = [
    ("blocks keep all", 1, {}, False),
    ("checkpointed", 1, {"checkpointing": "on"}, False),
    ("compiled", 1, {"compile": "on"}, False),
    ("in bfloat16", 1, {"dtype": "bfloat16"}, False),
    ("two threads", 1, {"parallel_micro_batches": 2}, False),
    ("LoRA", 1, {}, True),
    ("LoRA, two threads", 1, {"parallel_micro_batches": 2}, True),
    ("two ranks", 2, {}, False),
    ("two ranks, checkpointed", 2, {"checkpointing": "on"}, False),
]
SIZES = {
    "50 M": (32_768, {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}),
    "100 M": (151_936, {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 11}),
    "0.5 B": (151_936, {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}),
}
"""Vocabulary and shape."""


# --- In a separate process ------------------------------------------------------------------------


def write_model(path: Path, *, vocabulary: int, shape: dict[str, int], length: int) -> int:
    """Return the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    heads = max(1, shape["hidden_size"] // 64)
    config = Qwen3Config(
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        **shape,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


class Peak:
    """The process's peak of anonymous memory during a block, less the amount before."""

    bytes = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        ctypes.CDLL(None).malloc_trim(0)
        before, ended = _anonymous(), threading.Event()
        most = [before]

        def watch() -> None:
            while not ended.wait(0.0005):
                most[0] = max(most[0], _anonymous())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.bytes = most[0] - before


def _anonymous() -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def measure_training(
    model: Path,
    length: int,
    settings: dict[str, object],
    *,
    rank: int = 0,
    ranks: int = 1,
    store: str = "",
    lora: bool = False,
) -> dict[str, object]:
    """Measure two micro-batches of `length` tokens on each thread, beside the memory plan's
    numbers."""
    import numpy as np
    import torch

    from tandem.protocol.worker import LoraSpec, TrainingSpec
    from tandem.settings.workers import TrainerSettings
    from tandem.weights.layout import BaseModelFiles
    from tests.support.trainer_worker import datum, request
    from trainer_service.backends import World, backend_named
    from trainer_service.batches.validation import BatchLimits, parse, validate
    from trainer_service.compute.control_group import ControlGroup
    from trainer_service.compute.process_group import _parallel
    from trainer_service.compute.trainer import RankTrainer

    chosen = TrainerSettings.model_validate(
        {
            "device": "cpu",
            "checkpointing": "off",
            "parallel_micro_batches": 1,
            "micro_batch_tokens": length,
            "memory_bytes": 2**40,  # the plan must not depend on the free memory
            **settings,
        }
    )
    torch.set_num_threads(2)
    group = _meet(rank, ranks, store)
    backend = backend_named("fsdp2")(
        model_path=model,
        settings=chosen,
        world=World(rank=rank, size=ranks, device="cpu"),
        training=TrainingSpec(lora=LoraSpec() if lora else None),
    )
    trainer = RankTrainer(
        backend=backend,
        control=ControlGroup(rank=rank, size=ranks, group=group),
        micro_batch_tokens=length,
        base=BaseModelFiles.of_run(model, backend.training),
        parallel=_parallel(backend, chosen, 2),
    )
    limits = BatchLimits(vocabulary=backend.facts.vocabulary, max_length=backend.facts.max_length)
    generator = np.random.default_rng(0)
    if not backend.warm:
        backend.warm_up()
    count = 2 * ranks * chosen.parallel_micro_batches

    def forward_backward(size: int) -> None:
        tokens = generator.integers(0, backend.facts.vocabulary, (count, size)).tolist()
        data = [datum(each, weights=[1.0] * size) for each in tokens]
        trainer.forward_backward(validate(parse(request(data).SerializeToString()), limits=limits))

    forward_backward(8)  # the gradients exist from here on
    peak, began = Peak(), time.perf_counter()
    with peak.measured():
        forward_backward(length)
    if backend.plan is None:
        return {"peak": peak.bytes, "seconds": time.perf_counter() - began}
    needs, threads = backend.plan.device, chosen.parallel_micro_batches
    passing = ("activations", "logits", "gathered", "unreduced gradients")
    added = sum(needs.get(name, 0) for name in passing)
    if threads > 1:  # each thread has its own gradients, besides the held ones
        added += needs["gradients"] * threads // (1 + threads)
    return {"peak": peak.bytes, "seconds": time.perf_counter() - began, "planned": added}


def _meet(rank: int, ranks: int, store: str) -> dist.ProcessGroup | None:
    import torch.distributed as dist

    meeting = dist.FileStore(store, ranks) if ranks > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    return dist.new_group(backend="gloo") if ranks > 1 else None


def measure_loading(model: Path, rank: int, ranks: int, store: Path) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    from tandem.settings.workers import TrainerSettings
    from trainer_service.backends import World, backend_named

    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks
        )
    peak = Peak()
    with peak.measured():
        backend = backend_named("fsdp2")(
            model_path=model,
            settings=TrainerSettings(device="cpu", packing="off"),
            world=World(rank=rank, size=ranks, device="cpu"),
        )
    held = sum(
        getattr(each, "_local_tensor", each).nbytes for each in backend.parameters().values()
    )
    if ranks > 1:
        dist.barrier()
    return {"peak": peak.bytes, "held": held}


# --- The measurements -----------------------------------------------------------------------------


def child(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", json.dumps(arguments)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    try:
        out, _ = process.communicate(timeout=1800)
    finally:
        process.kill()  # a process that takes longer must not outlive this one
    if process.returncode:
        raise SystemExit(f"a measurement failed with {process.returncode}")
    return dict(json.loads(out.splitlines()[-1]))


def training_rows(work: Path, *, quick: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    lengths = LENGTHS[:2] if quick else LENGTHS
    cases = [(v, 4_096) for v in VOCABULARIES] + [(32_768, length) for length in lengths]
    for vocabulary, length in dict.fromkeys(cases):
        path = work / f"v{vocabulary}"
        if not path.exists():
            answer(child("write", str(path), vocabulary, TINY, LENGTHS[-1]))
        chunked = answer(child("train", str(path), length, {}))
        checkpointed = answer(child("train", str(path), length, {"checkpointing": "on"}))
        whole = {}
        if 4 * vocabulary * length <= 2 * 2**30:  # four such tensors
            whole = answer(child("train", str(path), length, {"logits_bytes": 2**62}))
        rows.append(
            {
                "vocabulary": vocabulary,
                "tokens": length,
                "peak_mib": _mib(chunked["peak"]),
                "planned_mib": _mib(chunked["planned"]),
                "checkpointed_mib": _mib(checkpointed["peak"]),
                "checkpointed_planned_mib": _mib(checkpointed["planned"]),
                "whole_mib": _mib(whole["peak"]) if whole else None,
                "seconds": round(chunked["seconds"], 2),
                "whole_seconds": round(whole["seconds"], 2) if whole else None,
            }
        )
    return rows


def planned_rows(work: Path, *, quick: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, (vocabulary, shape) in list(SIZES.items())[: 1 if quick else 3]:
        path = work / name.replace(" ", "")
        parameters = answer(child("write", str(path), vocabulary, shape, 4_096))["parameters"]
        ways, tokens = (WAYS, 512) if name == "50 M" else (WAYS[:2], 2_048)
        for about, ranks, settings, lora in ways:
            store = work / f"store-{len(rows)}"
            more = {"ranks": ranks, "store": str(store), "lora": lora}
            processes = [
                child("train", str(path), tokens, settings, {**more, "rank": rank})
                for rank in range(ranks)
            ]
            found = max((answer(each) for each in processes), key=lambda each: each["peak"])
            rows.append(
                {
                    "model": name,
                    "parameters": int(parameters),
                    "way": about,
                    "tokens": tokens,
                    "peak_mib": _mib(found["peak"]),
                    "planned_mib": _mib(found["planned"]),
                    "planned_percent": round(100 * found["planned"] / found["peak"]),
                    "seconds": round(found["seconds"], 2),
                }
            )
    return rows


def loading_rows(work: Path, *, quick: bool) -> list[dict[str, object]]:
    vocabulary, shape = SIZES["50 M" if quick else "100 M"]
    path = work / "loaded"
    answer(child("write", str(path), vocabulary, shape, 4_096))
    rows: list[dict[str, object]] = []
    for ranks in (1, 2) if quick else (1, 2, 4):
        store = work / f"store-{ranks}"
        processes = [child("load", str(path), rank, ranks, str(store)) for rank in range(ranks)]
        found = [answer(process) for process in processes]
        rows.append(
            {
                "ranks": ranks,
                "held_mib": _mib(max(each["held"] for each in found)),
                "peak_mib": _mib(max(each["peak"] for each in found)),
            }
        )
    return rows


PARTS = {
    "lengths": ("memory of forward_backward", training_rows),
    "plans": ("memory of forward_backward, planned and measured", planned_rows),
    "loading": ("memory of loading", loading_rows),
}


def _mib(size: float) -> int:
    return round(size / _MIB)


def show(console: Console, title: str, rows: list[dict[str, object]]) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lengths, no 0.5 B")
    parser.add_argument("--only", choices=PARTS, help="one of the three tables")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, path, *rest = json.loads(arguments.child)
        if kind == "write":
            vocabulary, shape, length = rest
            count = write_model(Path(path), vocabulary=vocabulary, shape=shape, length=length)
            print(json.dumps({"parameters": count}))
        elif kind == "train":
            length, settings, *more = rest
            print(json.dumps(measure_training(Path(path), length, settings, **(*more, {})[0])))
        else:
            rank, ranks, store = rest
            print(json.dumps(measure_loading(Path(path), rank, ranks, Path(store))))
        return
    console = Console()
    results: dict[str, object] = {"machine": record.machine()}
    with tempfile.TemporaryDirectory(prefix="tandem-memory-") as directory:
        work = Path(directory)
        for name, (title, measure) in PARTS.items():
            if arguments.only in (None, name):
                results[title] = rows = measure(work, quick=arguments.quick)
                show(console, title, rows)
    console.print(f"written to {record.save(results).name}")


if __name__ == "__main__":
    main()
