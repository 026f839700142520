"""The trainer of a run: started with it, and started again when it dies.

A new trainer loads the newest snapshot and gets the calls after it (`replay`); then what was under
way is delivered again. Their clients wait, and notice nothing else. See `docs/reliability.md`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.metrics import Metrics
from gateway.runs.journal import Journal
from gateway.runs.operations import Body, Call, Progress, RunBroken
from gateway.runs.replay import ReplayLog, SentCall, Snapshot
from gateway.runs.resumption import Unfinished
from gateway.runs.snapshots import SnapshotStore
from gateway.runs.training_run import TrainingRun
from gateway.storage.data_directory import relative_path
from gateway.usage.meter import TrainerReply
from gateway.workers.clients import (
    EXIT_REPORT_PATIENCE,
    Method,
    TrainerClient,
    WorkerUnavailable,
)
from gateway.workers.fleet import Backoff, Fleet, Worker
from tandem.errors import (
    InternalError,
    LimitExceeded,
    OutOfMemory,
    StorageFailed,
    TandemError,
    WorkerDied,
)
from tandem.settings import GatewaySettings
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2

_MOST_DEATHS = 3
"""Of the trainer at one operation."""
_MOST_FAILURES = 5
"""Of trainers that are to replace a lost one, before they are at an operation."""
_SNAPSHOT_PAUSE = 60.0
"""Seconds until a snapshot is tried again that failed or had no room."""
_PROGRESS_INTERVAL = 2.0
_IDLE_INTERVAL = 0.1

TrainerRequest = (
    trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.PublishRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
)
Request = TypeVar("Request", bound=TrainerRequest)
Reply = TypeVar("Reply", bound=TrainerReply)
Pick = Callable[[TrainerClient, bytes], Method[Request, Reply]]
"""Returns the method of a client that sends a request, with a payload if it has one."""


class RunTrainer:
    """`definition_of` returns the definition of the loss that a request names, if it names one.
    `on_lost` is called with the error that ends the run, when the trainer cannot be brought back.
    `log` is None for a run whose trainer is not restored."""

    def __init__(
        self,
        *,
        run: TrainingRun,
        settings: GatewaySettings,
        fleet: Fleet,
        journal: Journal,
        snapshots: SnapshotStore,
        metrics: Metrics,
        definition_of: Callable[[Body | None], Awaitable[bytes]],
        on_lost: Callable[[TandemError], None],
    ) -> None:
        self._run = run
        self._settings = settings
        self._fleet = fleet
        self._journal = journal
        self._snapshots = snapshots
        self._metrics = metrics
        self._definition_of = definition_of
        self._on_lost = on_lost
        self.log = journal.open_log(run.id, run.recovery) if run.recovery.enabled else None
        self.restoring = ""
        """Says what is done to bring the trainer back; "" while it serves."""
        self.restored = 0
        """How often it was."""
        self.snapshot_problem = ""
        self._serving: asyncio.Future[TrainerClient] = asyncio.Future()
        self.gone: asyncio.Future[None] = asyncio.Future()
        """Done once the trainer that serves now has been given up."""
        self._exit: asyncio.Future[str] = asyncio.Future()
        self._backoff = Backoff()
        self._deaths: Counter[int] = Counter()
        self._too_large: dict[int, int] = {}
        """By operation: how many tokens of a micro-batch were too many for a trainer."""
        self._at: SentCall | None = None
        self._restore_task: asyncio.Task[None] | None = None
        self._snapshot_task: asyncio.Task[None] | None = None
        self._snapshot_asked = ""
        self._next_snapshot_at = 0.0
        self._left_behind: list[str] = []
        self._unusable: set[str] = set()
        self._closed = False
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    @property
    def is_silent(self) -> bool:
        """Whether the trainer does not answer its heartbeat, and can be restored."""
        return self.log is not None and not (self._run.worker and not self._run.worker.silence)

    @property
    def problem(self) -> str:
        """Say why there is no snapshot since the newest one, or why it would be of no use; "" if
        all is well."""
        if self.log is not None and not self.log.complete:
            return _too_much(self._run.recovery.log_bytes)
        return self.snapshot_problem

    @property
    def snapshot_step(self) -> int:
        """Return the step of the newest snapshot, 0 without one."""
        return self.log.newest.step if self.log is not None else 0

    async def start(self) -> None:
        """Start the trainer for the first time. Raises `WorkerStartFailed` or `WorkerDied`. One
        that dies as soon as it serves is restored like any other."""
        client = await self._start_worker()
        try:
            self._run.about = await client.describe()
        except WorkerUnavailable as error:
            why = await self._why(error)
            if self.log is None:
                raise why from error
            self._replace(why)
        else:
            self._serve(client)

    def take_up(self, snapshots: Sequence[Snapshot], left: Unfinished, *, missing_to: int) -> None:
        """Take over the log of an earlier gateway; `take_over` goes on from it."""
        assert self.log is not None
        self.log.resume(
            snapshots=snapshots, calls=left.calls, missing_to=missing_to, answered=left.ended
        )
        self.restoring = "the gateway restarted; the trainer starts when its client is heard of"

    def _replace(self, error: TandemError) -> None:
        """Bring another trainer to where one was that ended with this error before it served."""
        self._restore_task = asyncio.create_task(
            self._restore(error), name=f"restore-{self._run.id}"
        )

    def take_over(self, error: TandemError) -> None:
        """Go on with the trainer that an earlier gateway has left. If there is none, or none that
        is of use, it ended with this error, and another one is brought to where it was."""
        self._restore_task = asyncio.create_task(
            self._take_over(error), name=f"restore-{self._run.id}"
        )

    async def _take_over(self, error: TandemError) -> None:
        client = await self._adopt()
        if client is None:
            await self._restore(error)
            return
        self._metrics.restorations.labels(outcome="adopted").inc()
        self._log.warning("trainer_adopted", step=self._run.step)
        self._serve(client)

    async def _adopt(self) -> TrainerClient | None:
        """Return the client of the trainer that an earlier gateway has left, once that has ended
        what it was sent; None if there is none, or none that is of use."""
        run, log, exit_ = self._run, self.log, asyncio.get_running_loop().create_future()
        assert log is not None
        self._exit = exit_
        run.worker = await self._fleet.adopt(run.id, on_exit=partial(self._note_exit, exit_))
        if run.worker is None:
            return None
        client, answered = self._client_of(run.worker), log.answered_up_to(log.newest)
        try:
            async with asyncio.timeout(self._settings.trainer.operation_timeout):
                run.about = await _when_idle(client)
                if run.about.last_seq_id <= log.newest_change:  # it was being restored itself
                    raise InternalError("it had not been brought to where the run was")
                # What came after its last call was refused, or it had just been restored, and was
                # not told of the newest version yet.
                if run.about.last_seq_id <= answered + 1:
                    request = trainer_pb2.RestoreRequest(
                        seq_id=answered + 1, weight_version=run.parent
                    )
                    await client.restore(request)
        except (WorkerUnavailable, TandemError, TimeoutError) as error:
            self._log.warning("trainer_not_adopted", reason=str(error))
            return None
        run.step = run.about.step
        return client

    def too_large(self, seq_id: int) -> int:
        """Return the tokens of the micro-batch of an operation that ended its trainer by running
        out of memory; 0 if none did."""
        return self._too_large.get(seq_id, 0)

    async def client(self) -> TrainerClient:
        """Return the client of the trainer once one serves. Raises `RunBroken`."""
        return await asyncio.shield(self._serving)

    def note_sent(
        self, call: Call, request: TrainerRequest, *, release: Callable[[], None] | None
    ) -> None:
        """Note a call that is about to be sent, so that it can be sent again, to another trainer.
        `release` is called when that is not needed any more."""
        if self.log is None:
            if release is not None:
                release()
            return
        operation, again = call.operation, deepcopy(request)
        match again:
            case trainer_pb2.OptimStepRequest():
                again.snapshot = ""
            case trainer_pb2.ForwardBackwardRequest():
                again.loss_definition = b""
            case trainer_pb2.LoadCheckpointRequest():
                again.path = relative_path(Path(again.path), self._settings.data_dir)
        content = again.SerializeToString()
        sent = SentCall(
            seq_id=operation.seq_id,
            kind=operation.kind,
            changes_state=operation.changes_state,
            request=content,
            body=operation.body,
            size=len(content) + (operation.size if operation.has_payload else 0),
            has_payload=operation.has_payload,
            release=release,
        )
        was_complete = self.log.complete
        self.log.note_sent(sent)
        if was_complete and not self.log.complete:
            self._log.warning("not_restorable", reason=self.problem)

    def note_answered(self, call: Call, request: TrainerRequest, reply: TrainerReply) -> None:
        """Note what the trainer has answered, and wait for the snapshot that it takes."""
        if self.log is not None:
            seq_id, failure = call.operation.seq_id, reply.failure.type
            self._note_plan(seq_id, reply)
            self.log.note_answered(seq_id, seconds=reply.seconds, failure=failure)
        if isinstance(request, trainer_pb2.OptimStepRequest) and request.snapshot:
            self._follow_snapshot(request, applied=not reply.HasField("failure"))

    def _note_plan(self, seq_id: int, reply: TrainerReply) -> None:
        """Note with how large micro-batches a batch was computed, or could not be: a replay does
        the same, and gives the same bits."""
        if self.log is None or not isinstance(reply, trainer_pb2.ForwardBackwardReply):
            return
        self._too_large.pop(seq_id, None)
        if reply.micro_batch_tokens:
            self._run.about.micro_batch_tokens = reply.micro_batch_tokens
        if (call := self.log.held(seq_id)) is not None:
            call.request += trainer_pb2.ForwardBackwardRequest(
                micro_batch_tokens=reply.micro_batch_tokens,
                out_of_memory_at=reply.out_of_memory_at,
            ).SerializeToString()

    @asynccontextmanager
    async def following(self, call: Call, client: TrainerClient) -> AsyncIterator[None]:
        """Keep the call's progress up to date while the block runs. What takes no longer than the
        interval is not asked about."""
        task = asyncio.create_task(self._follow(call, client))
        try:
            yield
        finally:
            task.cancel()

    async def _follow(self, call: Call, client: TrainerClient) -> None:
        await asyncio.wait({call.begun})
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            try:
                reply = await client.progress()
            except (WorkerUnavailable, TandemError) as error:  # the call itself says what it means
                self._log.debug("no_progress", reason=str(error))
                continue
            if reply.seq_id == call.operation.seq_id + 1:
                call.progress = Progress(
                    seconds=reply.seconds, tokens_done=reply.tokens_done, tokens=reply.tokens
                )

    async def close(self) -> None:
        """Stop bringing it back, and forget what that would need."""
        self._closed = True
        tasks = [task for task in (self._restore_task, self._snapshot_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.log is not None:
            self.log.close()

    # --- Death and restoration ----------------------------------------------------------------

    async def _start_worker(self) -> TrainerClient:
        run, exit_ = self._run, asyncio.get_running_loop().create_future()
        self._exit = exit_
        run.worker = await self._fleet.start(
            kind="trainer",
            session_id=run.session_id,
            run_id=run.id,
            model=run.model,
            training=run.training,
            on_exit=partial(self._note_exit, exit_),
        )
        return self._client_of(run.worker)

    def _client_of(self, worker: Worker) -> TrainerClient:
        return TrainerClient(
            worker,
            timeout=self._settings.trainer.operation_timeout,
            window=self._settings.dispatch_window,
        )

    def _note_exit(self, exit_: asyncio.Future[str], reason: str) -> None:
        exit_.set_result(reason)
        if self._serving.done() and exit_ is self._exit:
            self.lose(self._serving.result(), WorkerDied(f"the trainer died: {reason}"))

    def _serve(self, client: TrainerClient) -> None:
        self.restoring = ""
        self.gone = asyncio.Future()
        self._backoff.ready()
        self._serving.set_result(client)
        if self._exit.done():  # in this moment
            self.lose(client, WorkerDied(f"the trainer died: {self._exit.result()}"))

    def lose(self, client: TrainerClient, error: TandemError) -> None:
        """Give up a trainer that is gone or of no use, and bring it back if that is possible."""
        if self._closed or not self._serving.done() or self._serving.exception() is not None:
            return
        if self._serving.result() is not client:
            return
        self._serving = asyncio.Future()
        self.gone.set_result(None)
        if self._snapshot_asked:
            self._left_behind.append(self._snapshot_asked)
            self._snapshot_asked = ""
            # It may be what the trainer died of.
            self._note_no_snapshot("the trainer died while it took one")
        if self._snapshot_task is not None:
            self._snapshot_task.cancel()
        self._restore_task = asyncio.create_task(
            self._restore(error), name=f"restore-{self._run.id}"
        )

    async def _restore(self, error: TandemError) -> None:
        """Start trainers until one is where the lost one was, or it is of no use to go on."""
        log, began = self.log, time.monotonic()
        try:
            if log is None:
                raise _GiveUp(error)
            if (at := log.first_unanswered) is not None:
                self._note_death_at(at, error)
            failed = 0
            while True:
                self._log.warning("trainer_lost", reason=error.message)
                wait = self._backoff.failed()
                self.restoring = f"{error.message}; it is started again"
                await self._stop_worker(error.message)
                for folder in self._left_behind:
                    await self._snapshots.remove(self._run, Snapshot(folder=folder))
                self._left_behind.clear()
                await asyncio.sleep(wait)
                self._at = None
                try:
                    client = await self._start_worker()
                    await self._bring_back(client, log)
                except (WorkerUnavailable, TandemError) as failure:
                    error = await self._why(failure)
                    if self._at is not None:
                        self._note_death_at(self._at, error)
                        continue
                    failed += 1
                    if failed == _MOST_FAILURES:
                        raise _GiveUp(error) from failure
                else:
                    break
        except Exception as given_up:  # noqa: BLE001 - a fault of ours must not hang the clients
            if isinstance(given_up, _GiveUp):
                error = given_up.error
            else:
                self._log.exception("restoration_failed")
                error = InternalError(f"{type(given_up).__name__} in the gateway; see its log")
            self._metrics.restorations.labels(outcome="given_up").inc()
            try:
                final = await self.final(error)
            except Exception:  # noqa: BLE001 - the clients must hear of the end all the same
                self._log.exception("snapshot_not_kept")
                final = error
            self.restoring = ""
            self._serving.set_exception(RunBroken(final))
            self._serving.exception()  # nobody may be waiting
            self._on_lost(final)
            return
        self.restoring = ""
        self.restored += 1
        self._metrics.restorations.labels(outcome="restored").inc()
        self._log.warning(
            "trainer_restored", step=self._run.step, seconds=round(time.monotonic() - began, 3)
        )
        self._serve(client)

    async def _bring_back(self, client: TrainerClient, log: ReplayLog) -> None:
        """Bring a trainer that has just started to where the lost one was."""
        run = self._run
        run.about = await client.describe()
        snapshot = await self._load_newest(client, log)
        calls, previous = log.calls_after(snapshot), snapshot.seq_id
        for done, call in enumerate(calls):
            self.restoring = (
                f"the trainer is being restored from step {snapshot.step}: {done} of {len(calls)} "
                "operations are replayed"
            )
            self._at = call
            failure = await self._replay(client, call, previous)
            if call.answered and failure != call.failure:
                raise _GiveUp(
                    InternalError(
                        f"operation {call.seq_id} ended differently when it was replayed: "
                        f"{failure or 'well'} instead of {call.failure or 'well'}"
                    )
                )
            previous = call.seq_id
        self._at = None
        reply = await client.restore(
            trainer_pb2.RestoreRequest(
                seq_id=log.answered_up_to(snapshot) + 1, weight_version=run.parent
            )
        )
        run.step = reply.step
        await self._remove_unusable(log)

    async def _replay(self, client: TrainerClient, call: SentCall, previous: int) -> str:
        """Send a call again, after the one of the `seq_id` `previous`; return the type of its
        failure, "" for none."""

        async def send(method: Method[Request, Reply], request: Request) -> str:
            request.MergeFromString(call.request)
            if isinstance(request, trainer_pb2.LoadCheckpointRequest):
                request.path = str(self._settings.data_dir / request.path)
            request.header.previous_seq_id = previous + 1
            reply = await client.replay(method, request)
            self._note_plan(call.seq_id, reply)
            return reply.failure.type

        match call.kind:
            case "optim_step":
                return await send(client.stub.OptimStep, trainer_pb2.OptimStepRequest())
            case "load_weights":
                return await send(client.stub.LoadCheckpoint, trainer_pb2.LoadCheckpointRequest())
        payload = await self._journal.read_payload(self._run.id, call.seq_id)
        definition = await self._definition_of(call.body)
        return await send(
            client.forward_backward(payload),
            trainer_pb2.ForwardBackwardRequest(
                loss_definition=definition, out_of_memory_at=self.too_large(call.seq_id)
            ),
        )

    async def _load_newest(self, client: TrainerClient, log: ReplayLog) -> Snapshot:
        """Let the trainer load the newest snapshot that is whole; return it."""
        if not log.complete:
            raise _GiveUp(
                WorkerDied(f"the trainer died; {_too_much(self._run.recovery.log_bytes)}")
            )
        for snapshot in log.snapshots:
            if not snapshot.folder:
                return snapshot  # the trainer has loaded the base model
            if snapshot.folder in self._unusable:
                continue
            self.restoring = f"the trainer is being restored: it loads step {snapshot.step}"
            self._unusable.add(snapshot.folder)  # if the trainer dies of it, the next is tried
            reply = await client.restore(
                trainer_pb2.RestoreRequest(path=snapshot.folder, seq_id=snapshot.seq_id + 1)
            )
            if not reply.HasField("failure"):
                self._unusable.discard(snapshot.folder)
                return snapshot
            self._log.error("snapshot_unusable", step=snapshot.step, reason=reply.failure.message)
        raise _GiveUp(WorkerDied("the trainer died, and none of its snapshots can be read"))

    async def _remove_unusable(self, log: ReplayLog) -> None:
        """Remove the snapshots that could not be loaded, now that another one was."""
        for snapshot in log.snapshots:
            if snapshot.folder in self._unusable:
                log.lose(snapshot)
                await self._snapshots.remove(self._run, snapshot)
        self._unusable.clear()

    def _note_death_at(self, call: SentCall, error: TandemError) -> None:
        if isinstance(error, OutOfMemory) and call.kind in ("forward", "forward_backward"):
            before = self._too_large.get(call.seq_id, math.inf)
            self._too_large[call.seq_id] = error.tokens
            if error.tokens < before:  # until the trainer has none smaller, and refuses it
                return
        self._deaths[call.seq_id] += 1
        if self._deaths[call.seq_id] >= _MOST_DEATHS:
            raise _GiveUp(
                WorkerDied(
                    f"the trainer died {_MOST_DEATHS} times at operation {call.seq_id}, a "
                    f"{call.kind}: {error.message}"
                )
            )

    async def _why(self, failure: WorkerUnavailable | TandemError) -> TandemError:
        """Return the error that a trainer ended with while it was brought back."""
        if isinstance(failure, TandemError):
            return failure
        await asyncio.wait({self._exit}, timeout=EXIT_REPORT_PATIENCE)
        return WorkerDied(
            f"the trainer died: {self._exit.result() if self._exit.done() else failure}"
        )

    async def _stop_worker(self, reason: str) -> None:
        worker, self._run.worker = self._run.worker, None
        if worker is not None:
            await self._fleet.stop(worker, reason=reason, at_once=True)

    async def final(self, error: TandemError) -> TandemError:
        """Return the error that ends the run: it says where the newest state is kept."""
        kept = None
        if self.log is not None and self.log.newest.folder:
            kept = await self._snapshots.keep(self._run, self.log.newest)
        hint = f"from {kept}" if kept else "from a checkpoint if there is one"
        return type(error)(f"{error.message}; create the run again, {hint}")

    # --- Snapshots ----------------------------------------------------------------------------

    async def snapshot_folder(self) -> str:
        """Return where the trainer is to write a snapshot after the next step; "" for none."""
        log, run = self.log, self._run
        if log is None or self._snapshot_asked or time.monotonic() < self._next_snapshot_at:
            return ""
        if not run.about.trainable_parameters:  # after a restart: the size is not known yet
            return ""
        if not log.wants_snapshot(expected_bytes=run.expected_state_bytes):
            return ""
        try:
            self._snapshot_asked = await self._snapshots.new_folder(run)
        except (LimitExceeded, StorageFailed, OSError) as error:  # the step goes on without it
            self._note_no_snapshot(str(error))
        return self._snapshot_asked

    def _follow_snapshot(self, request: trainer_pb2.OptimStepRequest, *, applied: bool) -> None:
        if applied and self._serving.done():
            self._snapshot_task = asyncio.create_task(
                self._await_snapshot(self._serving.result(), request.snapshot)
            )
        else:
            self._snapshot_asked = ""

    async def _await_snapshot(self, client: TrainerClient, folder: str) -> None:
        """Note a snapshot once it is written, or remove what there is of it."""
        log, run = self.log, self._run
        assert log is not None
        useless = [Snapshot(folder=folder)]
        try:
            reply = await client.await_snapshot(trainer_pb2.AwaitSnapshotRequest(path=folder))
            if reply.HasField("failure"):
                self._note_no_snapshot(reply.failure.message)
                return
            self._metrics.snapshots.labels(outcome="written").inc()
            self.snapshot_problem = ""
            snapshot = Snapshot(
                seq_id=reply.seq_id - 1, step=reply.step, folder=folder, bytes=reply.bytes
            )
            self._snapshots.add(run, snapshot)
            useless = log.add_snapshot(snapshot, cost=reply.pause_seconds + reply.seconds)
            self._log.info(
                "snapshot",
                step=reply.step,
                bytes=reply.bytes,
                pause_seconds=round(reply.pause_seconds, 4),
                seconds=round(reply.seconds, 4),
            )
        except (WorkerUnavailable, TandemError) as error:
            self._note_no_snapshot(str(error))
        finally:
            if self._snapshot_asked == folder:
                self._snapshot_asked = ""
            for each in useless:
                await self._snapshots.remove(run, each)

    def _note_no_snapshot(self, reason: str) -> None:
        self._next_snapshot_at = time.monotonic() + _SNAPSHOT_PAUSE
        self.snapshot_problem = reason
        self._metrics.snapshots.labels(outcome="none").inc()
        self._log.warning("no_snapshot", reason=reason)


async def _when_idle(client: TrainerClient) -> trainer_pb2.DescribeTrainerReply:
    """Say where a trainer is once it has ended what it was sent."""
    last = -1
    while True:
        if not (await client.progress()).seq_id:
            about = await client.describe()
            if about.last_seq_id == last:
                return about
            last = about.last_seq_id
        await asyncio.sleep(_IDLE_INTERVAL)


def _too_much(log_bytes: int) -> str:
    return (
        f"it cannot be restored: more than {log_bytes} bytes came since the last snapshot "
        "(TANDEM_RECOVERY_LOG_BYTES)"
    )


class _GiveUp(Exception):
    """The trainer cannot be brought back."""

    def __init__(self, error: TandemError) -> None:
        super().__init__(error.message)
        self.error = error
