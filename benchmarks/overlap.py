"""`make bench-overlap`: a loop one step ahead beside the synchronous one.

Device groups pin trainer and engine to a core each. The runs of a pair have one seed and one task,
and take turns on these two workers. Answers have the length with which sampling takes about the
time of training."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import tinker
from rich.console import Console

from benchmarks import record
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.rl import Example, RLConfig, train
from tandem.stack import Stack

MODEL = "bench/model"
SHAPE = TinyShape(hidden=256, layers=4, ffn=1024, heads=8)
"""So large that the client's and the gateway's work, which has no core of its own, is small."""
DATASET = [Example(f"{left}+{right}=") for left in range(10) for right in range(10)]
LAST = 3
"""The steps whose mean is the final reward."""
TIMEOUT = 600.0


async def reward(_example: Example, answer: str) -> float:
    """The share of digits."""
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


def run(service: tinker.ServiceClient, config: RLConfig) -> dict[str, Any]:
    """Train a new policy. Its creation is not timed."""
    training = service.create_lora_training_client(MODEL, rank=32, seed=config.seed)
    client = training.result(TIMEOUT)
    began = time.perf_counter()
    result = train(client, DATASET, reward, config, tracked=False)
    seconds = time.perf_counter() - began
    parts = {
        part: round(fmean(step.seconds[part] for step in result.steps), 3)
        for part in ("sampling", "waiting", "training", "sync")
    }
    return {
        "seconds": round(seconds, 2),
        "first_reward": round(result.steps[0].reward, 3),
        "final_reward": round(fmean(step.reward for step in result.steps[-LAST:]), 3),
        "oldest": max(step.oldest for step in result.steps),
        "dropped": dict(result.dropped),
        "seconds_of_a_step": parts,
    }


def cores(stack: Stack) -> dict[str, list[int]]:
    """Return the cores of each worker."""
    with stack.client() as client:
        workers = client.get("status").raise_for_status().json()["workers"]
    return {each["kind"]: psutil.Process(each["pid"]).cpu_affinity() or [] for each in workers}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.overlap", description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--no-save", action="store_true", help="only print")
    asked = parser.parse_args()
    first, *_, last = sorted(os.sched_getaffinity(0))  # two cores at least
    groups = [
        {"name": "train", "devices": [f"cpu:{first}"], "roles": ["trainer"]},
        {"name": "sample", "devices": [f"cpu:{last}"], "roles": ["sampler"]},
    ]
    settings = {"port": "0", "groups": json.dumps(groups), "pool_processes": "0"}
    console = Console()
    load = os.getloadavg()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", seed=0, shape=SHAPE)
        with Stack(data_dir=folder / "data", settings=settings) as stack:
            stack.add_model(name=MODEL, path=folder / "model")
            endpoint = stack.endpoint
            with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:

                def measured(seed: int, *, off_by: int, steps: int = asked.steps) -> dict[str, Any]:
                    config = RLConfig(
                        steps=steps,
                        groups_per_step=8,
                        group_size=asked.group_size,
                        max_tokens=asked.tokens,
                        stop=(),
                        learning_rate=2e-3,
                        objective_options={"correction": "tis"},
                        off_by=off_by,
                        seed=seed,
                    )
                    return run(service, config)

                measured(0, off_by=0, steps=2)  # starts the workers
                pinned = cores(stack)
                for seed in range(asked.pairs):
                    order = (0, 1) if seed % 2 else (1, 0)
                    found = {off_by: measured(seed, off_by=off_by) for off_by in order}
                    ratio = found[0]["seconds"] / found[1]["seconds"]
                    pairs.append(
                        {
                            "seed": seed,
                            "synchronous": found[0],
                            "one_step_ahead": found[1],
                            "times_faster": round(ratio, 3),
                        }
                    )
                    console.print_json(json.dumps(pairs[-1]))
    result = {
        "steps": asked.steps,
        "tokens": asked.tokens,
        "load": [load[0], os.getloadavg()[0]],
        "cores": pinned,
        "times_faster": median(pair["times_faster"] for pair in pairs),
        "pairs": pairs,
    }
    if asked.no_save:
        console.print_json(json.dumps(result))
    else:
        console.print(f"written to {record.save({'machine': record.machine(), 'overlap': result})}")


if __name__ == "__main__":
    main()
