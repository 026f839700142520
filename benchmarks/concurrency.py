"""Many clients of one sampler, each requesting one sample after the other."""

from __future__ import annotations

import statistics
import threading
import time

import tinker
from tinker import types

CLIENTS, MAX_TOKENS = 64, 16


def many_clients(sampler: tinker.SamplingClient, *, requests: int) -> dict[str, object]:
    """Return throughput and latency of `requests` samples per client, after one for warm-up."""
    ready = threading.Barrier(CLIENTS + 1)
    latencies: list[float] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        mine = []
        _sample(sampler, number, 0)
        ready.wait()
        for turn in range(1, requests + 1):
            started = time.perf_counter()
            _sample(sampler, number, turn)
            mine.append(time.perf_counter() - started)
        with lock:
            latencies.extend(mine)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    ordered = sorted(latencies)
    return {
        "clients": CLIENTS,
        "samples": len(ordered),
        "tokens each": MAX_TOKENS,
        "samples/s": round(len(ordered) / seconds, 1),
        "p50_s": round(statistics.median(ordered), 3),
        "p95_s": round(ordered[int(len(ordered) * 0.95)], 3),
    }


def _sample(sampler: tinker.SamplingClient, number: int, turn: int) -> None:
    sampler.sample(
        types.ModelInput.from_ints([20 + number % 10, 30 + number // 10, 40 + turn % 50, 21]),
        num_samples=1,
        sampling_params=types.SamplingParams(
            max_tokens=MAX_TOKENS, temperature=1.0, seed=turn * 1000 + number, stop=[]
        ),
    ).result()
