"""The gateway's objects for a running worker: its channel and its record."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.workers.epoch import Epoch
from tandem.protocol.channels import worker_channel
from tandem.protocol.fencing import LEASE_METADATA_KEY
from tandem.protocol.worker import SECRET_METADATA_KEY, WorkerExit, WorkerHandle, WorkerKind


@dataclass(eq=False)
class Worker:
    """A serving worker. Every call carries `identity` and the fencing token of its lease.
    `silent_since` is the monotonic time of the first unanswered heartbeat. An earlier gateway has
    `left` the worker, which may still be `busy` with that gateway's calls. `busy_since` is the
    event loop time of the first look for them, or 0."""

    handle: WorkerHandle
    channel: grpc.aio.Channel
    epoch: Epoch
    identity: tuple[tuple[str, str], ...] = field(repr=False)
    lease: int = 0
    silent_since: float | None = None
    left: bool = False
    busy: bool = False
    busy_since: float = 0.0

    @classmethod
    def of(cls, handle: WorkerHandle, epoch: Epoch, *, lease: int = 0) -> Worker:
        return cls(
            handle=handle,
            channel=worker_channel(handle),
            epoch=epoch,
            identity=((SECRET_METADATA_KEY, handle.secret), *epoch.metadata),
            lease=lease,
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        if not self.lease:
            return self.identity
        return (*self.identity, (LEASE_METADATA_KEY, str(self.lease)))

    @property
    def worker_id(self) -> str:
        return self.handle.worker_id

    @property
    def silent_for(self) -> float:
        """Seconds since the first unanswered heartbeat, or 0 if the worker answers."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    @property
    def silence(self) -> str:
        if self.silent_since is None:
            return ""
        return f"the {self.handle.kind} has not answered its heartbeat for {self.silent_for:.0f} s"

    async def check_health(self, *, timeout: float) -> dict[str, str]:
        """Return the worker's description of itself. Raises `grpc.aio.AioRpcError` and
        `GatewaySuperseded`."""
        call = health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(), metadata=self.metadata, timeout=timeout
        )
        try:
            await call
        except grpc.aio.AioRpcError as error:
            self.epoch.raise_if_superseded(error)
            raise
        return {key: str(value) for key, value in await call.trailing_metadata() or ()}

    async def is_loading(self, *, timeout: float) -> bool:
        """Return whether the worker answers that it does not serve yet. Raises
        `GatewaySuperseded`."""
        request, status = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse
        check = health_pb2_grpc.HealthStub(self.channel).Check
        try:
            reply = await check(request, metadata=self.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:  # its next call decides
            self.epoch.raise_if_superseded(error)
            return False
        return bool(reply.status == status.NOT_SERVING)


@dataclass
class WorkerRecord:
    """The gateway's record of a starting or serving worker.

    `key` names its row. `phase` describes its start. `worker` is set when ready, `version` by the
    first heartbeat. `ended` has an earlier end."""

    worker_id: str
    kind: WorkerKind
    session_id: str
    run_id: str
    key: str
    started_at: float = field(default_factory=time.time)
    ended: asyncio.Future[WorkerExit] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    phase: str = "its process starts"
    worker: Worker | None = None
    version: str = ""

    @property
    def state(self) -> str:
        """Return "starting", "ready" or, while silent, "unresponsive"."""
        if self.worker is None:
            return "starting"
        return "ready" if self.worker.silent_since is None else "unresponsive"
