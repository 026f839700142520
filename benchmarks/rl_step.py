"""The demo's RL step through Tandem, with a breakdown of its time."""

from __future__ import annotations

import re
import statistics

import httpx
import tinker

from tandem.demo.configuration import Reinforcement
from tandem.demo.reinforcement import Loop, StepResult
from tandem.stack import Stack

_BUSY = re.compile(
    r"^tandem_(?:(trainer)_operation_seconds_sum\{[^}]*\}|(sampler)_engine_seconds_total) (\S+)$",
    re.M,
)
"""Seconds that a worker computed: of a trainer by kind of operation, of a sampler in all."""


def tandem_steps(
    stack: Stack, client: tinker.TrainingClient, *, steps: int
) -> tuple[list[StepResult], dict[str, float]]:
    """Return `steps` steps, after one for warm-up, and each worker's busy seconds per step."""
    loop = Loop(
        client=client,
        tokenizer=client.get_tokenizer(),
        seed=0,
        configuration=Reinforcement(steps=steps + 1),
    )
    iterator = loop.steps()
    next(iterator)
    before = busy_seconds(stack)
    results = list(iterator)
    after = busy_seconds(stack)
    return results, {kind: (after[kind] - before[kind]) / steps for kind in after}


def busy_seconds(stack: Stack) -> dict[str, float]:
    """Return the seconds that trainers and samplers have computed, from their /metrics."""
    totals: dict[str, float] = {}
    with stack.client() as client:
        workers = client.get("status").json()["workers"]
    for worker in workers:
        text = httpx.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=10).text
        for trainer, sampler, value in _BUSY.findall(text):
            kind = trainer or sampler
            totals[kind] = totals.get(kind, 0.0) + float(value)
    return totals


def medians(results: list[StepResult]) -> dict[str, float]:
    return {
        "sample": statistics.median(result.seconds_sample for result in results),
        "train": statistics.median(result.seconds_train for result in results),
        "sync": statistics.median(result.seconds_sync for result in results),
        "seconds": statistics.median(result.seconds for result in results),
    }


def floor_medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}
