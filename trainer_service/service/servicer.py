"""The gRPC servicer of rank 0: admits calls, puts them in order and answers each once.

Operations enter the engine thread in the order of their run's journal, and those of several runs as
they come. The thread applies them one after the other and alone touches torch, so that the asyncio
side stays free to answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.errors import OutOfMemory, TandemError
from tandem.fencing import Fence
from tandem.telemetry import Log
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from tandem.worker import OUT_OF_MEMORY_METADATA_KEY

if TYPE_CHECKING:
    from trainer_service.service.hosted_runs import HostedRuns
    from trainer_service.service.operations import Operations
    from trainer_service.service.switching import Switching

    Context = grpc.aio.ServicerContext[object, object]

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
"""As many as a gateway may send ahead (`dispatch_window`), so that a repeated operation finds its
result."""
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class TrainerMetrics:
    """The metrics `tandem_trainer_*`. Outcomes are "ok" and "failure"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.operations = Counter(
            "tandem_trainer_operations",
            "Operations applied.",
            ["operation", "outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "tandem_trainer_operation_seconds",
            "Time to apply an operation, without the wait for its turn.",
            ["operation"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.tokens = Counter("tandem_trainer_tokens", "Tokens computed.", registry=registry)
        self.runs = Gauge("tandem_trainer_runs", "Runs hosted.", registry=registry)
        self.steps = Gauge(
            "tandem_trainer_step",
            "Optimizer steps applied, to the run that was served last.",
            registry=registry,
        )
        self.published = Counter(
            "tandem_trainer_published_bytes", "Bytes written of weight versions.", registry=registry
        )
        self.micro_batch_tokens = Gauge(
            "tandem_trainer_micro_batch_tokens",
            "Tokens of a micro-batch at most; fewer once memory ran out.",
            registry=registry,
        )
        self.waiting = Gauge(
            "tandem_trainer_waiting_operations",
            "Operations received and not yet answered.",
            registry=registry,
        )


class EngineThread:
    """Runs `start` and then jobs in one thread, with a heartbeat every `heartbeat` seconds of
    idleness.

    `on_broken` gets every error that escapes a job: the process group is of no use then.
    """

    def __init__(
        self,
        *,
        start: Callable[[], HostedRuns],
        heartbeat: float,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._start = start
        self._heartbeat = heartbeat
        self._on_broken = on_broken
        self._jobs: queue.SimpleQueue[Callable[[HostedRuns], None]] = queue.SimpleQueue()
        self.started: Future[HostedRuns] = Future()
        # A daemon: it may hang in a collective when the process is to end.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # carries what log lines say of the service
            args=(self._run,),
            name="engine",
            daemon=True,
        )

    def run(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[HostedRuns], T]) -> Future[T]:
        """Queues a job. Its future gets the result, or the error that broke the group."""
        future: Future[T] = Future()

        def carry_out(runs: HostedRuns) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = job(runs)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(result)

        self._jobs.put(carry_out)
        return future

    def _run(self) -> None:
        try:
            runs = self._start()
        except BaseException as error:  # noqa: BLE001 (passed on by the future)
            self.started.set_exception(error)
            return
        self.started.set_result(runs)
        idle_limit = self._heartbeat if runs.ranks > 1 else None
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=idle_limit)
                except queue.Empty:
                    runs.heartbeat()
                else:
                    job(runs)
        except BaseException as error:  # noqa: BLE001 (any error breaks the group)
            self._on_broken(error)


class RunRemoved(Exception):
    """The run that an operation is of was removed before its turn came."""


class OperationSequence:
    """Admits the operations of a run in journal order, each once.

    `queued` is the newest operation handed to the engine thread, `applied` the newest that has
    ended. The last `keep` results are remembered, so that a repeated operation is answered and
    not applied again.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._results: OrderedDict[int, Reply] = OrderedDict()
        self._running: dict[int, asyncio.Task[Reply]] = {}
        self._turn = asyncio.Condition()
        self._closed = False
        self.queued = 0
        self.applied = 0

    def result(self, seq_id: int) -> Reply | None:
        """The result of an operation that has ended, while it is remembered."""
        return self._results.get(seq_id)

    def running(self, seq_id: int) -> asyncio.Task[Reply] | None:
        """The task of an operation that waits or runs."""
        return self._running.get(seq_id)

    def begin(self, seq_id: int, task: asyncio.Task[Reply]) -> None:
        self._running[seq_id] = task
        task.add_done_callback(lambda _: self._running.pop(seq_id, None))

    async def wait_for_turn(self, *, previous: int, timeout: float) -> None:
        """Returns once the operation before has been handed to the engine thread.

        Raises `TimeoutError` if it does not come in time, and `RunRemoved`.
        """
        if self.queued < previous:
            async with asyncio.timeout(timeout), self._turn:
                await self._turn.wait_for(lambda: self._closed or self.queued >= previous)
        if self._closed:
            raise RunRemoved

    async def enter(self, seq_id: int) -> None:
        """Notes that the operation was handed over. No await may come between the two."""
        self.queued = max(self.queued, seq_id)
        async with self._turn:
            self._turn.notify_all()

    async def close(self) -> None:
        """Let no further operation have its turn."""
        self._closed = True
        async with self._turn:
            self._turn.notify_all()

    @property
    def idle(self) -> bool:
        return not self._running

    async def restored(self, seq_id: int) -> None:
        """Note that the state contains everything up to `seq_id`."""
        self.applied = max(self.applied, seq_id)
        await self.enter(seq_id)

    def ended(self, seq_id: int, reply: Reply) -> None:
        self.applied = max(self.applied, seq_id)
        self._results[seq_id] = reply
        while len(self._results) > self._keep:
            self._results.popitem(last=False)


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """Answers every call with ABORTED and the sentence of `broken` once that is set, since the
    process group is then of no use; with RESOURCE_EXHAUSTED if it ran out of memory at an operation
    of the call's run. Callers are authenticated before (`tandem/worker_server.py`)."""

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
        self._sequences = {run_id: OperationSequence(keep=KEPT_RESULTS)}
        self._changing = asyncio.Lock()  # which runs there are
        metrics.runs.set(1)
        self._at_work = run_id
        self._fence = fence
        self._switches = 0

    async def AddRun(
        self, request: trainer_pb2.AddRunRequest, context: Context
    ) -> trainer_pb2.AddRunReply:
        await self._fence.check(context)
        async with self._changing:
            job = self._engine.submit(lambda runs: runs.add(request))
            reply = await self._or_broken(asyncio.wrap_future(job), context)
            if not reply.HasField("failure"):
                sequence = self._sequences.setdefault(
                    request.run_id, OperationSequence(keep=KEPT_RESULTS)
                )
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
            # The engine thread is through with the run's operations when it comes to this.
            job = self._engine.submit(lambda runs: runs.remove(request.run_id))
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
        job = self._engine.submit(lambda runs: runs.describe(request.run_id))
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
        return started.result().find(request.run_id).progress.read()

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

    async def AwaitSnapshot(
        self, request: trainer_pb2.AwaitSnapshotRequest, context: Context
    ) -> trainer_pb2.AwaitSnapshotReply:
        # Not by the engine thread, which may be at operations that were sent since.
        await self._sequence(request.run_id, context)
        runs = self._engine.started.result()
        written = runs.find(request.run_id).snapshots.result(request.path)
        # Who gives up waiting does not cancel what others may wait for.
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
        """Answers at once while awake, also in the middle of an operation: of an earlier gateway,
        whose next one takes the lease over."""
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
        self._fence.asleep = True  # for as long as it moves, too
        # A task of its own: a caller that gives up does not keep the fence from what comes of it.
        return await self._or_broken(asyncio.create_task(self._moved(move)), context)

    async def _moved(
        self, move: Callable[[Switching], common_pb2.SwitchReply]
    ) -> common_pb2.SwitchReply:
        def carry_out(runs: HostedRuns) -> tuple[common_pb2.SwitchReply, bool]:
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
    ) -> R:
        """The reply of an operation, which is applied now if it was not before. Only that needs
        the devices: what was applied, or has begun, is answered whatever has become of the
        lease."""
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
                # A task of its own: a caller that gives up does not undo what the journal holds.
                kind = reply_type.DESCRIPTOR.name.removesuffix("Reply")
                task = asyncio.create_task(self._in_order(sequence, header, kind, job))
                sequence.begin(header.seq_id, task)
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
        """The task's result. Aborts the call when its deadline has passed, if it has one, or when
        the process group breaks. How long an operation may take is the caller's to decide, who
        knows what was sent before it."""
        await first_of(task, self._broken, timeout=context.time_remaining())
        if task.done() and task.exception() is None:
            return task.result()
        if task.done() and isinstance(task.exception(), TimeoutError):
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(task.exception()))
        if task.done() and isinstance(task.exception(), RunRemoved):
            await _abort_unknown(context, run_id)
        if task.done() and not self._broken.done():
            # The operation broke the group; the rank to blame will be known in a moment.
            await first_of(self._broken, timeout=5)
        if self._broken.done():
            await self._abort_broken(context, run_id)
        if task.done():
            await _abort(context, grpc.StatusCode.INTERNAL, f"rank 0 failed: {task.exception()}")
        await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the operation took too long")

    async def _in_order(
        self,
        sequence: OperationSequence,
        header: common_pb2.OperationHeader,
        kind: str,
        job: Callable[[Operations], R],
    ) -> Reply:
        """Waits for the operation before this one, applies it and remembers the result."""
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
            future = self._engine.submit(lambda runs: self._apply(job, header, runs))
            await sequence.enter(header.seq_id)
            reply, seconds = await asyncio.wrap_future(future)
        finally:
            self._metrics.waiting.dec()
        sequence.ended(header.seq_id, reply)
        self._record(header, kind, reply, seconds)
        return reply

    def _apply(
        self, job: Callable[[Operations], R], header: common_pb2.OperationHeader, runs: HostedRuns
    ) -> tuple[R, float]:
        """Returns the reply, and how many seconds it took. The engine thread calls it."""
        began = time.perf_counter()
        self._at_work = header.run_id
        operations = runs.take_turn(header.run_id)
        operations.note_refused(header.gradients_incomplete)
        operations.progress.begin(header.seq_id)
        try:
            return job(operations), time.perf_counter() - began
        finally:
            operations.progress.end()

    async def _abort_broken(self, context: Context, run_id: str) -> NoReturn:
        error = self._broken.result()
        if isinstance(error, OutOfMemory) and run_id == self._at_work:
            context.set_trailing_metadata(((OUT_OF_MEMORY_METADATA_KEY, str(error.tokens)),))
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        await _abort(context, grpc.StatusCode.ABORTED, error.message)

    def _record(
        self, header: common_pb2.OperationHeader, kind: str, reply: Reply, seconds: float
    ) -> None:
        outcome = reply.failure.type if reply.HasField("failure") else "ok"
        self._metrics.operations.labels(kind, "ok" if outcome == "ok" else "failure").inc()
        self._metrics.seconds.labels(kind).observe(seconds)
        more: dict[str, int] = {}
        if isinstance(reply, trainer_pb2.ForwardBackwardReply):
            self._metrics.tokens.inc(reply.tokens)
            per_second = reply.tokens / seconds if seconds else 0
            more = {"tokens": reply.tokens, "tokens_per_second": round(per_second)}
            if reply.micro_batch_tokens:
                self._metrics.micro_batch_tokens.set(reply.micro_batch_tokens)
        elif isinstance(reply, trainer_pb2.PublishReply):
            self._metrics.published.inc(reply.written_bytes)
            more = {"bytes": reply.bytes, "written_bytes": reply.written_bytes}
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
            **more,
        )


async def first_of(*awaitables: Awaitable[object], timeout: float | None = None) -> None:
    """Returns when one is done, or after `timeout` seconds; cancels none and raises nothing."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence)
    raise AssertionError("abort raises")


async def _abort_unknown(context: Context, run_id: str) -> NoReturn:
    await _abort(context, grpc.StatusCode.NOT_FOUND, f"this trainer does not host the run {run_id}")
