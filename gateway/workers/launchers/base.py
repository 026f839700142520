"""The launcher seam: what the gateway asks of whatever runs its workers.

Nothing here is particular to a child process; a launcher of containers implements the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.worker import GRPC_OPTIONS, SECRET_METADATA_KEY, WorkerKind, WorkerSpec

_RETRY_SECONDS = 0.1
_FINAL_CODES = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Health answers that waiting does not change."""


@dataclass(frozen=True)
class WorkerHandle:
    """A worker that has bound its ports.

    Literal example: `WorkerHandle(worker_id="trainer-s-ab12-0", kind="trainer",
    address="127.0.0.1:40123", metrics_port=40124)`; the secret is never printed.
    """

    worker_id: str
    kind: WorkerKind
    address: str
    metrics_port: int
    secret: str = field(repr=False)


@dataclass(frozen=True)
class WorkerDetails:
    """What a person may want to know of a running worker and not every launcher has: the process
    id on this machine (0: none) and the file that its output goes to."""

    pid: int = 0
    log_path: Path | None = None


@dataclass(frozen=True)
class WorkerExit:
    """The unrequested end of a worker. `reason` is one sentence for the client."""

    worker_id: str
    reason: str


class Launcher(Protocol):
    """Starts and stops workers. All methods belong to one event loop."""

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker; return once it has bound its port and reported its address.

        Raises `WorkerStartFailed` with the worker's own reason, or with the end of its log;
        then nothing of the worker is left.
        """
        ...

    async def wait_ready(self, worker_id: str) -> None:
        """Return once the worker's gRPC health service says SERVING.

        Raises `WorkerStartFailed` as soon as the worker ends, or when the start timeout
        (counted from `start`) is over; then nothing of the worker is left.
        """
        ...

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        """Ask the worker to end, and kill it when it has not within the stop timeout; `at_once`:
        kill it without asking.

        Returns when nothing of it is left. Does nothing for a worker that has ended or is
        not known.
        """
        ...

    def list(self) -> list[WorkerHandle]:
        """Return the running workers that have reported an address."""
        ...

    def describe(self, worker_id: str) -> WorkerDetails:
        """Return what this launcher can show of a worker; empty for one that it does not run."""
        ...

    def watch(self) -> AsyncIterator[WorkerExit]:
        """Yield every exit that was not requested and that no `start` or `wait_ready` raised.

        Each exit goes to every iterator that existed when it happened. The iterators finish
        when the launcher is closed.
        """
        ...

    async def close(self) -> None:
        """Stop every worker and start no more. Idempotent."""
        ...


async def wait_until_serving(*, address: str, secret: str, timeout: float) -> str:
    """Return "" once the worker's health is SERVING, else the last answer in words.

    Gives up after `timeout` seconds, or at once where waiting cannot help (a wrong secret).
    Uses the streaming Watch method instead of polling, to leave alone a worker that loads a
    model on all cores.
    """
    last = "it was not reached"
    metadata = ((SECRET_METADATA_KEY, secret),)
    channel = grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)
    with suppress(TimeoutError):
        async with channel, asyncio.timeout(timeout):
            watch = health_pb2_grpc.HealthStub(channel).Watch
            while True:
                try:
                    async for reply in watch(
                        health_pb2.HealthCheckRequest(), metadata=metadata, wait_for_ready=True
                    ):
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return ""
                        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
                        last = f"its health was {status}"
                except grpc.aio.AioRpcError as error:
                    last = f"its health service answered {error.code().name}: {error.details()}"
                    if error.code() in _FINAL_CODES:
                        break
                # The stream ended early: the worker's server is starting or shutting down.
                await asyncio.sleep(_RETRY_SECONDS)
    return last
