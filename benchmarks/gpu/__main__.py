"""Measures models of several sizes, and writes each part when it ends, so that a lost machine
leaves results.

Without arguments, the parts of all goals come first. A part that does not fit into the `--budget`
any more is left out and named. So the command ends within 15 minutes. `--sizes 0.5B` and
`--only training` select parts. `--junitxml FILE` runs the tests of `make test-gpu` afterwards.
`--device cpu --sizes tiny` runs this code on cores, where host and device share memory."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import record
from benchmarks.gpu.goals import goal_table, judged
from benchmarks.gpu.joint import joint
from benchmarks.gpu.memory import memory
from benchmarks.gpu.moves import engines, together, trainers, wakes
from benchmarks.gpu.plan import Planned, planned, run_gpu_tests
from benchmarks.gpu.recovery import recovery
from benchmarks.gpu.sizes import SIZES, write_model
from benchmarks.gpu.speed import plain, sampling, training
from benchmarks.gpu.starts import starts
from benchmarks.gpu.versions import adapters, publishing, serving
from benchmarks.gpu.workers import Bench, attempt, elsewhere, torch_device
from tandem.agent.host import Accelerator, accelerators, driver_version, this_host
from tandem.protocol.devices import Device
from tandem.protocol.worker import compile_caches

Part = Callable[[Bench, str, Path], dict[str, object]]


def _in_a_loop(
    part: Callable[[Bench, str, Path], Coroutine[Any, Any, dict[str, object]]],
) -> Part:
    return lambda bench, size, model: bench.run(partial(part, bench, size, model))


PARTS: dict[str, Part] = {
    "serving": _in_a_loop(serving),
    "training": training,
    "joint": _in_a_loop(joint),
    "recovery": recovery,
    "starts": _in_a_loop(starts),
    "trainers": _in_a_loop(trainers),
    "wakes": _in_a_loop(wakes),
    "together": together,
    "engines": _in_a_loop(engines),
    "plain": plain,
    "sampling": _in_a_loop(sampling),
    "publishing": _in_a_loop(publishing),
    "memory": memory,
    "adapters": _in_a_loop(adapters),
}
_WITH_ENGINES = ("serving", "wakes", "engines", "sampling", "adapters")
_WITH_SDK = ("recovery", "starts", "together")
_NEEDED_WITH_SDK = ("vllm", "tinker", "fastapi")
_BUDGET_SECONDS = 840.0
"""Of 15 minutes, the rest is for the start of a rented machine."""


def measure(bench: Bench, parts: Sequence[Planned]) -> Iterator[tuple[Planned, dict[str, object]]]:
    """Yield each part with its results. A failure is recorded. Parts without time are left out."""
    for number, each in enumerate(parts):
        if bench.left is not None and each.seconds > bench.left:
            bench.say(f"left out: {each} takes {each.seconds:.0f} s, and {bench.left:.0f} are left")
            continue
        model = bench.work / each.size
        found: dict[str, object] = {}
        if not model.exists():
            bench.say(f"{each.size}: random weights are written")
            found = attempt(bench, _write, bench, each.size, model)
        if not found:
            ends = time.monotonic() + each.longest
            limited = replace(bench, until=min(ends, bench.until or ends))
            found = attempt(limited, PARTS[each.part], limited, each.size, model)
        for folder in (bench.work / "weights", bench.work / "recovery", bench.work / "data"):
            shutil.rmtree(folder, ignore_errors=True)
        yield each, found
        if each.size not in (later.size for later in parts[number + 1 :]):
            shutil.rmtree(model, ignore_errors=True)


def _write(bench: Bench, size: str, model: Path) -> dict[str, object]:
    try:
        elsewhere(bench, write_model, model, size, torch_device(bench))
    except BaseException:
        shutil.rmtree(model, ignore_errors=True)
        raise
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
        reasons |= dict.fromkeys(_WITH_ENGINES, "vLLM is not installed")
    if missing:
        reasons |= dict.fromkeys(_WITH_SDK, f"not installed: {', '.join(missing)}")
    return reasons


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: those of the goals")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each experiment")
    parser.add_argument(
        "--budget", type=float, default=_BUDGET_SECONDS, metavar="SECONDS", help="0: no limit"
    )
    parser.add_argument("--junitxml", type=Path, metavar="FILE", help="run the tests, too")
    parser.add_argument("--no-save", action="store_true", help="only print")
    parser.add_argument(
        "--output", type=Path, default=record.RESULTS, metavar="FOLDER", help="for the results"
    )
    return parser


def _device(name: str) -> tuple[str, Accelerator | None]:
    """Return the workers' device, and the GPU if it is one."""
    if name != "cuda":
        return str(Device("cpu", cores=frozenset(this_host().cores))), None
    if not (found := accelerators()):
        raise SystemExit(
            "bench-gpu: there is no NVIDIA device here, and nothing was measured. "
            'ARGS="--device cpu --sizes tiny" runs the same code on the cores.'
        )
    return f"cuda:{found[0].uuid}", found[0]


@contextmanager
def _kept_code(work: Path) -> Iterator[None]:
    """Keep all workers' compiled code together, as an agent does."""
    before = {name: os.environ.get(name) for name in compile_caches(work)}
    os.environ.update(compile_caches(work))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    chosen = _parser().parse_args(arguments)
    began = time.monotonic()
    console = Console(width=160)
    device, gpu = _device(chosen.device)
    missing = [name for name in _NEEDED_WITH_SDK if find_spec(name) is None]
    absent = not_measured(gpu, missing=missing)
    parts = planned(chosen.sizes, [part for part in chosen.only if part not in absent])
    results: dict[str, object] = {
        "machine": record.machine()
        | {"gpu": gpu.name if gpu is not None else "none", "driver": driver_version()},
        "benchmark": "gpu",
        "rounds": chosen.rounds,
        "not_measured": absent,
        "left_out": [str(each) for each in parts],
    }
    for what, why in absent.items():
        console.print(f"not measured: {what}: {why}", highlight=False)
    path = None if chosen.no_save else record.new_file(chosen.output)

    def keep(**more: object) -> None:
        results.update(more)
        if path is not None:
            record.write(path, results)

    with tempfile.TemporaryDirectory() as folder, _kept_code(Path(folder)):
        bench = Bench(
            work=Path(folder),
            device=device,
            gpu=gpu,
            rounds=chosen.rounds,
            steps=chosen.steps,
            say=lambda line: console.print(line, highlight=False),
            until=began + chosen.budget if chosen.budget else None,
        )
        rows: dict[str, dict[str, object]] = {}
        left_out = [str(each) for each in parts]
        chosen_parts = {(each.size, each.part) for each in parts}
        for each, found in measure(bench, parts):
            rows.setdefault(each.size, {})[each.part] = found
            left_out.remove(str(each))
            keep(**rows, left_out=left_out, goals=judged(rows, chosen_parts))
        if goals := judged(rows, chosen_parts):
            console.print(goal_table(goals))
        if left_out:
            console.print(f"left out: {', '.join(left_out)}", highlight=False)
        if chosen.junitxml is not None:
            keep(tests=run_gpu_tests(chosen.junitxml, seconds=bench.left))
    if path is not None:
        console.print(f"written to {path}")
    return results


if __name__ == "__main__":
    raise SystemExit(failed(main()))
