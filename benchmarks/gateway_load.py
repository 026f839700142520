"""`make bench-gateway`: one gateway under many sessions, beside the engine called directly.

Clients sample from a sampler's process by gRPC, through a gateway without other users, and through
a gateway with idle sessions. These only send a heartbeat every ten seconds. The clients use raw
HTTP from one process."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.raw_http import Connection
from gateway.workers.epoch import Epoch
from gateway.workers.sampler_client import SamplerClient
from gateway.workers.worker import Worker
from tandem.agent.launcher import ProcessLauncher
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.worker import WorkerSpec
from tandem.protocol.worker_health import wait_until_serving
from tandem.settings.workers import SamplerSettings
from tandem.stack import Stack
from tandem.v1 import common_pb2, sampler_pb2

HEARTBEAT_SECONDS = 10.0
MAX_TOKENS = 16
MODEL = "bench/model"
_WARM_UP = 3

Ask = Callable[[int], Awaitable[None]]
"""Sends the sample request with this number, and returns after the answer."""


@dataclass(frozen=True)
class Load:
    """Idle sessions, sampling clients, and the seconds of each measurement."""

    sessions: int
    clients: int
    seconds: float


@dataclass(frozen=True)
class Usage:
    """The gateway process's CPU seconds since its start, and resident bytes."""

    cpu: float
    resident: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return cls(cpu=times.user + times.system, resident=process.memory_info().rss)


async def sample_all(asks: Sequence[Ask], *, seconds: float) -> tuple[list[float], float]:
    """Sample with all clients at once, each one request after the other.

    Returns the latencies and the whole duration, in seconds. Each client's first requests do not
    count."""
    latencies: list[float] = []

    async def client(ask: Ask) -> None:
        number = _WARM_UP
        while time.perf_counter() < end:
            began = time.perf_counter()
            await ask(number)
            latencies.append(time.perf_counter() - began)
            number += 1

    async def warm_up(ask: Ask) -> None:
        for number in range(_WARM_UP):
            await ask(number)

    await asyncio.gather(*(warm_up(ask) for ask in asks))
    began = time.perf_counter()
    end = began + seconds
    await asyncio.gather(*(client(ask) for ask in asks))
    return latencies, time.perf_counter() - began


def row(what: str, latencies: Sequence[float], seconds: float) -> dict[str, object]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "what": what,
        "samples": len(latencies),
        "samples/s": round(len(latencies) / seconds, 1),
        **{f"p{p}_ms": round(cuts[p - 1] * 1e3, 1) for p in (50, 95, 99)},
    }


