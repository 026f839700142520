"""The gRPC calls to trainers, and what all calls have: secret and epoch, a bound on their time and
typed errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator
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
_IDLE_INTERVAL = 0.1
EXIT_REPORT_PATIENCE = 5.0
"""Seconds within which the launcher reports the end of a worker whose connection broke."""

Request = TypeVar("Request", contravariant=True)
Operation = TypeVar("Operation", bound="HasHeader")
Reply = TypeVar("Reply", covariant=True)
Answer = TypeVar("Answer")


class Method(Protocol[Request, Reply]):
    """A method of a stub."""

    def __call__(
        self,
        request: Request,
        *,
        metadata: tuple[tuple[str, str], ...],
        timeout: float | None = None,
    ) -> Awaitable[Reply]: ...


class WorkerUnavailable(Exception):
    """The connection broke or was closed: the worker has died, and its exit will be reported."""


class HasHeader(Protocol):
    """The request of an operation."""

    @property
    def header(self) -> common_pb2.OperationHeader: ...


class CallOrder:
    """The operations that were sent to one trainer process and are not answered, in order: it
    applies one at a time, so that the first is the one that it is at, or was at when it died.

    `since` is when it came to that, in the time of the event loop, as far as can be known; what an
    earlier gateway has sent it is unknown.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], None] = {}
        self.since = -math.inf

    @property
    def first(self) -> str:
        """The run of the first; "" if there is none."""
        return next(iter(self._calls), ("", 0))[0]

    @contextmanager
    def sent(self, run_id: str, seq_id: int) -> Iterator[None]:
        if not self._calls:
            self.note_progress()
        self._calls.setdefault((run_id, seq_id))
        yield
        self.note_progress()
        # Not after an error: the process may be at it all the same.
        self._calls.pop((run_id, seq_id), None)

    def note_progress(self) -> None:
        """Note that the process comes to something else now."""
        self.since = asyncio.get_running_loop().time()

    def forget(self, run_id: str) -> None:
        self._calls = {call: None for call in self._calls if call[0] != run_id}

    def clear(self) -> None:
        """Begin anew, with a process that has been sent nothing."""
        self._calls.clear()
        self.since = -math.inf


class TrainerClient:
    """A run's calls to its trainer. Use:
    `await client.call(client.stub.Publish, request, begun=call.begun)`.

    Every call raises `WorkerUnavailable` or the `TandemError` that a failure stands for. An
    operation may take `timeout` seconds; at most `window` are sent ahead. `calls` are those of all
    runs that share the trainer: what comes after those of others waits as long as the trainer ends
    one of them in time.
    """

    def __init__(
        self, worker: Worker, *, run_id: str, timeout: float, window: int, calls: CallOrder
    ) -> None:
        self.stub = trainer_pb2_grpc.TrainerStub(worker.channel)
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
        """Say where the run's trainer is once it has ended what it was sent."""
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
        """The time that it may take counts from `begun`: operations are sent ahead, and those
        before it may take their time. The call's own deadline, which its worker is told, allows
        for all of them."""
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
        """Return what it returns within the time of an operation. Raises `OperationTimedOut`."""
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise OperationTimedOut(
                f"the trainer did not end it within {self._timeout:g} s (TANDEM_OPERATION_TIMEOUT)"
            ) from None

    async def replay(self, method: Method[Operation, Reply], request: Operation) -> Reply:
        """Call it as `call` does, where nothing is sent ahead."""
        with self._calls.sent(request.header.run_id, request.header.seq_id):
            return await self._in_turn(method, request)

    async def restore(self, request: trainer_pb2.RestoreRequest) -> trainer_pb2.RestoreReply:
        request.run_id = self._run_id
        with self._calls.sent(self._run_id, request.seq_id):
            return await self._in_turn(self.stub.Restore, request)

    async def _in_turn(
        self, method: Method[Request, Reply], request: Request, *, timeout: float = 0.0
    ) -> Reply:
        """Call what may take `timeout` seconds, if not as long as an operation, once the trainer is
        through with what it was sent before. Raises `OperationTimedOut` if it ends none of that in
        the time of an operation."""
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
        """Let it free what it keeps of a version for a sampler; whatever it is at, it does so at
        once."""
        request = trainer_pb2.ReleaseRequest(run_id=self._run_id, name=name)
        await call_worker(self.worker, self.stub.Release, request, timeout=_RELEASE_TIMEOUT)

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

    async def sleep(
        self, request: common_pb2.SleepRequest, *, timeout: float
    ) -> common_pb2.SwitchReply:
        return await call_worker(self.worker, self.stub.Sleep, request, timeout=timeout)

    async def wake(
        self, request: common_pb2.WakeRequest, *, timeout: float
    ) -> common_pb2.SwitchReply:
        return await call_worker(self.worker, self.stub.Wake, request, timeout=timeout)

    def forward_backward(
        self, payload: bytes
    ) -> Method[trainer_pb2.ForwardBackwardRequest, trainer_pb2.ForwardBackwardReply]:
        """Return the method that sends a request with this payload. The request itself stays
        without it, because the replay log keeps requests."""

        def send(
            request: trainer_pb2.ForwardBackwardRequest,
            *,
            metadata: tuple[tuple[str, str], ...],
            timeout: float | None = None,
        ) -> Awaitable[trainer_pb2.ForwardBackwardReply]:
            whole = trainer_pb2.ForwardBackwardRequest(payload=payload)
            whole.MergeFrom(request)
            return self.stub.ForwardBackward(whole, metadata=metadata, timeout=timeout)

        return send


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
    """Whether a `CancelledError` is for the current task, and not only for what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@asynccontextmanager
async def errors_translated(worker: Worker) -> AsyncIterator[None]:
    """Raise gRPC's errors as those that the clients promise."""
    kind = worker.handle.kind
    try:
        yield
    except grpc.aio.UsageError as error:  # of a channel that was closed
        raise WorkerUnavailable(describe(error)) from error
    except grpc.aio.AioRpcError as error:
        worker.epoch.check(error)
        code, details = error.code(), without_paths(error.details() or "")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise WorkerUnavailable(details or code.name) from error
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise OperationTimedOut(f"the {kind} gave up: {error.details()}") from error
        metadata = dict(error.trailing_metadata() or ())
        if tokens := metadata.get(OUT_OF_MEMORY_METADATA_KEY):
            raise OutOfMemory(details, tokens=int(tokens)) from error
        if code is grpc.StatusCode.ABORTED:  # the worker says that it is of no use any more
            defect = DEFECT_METADATA_KEY in metadata
            raise WorkerDied(details or f"the {kind} is broken", defect=defect) from error
        raise InternalError(f"the {kind} answered {code.name}: {details}") from error
    except asyncio.CancelledError:
        if this_task_is_cancelled():  # and not by closing the channel, which cancels its calls
            raise
        raise WorkerUnavailable("the connection to the worker was closed") from None
