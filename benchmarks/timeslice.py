"""`make bench-timeslice`: experiments that share devices in turns, beside the same ones in a row.

Each experiment spends about equal time sampling and training, on one core each. In each round, the
experiments do a number of steps one after the other, and then as many at once.

It reports the makespans, and each group's duty cycle: processor seconds of its workers over the
makespan. The busier group and all processes on all cores each set a bound. Fairness divides
the device seconds of the owner with most of them by those of the owner with fewest. It is measured
in a row, too, where equal work differs already. `others` are the cores of other programs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker
from rich.console import Console
from tinker import types

from benchmarks import record
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.settings.sharing import SharingSettings
from tandem.stack import Stack

MODEL = "bench/timeslice"
_SHAPE = TinyShape(hidden=256, layers=4, ffn=768, heads=4, max_length=256, tied=True)
_PROMPTS, _SAMPLES = 4, 4
TIMEOUT = 600.0


class Experiment:
    """Samples `tokens` per sample, then computes its batch `repeats` times."""

    def __init__(
        self, service: tinker.ServiceClient, *, tokens: int, repeats: int, model: str = MODEL
    ) -> None:
        self._training = service.create_lora_training_client(model, rank=8, seed=1).result(TIMEOUT)
        self._tokens, self.repeats = tokens, repeats
        self.seconds = {"sample": 0.0, "train": 0.0}

    def step(self) -> None:
        began = time.perf_counter()
        sampler = self._training.save_weights_and_get_sampling_client().result(TIMEOUT)
        prompts = [[20 + i, 30, 40, 21] for i in range(_PROMPTS)]
        params = types.SamplingParams(max_tokens=self._tokens, seed=1, temperature=1.0, stop=[])
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt), num_samples=_SAMPLES, sampling_params=params
            )
            for prompt in prompts
        ]
        data = [
            _datum(prompt, sequence)
            for prompt, future in zip(prompts, futures, strict=True)
            for sequence in future.result(TIMEOUT).sequences
        ]
        sampled = time.perf_counter()
        for _ in range(self.repeats):
            self._training.forward_backward(data, "importance_sampling")
            step = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
        step.result(TIMEOUT)
        self.seconds["sample"] += sampled - began
        self.seconds["train"] += time.perf_counter() - sampled


def _datum(prompt: list[int], sequence: types.SampledSequence) -> types.Datum:
    tokens, before = prompt + list(sequence.tokens), len(prompt) - 1
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "logprobs": np.array([0.0] * before + list(sequence.logprobs or []), np.float32),
        "advantages": np.array([0.0] * before + [0.1] * len(sequence.tokens), np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def _calibrate(experiment: Experiment) -> None:
    """Make training take about as long as sampling."""
    for _ in range(3):
        experiment.seconds = {"sample": 0.0, "train": 0.0}
        experiment.step()
        one = experiment.seconds["train"] / experiment.repeats
        experiment.repeats = max(1, round(experiment.seconds["sample"] / one))


def _busy(stack: Stack) -> dict[str, float]:
    """Return the processor seconds of all trainers, all samplers, and all processes."""
    with stack.client() as client:
        workers = client.get("status").json()["workers"]
    kinds = {worker["pid"]: worker["kind"] for worker in workers}
    found = {"trainer": 0.0, "sampler": 0.0, "all": 0.0}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        times = process.cpu_times()
        for kind in {kinds.get(process.pid, "all"), "all"}:
            found[kind] += times.user + times.system
    return found


def _busy_cores() -> float:
    """Return the processor seconds of the whole machine since its start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _timed(stack: Stack, work: Callable[[], None]) -> dict[str, float]:
    before, machine, began = _busy(stack), _busy_cores(), time.perf_counter()
    work()
    seconds, machine = time.perf_counter() - began, _busy_cores() - machine
    after = _busy(stack)
    used = {kind: after[kind] - before[kind] for kind in after}
    both = {kind: used[kind] for kind in ("trainer", "sampler")}
    duty = {kind: round(value / seconds, 3) for kind, value in both.items()}
    busiest, others = max(both.values()), round((machine - used["all"]) / seconds, 3)
    return {"seconds": seconds, **duty, "busiest": busiest, "all": used["all"], "others": others}


def in_a_row(experiments: Sequence[Experiment], steps: int) -> None:
    for experiment in experiments:
        for _ in range(steps):
            experiment.step()


