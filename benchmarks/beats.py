"""`make bench-beats`: another owner's heartbeats and healthz during a burst of 5,000 samples.

One owner requests all samples at once over 1,000 connections, like the SDK. With another checkout
as the argument, this file measures both in turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks.raw_http import Connection
from tandem.demo.tiny_model import write_tiny_model
from tandem.stack import Endpoint, Stack

HERE = Path(__file__).resolve().parent
SAMPLES, CONNECTIONS = 5000, 1000
MODEL = "bench/model"
_INTERVAL = 0.05
_LAST = 10_000


async def _answer(connection: Connection, path: str, body: object) -> dict[str, str]:
    while True:
        status, content = await connection.post(path, body)
        if status not in (408, 429):
            break
    assert status == 200, (path, status, content[:300])
    found: dict[str, str] = json.loads(content) if content[:1] == b"{" else {}
    return found


async def _session(connection: Connection) -> str:
    new = {"tags": [], "sdk_version": "bench"}
    return (await _answer(connection, "/api/v1/create_session", new))["session_id"]


def burst(endpoint: Endpoint, ready: Event, begin: Event, done: Event, samples: int) -> None:
    async def run() -> None:
        async with AsyncExitStack() as opened:
            connections = [
                await opened.enter_async_context(Connection(url=endpoint.url, key=endpoint.api_key))
                for _ in range(CONNECTIONS)
            ]
            session = await _session(connections[0])
            new = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
            made = await _answer(connections[0], "/api/v1/create_sampling_session", new)
            numbers = iter(range(samples))

            async def sample(connection: Connection, number: int) -> None:
                wanted = {
                    "sampling_session_id": made["sampling_session_id"],
                    "seq_id": number,
                    "num_samples": 1,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [20, 30, 40]}]},
                    "sampling_params": {"max_tokens": 4, "seed": number, "stop": []},
                }
                asked = await _answer(connection, "/api/v1/asample", wanted)
                pending.append(asked["request_id"])

            async def client(connection: Connection) -> None:
                for number in numbers:
                    await sample(connection, number)
                while pending:
                    await _answer(
                        connection, "/api/v1/retrieve_future", {"request_id": pending.pop()}
                    )

            pending: list[str] = []
            await sample(connections[0], _LAST)  # the engine has started
            await _answer(connections[0], "/api/v1/retrieve_future", {"request_id": pending.pop()})
            ready.set()
            begin.wait()
            await asyncio.gather(*map(client, connections))
        done.set()

    asyncio.run(run())


def beats(endpoint: Endpoint, key: str, done: Event) -> dict[str, list[float]]:
    """Send heartbeats over one connection, healthz over new ones. Return latencies in seconds."""

    async def run() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"heartbeat": [], "healthz": []}
        async with Connection(url=endpoint.url, key=key) as connection:
            session_id = await _session(connection)

            async def heartbeats() -> None:
                while not done.is_set():
                    began = time.perf_counter()
                    body = {"session_id": session_id}
                    await _answer(connection, "/api/v1/session_heartbeat", body)
                    found["heartbeat"].append(time.perf_counter() - began)
                    await asyncio.sleep(_INTERVAL)

            async def health() -> None:
                host, _, port = endpoint.url.removeprefix("http://").rpartition(":")
                while not done.is_set():
                    began = time.perf_counter()
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                    found["healthz"].append(time.perf_counter() - began)
                    writer.close()
                    await asyncio.sleep(_INTERVAL)

            await asyncio.gather(heartbeats(), health())
        return found

    return asyncio.run(run())


def measure(*, samples: int) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    ready, begin, done = context.Event(), context.Event(), context.Event()
    with (
        tempfile.TemporaryDirectory() as work,
        Stack(data_dir=Path(work) / "data", settings={"port": "0"}) as stack,
    ):
        write_tiny_model(Path(work) / "tiny", seed=0)
        stack.add_model(name=MODEL, path=Path(work) / "tiny")
        with stack.endpoint.client() as client:
            made = client.post("keys", json={"owner": "another", "role": "member"}).json()
        process = context.Process(
            target=burst, args=(stack.endpoint, ready, begin, done, samples), daemon=True
        )
        process.start()
        assert ready.wait(timeout=300)
        began = time.perf_counter()
        begin.set()
        found = beats(stack.endpoint, made["key"], done)
        found["burst"] = [time.perf_counter() - began]
        process.join()
    return found


def measure_checkout(checkout: Path, *, samples: int) -> dict[str, list[float]]:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--alone", "--samples", str(samples)]
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True
    )
    rows: dict[str, list[float]] = json.loads(done.stdout)
    return rows


def row(what: str, rounds: Sequence[dict[str, list[float]]]) -> dict[str, object]:
    """Return the percentiles over all rounds, in milliseconds."""
    found: dict[str, object] = {"what": what, "rounds": len(rounds)}
    for name in ("heartbeat", "healthz"):
        latencies = [each for one in rounds for each in one[name]]
        cuts = statistics.quantiles(latencies, n=100, method="inclusive")
        found |= {f"{name}s": len(latencies)}
        found |= {f"{name}_p{p}_ms": round(cuts[p - 1] * 1e3, 1) for p in (50, 99)}
        found |= {f"{name}_max_ms": round(max(latencies) * 1e3, 1)}
    bursts = [each for one in rounds for each in one["burst"]]
    return found | {"burst_seconds": round(statistics.median(bursts), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="beats", description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="a checkout to measure in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--alone", action="store_true", help="print JSON, and write nothing")
    arguments = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.alone:
        print(json.dumps(measure(samples=arguments.samples)))
        return
    from benchmarks import record  # missing if this file runs alone

    checkouts = {"this checkout": HERE.parent}
    if arguments.other is not None:
        checkouts["another checkout"] = arguments.other.resolve()
    rounds: dict[str, list[dict[str, list[float]]]] = {name: [] for name in checkouts}
    for number in range(arguments.rounds):
        for name in list(checkouts)[:: -1 if number % 2 else 1]:
            rounds[name].append(measure_checkout(checkouts[name], samples=arguments.samples))
            print(json.dumps(row(name, rounds[name][-1:]), indent=1), flush=True)
    rows = [row(name, found) for name, found in rounds.items()]
    about = {"samples": arguments.samples, "connections": CONNECTIONS, "load": os.getloadavg()}
    results = {"machine": record.machine(), "burst": about, "beats": rows}
    print(json.dumps(rows, indent=1), f"\nWritten to {record.save(results).name}")


if __name__ == "__main__":
    main()
