"""Measures models of several sizes, and writes each part when it ends, so that a lost machine
leaves results.

A size takes minutes. `--sizes 0.5B` and `--only training` select parts. `--device cpu` with
`--sizes tiny` runs this code on cores, where host and device share memory."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import record
from benchmarks.gpu.memory import memory
from benchmarks.gpu.moves import engines, together, trainers
from benchmarks.gpu.speed import publishing, sampling, serving, training
from benchmarks.gpu.workers import (
    SIZES,
    Bench,
    attempt,
    elsewhere,
    torch_device,
    trains_adapters,
    write_model,
)
from tandem.agent.host import Accelerator, accelerators, driver_version, this_host
from tandem.protocol.devices import Device

Part = Callable[[Bench, str, Path], dict[str, object]]


def _in_a_loop(
    part: Callable[[Bench, str, Path], Coroutine[Any, Any, dict[str, object]]],
) -> Part:
    return lambda bench, size, model: asyncio.run(part(bench, size, model))


PARTS: dict[str, Part] = {
    "training": training,
    "memory": memory,
    "publishing": _in_a_loop(publishing),
    "sampling": _in_a_loop(sampling),
    "serving": _in_a_loop(serving),
    "trainers": _in_a_loop(trainers),
    "engines": _in_a_loop(engines),
    "together": together,
}
_OF_ALL_PARAMETERS = ("trainers", "engines")
_NEEDED_TOGETHER = ("vllm", "tinker", "fastapi")


def measure(
    bench: Bench, sizes: Sequence[str], parts: Sequence[str]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the results of a size so far, after each part. A failure is recorded."""
    for size in sizes:
        model = bench.work / size
        bench.say(f"{size}: random weights are written")
        found = attempt(bench, _write, bench, size, model)
        if found:
            yield size, found
            continue
        for part in parts:
            if part in _OF_ALL_PARAMETERS and trains_adapters(size):
                continue
            if part == "together" and size != sizes[0]:
                continue
            found[part] = attempt(bench, PARTS[part], bench, size, model)
            shutil.rmtree(bench.work / "weights", ignore_errors=True)
            yield size, found
        shutil.rmtree(model)


def _write(bench: Bench, size: str, model: Path) -> dict[str, object]:
    elsewhere(bench, write_model, model, size, torch_device(bench))
    return {}


def failed(results: object) -> bool:
    """True if anything in the results, which may be nested, has failed."""
    if not isinstance(results, dict):
        return False
    return "failed" in results or any(failed(value) for value in results.values())


def not_measured(gpu: Accelerator | None, *, missing: Sequence[str]) -> dict[str, str]:
    """Return the impossible measurements, with the reason."""
    reasons = {}
    if gpu is None:
        reasons["GB/s, bytes left"] = (
            "there is no NVIDIA device: host and device are the same memory, and nothing moves. "
            "Device bytes are the resident memory of the worker"
        )
        reasons["peaks of memory"] = (
            "there is no NVIDIA device: `make bench-memory` measures those of cores"
        )
    if "vllm" in missing:
        reasons |= dict.fromkeys(("engines", "sampling", "serving"), "vLLM is not installed")
    if missing:
        reasons["together"] = f"not installed: {', '.join(missing)}"
    return reasons


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.5B", "8B"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each experiment")
    parser.add_argument("--no-save", action="store_true", help="only print")
    parser.add_argument(
        "--output", type=Path, default=record.RESULTS, metavar="FOLDER", help="for the results"
    )
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
    path = None if chosen.no_save else record.new_file(chosen.output)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            work=Path(folder),
            device=device,
            gpu=gpu,
            rounds=chosen.rounds,
            steps=chosen.steps,
            say=lambda line: console.print(line, highlight=False),
        )
        for size, row in measure(bench, chosen.sizes, parts):
            results[size] = row
            if path is not None:
                record.write(path, results)
    if path is not None:
        console.print(f"written to {path}")
    return results


if __name__ == "__main__":
    raise SystemExit(failed(main()))
