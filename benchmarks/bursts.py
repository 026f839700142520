"""Sampling in three ways that take turns: the engine directly, the gateway by plain HTTP, and by
the SDK.

Plain HTTP shows the server's cost. The SDK's difference to it is work in the client's process. In
all ways, all requests are sent at once, and each fetches its own samples."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil
import tinker
from tinker import types

from benchmarks.in_turn import Ask, asked, floor_environment
from benchmarks.raw_http import Connection
from benchmarks.workloads import WORKLOADS, Workload, prompts
from tandem.stack import Endpoint
from tandem.wire.v1 import tinker_pb2


class DirectEngine:
    """vLLM alone in its own process."""

    def __init__(self, ask: Ask, process: psutil.Process) -> None:
        self._ask = ask
        self.process = process

    def round(self, name: str, number: int) -> float:
        return float(self._ask([name, number]))

    def reload(self, folder: Path) -> float:
        """Return the seconds of the engine's own in-place reload from a folder."""
        return float(self._ask(["reload", str(folder)]))


@contextmanager
def direct_engine(model: Path) -> Iterator[DirectEngine]:
    environment = floor_environment(threads=1)
    engine = asked("benchmarks.direct_engine", str(model), environment=environment)
    with engine as (ask, process):
        yield DirectEngine(ask, process)


class RawSampling:
    def __init__(self, endpoint: Endpoint, sampling_session_id: str) -> None:
        self._endpoint = endpoint
        self._sampling_session_id = sampling_session_id
        self._seq_ids = 10**12  # above all of the SDK client's

    def processes(self) -> dict[str, psutil.Process]:
        with self._endpoint.client() as client:
            workers = client.get("status").json()["workers"]
        (sampler,) = [each["pid"] for each in workers if each["kind"] == "sampler"]
        pids = {"gateway": self._endpoint.pid, "sampler": sampler}
        return {name: psutil.Process(pid) for name, pid in pids.items()}

    def round(self, workload: Workload, number: int) -> float:
        return asyncio.run(self._round(workload, number))

    async def _round(self, workload: Workload, number: int) -> float:
        async with AsyncExitStack() as opened:
            asked = []
            for index, prompt in enumerate(prompts(workload)):
                connection = Connection(url=self._endpoint.url, key=self._endpoint.api_key)
                await opened.enter_async_context(connection)
                request = self._request(workload, prompt, seed=number * 1000 + index)
                asked.append(self._sample(connection, request))
            started = time.perf_counter()
            tokens = sum(await asyncio.gather(*asked))
            return tokens / (time.perf_counter() - started)

    def _request(self, workload: Workload, prompt: list[int], *, seed: int) -> dict[str, object]:
        self._seq_ids += 1
        return {
            "sampling_session_id": self._sampling_session_id,
            "seq_id": self._seq_ids,
            "num_samples": workload.samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {
                "max_tokens": workload.max_tokens,
                "temperature": 1.0,
                "seed": seed,
                "stop": [],
            },
        }

    async def _sample(self, connection: Connection, request: dict[str, object]) -> int:
        """Return the number of sampled tokens."""
        status, body = await connection.post("/api/v1/asample", request)
        assert status == 200, body
        accepted = {"request_id": json.loads(body)["request_id"]}
        status, body = await connection.post("/api/v1/retrieve_future", accepted)
        assert status == 200, body
        answer = tinker_pb2.SampleResponse.FromString(body)
        return sum(len(sequence.tokens) // 4 for sequence in answer.sequences)


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
    engine: DirectEngine, raw: RawSampling, client: tinker.SamplingClient, *, rounds: int
) -> list[dict[str, object]]:
    """Return a row for each workload: medians, and medians of each round's ratios.

    A row also has the CPU seconds of a plain HTTP round beside the engine's alone. Workloads with
    short rounds have three times as many."""
    rows: list[dict[str, object]] = []
    for name, workload in WORKLOADS.items():
        turns = rounds if workload.tokens > 10_000 else 3 * rounds
        ways = (
            partial(engine.round, name),
            partial(raw.round, workload),
            partial(run_round, client, workload),
        )
        for way in reversed(ways):  # the SDK's client starts the engine
            way(0)
        processes = {"engine alone": engine.process, **raw.processes()}
        measured, busy = [], dict.fromkeys(processes, 0.0)
        for number in range(1, turns + 1):
            found = {}
            for way in ways if number % 2 else ways[::-1]:
                before = {each: cpu_seconds(process) for each, process in processes.items()}
                found[way] = way(number)
                for each, process in processes.items():
                    if (way is ways[0]) is (each == "engine alone") and way is not ways[2]:
                        busy[each] += (cpu_seconds(process) - before[each]) / turns
            measured.append([found[way] for way in ways])
        alone, http, sdk = zip(*measured, strict=True)
        rows.append(
            {
                "workload": name,
                "engine tokens/s": round(statistics.median(alone)),
                "plain HTTP tokens/s": round(statistics.median(http)),
                "SDK tokens/s": round(statistics.median(sdk)),
                "HTTP / engine": _ratio(http, alone),
                "SDK / engine": _ratio(sdk, alone),
                **{f"{each}, CPU s": round(seconds, 3) for each, seconds in busy.items()},
            }
        )
    return rows


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _ratio(ours: tuple[float, ...], floor: tuple[float, ...]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, floor, strict=True)), 3)
