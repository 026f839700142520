"""`make bench-shared`: LoRA runs that share a trainer and an engine, beside as many with their own.

Both ways take turns on new stacks. For each number of runs, it measures the creation of the first
run and of each further one, and then all workers' memory and the steps per second of all runs at
once. Then it measures one session of the base model, and many at once, each with one sample. The
start of their engine is included. CPU seconds tell more than seconds on a busy machine."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import tinker
from rich.console import Console
from tinker import types

from benchmarks import record
from benchmarks.timeslice import MODEL, TIMEOUT, Experiment, at_once
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.stack import Stack

SHAPE = TinyShape(hidden=768, layers=12, ffn=2304, heads=12, max_length=256, tied=True)
_WAYS = {"shared": "always", "own": "never"}
_SETTINGS = {
    "port": "0",
    "sampler_kv_cache_bytes": str(64 * 2**20),
    "pool_processes": "0",  # idle processes would be measured too
}


def _workers(stack: Stack) -> list[psutil.Process]:
    with stack.client() as client:
        found = client.get("status").raise_for_status().json()["workers"]
    return [psutil.Process(worker["pid"]) for worker in found]


def _memory(processes: Sequence[psutil.Process]) -> int:
    """Return the bytes of processes and their children. Shared pages count once."""
    family = {each for one in processes for each in (one, *one.children(recursive=True))}
    return sum(each.memory_full_info().pss for each in family)


def _cpu_seconds(stack: Stack) -> float:
    """Return the CPU time of this process, its children and all workers."""
    found = (psutil.Process(), *_workers(stack))
    family = {each for one in found for each in (one, *one.children(recursive=True))}
    times = [each.cpu_times() for each in family]
    return sum(each.user + each.system for each in times)


def _in_passes(stack: Stack) -> int:
    """Return the forward_backwards that shared a pass, by the trainers' logs."""
    logs = (stack.data_dir / "logs").glob("*.log")
    lines = (line for log in logs for line in log.read_text().splitlines())
    return sum(json.loads(line)["runs"] for line in lines if '"joint_pass"' in line)


def measure(
    model: Path, *, way: str, runs: int, steps: int, tokens: int, planned: int
) -> dict[str, object]:
    """`tokens`: of each sample. `planned`: of a micro-batch, in the memory plan."""
    settings = {**_SETTINGS, "sharing_lora_runs": _WAYS[way]}
    settings["trainer_micro_batch_tokens"] = str(planned)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_until_the_end:
        stack = open_until_the_end.enter_context(Stack(data_dir=Path(folder), settings=settings))
        stack.add_model(name=MODEL, path=model)
        experiments, created = [], []
        for _ in range(runs):
            service = open_until_the_end.enter_context(
                tinker.ServiceClient(base_url=stack.endpoint.url, api_key=stack.endpoint.api_key)
            )
            began = time.perf_counter()
            experiments.append(Experiment(service, tokens=tokens, repeats=1))
            created.append(time.perf_counter() - began)
        for experiment in experiments:  # its engine starts, and its optimizer gets its moments
            experiment.step()
        workers = _workers(stack)
        memory = _memory(workers)
        for experiment in experiments:
            experiment.seconds = dict.fromkeys(experiment.seconds, 0.0)
        cpu_before, joint_before = _cpu_seconds(stack), _in_passes(stack)
        began = time.perf_counter()
        at_once(experiments, steps)
        seconds = time.perf_counter() - began
        cpu_seconds, joint = _cpu_seconds(stack) - cpu_before, _in_passes(stack) - joint_before
    return {
        "workers": len(workers),
        "first_created_s": round(created[0], 2),
        "further_created_s": round(statistics.median(created[1:]), 2) if runs > 1 else None,
        "memory_mib": round(memory / 2**20),
        "steps_per_second": round(runs * steps / seconds, 3),
        "cpu_seconds_of_a_step": round(cpu_seconds / (runs * steps), 3),
        "share_in_joint_passes": round(joint / (runs * steps), 2),
        "seconds_of_a_step": {
            part: round(sum(each.seconds[part] for each in experiments) / (runs * steps), 2)
            for part in experiments[0].seconds
        },
    }


def sample_base(model: Path, *, sessions: int, tokens: int) -> dict[str, object]:
    """Measure sessions that sample the base model at once, with default settings."""

    def sample(service: tinker.ServiceClient) -> None:
        sampler = service.create_sampling_client(base_model=MODEL).result(TIMEOUT)
        prompt = types.ModelInput.from_ints([20, 30, 40, 21])
        params = types.SamplingParams(max_tokens=tokens, seed=1, stop=[])
        sampler.sample(prompt, num_samples=1, sampling_params=params).result(TIMEOUT)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_until_the_end:
        stack = open_until_the_end.enter_context(Stack(data_dir=Path(folder), settings=_SETTINGS))
        stack.add_model(name=MODEL, path=model)
        url, key = stack.endpoint.url, stack.endpoint.api_key
        began, cpu_began = time.perf_counter(), _cpu_seconds(stack)
        clients = [tinker.ServiceClient(base_url=url, api_key=key) for _ in range(sessions)]
        for client in clients:
            open_until_the_end.enter_context(client)
        with ThreadPoolExecutor(sessions) as pool:
            list(pool.map(sample, clients))
        seconds = time.perf_counter() - began
        return {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(_cpu_seconds(stack) - cpu_began, 2),
            "workers": len(_workers(stack)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_lora", description=__doc__)
    parser.add_argument("--runs", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64], help="of the base")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of each sample")
    parser.add_argument("--ways", choices=_WAYS, nargs="+", default=list(_WAYS))
    parser.add_argument("--rounds", type=int, default=1)
    # With the default of 2,048, two trainers' plans fill 24 GiB.
    parser.add_argument("--planned", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    console = Console()
    results: dict[str, object] = {"machine": record.machine(), "benchmark": "shared_lora"}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model(model, seed=0, shape=SHAPE)
        results["model_mib"] = round(
            sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**20
        )
        given = {name: getattr(arguments, name) for name in ("steps", "tokens", "planned")}
        results |= given
        for runs in arguments.runs:
            found: dict[str, list[dict[str, object]]] = {way: [] for way in arguments.ways}
            for _ in range(arguments.rounds):
                for way in arguments.ways:
                    found[way].append(measure(model, way=way, runs=runs, **given))
            results[f"{runs} runs"] = found
            console.print_json(json.dumps({f"{runs} runs": found}))
        for sessions in arguments.sessions:
            key = f"{sessions} sessions of the base model"
            results[key] = sample_base(model, sessions=sessions, tokens=arguments.tokens)
            console.print_json(json.dumps({key: results[key]}))
    if not arguments.no_save:
        console.print(f"written to {record.save(results).name}")


if __name__ == "__main__":
    main()
