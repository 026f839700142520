"""`make bench-bombs`: latency of healthz while clients send compressed bombs.

A bomb is a few kilobytes of zstd that expand to megabytes. With another checkout as the argument,
this file measures its gateway too."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import zstandard

from tandem.stack import Endpoint, Stack

HERE = Path(__file__).resolve().parent
_CLIENTS = 4

Bombs = list[tuple[str, bytes]]


def bombs() -> Bombs:
    """Return paths and bodies, each millions of tokens or other values, or one long text."""

    def many(piece: bytes, count: int) -> bytes:
        return b"[" + b",".join([piece] * count) + b"]"

    sample = b'{"base_model":"none","sampling_params":{},"prompt":{"chunks":[{"tokens":%s}]}}'
    bodies = [
        ("/api/v1/asample", sample % many(b"151643", 2**20)),
        ("/api/v1/asample", b'{"more":%s}' % many(b"1.5", 2**22 - 10)),
        ("/v1/completions", b'{"model":"none","prompt":%s}' % many(b'""', 2**21)),
        ("/api/v1/telemetry", b'{"events":%s}' % many(b'{"a":1}', 65_000)),
        ("/api/v1/telemetry", b'{"events":["%s"]}' % (b"x" * (60 * 2**20))),
        ("/api/v1/forward_backward", b"\x0a\x09s:train:0\x10\x01" + b"\x7a\x00" * (30 * 2**20)),
    ]
    return [(path, zstandard.ZstdCompressor(level=9).compress(body)) for path, body in bodies]


class Client:
    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        self._address = (str(parts.hostname), int(parts.port or 0))
        self._head = f"Host: {parts.netloc}\r\nX-API-Key: {endpoint.api_key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, line: str, body: bytes = b"", headers: str = "") -> int:
        if self._streams is None or self._streams[0].at_eof():
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        head = f"{line} HTTP/1.1\r\n{self._head}{headers}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(120):
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, _, size = answer.partition(b"content-length:")
            await reader.readexactly(int(size.split(None, 1)[0]))
        return int(answer.split(None, 2)[1])


def throw(
    endpoint: Endpoint, bodies: Bombs, stop: Event, answered: multiprocessing.Queue[int]
) -> None:
    async def run() -> int:
        client = Client(endpoint)
        for count, (path, body) in enumerate(itertools.cycle(bodies)):
            if stop.is_set():
                return count
            await client.request(f"POST {path}", body, "Content-Encoding: zstd\r\n")
            if count == 0:
                answered.put(0)  # it has begun
        raise AssertionError

    answered.put(asyncio.run(run()))


def healthz(endpoint: Endpoint, *, seconds: float) -> list[float]:
    """Request healthz a hundred times a second. Return latencies in seconds."""

    async def run() -> list[float]:
        client, found = Client(endpoint), []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            assert await client.request("GET /api/v1/healthz") == 200
            found.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)
        return found

    return asyncio.run(run())


def row(what: str, latencies: list[float], *, seconds: float, answered: int) -> dict[str, object]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "what": what,
        **{f"healthz_p{p}_ms": round(cuts[p - 1] * 1e3, 1) for p in (50, 99)},
        "healthz_max_ms": round(max(latencies) * 1e3, 1),
        "bombs_per_second": round(answered / seconds, 1),
    }


def measure(*, clients: int, seconds: float) -> list[dict[str, object]]:
    context = multiprocessing.get_context("spawn")
    stop, answered = context.Event(), context.Queue()
    bodies = bombs()
    with (
        tempfile.TemporaryDirectory() as work,
        Stack(data_dir=Path(work) / "data", settings={"port": "0"}) as stack,
    ):
        alone = healthz(stack.endpoint, seconds=seconds)
        processes = [
            context.Process(
                target=throw,
                args=(stack.endpoint, bodies[first:] + bodies[:first], stop, answered),
                daemon=True,
            )
            for first in range(clients)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            answered.get(timeout=300)
        beside = healthz(stack.endpoint, seconds=seconds)
        stop.set()
        count = sum(answered.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return [
        row("alone", alone, seconds=seconds, answered=0),
        row(f"beside {clients} clients with bombs", beside, seconds=seconds, answered=count),
    ]


def measure_checkout(checkout: Path, *, seconds: float) -> list[dict[str, object]]:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--alone", "--seconds", str(seconds)]
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True
    )
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bombs", description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="a checkout to measure beside this one")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--alone", action="store_true", help="print JSON, and write nothing")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measure(clients=_CLIENTS, seconds=arguments.seconds)))
        return
    from benchmarks import record  # missing if this file runs alone

    results: dict[str, object] = {"machine": record.machine()}
    for name, checkout in (("bombs", HERE.parent), ("bombs, other checkout", arguments.other)):
        if checkout is not None:
            results[name] = measure_checkout(checkout.resolve(), seconds=arguments.seconds)
            print(name, json.dumps(results[name], indent=1))
    print(f"Written to {record.save(results).name}")


if __name__ == "__main__":
    main()
