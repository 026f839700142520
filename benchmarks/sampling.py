"""How much of the engine's speed is left through SDK, HTTP, gateway and gRPC."""

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
    """vLLM alone, in a process of its own, with the one thread that a sampler's engine has."""
    return run_module("benchmarks.direct_engine", str(model), str(rounds), threads=1)  # type: ignore[return-value]


def run_module(module: str, *arguments: str, threads: int = 0) -> object:
    """Runs one of our measuring processes as its floor deserves: with libiomp5 preloaded.

    `threads` of OpenMP; 0 leaves it to the libraries, which take every core.
    """
    environment = dict(os.environ)
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads)}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        environment |= {"LD_PRELOAD": str(openmp)}
    answer = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=900,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def through_gateway(client: tinker.SamplingClient, *, rounds: int) -> dict[str, list[float]]:
    """The same workloads with the SDK; the first round is not counted."""
    results = {}
    for name, workload in WORKLOADS.items():
        _round(client, workload, 0)
        results[name] = [_round(client, workload, round_ + 1) for round_ in range(rounds)]
    return results


def _round(client: tinker.SamplingClient, workload: Workload, round_: int) -> float:
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
    """Medians and their ratio, a row for each workload."""
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
