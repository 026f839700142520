"""gRPC calls to trainers, and the secret, epoch, deadline and typed errors of all calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from gateway.workers.worker import Worker
from tandem.errors import (
    InternalError,
    OperationTimedOut,
    OutOfMemory,
    WorkerDied,
    describe,
    without_paths,
)
from tandem.protocol.worker import DEFECT_METADATA_KEY, OUT_OF_MEMORY_METADATA_KEY
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc

DESCRIBE_TIMEOUT = 30.0
_REMOVAL_TIMEOUT = 60.0
_PROGRESS_TIMEOUT = 5.0
_RELEASE_TIMEOUT = 5.0
_IDLE_INTERVAL = 0.02
_FAILED_SEND = "Internal error from Core"  # gRPC's own words
EXIT_REPORT_PATIENCE = 5.0
"""Seconds for the launcher to report a worker's end after its connection broke."""

Request = TypeVar("Request", contravariant=True)
Operation = TypeVar("Operation", bound="HasHeader")
Reply = TypeVar("Reply", covariant=True)
Answer = TypeVar("Answer")


class Method(Protocol[Request, Reply]):
    def __call__(
        self,
        request: Request,
        *,
        metadata: tuple[tuple[str, str], ...],
        timeout: float | None = None,
    ) -> Awaitable[Reply]: ...


class WorkerUnavailable(Exception):
    """The connection broke or was closed. The worker's exit will be reported."""


class HasHeader(Protocol):
    @property
    def header(self) -> common_pb2.OperationHeader: ...


