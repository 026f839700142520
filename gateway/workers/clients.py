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

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)

Tell = Callable[[sampler_pb2.SampleDelta], Awaitable[None]]
"""Receives the new tokens of a sample."""


class _Method(Protocol[Request, Reply]):
    def __call__(
        self, request: Request, *, metadata: tuple[tuple[str, str], ...], timeout: float
    ) -> Awaitable[Reply]: ...


class WorkerUnavailable(Exception):
    """The connection broke or was closed: the worker has died, and its exit will be reported."""


class TrainerClient:
    """Every call raises `WorkerUnavailable` or the `TandemError` that a failure stands for.

    `timeout` in seconds is the deadline of each call.
    """

    def __init__(self, worker: Worker, *, timeout: float) -> None:
        self.worker = worker
        self._stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        self._timeout = timeout

    async def describe(self) -> trainer_pb2.DescribeTrainerReply:
        request = trainer_pb2.DescribeTrainerRequest()
        return await _call(self.worker, self._stub.Describe, request, _DESCRIBE_TIMEOUT)

    async def forward_backward(
        self, request: trainer_pb2.ForwardBackwardRequest
    ) -> trainer_pb2.ForwardBackwardReply:
        return await _call(self.worker, self._stub.ForwardBackward, request, self._timeout)

    async def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepReply:
        return await _call(self.worker, self._stub.OptimStep, request, self._timeout)

    async def publish(self, request: trainer_pb2.PublishRequest) -> trainer_pb2.PublishReply:
        return await _call(self.worker, self._stub.Publish, request, self._timeout)

    async def save_checkpoint(
        self, request: trainer_pb2.SaveCheckpointRequest
    ) -> trainer_pb2.SaveCheckpointReply:
        return await _call(self.worker, self._stub.SaveCheckpoint, request, self._timeout)

    async def load_checkpoint(
        self, request: trainer_pb2.LoadCheckpointRequest
    ) -> trainer_pb2.LoadCheckpointReply:
        return await _call(self.worker, self._stub.LoadCheckpoint, request, self._timeout)


class SamplerClient:
    """Every call raises `WorkerUnavailable` or the `TandemError` that a failure stands for.

    `timeout` in seconds is the deadline of each call.
    """

    def __init__(self, worker: Worker, *, timeout: float) -> None:
        self.worker = worker
        self._stub = sampler_pb2_grpc.SamplerStub(worker.channel)
        self._timeout = timeout

    async def load(self, request: sampler_pb2.LoadRequest) -> sampler_pb2.LoadReply:
        return await _call(self.worker, self._stub.Load, request, self._timeout)

    async def sample(self, request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleReply:
        return await _call(self.worker, self._stub.Sample, request, self._timeout)

    async def sample_stream(
        self, request: sampler_pb2.SampleRequest, tell: Tell
    ) -> sampler_pb2.SampleReply:
        """Sample as `sample` does, and pass tokens to `tell` as they are drawn.

        Nothing more is read while `tell` waits.
        """
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
    worker: Worker, method: _Method[Request, Reply], request: Request, timeout: float
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