def prompt(client: int, number: int) -> list[int]:
    """Return four tokens of a vocabulary of 128, different for concurrent clients."""
    return [20 + client % 10, 30 + client // 10 % 10, 40 + number % 50, 21]


def seed(client: int, number: int) -> int:
    return number * 1000 + client


# --- The engine alone ----------------------------------------------------------------------------


async def direct(work: Path, model: Path, load: Load) -> dict[str, object]:
    launcher = ProcessLauncher(data_dir=work / "direct")
    secret = secrets.token_urlsafe(32)
    spec = WorkerSpec(
        worker_id="sampler-direct",
        kind="sampler",
        secret=secret,
        model_name=MODEL,
        model_path=str(model),
        session_id="s-direct",
        sampler=SamplerSettings(),
    )
    version = common_pb2.WeightVersion(name=f"base/{MODEL}", path=str(model))
    try:
        handle = await launcher.start(spec)
        if answer := await wait_until_serving(handle, timeout=spec.start_timeout):
            raise SystemExit(answer)
        worker = Worker.of(handle, Epoch(number=1, superseded=lambda: None))
        async with worker.channel:
            sampler = SamplerClient(worker, timeout=120, give_up=print)

            def client(index: int) -> Ask:
                async def ask(number: int) -> None:
                    reply = await sampler.sample(
                        sampler_pb2.SampleRequest(
                            operation_id=f"{index}:{number}",
                            session_id="s-direct",
                            version=version,
                            prompt_tokens=np.array(prompt(index, number), "<i4").tobytes(),
                            num_samples=1,
                            params=sampler_pb2.SamplingParams(
                                max_tokens=MAX_TOKENS,
                                temperature=1.0,
                                top_k=-1,
                                top_p=1.0,
                                seed=seed(index, number),
                            ),
                            seq_id=number,
                        )
                    )
                    assert not reply.HasField("failure"), reply.failure

                return ask

            asks = [client(index) for index in range(load.clients)]
            latencies, seconds = await sample_all(asks, seconds=load.seconds)
            return row("engine alone, gRPC", latencies, seconds)
    finally:
        await launcher.close()


# --- Through the gateway -------------------------------------------------------------------------


class Sampling:
    """A client with its own sampling session and connection, like a separate process."""

    def __init__(self, connection: Connection, *, index: int, sampler_id: str) -> None:
        self._connection = connection
        self._index = index
        self._sampler_id = sampler_id
        self._next = 0

    async def ask(self, number: int) -> None:
        seq_id, self._next = self._next, self._next + 1
        status, body = await self._connection.post(
            "/api/v1/asample",
            {
                "sampling_session_id": self._sampler_id,
                "seq_id": seq_id,
                "num_samples": 1,
                "prompt": {
                    "chunks": [{"type": "encoded_text", "tokens": prompt(self._index, number)}]
                },
                "sampling_params": {
                    "max_tokens": MAX_TOKENS,
                    "temperature": 1.0,
                    "seed": seed(self._index, number),
                    "stop": [],
                },
            },
        )
        assert status == 200, (status, body[:300])
        request = {"request_id": json.loads(body)["request_id"]}
        while True:
            status, body = await self._connection.post("/api/v1/retrieve_future", request)
            if status != 408:
                break
        assert status == 200, (status, body[:300])


async def post(connection: Connection, path: str, body: object) -> dict[str, str]:
    status, content = await connection.post(path, body)
    assert status == 200, (path, status, content[:300])
    found: dict[str, str] = json.loads(content)
    return found


async def new_session(connection: Connection) -> str:
    answer = await post(connection, "/api/v1/create_session", {"tags": [], "sdk_version": "bench"})
    return answer["session_id"]


@asynccontextmanager
async def idle_sessions(stack: Stack, load: Load, heartbeats: list[float]) -> AsyncIterator[None]:
    """Open the idle sessions, and append each heartbeat's seconds."""
    endpoint = stack.endpoint

    async def live(connection: Connection, session_id: str, offset: float) -> None:
        await asyncio.sleep(offset)
        while True:
            began = time.perf_counter()
            await post(connection, "/api/v1/session_heartbeat", {"session_id": session_id})
            took = time.perf_counter() - began
            heartbeats.append(took)
            await asyncio.sleep(max(0.0, HEARTBEAT_SECONDS - took))

    async with AsyncExitStack() as opened:
        tasks: list[asyncio.Task[None]] = []
        try:
            for number in range(load.sessions):
                connection = Connection(url=endpoint.url, key=endpoint.api_key)
                await opened.enter_async_context(connection)
                session_id = await new_session(connection)
                offset = HEARTBEAT_SECONDS * number / load.sessions
                tasks.append(asyncio.create_task(live(connection, session_id, offset)))
            yield
            for task in tasks:
                if task.done():
                    task.result()  # a failed heartbeat fails the measurement
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def sampling_clients(stack: Stack, count: int) -> AsyncIterator[list[Ask]]:
    """Open the clients in one session, so that one engine serves them, as in `direct`."""
    endpoint = stack.endpoint
    async with AsyncExitStack() as opened:
        main = Connection(url=endpoint.url, key=endpoint.api_key)
        await opened.enter_async_context(main)
        session_id = await new_session(main)
        asks: list[Ask] = []
        for index in range(count):
            connection = Connection(url=endpoint.url, key=endpoint.api_key)
            await opened.enter_async_context(connection)
            created = await post(
                main,
                "/api/v1/create_sampling_session",
                {
                    "session_id": session_id,
                    "sampling_session_seq_id": index,
                    "base_model": MODEL,
                },
            )
            sampler_id = created["sampling_session_id"]
            asks.append(Sampling(connection, index=index, sampler_id=sampler_id).ask)
        heart = asyncio.create_task(_beat(main, session_id))
        try:
            await asks[0](0)  # the engine has started
            yield asks
        finally:
            heart.cancel()


async def _beat(connection: Connection, session_id: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        await post(connection, "/api/v1/session_heartbeat", {"session_id": session_id})


async def through_gateway(work: Path, model: Path, load: Load) -> list[dict[str, object]]:
    """Return two rows: without and with the idle sessions."""
    rows = []
    with Stack(data_dir=work / "stack", settings={"port": "0"}) as stack:
        stack.add_model(name=MODEL, path=model)
        pid = stack.process.pid
        fresh = Usage.of(pid)
        async with sampling_clients(stack, load.clients) as asks:
            rows.append(await _measured("gateway", asks, load, pid=pid, before=fresh))
            heartbeats: list[float] = []
            quiet = Usage.of(pid)
            async with idle_sessions(stack, load, heartbeats):
                name = f"gateway, {load.sessions} idle sessions"
                measured = await _measured(name, asks, load, pid=pid, before=quiet)
                latency = row("", heartbeats, load.seconds) if len(heartbeats) > 1 else {}
                measured |= {
                    "heartbeats": len(heartbeats),
                    "heartbeat_p99_ms": latency.get("p99_ms", ""),
                }
                rows.append(measured)
    return rows


async def _measured(
    name: str, asks: Sequence[Ask], load: Load, *, pid: int, before: Usage
) -> dict[str, object]:
    began = Usage.of(pid)
    latencies, seconds = await sample_all(asks, seconds=load.seconds)
    ended = Usage.of(pid)
    counted = len(latencies) + _WARM_UP * len(asks)
    return {
        **row(name, latencies, seconds),
        "gateway_cpu_ms_per_sample": round((ended.cpu - began.cpu) / counted * 1e3, 3),
        "gateway_cpu_share": round((ended.cpu - began.cpu) / seconds, 3),
        "gateway_mib_before": round(before.resident / 2**20, 1),
        "gateway_mib_after": round(ended.resident / 2**20, 1),
    }


def show(console: Console, rows: Sequence[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for each in rows for name in each))
    table = Table(*names, title="gateway under load", title_justify="left")
    for each in rows:
        table.add_row(*(str(each.get(name, "")) for name in names))
    console.print(table)


async def run(load: Load) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_tiny_model(work / "model", seed=0)
        alone = await direct(work, work / "model", load)
        return [alone, *await through_gateway(work, work / "model", load)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gateway_load", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="idle sessions")
    parser.add_argument("--clients", type=int, default=64, help="clients that sample")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="50 sessions, 16 clients, 10 s")
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    load = Load(sessions=arguments.sessions, clients=arguments.clients, seconds=arguments.seconds)
    if arguments.quick:
        load = Load(sessions=50, clients=16, seconds=10.0)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    console = Console(width=200)
    rows = asyncio.run(run(load))
    show(console, rows)
    if not arguments.no_save:
        written = record.save(
            {"machine": record.machine(), "load": vars(load), "gateway load": rows}
        )
        console.print(f"Written to {written.name}")


if __name__ == "__main__":
    main()