def at_once(experiments: Sequence[Experiment], steps: int) -> None:
    faults: list[BaseException] = []

    def work(experiment: Experiment) -> None:
        try:
            in_a_row([experiment], steps)
        except BaseException as error:  # noqa: BLE001 - raised below
            faults.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in experiments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def list_groups(stack: Stack) -> list[dict[str, Any]]:
    with stack.client() as client:
        groups: list[dict[str, Any]] = client.get("groups").raise_for_status().json()["groups"]
    return groups


def switches(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> dict[str, object]:
    """Return the number of switches, the seconds of a recent switch, and the owners' shares of
    time."""
    evenness = {}
    for old, new in zip(before, after, strict=True):
        used: dict[str, float] = {}
        for sign, group in ((-1, old), (1, new)):
            for worker in group["workers"]:
                owner = worker["owner"]
                used[owner] = used.get(owner, 0.0) + sign * worker["device_seconds"]
        if min(used.values(), default=0.0) > 0:
            evenness[new["name"]] = round(max(used.values()) / min(used.values()), 3)
    return {
        "switches": sum(each["switches"] for each in after)
        - sum(each["switches"] for each in before),
        "switch_seconds": {each["name"]: each["switch_seconds"] for each in after},
        "owners_max_over_min": evenness,
    }


def measure(
    stack: Stack, experiments: Sequence[Experiment], *, steps: int, rounds: int
) -> dict[str, object]:
    rows, alone, together = [], [], []
    told: list[dict[str, object]] = []
    told_alone: list[dict[str, object]] = []
    for _ in range(rounds):
        groups = [list_groups(stack)]
        alone.append(_timed(stack, lambda: in_a_row(experiments, steps)))
        groups.append(list_groups(stack))
        together.append(_timed(stack, lambda: at_once(experiments, steps)))
        groups.append(list_groups(stack))
        told_alone.append(switches(*groups[:2]))
        told.append(switches(*groups[1:]))
        rows.append(together[-1]["seconds"] / alone[-1]["seconds"])
    cores = len(os.sched_getaffinity(0))
    pairs = list(zip(alone, together, strict=True))
    bound = [there["busiest"] / here["seconds"] for here, there in pairs]
    by_all = [there["all"] / cores / here["seconds"] for here, there in pairs]
    return {
        "experiments": len(experiments),
        "steps": steps,
        "makespan_over_serial": round(statistics.median(rows), 3),
        "each_round": [round(row, 3) for row in rows],
        "bound_by_busiest": round(statistics.median(bound), 3),
        "bound_by_all_cores": round(statistics.median(by_all), 3),
        "serial": alone,
        "together": together,
        "leases": told,
        "leases_alone": told_alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeslice", description=__doc__)
    parser.add_argument("--experiments", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of each sample")
    parser.add_argument("--quantum", type=float, default=SharingSettings().quantum)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    console = Console()
    cores = sorted(os.sched_getaffinity(0))
    groups = [
        {"name": "train", "devices": [f"cpu:{cores[0]}"], "roles": ["trainer"]},
        {"name": "sample", "devices": [f"cpu:{cores[-1]}"], "roles": ["sampler"]},
    ]
    settings = {
        "port": "0",
        "groups": json.dumps(groups),
        "sharing_quantum": str(arguments.quantum),
        "sampler_kv_cache_bytes": str(64 * 2**20),
        "pool_processes": "0",  # idle processes would be measured too
    }
    results: dict[str, object] = {
        "machine": record.machine(),
        "benchmark": "timeslice",
        "quantum": arguments.quantum,
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_until_the_end:
        model = Path(folder) / "model"
        write_tiny_model(model, seed=0, shape=_SHAPE)
        stack = open_until_the_end.enter_context(
            Stack(data_dir=Path(folder) / "data", settings=settings)
        )
        stack.add_model(name=MODEL, path=model)
        experiments: list[Experiment] = []
        for number in range(max(arguments.experiments)):
            with stack.client() as client:
                body = {"owner": f"owner-{number}", "role": "member", "name": "bench"}
                key = client.post("keys", json=body).raise_for_status().json()["key"]
            service = open_until_the_end.enter_context(
                tinker.ServiceClient(base_url=stack.endpoint.url, api_key=key)
            )
            repeats = experiments[0].repeats if experiments else 4
            experiments.append(Experiment(service, tokens=arguments.tokens, repeats=repeats))
            experiments[-1].step()
            if not number:
                _calibrate(experiments[0])
        for count in arguments.experiments:
            found = measure(
                stack, experiments[:count], steps=arguments.steps, rounds=arguments.rounds
            )
            results[f"{count} experiments"] = found
            console.print_json(json.dumps(found))
    if not arguments.no_save:
        console.print(f"written to {record.save(results).name}")


if __name__ == "__main__":
    main()
