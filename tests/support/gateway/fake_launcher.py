"""A launcher that starts workers as gRPC servers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.workers.needs import Prepare, with_needs
from tandem.agent.host import Host
from tandem.agent.preflight import JobNeeds, PreflightCheck
from tandem.errors import SuspendFailed, WorkerCrashed, WorkerStartFailed
from tandem.protocol.epoch import EpochInterceptor
from tandem.protocol.worker import (
    PROTOCOL,
    PROTOCOL_METADATA_KEY,
    VERSION_METADATA_KEY,
    WorkerExit,
    WorkerHandle,
    WorkerSpec,
    own_version,
)
from tandem.v1 import sampler_pb2_grpc, trainer_pb2_grpc
from tests.support.gateway.fake_sampler import FakeSampler
from tests.support.gateway.fake_trainer import FakeTrainer

HOST = Host("host", cores=(0, 1, 2, 3), memory_bytes=48 * 2**30)


def of_version(version: str, *, protocol: int = PROTOCOL) -> tuple[tuple[str, str], ...]:
    return ((PROTOCOL_METADATA_KEY, str(protocol)), (VERSION_METADATA_KEY, version))


class FakeHealth(health_pb2_grpc.HealthServicer):
    """Answers while `answering` is set. Workers serve from when `serving` is set. `about` is its
    metadata."""

    def __init__(self) -> None:
        self.answering = asyncio.Event()
        self.answering.set()
        self.serving = asyncio.Event()
        self.serving.set()
        self.about = of_version(own_version())

    async def Check(self, request, context):
        await self.answering.wait()
        context.set_trailing_metadata(self.about)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def Watch(self, request, context):
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.serving.wait()
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class FakeLauncher:
    """Implements `Launcher` with gRPC servers in this process. `trainer` is made for each run."""

    name = "agent"

    def __init__(
        self,
        trainer: Callable[[WorkerSpec], FakeTrainer] = FakeTrainer,
        *,
        host: Host = HOST,
        prepare: Prepare = with_needs,
    ) -> None:
        self.prepare = prepare
        self._trainer = trainer
        self._host = host
        self.specs: list[WorkerSpec] = []
        self.stopped: list[str] = []
        self.suspended: list[tuple[str, str, int]] = []
        self.suspend_error = ""
        self.servicers: dict[str, FakeTrainer | FakeSampler] = {}
        self.preflights: list[JobNeeds] = []
        self.checks: tuple[PreflightCheck, ...] = ()
        self.start_error: dict[str, str] = {}
        self.crashes = 0  # the number of next starts that crash
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.waits_for = ""
        self.health = FakeHealth()  # of all workers
        self._servers: dict[str, grpc.aio.Server] = {}
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()

    @property
    def trainers(self) -> list[FakeTrainer]:
        """All trainers, the newest one last."""
        found = tuple(self.servicers.values())
        return [each for each in found if isinstance(each, FakeTrainer)]

    @property
    def serving(self) -> list[str]:
        """The ids of the workers that have not ended."""
        return [*self._servers]

    async def preflight(self, needs: JobNeeds, *, timeout: float) -> tuple[PreflightCheck, ...]:
        self.preflights.append(needs)
        return self.checks

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        self.specs.append(spec)
        await self.start_gate.wait()
        if self.crashes > 0:
            self.crashes -= 1
            raise WorkerCrashed(f"the {spec.kind} was killed by SIGSEGV")
        if reason := self.start_error.get(spec.kind):
            raise WorkerStartFailed(reason)
        server = grpc.aio.server(interceptors=[EpochInterceptor()])
        if spec.kind == "trainer":
            trainer = self.servicers[spec.worker_id] = self._trainer(spec)
            trainer.launcher = self
            trainer_pb2_grpc.add_TrainerServicer_to_server(trainer, server)
        elif spec.kind == "sampler":
            sampler = self.servicers[spec.worker_id] = FakeSampler(spec)
            sampler_pb2_grpc.add_SamplerServicer_to_server(sampler, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers[spec.worker_id] = server
        return WorkerHandle.of(spec, address=f"127.0.0.1:{port}", pid=1, log_path="log")

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        self.stopped.append(worker_id)
        await self._end(worker_id)

    async def kill(self, worker_id: str, reason: str, *, crashed: bool = False) -> None:
        await self._end(worker_id)
        self._exits.put_nowait(WorkerExit(worker_id=worker_id, reason=reason, crashed=crashed))

    async def _end(self, worker_id: str) -> None:
        server = self._servers.pop(worker_id, None)
        if server is not None:
            await server.stop(grace=None)

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        if self.suspend_error:
            raise SuspendFailed(self.suspend_error)
        self.suspended.append(("suspend", worker_id, lease))

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        self.suspended.append(("resume", worker_id, lease))

    metrics_address = ""

    @property
    def reports(self) -> bool:
        return True

    async def list(self) -> list[WorkerHandle]:
        return []

    async def describe_host(self) -> Host:
        return self._host

    def explain(self, worker_id: str) -> str:
        return self.waits_for

    async def watch(self) -> AsyncIterator[WorkerExit]:
        while True:
            yield await self._exits.get()

    async def close(self) -> None:
        for worker_id in tuple(self._servers):
            await self._end(worker_id)
