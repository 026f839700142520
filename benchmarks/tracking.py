"""`make bench-tracking`: the demo's RL step with and without a record, in turn in one run, and
the processor time of the recording alone.

A tracked step records metrics and all 800 rollouts with their tokens and logprobs. Its rows are
sent before the next step begins, and that time is counted too."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import tinker

import tandem
from benchmarks import record
from benchmarks.bursts import cpu_seconds
from tandem.demo.addition import REINFORCEMENT, reward, sums
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.own_machine import without_proxies
from tandem.rl import train
from tandem.stack import Stack
from tandem.tracking.run import TrackedRun

MODEL = "bench/tiny"
ALONE = 30
"""Steps that are only recorded, with nothing beside them."""
PLAIN, TRACKED = "without", "with"


class Later:
    """A record of loops of one step, in a row."""

    def __init__(self, run: TrackedRun, *, earlier: int) -> None:
        self._run, self._earlier = run, earlier

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(self._earlier + step, values)

    def rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        self._run.rollouts(self._earlier + step, rollouts)


def measure(
    *, rounds: int, samples: int
) -> tuple[dict[str, list[dict[str, float]]], dict[str, float]]:
    """Return the seconds of each round's steps, and those of `record_alone`. A round is plain,
    tracked, tracked, plain."""
    found: dict[str, list[dict[str, float]]] = {PLAIN: [], TRACKED: []}
    with (
        tempfile.TemporaryDirectory() as work,
        Stack(data_dir=Path(work) / "data", settings={"port": "0"}) as stack,
    ):
        write_tiny_model(Path(work) / "tiny", seed=0)
        stack.add_model(name=MODEL, path=Path(work) / "tiny")
        endpoint = stack.endpoint
        with (
            without_proxies(),
            tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service,
        ):
            client = service.create_lora_training_client(f"{MODEL}:full").result()
            order = [PLAIN, TRACKED, TRACKED, PLAIN] * rounds
            # Without learning, all steps are equally long.
            config = replace(REINFORCEMENT, steps=1, group_size=samples, learning_rate=0.0)
            tokenizer = client.get_tokenizer()
            processes = [psutil.Process(os.getpid()), psutil.Process(endpoint.pid)]
            with tandem.track(client, name="bench-tracking") as run:
                for number, way in enumerate([TRACKED, PLAIN, *order]):
                    tracked: Later | Literal[False] = False
                    if way == TRACKED:
                        tracked = Later(run, earlier=number)
                    cpu, began = sum(map(cpu_seconds, processes)), time.perf_counter()
                    done = train(
                        client, sums(), reward, config, tokenizer=tokenizer, tracked=tracked
                    )
                    stepped = time.perf_counter()
                    assert run.flush()
                    sent = time.perf_counter()
                    row = {
                        "step": stepped - began,
                        "sent": sent - began,
                        "cpu": sum(map(cpu_seconds, processes)) - cpu,
                        "sample": done.steps[0].seconds["waiting"],
                        "train": done.steps[0].seconds["training"],
                    }
                    if number > 1:
                        found[way].append(row)
                        print(way, {name: round(value, 3) for name, value in row.items()})
                alone = record_alone(run, processes, samples=samples)
                assert run.dropped == 0
    return found, alone


def record_alone(
    run: TrackedRun, processes: Sequence[psutil.Process], *, samples: int
) -> dict[str, float]:
    """Return seconds per step: of the loop's calls, and of the processors of client and gateway."""
    rollout = {"prompt": "1+2=", "answer": "3", "expected": "3", "reward": 1.0, "advantage": 0.1}
    rollout |= {"tokens": [4, 5, 6, 7], "logprobs": [-0.25, -0.5, -0.75, -1.5]}
    rollouts = [rollout] * (samples * len(sums()))
    before, in_loop = [cpu_seconds(each) for each in processes], 0.0
    for step in range(1_000, 1_000 + ALONE):
        began = time.perf_counter()
        run.rollouts(step, rollouts)
        run.log(step, {"reward": 0.5})
        in_loop += time.perf_counter() - began
        assert run.flush()
    client, gateway = (
        (cpu_seconds(each) - then) / ALONE for each, then in zip(processes, before, strict=True)
    )
    return {"loop": in_loop / ALONE, "client cpu": client, "gateway cpu": gateway}


def compare(found: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    """Return means in seconds, and what a tracked step costs in per cent of a plain one, with the
    standard error of the pairs' differences."""
    rows: list[dict[str, object]] = []
    for name in found[PLAIN][0]:
        plain, tracked = ([step[name] for step in found[way]] for way in (PLAIN, TRACKED))
        mean = statistics.mean(plain)
        differences = [with_ - without for with_, without in zip(tracked, plain, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        rows.append(
            {
                "seconds": name,
                "steps": len(plain),
                PLAIN: round(mean, 3),
                TRACKED: round(statistics.mean(tracked), 3),
                "cost %": round(100 * statistics.mean(differences) / mean, 2),
                "± %": round(100 * error / mean, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="tracking", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="of four steps each")
    parser.add_argument("--samples", type=int, default=REINFORCEMENT.group_size)
    arguments = parser.parse_args()
    load = os.getloadavg()
    steps, alone = measure(rounds=arguments.rounds, samples=arguments.samples)
    rows = compare(steps)
    about = {"rounds": arguments.rounds, "samples": arguments.samples, "load": load}
    results = {"machine": record.machine(), "tracking": about, "rl_step": rows, "steps": steps}
    results["recording_alone_seconds"] = alone
    print(json.dumps([*rows, alone], indent=1), f"\nWritten to {record.save(results).name}")


if __name__ == "__main__":
    main()
