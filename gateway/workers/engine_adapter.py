"""The adapter of engines: it starts them, and asks them to sleep and to wake."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.workers.adapters import Found, WorkerAdapter, WorkerOwner
from gateway.workers.clients import DESCRIBE_TIMEOUT, call_worker
from gateway.workers.groups import WorkerGroup
from gateway.workers.processes import Processes
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import WorkerDied
from tandem.v1 import common_pb2, sampler_pb2, sampler_pb2_grpc

_ON_ITS_WAY = (sampler_pb2.SAMPLER_STATE_LOADING, sampler_pb2.SAMPLER_STATE_WAKING)
"""States that end by themselves soon."""
_LOOK_SECONDS = 0.1


class EngineOwner(WorkerOwner, Protocol):
    """The sampler of an engine."""

    def wanted_version(self) -> common_pb2.WeightVersion | None:
        """Return the version that the first waiting call needs. It is loaded at the wake."""
        ...

    def note_woken(self, version: str) -> None:
        """Note the version that the engine has after its wake."""
        ...

    def note_found(self, about: sampler_pb2.DescribeSamplerReply) -> None:
        """Note the description of an earlier gateway's engine."""
        ...


class EngineAdapter(WorkerAdapter[EngineOwner]):
    """An earlier gateway's load may take `operation_timeout` seconds."""

    kind = "sampler"

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        self._abouts: dict[str, sampler_pb2.DescribeSamplerReply] = {}
        self._looked_at: dict[str, float] = {}
        """The time of the first look at each process of an earlier gateway."""

    def register(self, key: str, owner: EngineOwner) -> None:
        super().register(key, owner)
        if (about := self._abouts.pop(key, None)) is not None:
            owner.note_found(about)

    def _note_found(self, key: str, about: sampler_pb2.DescribeSamplerReply) -> None:
        if (owner := self._owners.get(key)) is not None:
            owner.note_found(about)
        else:
            self._abouts[key] = about

    async def send_sleep(
        self, worker: Worker, row: WorkerRow, request: common_pb2.SleepRequest
    ) -> common_pb2.SwitchReply:
        stub = sampler_pb2_grpc.SamplerStub(worker.channel)
        return await call_worker(worker, stub.Sleep, request, timeout=self._timeout)

    async def send_wake(self, worker: Worker, row: WorkerRow) -> common_pb2.SwitchReply:
        """Wake the engine with the wanted version. The previous one serves if that load fails."""
        owner = self._owners.get(row.key)
        version = owner.wanted_version() if owner is not None else None
        stub = sampler_pb2_grpc.SamplerStub(worker.channel)
        request = common_pb2.WakeRequest(version=version)
        reply = await call_worker(worker, stub.Wake, request, timeout=self._timeout)
        if owner is not None and reply.HasField("version"):
            owner.note_woken(reply.version.name)
        return reply

    async def find_state(self, worker: Worker, row: WorkerRow, group: WorkerGroup) -> Found:
        about = await self._describe_when_settled(worker, row.key)
        asleep = about.state == sampler_pb2.SAMPLER_STATE_ASLEEP
        if not asleep and about.state != sampler_pb2.SAMPLER_STATE_AWAKE:
            raise WorkerDied("its engine has failed")
        if asleep and not group.leased:
            raise WorkerDied("its engine is asleep, and its group takes no turns any more")
        return await super().find_state(worker, row, group)

    async def _describe_when_settled(
        self, worker: Worker, key: str
    ) -> sampler_pb2.DescribeSamplerReply:
        """Return an engine's description once it has ended a load or a wake. Raises `WorkerDied` if
        it takes too long."""
        now = asyncio.get_running_loop().time
        first_look = self._looked_at.setdefault(worker.worker_id, now())
        stub = sampler_pb2_grpc.SamplerStub(worker.channel)
        request = sampler_pb2.DescribeSamplerRequest()
        while True:
            about = await call_worker(worker, stub.Describe, request, timeout=DESCRIBE_TIMEOUT)
            self._note_found(key, about)
            if about.state not in _ON_ITS_WAY:
                return about
            if now() > first_look + self._processes.settings.operation_timeout:
                raise WorkerDied("it did not end a load or a wake")
            await asyncio.sleep(_LOOK_SECONDS)
