"""The gRPC face of rank 0: admits calls, puts them in order, answers them once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc

from tandem.telemetry import Log
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from trainer_service.engine_thread import EngineThread
from trainer_service.metrics import TrainerMetrics
from trainer_service.sequence import OperationSequence
from trainer_service.waiting import first_of

if TYPE_CHECKING:
    from trainer_service.operations import Operations

Request = (
    trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.PublishRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
)
Reply = (
    trainer_pb2.ForwardBackwardReply
    | trainer_pb2.OptimStepReply
    | trainer_pb2.PublishReply
    | trainer_pb2.SaveCheckpointReply
    | trainer_pb2.LoadCheckpointReply
)
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[object, object]
R = TypeVar(
    "R",
    trainer_pb2.ForwardBackwardReply,
    trainer_pb2.OptimStepReply,
    trainer_pb2.PublishReply,
    trainer_pb2.SaveCheckpointReply,
    trainer_pb2.LoadCheckpointReply,
)

T = TypeVar("T")

KEPT_RESULTS = 32
"""More than the gateway ever sends ahead, so that what it sends again is remembered."""


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """Who may call is decided before (`tandem/worker_access.py`). `broken` is set to a sentence
    once the process group is of no use any more: then every call is answered with ABORTED and
    that sentence."""

    def __init__(
        self,
        *,
        engine: EngineThread,
        operation_timeout: float,
        metrics: TrainerMetrics,
        log: Log,
        broken: asyncio.Future[str],
    ) -> None:
        self._engine = engine
        self._operation_timeout = operation_timeout
        self._metrics = metrics
        self._log = log
        self._broken = broken
        self._sequence: OperationSequence[Reply] = OperationSequence(keep=KEPT_RESULTS)

    async def Describe(
        self, request: trainer_pb2.DescribeTrainerRequest, context: Context
    ) -> trainer_pb2.DescribeTrainerReply:
        applied = self._sequence.applied
        job = self._engine.submit(lambda operations: operations.describe(last_seq_id=applied))
        return await self._or_broken(
            asyncio.ensure_future(asyncio.wrap_future(job)), context, self._time_left(context)
        )

    async def ForwardBackward(
        self, request: trainer_pb2.ForwardBackwardRequest, context: Context
    ) -> trainer_pb2.ForwardBackwardReply:
        return await self._answer(
            request,
            context,
            trainer_pb2.ForwardBackwardReply,
            lambda operations: operations.forward_backward(request),
        )

    async def OptimStep(
        self, request: trainer_pb2.OptimStepRequest, context: Context
    ) -> trainer_pb2.OptimStepReply:
        return await self._answer(
            request,
            context,
            trainer_pb2.OptimStepReply,
            lambda operations: operations.optim_step(request),
        )

    async def Publish(
        self, request: trainer_pb2.PublishRequest, context: Context
    ) -> trainer_pb2.PublishReply:
        return await self._answer(
            request,
            context,
            trainer_pb2.PublishReply,
            lambda operations: operations.publish(request),
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointReply:
        return await self._answer(
            request,
            context,
            trainer_pb2.SaveCheckpointReply,
            lambda operations: operations.save_checkpoint(request),
        )

    async def LoadCheckpoint(
        self, request: trainer_pb2.LoadCheckpointRequest, context: Context
    ) -> trainer_pb2.LoadCheckpointReply:
        return await self._answer(
            request,
            context,
            trainer_pb2.LoadCheckpointReply,
            lambda operations: operations.load_checkpoint(request),
        )

    # --- Admission -------------------------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        context: Context,
        reply_type: type[R],
        job: Callable[[Operations], R],
    ) -> R:
        header = request.header
        reply: Reply | None = self._sequence.result(header.seq_id)
        if reply is None:
            task = self._sequence.running(header.seq_id)
            if task is None:
                if header.seq_id <= self._sequence.queued:
                    await _abort(
                        context,
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"operation {header.seq_id} was applied already and its result is no "
                        f"longer kept; the newest is {self._sequence.queued}",
                    )
                # A task of its own: a caller who gives up does not undo what the log holds.
                task = asyncio.create_task(self._in_order(header, reply_type.DESCRIPTOR.name, job))
                self._sequence.begin(header.seq_id, task)
            reply = await self._or_broken(task, context, self._time_left(context))
        if not isinstance(reply, reply_type):
            await _abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"operation {header.seq_id} was one of another kind ({type(reply).__name__})",
            )
        return reply

    def _time_left(self, context: Context) -> float:
        left = context.time_remaining()
        return self._operation_timeout if left is None else min(left, self._operation_timeout)

    async def _or_broken(self, task: asyncio.Future[T], context: Context, timeout: float) -> T:
        await first_of(task, self._broken, timeout=timeout)
        if task.done() and task.exception() is None:
            return task.result()
        if task.done() and isinstance(task.exception(), TimeoutError):
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(task.exception()))
        if task.done() and not self._broken.done():
            # The operation broke the group; who did it will be known in a moment.
            await first_of(self._broken, timeout=5)
        if self._broken.done():
            await _abort(context, grpc.StatusCode.ABORTED, self._broken.result())
        if task.done():
            await _abort(context, grpc.StatusCode.INTERNAL, f"rank 0 failed: {task.exception()}")
        await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the operation took too long")

    # --- Order -----------------------------------------------------------------------------

    async def _in_order(
        self, header: common_pb2.OperationHeader, reply_name: str, job: Callable[[Operations], R]
    ) -> Reply:
        """Waits for the operation before this one, applies it and remembers the result."""
        kind = reply_name.removesuffix("Reply")
        self._metrics.waiting.inc()
        try:
            try:
                await self._sequence.wait_for_turn(
                    previous=header.previous_seq_id, timeout=self._operation_timeout
                )
            except TimeoutError:
                raise TimeoutError(
                    f"operation {header.seq_id} waited {self._operation_timeout:g} s for "
                    f"operation {header.previous_seq_id}, which did not come"
                ) from None
            future = self._engine.submit(lambda operations: _timed(job, operations))
            await self._sequence.enter(header.seq_id)
            reply, seconds = await asyncio.wrap_future(future)
        finally:
            self._metrics.waiting.dec()
        self._sequence.ended(header.seq_id, reply)
        self._record(header, kind, reply, seconds)
        return reply

    def _record(
        self, header: common_pb2.OperationHeader, kind: str, reply: Reply, seconds: float
    ) -> None:
        outcome = reply.failure.type if reply.HasField("failure") else "ok"
        self._metrics.operations.labels(kind, "ok" if outcome == "ok" else "failure").inc()
        self._metrics.seconds.labels(kind).observe(seconds)
        if isinstance(reply, trainer_pb2.ForwardBackwardReply):
            self._metrics.tokens.inc(reply.tokens)
        elif isinstance(reply, trainer_pb2.PublishReply):
            self._metrics.published.inc(reply.bytes)
        elif isinstance(reply, trainer_pb2.OptimStepReply | trainer_pb2.LoadCheckpointReply):
            self._metrics.steps.set(reply.step)
        self._log.info(
            "operation",
            operation=kind,
            outcome=outcome,
            seconds=round(seconds, 6),
            session_id=header.session_id,
            run_id=header.run_id,
            request_id=header.operation_id,
            seq_id=header.seq_id,
        )


def _timed(job: Callable[[Operations], R], operations: Operations) -> tuple[R, float]:
    began = time.perf_counter()
    return job(operations), time.perf_counter() - began


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence)
    raise AssertionError("abort raises")
