"""The demo's RL step through Tandem and in one process, in ways that take turns."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import tinker

from benchmarks.bursts import cpu_seconds
from benchmarks.in_turn import asked, floor_environment
from tandem.demo.addition import REINFORCEMENT, reward, sums
from tandem.protocol.own_machine import http_client
from tandem.rl import train
from tandem.stack import Stack

FLOOR, COMPILED_FLOOR = "one process", "one process, compiled"
TIMES = ("sample", "train", "sync", "seconds")
BUSY = (
    "trainer busy",
    "sampler busy",
    "trainer CPU",
    "sampler CPU",
    "gateway CPU",
    "client CPU",
)
Step = Callable[[], dict[str, float]]
"""Makes a step and returns the seconds of its parts and in total."""

_BUSY = re.compile(
    r"^tandem_(?:(trainer)_operation_seconds_sum\{[^}]*\}|(sampler)_engine_seconds_total) (\S+)$",
    re.M,
)
"""Computing seconds of a worker: of a trainer by kind of operation, of a sampler in total."""


@contextmanager
def floor(model: Path, *, threads: int, compiled: bool, core: int | None) -> Iterator[Step]:
    """The step in one process with `threads` threads, on one `core` if given."""
    arguments = (str(model), str(threads), *(["compiled"] if compiled else []))
    environment = floor_environment(threads=threads)
    with asked("benchmarks.floor", *arguments, environment=environment) as (ask, process):
        rounds = iter(range(10**6))
        if core is not None:
            pin_process(process, {core})
        yield lambda: ask([next(rounds)])


def through_tandem(stack: Stack, client: tinker.TrainingClient) -> Step:
    """Loops of one step through a stack, with its workers' computing seconds."""
    config, tokenizer = replace(REINFORCEMENT, steps=1), client.get_tokenizer()

    def step() -> dict[str, float]:
        before = busy_seconds(stack)
        done = train(client, sums(), reward, config, tokenizer=tokenizer, tracked=False)
        spent = {kind: value - before[kind] for kind, value in busy_seconds(stack).items()}
        seconds = done.steps[0].seconds
        times = {
            "sample": seconds["waiting"],
            "train": seconds["training"],
            "sync": seconds["sync"],
        }
        return {**times, "seconds": sum(times.values()), **spent}

    return step


def pin(stack: Stack, core: int) -> None:
    """Give the trainer this core alone, and all other processes the other cores."""
    others = os.sched_getaffinity(0) - {core}
    for kind, process in _processes(stack):
        pin_process(process, {core} if kind == "trainer" else others)


def pin_process(process: psutil.Process, cores: Set[int]) -> None:
    """Pin a process and all its present threads."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


def _processes(stack: Stack) -> list[tuple[str, psutil.Process]]:
    with stack.client() as client:
        workers = client.get("status").json()["workers"]
    pids = [("client", os.getpid()), ("gateway", stack.endpoint.pid)]
    pids += [(each["kind"], each["pid"]) for each in workers]
    return [(kind, psutil.Process(pid)) for kind, pid in pids]


def busy_seconds(stack: Stack) -> dict[str, float]:
    """Return computing seconds of workers, and processor seconds of each process and the client."""
    with stack.client() as client:
        workers = client.get("status").json()["workers"]
    totals = dict.fromkeys(BUSY, 0.0)
    for kind, process in _processes(stack):
        totals[f"{kind} CPU"] += cpu_seconds(process)
    for worker in workers:
        with http_client(f"http://127.0.0.1:{worker['metrics_port']}") as worker_client:
            text = worker_client.get("metrics").text
        for trainer, sampler, value in _BUSY.findall(text):
            totals[f"{trainer or sampler} busy"] += float(value)
    return totals


def compare(ways: dict[str, Step], *, steps: int) -> list[dict[str, object]]:
    """Return a row for each way: medians of times and of each round's ratios, after one step."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(steps + 1):
        for way, step in ways.items():
            measured = step()
            if number:
                found[way].append(measured)
    return [
        {
            "what": way,
            **{each: _median(row[each] for row in rows) for each in TIMES},
            "× floor": _ratio(rows, found[FLOOR]),
            "× compiled floor": _ratio(rows, found[COMPILED_FLOOR]),
            **{
                each: _median(row[each] for row in rows) if each in rows[0] else "" for each in BUSY
            },
        }
        for way, rows in found.items()
    ]


def _ratio(ours: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    pairs = zip(ours, other, strict=True)
    return _median(mine["seconds"] / their["seconds"] for mine, their in pairs)


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 3)
