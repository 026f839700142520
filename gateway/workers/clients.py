"""The gRPC calls to workers: each with the secret, a deadline and typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from gateway.workers.fleet import Worker
from tandem.errors import InternalError, OperationTimedOut, WorkerDied
from tandem.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc

_DESCRIBE_TIMEOUT = 30.0
_PROGRESS_TIMEOUT = 5.0
EXIT_REPORT_PATIENCE = 5.0
"""Seconds within which the launcher reports the end of a worker whose connection broke."""

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)

Tell = Callable[[sampler_pb2.SampleDelta], Awaitable[None]]
"""Receives the new tokens of a sample."""


class Method(Protocol[Request, Reply]):
    """A method of a stub."""

    def __call__(
        self, request: Request, *, metadata: tuple[tuple[str, str], ...], timeout: float
    ) -> Awaitable[Reply]: ...


class WorkerUnavailable(Exception):
    """The connection broke or was closed: the worker has died, and its exit will be reported."""


class TrainerClient:
    """Literal use: `await client.call(client.stub.Publish, request)`.

    Every call raises `WorkerUnavailable` or the `TandemError` that a failure stands for.
    `timeout` in seconds is the deadline of each call.
    """

    def __init__(self, worker: Worker, *, timeout: float) -> None:
        self.stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        self._worker = worker
        self._timeout = timeout

    async def describe(self) -> trainer_pb2.DescribeTrainerReply:
        request = trainer_pb2.DescribeTrainerRequest()
        return await _call(self._worker, self.stub.Describe, request, _DESCRIBE_TIMEOUT)

    async def progress(self) -> trainer_pb2.ProgressReply:
        request = trainer_pb2.ProgressRequest()
        return await _call(self._worker, self.stub.Progress, request, _PROGRESS_TIMEOUT)

    async def call(self, method: Method[Request, Reply], request: Request) -> Reply:
        return await _call(self._worker, method, request, self._timeout)


class SamplerClient:
    """Raises and has a deadline as `TrainerClient`."""

    def __init__(self, worker: Worker, *, timeout: float) -> None:
        self.worker = worker
        self._stub = sampler_pb2_grpc.SamplerStub(worker.channel)
        self._timeout = timeout

    async def load(self, request: sampler_pb2.LoadRequest) -> sampler_pb2.LoadReply:
        return await _call(self.worker, self._stub.Load, request, self._timeout)

    async def sample(
        self, request: sampler_pb2.SampleRequest, tell: Tell | None = None
    ) -> sampler_pb2.SampleReply:
        """Return all samples; pass their tokens to `tell`, if given, as they are drawn. Nothing
        more is read while `tell` waits."""
        if tell is None:
            return await _call(self.worker, self._stub.Sample, request, self._timeout)
        async with _errors_translated(self.worker, self._timeout):
            call = self._stub.SampleStream(
                request, metadata=self.worker.metadata, timeout=self._timeout
            )
            try:
                async for event in call:
                    if event.HasField("reply"):
                        return event.reply
                    await tell(event.delta)
            finally:
                call.cancel()  # does nothing to a call that has ended
            raise InternalError("the sampler ended a stream without an answer")


async def _call(
    worker: Worker, method: Method[Request, Reply], request: Request, timeout: float
) -> Reply:
    async with _errors_translated(worker, timeout):
        return await method(request, metadata=worker.metadata, timeout=timeout)


@asynccontextmanager
async def _errors_translated(worker: Worker, timeout: float) -> AsyncIterator[None]:
    """Raise gRPC's errors as those that the clients promise."""
    kind = worker.handle.kind
    try:
        yield
    except grpc.aio.AioRpcError as error:
        code = error.code()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise WorkerUnavailable(error.details() or code.name) from error
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise OperationTimedOut(f"the {kind} did not answer within {timeout:g} s") from error
        if code is grpc.StatusCode.ABORTED:  # the worker says that it is of no use any more
            raise WorkerDied(error.details() or f"the {kind} is broken") from error
        raise InternalError(f"the {kind} answered {code.name}: {error.details()}") from error
    except asyncio.CancelledError:
        # Closing a channel cancels its calls, which is no cancellation of the current task.
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise WorkerUnavailable("the connection to the worker was closed") from None
