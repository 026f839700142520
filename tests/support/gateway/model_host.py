"""Starts the model workers of `model_workers`, and carries calls to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from gateway.workers.launchers.base import WorkerExit, WorkerHandle
from gateway.workers.needs import with_needs
from tandem.agent.host import Host
from tandem.protocol.worker import SECRET_METADATA_KEY, WorkerSpec
from tandem.v1 import trainer_pb2
from tests.support.gateway.model_workers import (
    Misfortune,
    ModelSampler,
    ModelTrainer,
    ModelWorker,
    broken,
)
from tests.support.gateway.sample_streams import answered


class ModelHost:
    def __init__(self, misfortune: Misfortune) -> None:
        self.misfortune = misfortune
        self.workers: dict[str, ModelWorker] = {}
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()

    def kill(self, worker_id: str) -> None:
        """Kill a worker. The report follows a little later."""
        if (worker := self.workers.pop(worker_id, None)) is not None:
            worker.die()
            exit_ = WorkerExit(worker_id=worker_id, reason="it was killed by SIGKILL")
            self.exits.put_nowait(exit_)

    def kill_all(self) -> None:
        for worker_id in tuple(self.workers):
            self.kill(worker_id)


class ModelLauncher:
    """It `reports` exits unless a test says otherwise. `trainer` is the class of its trainers."""

    name = "agent"
    prepare = staticmethod(with_needs)
    reports = True
    trainer: type[ModelTrainer] = ModelTrainer

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._misfortune = host.misfortune

    def channel(self, address: str, options: object = None) -> ModelChannel:
        worker = self._host.workers.get(address)
        return ModelChannel(worker, self._misfortune, lambda: self._host.kill(address))

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        await self._misfortune.delay(3.0)
        worker: ModelWorker
        if spec.kind == "trainer":
            worker = self.trainer(spec, self._misfortune)
        else:
            worker = ModelSampler(spec, self._misfortune)
        worker.kill = partial(self._host.kill, spec.worker_id)
        self._host.workers[spec.worker_id] = worker
        return worker.handle

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        if (worker := self._host.workers.pop(worker_id, None)) is not None:
            worker.die()
        await self._misfortune.delay(0.5)

    async def list(self) -> list[WorkerHandle]:
        return [worker.handle for worker in self._host.workers.values()]

    async def describe_host(self) -> Host:
        return Host("host", cores=tuple(range(5)), memory_bytes=48 * 2**30)

    def explain(self, worker_id: str) -> str:
        return ""

    async def watch(self) -> AsyncIterator[WorkerExit]:
        # A new queue: the old one would wake only the dead gateway.
        before, exits = self._host.exits, asyncio.Queue()
        while not before.empty():
            exits.put_nowait(before.get_nowait())
        self._host.exits = exits
        while True:
            yield await exits.get()

    async def close(self) -> None: ...


class ModelCall:
    """Stands for a `grpc.aio.UnaryUnaryCall`."""

    def __init__(self, answer: Coroutine[Any, Any, Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer.__await__()

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class ModelChannel:
    """A channel with a slow network."""

    def __init__(
        self, worker: ModelWorker | None, misfortune: Misfortune, kill: Callable[[], None]
    ):
        self._worker = worker
        self._misfortune = misfortune
        self._kill = kill
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def unary_stream(self, method: str, *_args, **_more) -> Callable[..., AsyncIterator[Any]]:
        """Only health is streamed here, and no sample."""
        assert method.endswith(("Health/Watch", "SampleStream")), method

        async def watch(_request, **_about):
            if self._worker is None:
                raise broken()
            await self._misfortune.delay(3.0)
            await (asyncio.Event() if self._worker.frozen else self._worker.serving).wait()
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

        return watch

    def unary_unary(self, method: str, *_args, **_more) -> Callable[..., ModelCall]:
        name = method.rpartition("/")[2]

        async def call(request, *, metadata, timeout=None):
            if (worker := self._worker) is None:
                raise broken()
            assert dict(metadata)[SECRET_METADATA_KEY] == worker.spec.secret
            try:
                async with asyncio.timeout(timeout):
                    return await self._call(worker, name, request)
            except TimeoutError:
                raise broken(grpc.StatusCode.DEADLINE_EXCEEDED) from None

        return lambda *args, **more: ModelCall(call(*args, **more))

    def stream_stream(self, method: str, *_args, **_more) -> Callable[..., AsyncIterator[Any]]:
        name = method.rpartition("/")[2]

        async def stream(requests, *, metadata):
            if (worker := self._worker) is None:
                raise broken()
            assert dict(metadata)[SECRET_METADATA_KEY] == worker.spec.secret
            async for replies in answered(requests, partial(self._call, worker, name)):
                yield replies

        return stream

    async def _call(self, worker: ModelWorker, name: str, request: Any) -> Any:
        if isinstance(request, bytes):
            request = trainer_pb2.ForwardBackwardRequest.FromString(request)
        message = type(request).FromString(request.SerializeToString())
        await self._travel(worker)
        deaths = "deaths" if isinstance(worker, ModelTrainer) else "engine_deaths"
        if name != "Check" and self._misfortune.strikes(deaths):
            asyncio.get_running_loop().call_later(self._misfortune.rng.random() * 3, self._kill)
        answer = worker.task(
            getattr(worker, name)(message) if not worker.frozen else asyncio.Event().wait()
        )
        await asyncio.wait({answer, self._closed, worker.died}, return_when=asyncio.FIRST_COMPLETED)
        await self._travel(worker)
        if not answer.done() or answer.cancelled():
            raise broken()
        return answer.result()

    async def _travel(self, worker: ModelWorker) -> None:
        await self._misfortune.delay(0.01)
        if self._closed.done() or worker.died.done():
            raise broken()
        if isinstance(worker, ModelTrainer) and self._misfortune.strikes("broken_connections"):
            raise broken()
