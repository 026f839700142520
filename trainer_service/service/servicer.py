"""The gRPC servicer of rank 0: admits calls, puts them in order and answers each once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc

from tandem.errors import OutOfMemory, StorageFailed, TandemError, WorkerDied
from tandem.protocol.fencing import Fence
from tandem.protocol.worker import DEFECT_METADATA_KEY, OUT_OF_MEMORY_METADATA_KEY
from tandem.telemetry import Log
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from trainer_service.service.batch_call import BatchCall
from trainer_service.service.deaths import trace
from trainer_service.service.engine_thread import EngineThread
from trainer_service.service.metrics import TrainerMetrics
from trainer_service.service.sequence import OperationSequence, Reply, RunRemoved

if TYPE_CHECKING:
    from trainer_service.service.hosted_runs import HostedRuns
    from trainer_service.service.operations import Operations
    from trainer_service.service.switching import Switching

    Context = grpc.aio.ServicerContext[object, object]

T = TypeVar("T")

Request = (
    trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.PublishRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
)
R = TypeVar(
    "R",
    trainer_pb2.ForwardBackwardReply,
    trainer_pb2.OptimStepReply,
    trainer_pb2.PublishReply,
    trainer_pb2.SaveCheckpointReply,
    trainer_pb2.LoadCheckpointReply,
)


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """Once `broken` is set, every call ends with ABORTED and its sentence, or with
    RESOURCE_EXHAUSTED if the call's run ran out of memory.

    Callers are already authenticated (`tandem/protocol/worker_server.py`)."""

    def __init__(
        self,
        *,
        engine: EngineThread,
        run_id: str,
        operation_timeout: float,
        metrics: TrainerMetrics,
        log: Log,
        broken: asyncio.Future[TandemError],
        fence: Fence,
    ) -> None:
        self._engine = engine
        self._operation_timeout = operation_timeout
        self._metrics = metrics
        self._log = log
        self._broken = broken
        self._sequences = {run_id: OperationSequence()}
        self._changing = asyncio.Lock()  # protects the set of runs
        metrics.runs.set(1)
        self._at_work = run_id
        self._fence = fence
        self._switches = 0

    async def AddRun(
        self, request: trainer_pb2.AddRunRequest, context: Context
    ) -> trainer_pb2.AddRunReply:
        await self._fence.check(context)
        async with self._changing:
            job = self._engine.submit(lambda runs: runs.add_run(request))
            reply = await self._or_broken(asyncio.wrap_future(job), context)
            if not reply.HasField("failure"):
                sequence = self._sequences.setdefault(request.run_id, OperationSequence())
                reply.about.last_seq_id = sequence.applied
                self._metrics.runs.set(len(self._sequences))
                self._log.info("run_added", run_id=request.run_id)
        return reply

    async def RemoveRun(
        self, request: trainer_pb2.RemoveRunRequest, context: Context
    ) -> trainer_pb2.RemoveRunReply:
        async with self._changing:
            if list(self._sequences) == [request.run_id]:
                await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "it is the last run")
            if (sequence := self._sequences.pop(request.run_id, None)) is not None:
                await sequence.close()
            # The engine thread has finished the run's operations before this job.
            job = self._engine.submit(lambda runs: runs.remove_run(request.run_id))
            await self._or_broken(asyncio.wrap_future(job), context)
            self._metrics.runs.set(len(self._sequences))
        self._log.info("run_removed", run_id=request.run_id)
        return trainer_pb2.RemoveRunReply()

    async def Describe(
        self, request: trainer_pb2.DescribeTrainerRequest, context: Context
    ) -> trainer_pb2.DescribeTrainerReply:
        if not request.run_id:
            return trainer_pb2.DescribeTrainerReply(run_ids=self._sequences)
        await self._sequence(request.run_id, context)
        job = self._engine.submit(lambda runs: runs.describe_run(request.run_id))
        about = await self._or_broken(asyncio.wrap_future(job), context)
        about.last_seq_id = (await self._sequence(request.run_id, context)).applied
        return about

    async def Progress(
        self, request: trainer_pb2.ProgressRequest, context: Context
    ) -> trainer_pb2.ProgressReply:
        await self._sequence(request.run_id, context)
        started = self._engine.started
        if not started.done() or started.exception() is not None:
            return trainer_pb2.ProgressReply()
        return started.result().operations_of(request.run_id).progress.read()

    async def ForwardBackward(
        self, request: trainer_pb2.ForwardBackwardRequest, context: Context
    ) -> trainer_pb2.ForwardBackwardReply:
        return await self._answer(
            request,
            context,
            trainer_pb2.ForwardBackwardReply,
            (call := BatchCall(request)).compute,
            call=call,
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

    async def AwaitPublished(
        self, request: trainer_pb2.PublishRequest, context: Context
    ) -> trainer_pb2.PublishReply:
        # Not in the engine thread, which may be busy with later operations.
        await self._sequence(request.header.run_id, context)
        operations = self._engine.started.result().operations_of(request.header.run_id)
        durable = operations.publisher.await_published(request)
        return await self._or_broken(asyncio.wrap_future(durable), context)

    async def Release(
        self, request: trainer_pb2.ReleaseRequest, context: Context
    ) -> trainer_pb2.ReleaseReply:
        # Not in the engine thread, which may be busy with later operations.
        await self._sequence(request.run_id, context)
        operations = self._engine.started.result().operations_of(request.run_id)
        await asyncio.to_thread(operations.publisher.release, request.name)
        return trainer_pb2.ReleaseReply()

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

    async def AwaitSnapshot(
        self, request: trainer_pb2.AwaitSnapshotRequest, context: Context
    ) -> trainer_pb2.AwaitSnapshotReply:
        # Not in the engine thread, which may be busy with later operations.
        await self._sequence(request.run_id, context)
        runs = self._engine.started.result()
        written = runs.operations_of(request.run_id).snapshots.result(request.path)
        # A caller that gives up must not cancel the future for others.
        return await self._or_broken(asyncio.wrap_future(written), context)

    async def TakeSnapshot(
        self, request: trainer_pb2.TakeSnapshotRequest, context: Context
    ) -> trainer_pb2.AwaitSnapshotReply:
        await self._sequence(request.run_id, context)
        await self._fence.check(context)
        job = self._engine.submit(
            lambda runs: runs.take_turn(request.run_id).take_snapshot(request)
        )
        await self._or_broken(asyncio.wrap_future(job), context)
        return await self.AwaitSnapshot(
            trainer_pb2.AwaitSnapshotRequest(path=request.path, run_id=request.run_id), context
        )

    async def Restore(
        self, request: trainer_pb2.RestoreRequest, context: Context
    ) -> trainer_pb2.RestoreReply:
        sequence = await self._sequence(request.run_id, context)
        await self._fence.check(context)
        if request.path:  # otherwise calls may wait for one that the earlier gateway did not send
            await self._refuse_unless_idle(context, sequence)
        job = self._engine.submit(lambda runs: runs.take_turn(request.run_id).restore(request))
        reply = await self._or_broken(asyncio.wrap_future(job), context)
        if not reply.HasField("failure"):
            await sequence.restored(request.seq_id)
        return reply

    async def Sleep(
        self, request: common_pb2.SleepRequest, context: Context
    ) -> common_pb2.SwitchReply:
        return await self._switch(context, lambda switching: switching.sleep(request))

    async def Wake(
        self, request: common_pb2.WakeRequest, context: Context
    ) -> common_pb2.SwitchReply:
        """Answer at once while awake, even during an operation of an earlier gateway."""
        if self._fence.leased and not self._fence.asleep:
            await self._fence.admit(context)
            return common_pb2.SwitchReply()
        return await self._switch(context, lambda switching: switching.wake())

    async def _switch(
        self, context: Context, move: Callable[[Switching], common_pb2.SwitchReply]
    ) -> common_pb2.SwitchReply:
        await self._fence.admit(context)
        await self._refuse_unless_idle(context, *self._sequences.values())
        self._switches += 1
        self._fence.asleep = True  # also while state moves
        # A separate task: if the caller gives up, the fence must still be updated.
        return await self._or_broken(asyncio.create_task(self._moved(move)), context)

    async def _moved(
        self, move: Callable[[Switching], common_pb2.SwitchReply]
    ) -> common_pb2.SwitchReply:
        def carry_out(runs: HostedRuns) -> tuple[common_pb2.SwitchReply, bool]:
            if not runs.release_copies():
                busy = StorageFailed("a version's files are still being written from its memory")
                return common_pb2.SwitchReply(failure=busy.to_failure()), runs.switching.asleep
            return move(runs.switching), runs.switching.asleep

        reply, asleep = await asyncio.wrap_future(self._engine.submit(carry_out))
        self._switches -= 1
        self._fence.asleep = asleep or self._switches > 0
        self._log.info(
            "asleep" if asleep else "awake",
            outcome=reply.failure.type or "ok",
            seconds=round(reply.seconds, 6),
            bytes_moved=reply.bytes_moved,
        )
        return reply

    async def _refuse_unless_idle(self, context: Context, *sequences: OperationSequence) -> None:
        if not all(sequence.idle for sequence in sequences):
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "operations are under way")

    async def _answer(
        self,
        request: Request,
        context: Context,
        reply_type: type[R],
        job: Callable[[Operations], R],
        *,
        call: BatchCall | None = None,
    ) -> R:
        """Return an operation's reply, applying the operation unless it was applied before.

        The batch of a `call` is read at once. The engine thread calls `job` in its turn. Applied
        and running operations are answered without a lease."""
        header = request.header
        sequence = await self._sequence(header.run_id, context)
        reply: Reply | None = sequence.result(header.seq_id)
        if reply is None:
            task = sequence.running(header.seq_id)
            if task is None:
                if header.seq_id <= sequence.queued:
                    await _abort(
                        context,
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"operation {header.seq_id} was applied already and its result is no "
                        f"longer kept; the newest is {sequence.queued}",
                    )
                await self._fence.check(context)
                if call:
                    self._engine.read_ahead(call)
                # A separate task: if the caller gives up, the journal's operation must still be
                # applied.
                kind = reply_type.DESCRIPTOR.name.removesuffix("Reply")
                task = asyncio.create_task(self._in_order(sequence, header, kind, job, call))
                sequence.begin_operation(header.seq_id, task)
            reply = await self._or_broken(task, context, run_id=header.run_id)
        if not isinstance(reply, reply_type):
            await _abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"operation {header.seq_id} was one of another kind ({type(reply).__name__})",
            )
        return reply

    async def _sequence(self, run_id: str, context: Context) -> OperationSequence:
        if (sequence := self._sequences.get(run_id)) is None:
            await _abort_unknown(context, run_id)
        return sequence

    async def _or_broken(self, task: asyncio.Future[T], context: Context, *, run_id: str = "") -> T:
        """Return the task's result, or abort the call at its deadline or when the process group
        breaks.

        The caller decides the deadline, because it knows the operations sent before."""
        await first_of(task, self._broken, timeout=context.time_remaining())
        if task.done() and task.exception() is None:
            return task.result()
        if task.done() and isinstance(task.exception(), TimeoutError):
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(task.exception()))
        if task.done() and isinstance(task.exception(), RunRemoved):
            await _abort_unknown(context, run_id)
        if task.done() and not self._broken.done():
            # The operation broke the group. The causing rank will be known in a moment.
            await first_of(self._broken, timeout=5)
        if self._broken.done():
            await self._abort_broken(context, run_id)
        if task.done() and (error := task.exception()) is not None:
            await _abort(context, grpc.StatusCode.INTERNAL, f"rank 0 failed: {trace(error)}")
        await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the operation took too long")

    async def _in_order(
        self,
        sequence: OperationSequence,
        header: common_pb2.OperationHeader,
        kind: str,
        job: Callable[[Operations], R],
        call: BatchCall | None,
    ) -> Reply:
        self._metrics.waiting.inc()
        try:
            try:
                await sequence.wait_for_turn(
                    previous=header.previous_seq_id, timeout=self._operation_timeout
                )
            except TimeoutError:
                raise TimeoutError(
                    f"operation {header.seq_id} waited {self._operation_timeout:g} s for "
                    f"operation {header.previous_seq_id}, which did not come"
                ) from None
            future = self._engine.submit(
                lambda runs: self._apply(job, header, runs), run_id=header.run_id, call=call
            )
            await sequence.enter(header.seq_id)
            reply, seconds = await asyncio.wrap_future(future)
        finally:
            self._metrics.waiting.dec()
        sequence.ended(header.seq_id, reply)
        self._metrics.record(kind, reply, seconds)
        self._log.info(
            "operation",
            operation=kind,
            outcome=reply.failure.type if reply.HasField("failure") else "ok",
            seconds=round(seconds, 6),
            session_id=header.session_id,
            run_id=header.run_id,
            request_id=header.operation_id,
            seq_id=header.seq_id,
            **_in_numbers(reply, seconds),
        )
        return reply

    def _apply(
        self, job: Callable[[Operations], R], header: common_pb2.OperationHeader, runs: HostedRuns
    ) -> tuple[R, float]:
        """Return the reply and its seconds. Runs in the engine thread."""
        began = time.perf_counter()
        self._at_work = header.run_id
        operations = runs.take_turn(header.run_id)
        operations.note_refused(header.gradients_incomplete)
        operations.progress.begin_batch(header.seq_id)
        try:
            reply = job(operations)
            return reply, reply.seconds or time.perf_counter() - began
        finally:
            operations.progress.end_batch()

    async def _abort_broken(self, context: Context, run_id: str) -> NoReturn:
        error = self._broken.result()
        if isinstance(error, OutOfMemory) and run_id == self._at_work:
            context.set_trailing_metadata(((OUT_OF_MEMORY_METADATA_KEY, str(error.tokens)),))
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        if isinstance(error, WorkerDied) and error.defect and run_id == self._at_work:
            context.set_trailing_metadata(((DEFECT_METADATA_KEY, "yes"),))
        await _abort(context, grpc.StatusCode.ABORTED, error.message)


async def first_of(*awaitables: Awaitable[object], timeout: float | None = None) -> None:
    """Return when one is done, or after `timeout` seconds. Cancels none and raises nothing."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence)
    raise AssertionError("abort raises")


async def _abort_unknown(context: Context, run_id: str) -> NoReturn:
    await _abort(context, grpc.StatusCode.NOT_FOUND, f"this trainer does not host the run {run_id}")


def _in_numbers(reply: Reply, seconds: float) -> dict[str, int]:
    if isinstance(reply, trainer_pb2.ForwardBackwardReply):
        per_second = reply.tokens / seconds if seconds else 0
        return {"tokens": reply.tokens, "tokens_per_second": round(per_second)}
    if isinstance(reply, trainer_pb2.PublishReply):
        return {"bytes": reply.bytes}
    return {}