class CallOrder:
    """The unanswered operations of one trainer process, in order. The trainer works on the first
    one. `since` is the event loop time of its last progress. Operations of an earlier gateway are
    unknown."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], None] = {}
        self.since = -math.inf

    @property
    def first(self) -> str:
        return next(iter(self._calls), ("", 0))[0]

    @contextmanager
    def sent(self, run_id: str, seq_id: int) -> Iterator[None]:
        if not self._calls:
            self.note_progress()
        self._calls.setdefault((run_id, seq_id))
        yield
        self.note_progress()
        # Not after an error: the process may still work on it.
        self._calls.pop((run_id, seq_id), None)

    def note_progress(self) -> None:
        self.since = asyncio.get_running_loop().time()

    def forget(self, run_id: str) -> None:
        self._calls = {call: None for call in self._calls if call[0] != run_id}

    def clear(self) -> None:
        self._calls.clear()
        self.since = -math.inf


class TrainerClient:
    """A run's calls to its trainer. Use: `await client.call(client.stub.Publish, request,
    begun=call.begun)`.

    Calls raise `WorkerUnavailable` or the failure's `TandemError`. An operation may take `timeout`
    seconds, and at most `window` are sent ahead. All runs of the trainer share `calls`. A call
    waits for other runs' calls while each ends in time."""

    def __init__(
        self, worker: Worker, *, run_id: str, timeout: float, window: int, calls: CallOrder
    ) -> None:
        self.stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        self._forward_backward: Callable[..., Awaitable[trainer_pb2.ForwardBackwardReply]]
        self._forward_backward = worker.channel.unary_unary(
            "/tandem.v1.Trainer/ForwardBackward",
            response_deserializer=trainer_pb2.ForwardBackwardReply.FromString,
        )
        self.worker = worker
        self._run_id = run_id
        self._timeout = timeout
        self._calls = calls
        self._call_timeout = (window + 1) * timeout

    async def describe(self) -> trainer_pb2.DescribeTrainerReply:
        request = trainer_pb2.DescribeTrainerRequest(run_id=self._run_id)
        return await self._in_turn(self.stub.Describe, request, timeout=DESCRIBE_TIMEOUT)

    async def progress(self) -> trainer_pb2.ProgressReply:
        request = trainer_pb2.ProgressRequest(run_id=self._run_id)
        return await call_worker(
            self.worker, self.stub.Progress, request, timeout=_PROGRESS_TIMEOUT
        )

    async def add_run(self, request: trainer_pb2.AddRunRequest) -> trainer_pb2.AddRunReply:
        return await self._in_turn(self.stub.AddRun, request)

    async def remove_run(self, run_id: str) -> None:
        request = trainer_pb2.RemoveRunRequest(run_id=run_id)
        await self._in_turn(self.stub.RemoveRun, request, timeout=_REMOVAL_TIMEOUT)

    async def when_idle(self) -> trainer_pb2.DescribeTrainerReply:
        """Return the run's description when its trainer has finished all operations."""
        last = -1
        while True:
            if not (await self.progress()).seq_id:
                about = await self.describe()
                if about.last_seq_id == last:
                    return about
                last = about.last_seq_id
            await asyncio.sleep(_IDLE_INTERVAL)

    async def call(
        self, method: Method[Operation, Reply], request: Operation, *, begun: asyncio.Future[None]
    ) -> Reply:
        """Call the trainer. The operation's time counts from `begun`. The gRPC deadline also allows
        for earlier operations."""
        answer = call_worker(self.worker, method, request, timeout=self._call_timeout)
        with self._calls.sent(request.header.run_id, request.header.seq_id):
            if begun.done():
                return await self._in_time(answer)
            task = asyncio.create_task(answer)
            either: tuple[asyncio.Future[Any], ...] = (task, begun)
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                return await self._in_time(task)
            finally:
                task.cancel()

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise OperationTimedOut(
                f"the trainer did not end the operation within {self._timeout:g} s "
                "(TANDEM_OPERATION_TIMEOUT); send smaller batches, or raise the setting"
            ) from None

    async def replay(self, method: Method[Operation, Reply], request: Operation) -> Reply:
        with self._calls.sent(request.header.run_id, request.header.seq_id):
            return await self._in_turn(method, request)

    async def restore(self, request: trainer_pb2.RestoreRequest) -> trainer_pb2.RestoreReply:
        request.run_id = self._run_id
        with self._calls.sent(self._run_id, request.seq_id):
            return await self._in_turn(self.stub.Restore, request)

    async def _in_turn(
        self, method: Method[Request, Reply], request: Request, *, timeout: float = 0.0
    ) -> Reply:
        """Wait for earlier calls, then for this one, for at most `timeout` seconds or an
        operation's time. Raises `OperationTimedOut`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        task = asyncio.create_task(call_worker(self.worker, method, request))
        try:
            while not task.done():
                at_least = began + (timeout or self._timeout)
                left = max(at_least, self._calls.since + self._timeout) - loop.time()
                if left <= 0:
                    waited = loop.time() - began
                    raise OperationTimedOut(f"the trainer did not answer within {waited:.0f} s")
                await asyncio.wait({task}, timeout=left)
            answer = task.result()
            self._calls.note_progress()
            return answer
        finally:
            task.cancel()

    async def release(self, name: str) -> None:
        """Let the trainer free the weights for a sampler, which it does at once."""
        request = trainer_pb2.ReleaseRequest(run_id=self._run_id, name=name)
        await call_worker(self.worker, self.stub.Release, request, timeout=_RELEASE_TIMEOUT)

    async def await_published(
        self, request: trainer_pb2.PublishRequest
    ) -> trainer_pb2.PublishReply:
        return await call_worker(
            self.worker, self.stub.AwaitPublished, request, timeout=self._timeout
        )

    async def await_snapshot(
        self, request: trainer_pb2.AwaitSnapshotRequest
    ) -> trainer_pb2.AwaitSnapshotReply:
        request.run_id = self._run_id
        return await call_worker(
            self.worker, self.stub.AwaitSnapshot, request, timeout=self._timeout
        )

    async def take_snapshot(
        self, request: trainer_pb2.TakeSnapshotRequest
    ) -> trainer_pb2.AwaitSnapshotReply:
        request.run_id = self._run_id
        return await self._in_turn(self.stub.TakeSnapshot, request)

    def forward_backward(
        self, payload: bytes
    ) -> Method[trainer_pb2.ForwardBackwardRequest, trainer_pb2.ForwardBackwardReply]:
        """Return a method that sends a request with this payload, which the replay log does not
        store. Joining the bytes blocks the event loop for 18 ms per 32 MiB. A message with the
        payload would take 58 ms."""

        def send(
            request: trainer_pb2.ForwardBackwardRequest,
            *,
            metadata: tuple[tuple[str, str], ...],
            timeout: float | None = None,
        ) -> Awaitable[trainer_pb2.ForwardBackwardReply]:
            tag = request.PAYLOAD_FIELD_NUMBER << 3 | 2  # 2: bytes, after their length
            parts = (request.SerializeToString(), _varint(tag), _varint(len(payload)), payload)
            return self._forward_backward(b"".join(parts), metadata=metadata, timeout=timeout)

        return send


def _varint(value: int) -> bytes:
    """Encode a number as protobuf does: seven bits per byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


async def call_worker(
    worker: Worker,
    method: Method[Request, Reply],
    request: Request,
    *,
    timeout: float | None = None,
) -> Reply:
    async with errors_translated(worker):
        return await method(request, metadata=worker.metadata, timeout=timeout)


def this_task_is_cancelled() -> bool:
    """Return whether a `CancelledError` is meant for the current task itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@asynccontextmanager
async def errors_translated(worker: Worker) -> AsyncIterator[None]:
    kind = worker.handle.kind
    try:
        yield
    except grpc.aio.UsageError as error:  # a closed channel
        raise WorkerUnavailable(describe(error)) from error
    except grpc.aio.AioRpcError as error:
        worker.epoch.raise_if_superseded(error)
        code, details = error.code(), without_paths(error.details() or "")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise WorkerUnavailable(details or code.name) from error
        # A failed send hides the status that ended a stream. The next stream shows it.
        if code is grpc.StatusCode.INTERNAL and details.startswith(_FAILED_SEND):
            raise WorkerUnavailable(f"the {kind} ended the stream during a send") from error
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise OperationTimedOut(f"the {kind} gave up: {error.details()}") from error
        metadata = dict(error.trailing_metadata() or ())
        if tokens := metadata.get(OUT_OF_MEMORY_METADATA_KEY):
            raise OutOfMemory(details, tokens=int(tokens)) from error
        if code is grpc.StatusCode.ABORTED:  # the worker reports that it is useless
            defect = DEFECT_METADATA_KEY in metadata
            raise WorkerDied(details or f"the {kind} is broken", defect=defect) from error
        raise InternalError(f"the {kind} answered {code.name}: {details}") from error
    except asyncio.CancelledError:
        if this_task_is_cancelled():  # not a closed channel, which also cancels calls
            raise
        raise WorkerUnavailable("the connection to the worker was closed") from None
