"""`make bench-recovery`: the cost of snapshots, and a run's pause after the death of its trainer.

Each model does some optimizer steps, with snapshots as often as possible. Then the trainer is
killed a few times, each time when the agent has an idle process for the next one, and the time
until the next result is measured. `--pool 0` measures without idle processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tinker
from rich.console import Console
from tinker import types

from benchmarks import record
from benchmarks.publish import SHAPES
from tandem.demo.tiny_model import write_tiny_model
from tandem.stack import Stack

MODEL = "bench/model"
_SEQUENCES, _TOKENS = 16, 64
_OFTEN = {"recovery_share": "1"}
IDLE_WITHIN = 300.0
"""Seconds. Idle processes import their libraries at a low priority."""
_RESULT_WITHIN = 600.0


def batch() -> list[types.Datum]:
    random = np.random.default_rng(0)
    data = []
    for _ in range(_SEQUENCES):
        tokens = random.integers(0, 64, _TOKENS + 1).tolist()
        inputs = {
            "target_tokens": tokens[1:],
            "weights": types.TensorData.from_numpy(np.ones(_TOKENS, np.float32)),
        }
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    return data


def events(stack: Stack, name: str) -> Iterator[dict[str, float]]:
    for line in stack.log_path.read_text().splitlines():
        if f'"event": "{name}"' in line or f'"event":"{name}"' in line:
            yield json.loads(line)


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3) if values else 0.0


def wait_for_idle_trainer(stack: Stack) -> None:
    """Wait until the agent has an idle process that can become a trainer. Raises `TimeoutError`."""
    log = stack.data_dir / "logs" / "agent.log"
    deadline = time.monotonic() + IDLE_WITHIN
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        ready = {
            each["pid"]
            for each in lines
            if each["event"] == "idle_process_ready" and each["kind"] == "trainer"
        }
        if ready - {each["pid"] for each in lines if each["event"] == "worker_started"}:
            return
        time.sleep(0.1)
    raise TimeoutError(f"there is no idle trainer after {IDLE_WITHIN:.0f} s")


def measure(
    model: Path, data_dir: Path, *, suffix: str, steps: int, kills: int, pool: int
) -> dict[str, object]:
    data = batch()
    settings = {"port": "0", "pool_processes": str(pool), **_OFTEN}
    with Stack(data_dir=data_dir, settings=settings) as stack:
        stack.add_model(name=MODEL, path=model)
        endpoint = stack.endpoint
        with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:
            training = service.create_lora_training_client(f"{MODEL}{suffix}").result(
                _RESULT_WITHIN
            )

            def train() -> float:
                began = time.perf_counter()
                training.forward_backward(data, "cross_entropy").result(_RESULT_WITHIN)
                step = training.optim_step(types.AdamParams(learning_rate=1e-4))
                step.result(_RESULT_WITHIN)
                return time.perf_counter() - began

            seconds = [train() for _ in range(steps)]
            pauses = []
            for _ in range(kills):
                if pool:
                    wait_for_idle_trainer(stack)
                with stack.client() as client:
                    workers = client.get("status").json()["workers"]
                (pid,) = [each["pid"] for each in workers if each["kind"] == "trainer"]
                os.kill(pid, signal.SIGKILL)
                pauses.append(train() - median(seconds))
                for _ in range(3):
                    train()
        snapshots, restored = (
            list(events(stack, "snapshot")),
            list(events(stack, "trainer_restored")),
        )
    return {
        "snapshots": len(snapshots),
        "megabytes": round(snapshots[-1]["bytes"] / 1e6, 1) if snapshots else 0,
        "pause_seconds": median([each["pause_seconds"] for each in snapshots]),
        "written_in_seconds": median([each["seconds"] for each in snapshots]),
        "step_seconds": median(seconds[1:]),
        "kills": kills,
        "seconds_until_the_next_result": sorted(round(each, 2) for each in pauses),
        "of_these_until_restored": sorted(round(each["seconds"], 2) for each in restored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--pool", type=int, default=1, help="idle processes of each kind")
    parser.add_argument("--size", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    console = Console(width=140)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as work:
        for size in arguments.size or SHAPES:
            shape = SHAPES[size]
            model = Path(work) / size.replace(" ", "")
            write_tiny_model(model, seed=0, shape=shape)
            for what, suffix in (("all parameters", ":full"), ("LoRA, rank 32", "")):
                data_dir = Path(work) / f"data-{len(results)}"
                found = results[f"{size}, {what}"] = measure(
                    model,
                    data_dir,
                    suffix=suffix,
                    steps=arguments.steps,
                    kills=arguments.kills,
                    pool=arguments.pool,
                )
                console.print({f"{size}, {what}": found})
    if not arguments.no_save:
        console.print(f"Written to {record.save({'machine': record.machine()} | results).name}")


if __name__ == "__main__":
    main()
