"""Sampling through SDK, HTTP, gateway and gRPC, beside the engine called directly."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import tinker
from tinker import types

from benchmarks.workloads import WORKLOADS, Workload, prompts


def direct(model: Path, *, rounds: int) -> dict[str, list[float]]:
    """Measure vLLM alone, in a process with one thread, as a sampler's engine has."""
    return run_module("benchmarks.direct_engine", str(model), str(rounds), threads=1)  # type: ignore[return-value]


def run_module(module: str, *arguments: str, threads: int = 0) -> object:
    """Run a module that measures a floor, with libiomp5 preloaded; return the JSON it prints.

    `threads` of OpenMP; with 0 the libraries use every core.
    """
    answer = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | floor_environment(threads=threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=1800,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def floor_environment(*, threads: int) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return environment | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def through_gateway(client: tinker.SamplingClient, *, rounds: int) -> dict[str, list[float]]:
    """Measure the same workloads through the SDK, after a round for warm-up."""
    results = {}
    for name, workload in WORKLOADS.items():
        run_round(client, workload, 0)
        results[name] = [run_round(client, workload, round_ + 1) for round_ in range(rounds)]
    return results


def run_round(client: tinker.SamplingClient, workload: Workload, round_: int) -> float:
    started = time.perf_counter()
    futures = [
        client.sample(
            types.ModelInput.from_ints(prompt),
            num_samples=workload.samples,
            sampling_params=types.SamplingParams(
                max_tokens=workload.max_tokens,
                temperature=1.0,
                seed=round_ * 1000 + index,
                stop=[],
            ),
        )
        for index, prompt in enumerate(prompts(workload))
    ]
    tokens = sum(len(s.tokens) for future in futures for s in future.result().sequences)
    return tokens / (time.perf_counter() - started)


def compare(
    engine: dict[str, list[float]], gateway: dict[str, list[float]]
) -> list[dict[str, object]]:
    """Return a row for each workload: the medians and their ratio."""
    rows = []
    for name in WORKLOADS:
        alone, ours = statistics.median(engine[name]), statistics.median(gateway[name])
        rows.append(
            {
                "workload": name,
                "engine_tokens_per_second": round(alone),
                "gateway_tokens_per_second": round(ours),
                "ratio": round(ours / alone, 3),
            }
        )
    return rows
