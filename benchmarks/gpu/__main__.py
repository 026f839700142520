"""Measures sizes of models one after the other, and writes the result.

A size takes minutes: `--sizes 0.5B` and `--only training` measure parts. `--device cpu` with
`--sizes tiny` runs the same code on cores, where host and device are the same memory: what that
cannot measure is named in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks import record
from benchmarks.gpu.moves import engine_of, together, trainer_of
from benchmarks.gpu.speed import ADAPTERS_FROM, parameters_of, sampling, serving, training
from benchmarks.gpu.workers import SIZES, Bench, elsewhere, torch_device, write_model
from tandem.devices import Device
from tandem.host import Accelerator, accelerators, driver_version, this_host

PARTS = ("training", "sampling", "serving", "trainers", "engines", "together")
_NEEDED_TOGETHER = ("vllm", "tinker", "fastapi")


def measure(
    bench: Bench, sizes: Sequence[str], parts: Sequence[str], *, steps: int
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what was found of each size. What fails is told in its place, and the rest goes on."""
    for size in sizes:
        model = bench.work / size
        bench.say(f"{size}: random weights are written")
        found: dict[str, object] = {}
        whole = parameters_of(size) <= ADAPTERS_FROM
        try:
            elsewhere(bench, write_model, model, size, torch_device(bench))
            for part, of_part in (
                ("training", training),
                ("sampling", sampling),
                ("serving", serving),
            ):
                if part in parts:
                    found[part] = asyncio.run(of_part(bench, size, model))
            if whole and ("trainers" in parts or "engines" in parts):
                measured, count = "trainers" in parts, 2 if "engines" in parts else 0
                row, versions = asyncio.run(
                    trainer_of(bench, size, model, measured=measured, versions=count)
                )
                found |= {"trainer": row} if measured else {}
                if "engines" in parts:
                    found["engine"] = asyncio.run(engine_of(bench, size, model, versions))
            if "together" in parts and size == sizes[0]:
                found["together"] = together(bench, size, model, steps=steps)
        except Exception as error:  # noqa: BLE001 - minutes of a lent machine are not thrown away
            found["failed"] = failure = f"{type(error).__name__}: {error}"
            bench.say(failure)
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(bench.work / "weights", ignore_errors=True)
        yield size, found


def not_measured(gpu: Accelerator | None, *, missing: Sequence[str]) -> dict[str, str]:
    """Return what a machine without a GPU, or without these packages, cannot show, and why."""
    reasons = {}
    if gpu is None:
        reasons["GB/s, bytes left"] = (
            "there is no NVIDIA device: host and device are the same memory, and nothing moves. "
            "Device bytes are the resident memory of the worker"
        )
    if "vllm" in missing:
        reasons |= dict.fromkeys(("engines", "sampling", "serving"), "vLLM is not installed")
    if missing:
        reasons["together"] = f"not installed: {', '.join(missing)}"
    return reasons


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.5B", "8B"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each experiment")
    parser.add_argument("--no-save", action="store_true", help="only print")
    chosen = parser.parse_args(arguments)
    console = Console(width=160)
    gpu = None
    if chosen.device == "cuda":
        found = accelerators()
        if not found:
            raise SystemExit(
                "bench-gpu: there is no NVIDIA device here, and nothing was measured. "
                'ARGS="--device cpu --sizes tiny" runs the same code on the cores.'
            )
        gpu = found[0]
        device = f"cuda:{gpu.uuid}"
    else:
        device = str(Device("cpu", cores=frozenset(this_host().cores)))
    missing = [name for name in _NEEDED_TOGETHER if find_spec(name) is None]
    absent = not_measured(gpu, missing=missing)
    parts = [part for part in chosen.only if part not in absent]
    results: dict[str, object] = {
        "machine": record.machine()
        | {"gpu": gpu.name if gpu is not None else "none", "driver": driver_version()},
        "benchmark": "gpu",
        "rounds": chosen.rounds,
        "not_measured": absent,
    }
    for what, why in absent.items():
        console.print(f"not measured: {what}: {why}", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            work=Path(folder),
            device=device,
            gpu=gpu,
            rounds=chosen.rounds,
            say=lambda line: console.print(line, highlight=False),
        )
        for size, row in measure(bench, chosen.sizes, parts, steps=chosen.steps):
            results[size] = row
    if not chosen.no_save:
        console.print(f"written to {record.save(results).name}")
    return results


if __name__ == "__main__":
    raise SystemExit(any("failed" in row for row in main().values() if isinstance(row, dict)))
