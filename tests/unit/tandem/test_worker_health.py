from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
from grpc.aio import AioRpcError, Metadata
from grpc_health.v1 import health_pb2

from tandem.protocol import worker_health
from tandem.protocol.worker import WorkerHandle, WorkerSpec
from tests.support.virtual_time import run_in_virtual_time

HANDLE = WorkerHandle.of(
    WorkerSpec(
        worker_id="trainer-s-1-0",
        kind="trainer",
        secret="hidden",
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
    ),
    address="10.0.0.1:7300",
)


class LoadingWorker:
    def __init__(self) -> None:
        self.called_at: list[float] = []

    async def watch(self, _request, *, metadata, timeout, wait_for_ready):
        loop = asyncio.get_running_loop()
        self.called_at.append(loop.time())
        status = health_pb2.HealthCheckResponse
        yield status(status=status.NOT_SERVING)
        left = 3600 - loop.time()
        await asyncio.sleep(min(timeout, left))
        if timeout < left:
            raise AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata())
        yield status(status=status.SERVING)


def wait(monkeypatch, worker: LoadingWorker, *, timeout: float) -> str:
    @asynccontextmanager
    async def channel(_handle):
        yield None

    stub = SimpleNamespace(Watch=worker.watch)
    monkeypatch.setattr(worker_health, "worker_channel", channel)
    monkeypatch.setattr(worker_health.health_pb2_grpc, "HealthStub", lambda _channel: stub)
    return run_in_virtual_time(worker_health.wait_until_serving(HANDLE, timeout=timeout))


def test_a_worker_that_loads_for_long_is_called_each_minute_as_its_lifeline_needs(monkeypatch):
    worker = LoadingWorker()
    assert wait(monkeypatch, worker, timeout=4000) == ""
    assert worker.called_at == [60 * minute for minute in range(60)]


def test_what_is_said_of_a_worker_that_was_never_ready_is_its_health(monkeypatch):
    assert wait(monkeypatch, LoadingWorker(), timeout=1000) == "its health was NOT_SERVING"
