"""A run's trainer. After its death another one takes over.

`restoration` restores the next trainer, and unanswered calls are repeated. Clients only notice a
delay. See `docs/design/recovery.md`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

from gateway.metrics import Metrics
from gateway.owners.usage.meter import TrainerReply
from gateway.runs.journal import Journal
from gateway.runs.operations import Call, Operation, RunBroken
from gateway.runs.recovery.replay_log import VARIABLE_FAILURES, SentCall, Snapshot
from gateway.runs.recovery.restoration import (
    DefinitionOf,
    GiveUp,
    Restoration,
    TrainerRequest,
)
from gateway.runs.recovery.resumption import Unfinished
from gateway.runs.recovery.snapshot_taker import SnapshotTaker
from gateway.runs.recovery.snapshots import SnapshotStore
from gateway.runs.run import Run
from gateway.runs.trainer_host import DevicesLost, TrainerHost
from gateway.storage.data_directory import relative_path
from gateway.workers.clients import (
    EXIT_REPORT_PATIENCE,
    TrainerClient,
    WorkerUnavailable,
)
from tandem.errors import (
    InternalError,
    OperationTimedOut,
    OutOfMemory,
    TandemError,
    WorkerDied,
    describe,
)
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2

_MOST_FAILURES = 5
"""Most trainers that fail in a row before one reaches an operation."""
_PAUSE = 5.0
"""Seconds before a run joins a shared trainer again, after its replay failed for a temporary
reason."""


class RunTrainer:
    """`host` is the process, perhaps shared. `definition_of` returns a request's loss definition.
    `on_lost` gets the error that ends the run. `log` is None without recovery."""

    def __init__(
        self,
        *,
        run: Run,
        host: TrainerHost,
        settings: GatewaySettings,
        journal: Journal,
        snapshots: SnapshotStore,
        metrics: Metrics,
        definition_of: DefinitionOf,
        on_lost: Callable[[TandemError], None],
    ) -> None:
        self._run = run
        self._settings = settings
        self.host = host
        self._snapshots = snapshots
        self._metrics = metrics
        self._on_lost = on_lost
        self.log = journal.open_log(run.id, run.recovery) if run.recovery.enabled else None
        self.restoration = Restoration(
            run=run,
            host=host,
            log=self.log,
            journal=journal,
            snapshots=snapshots,
            definition_of=definition_of,
            data_dir=settings.data_dir,
        )
        self.taker = SnapshotTaker(run=run, log=self.log, snapshots=snapshots, metrics=metrics)
        self.restored = 0
        self._serving: asyncio.Future[TrainerClient] = asyncio.Future()
        self.gone: asyncio.Future[None] = asyncio.Future()
        self._exit: asyncio.Future[str] = asyncio.Future()
        self._without_turn: dict[int, asyncio.Event | None] = {}
        """By `seq_id`: operations waiting for a turn. A later operation waits for the event."""
        self._restore_task: asyncio.Task[None] | None = None
        self._closed = False
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    @property
    def serves(self) -> bool:
        return self._serving.done() and self._serving.exception() is None

    @property
    def is_silent(self) -> bool:
        """Whether the trainer ignores heartbeats and can be restored."""
        return self.log is not None and not (self.host.worker and not self.host.silence)

    @property
    def is_at_work(self) -> bool:
        """Whether the trainer, perhaps shared, may work on this run."""
        return self.host.was_at(self._run.id)

    @property
    def problem(self) -> str:
        """Why there is no useful newer snapshot, or ""."""
        if self.log is not None and not self.log.complete:
            return self.log.why_incomplete
        return self.taker.problem

    @property
    def makes_room(self) -> bool:
        return self.log is not None and self.log.nearly_full and self.taker.writing

    @property
    def snapshot_step(self) -> int:
        return self.log.newest.step if self.log is not None else 0

    async def start(self) -> None:
        """Start the first trainer. Raises `WorkerStartFailed` or `WorkerDied`."""
        try:
            client = await self._join()
            async with self.host.use():
                self._run.about = await client.describe()
        except WorkerUnavailable as error:
            why = await self._why(error)
            if self.log is None:
                raise why from error
            self._replace(why)
        else:
            self._serve(client)

    def take_up(self, snapshots: Sequence[Snapshot], left: Unfinished, *, missing_to: int) -> None:
        """Continue an earlier gateway's log. `take_over` follows."""
        assert self.log is not None
        self.log.resume(
            snapshots=snapshots, calls=left.calls, missing_to=missing_to, answered=left.ended
        )
        self.restoration.doing = (
            "the gateway restarted; the trainer starts when its client is heard of"
        )

    def _replace(self, error: TandemError, lost: TrainerClient | None = None) -> None:
        self._restore_task = asyncio.create_task(
            self._restore(error, lost), name=f"restore-{self._run.id}"
        )

    def take_over(self, error: TandemError) -> None:
        """Continue with an earlier gateway's trainer. If it is useless, restore another one after
        this error."""
        self._restore_task = asyncio.create_task(
            self._take_over(error), name=f"restore-{self._run.id}"
        )

    async def _take_over(self, error: TandemError) -> None:
        try:
            client = await self._take_up_process()
        except Exception:  # noqa: BLE001 - a fault of ours must not hang the clients
            self._log.exception("trainer_not_taken_up")
            client = None
        if client is None:
            await self._restore(error, None)
            return
        self._metrics.restorations.labels(outcome="taken_up").inc()
        self._log.warning("trainer_taken_up", step=self._run.step)
        self._serve(client)

    async def _take_up_process(self) -> TrainerClient | None:
        """Return the client of an earlier gateway's trainer once it is idle, or None if it is
        useless."""
        run, log, exit_ = self._run, self.log, asyncio.get_running_loop().create_future()
        assert log is not None
        self._exit = exit_
        answered = log.answered_up_to(log.newest)
        try:
            client = await self.host.take_up(run, on_exit=partial(self._note_exit, exit_))
            if client is None:
                return None
            async with self.host.use(), asyncio.timeout(self.host.patience):
                run.about = await client.when_idle()
                if run.about.last_seq_id <= log.newest_change:  # it was being restored
                    raise InternalError("it had not reached the run's state")
                # Later calls were refused, or it was just restored and does not know the newest
                # version.
                if run.about.last_seq_id <= answered + 1:
                    request = trainer_pb2.RestoreRequest(
                        seq_id=answered + 1, weight_version=run.parent
                    )
                    await client.restore(request)
        except (WorkerUnavailable, TandemError, TimeoutError) as error:
            self._log.warning("trainer_not_taken_up", reason=describe(error))
            return None
        run.step = run.about.step
        return client

    async def client(self) -> TrainerClient:
        """Return the client of a serving trainer. Raises `RunBroken`."""
        serving = self._serving
        return serving.result() if serving.done() else await asyncio.shield(serving)

    @asynccontextmanager
    async def turn(self, operation: Operation) -> AsyncIterator[TrainerClient]:
        """Hold a serving trainer with its devices for the block. Raises `RunBroken`.

        Operations get their turns in order. Otherwise one could hold the devices while its
        predecessor waits for them."""
        seq_id = operation.seq_id
        self._without_turn[seq_id] = None
        try:
            while True:
                await self.client()
                if (first := min(self._without_turn)) < seq_id:
                    before = self._without_turn[first] or asyncio.Event()
                    self._without_turn[first] = before
                    await before.wait()
                    continue
                async with AsyncExitStack() as stack:
                    try:
                        await stack.enter_async_context(
                            self.host.turn(self._run.id, operation.kind)
                        )
                    except DevicesLost:
                        continue
                    if self.serves:  # it may have died meanwhile
                        self._let_next_go(seq_id)
                        yield self._serving.result()
                        return
        finally:
            self._let_next_go(seq_id)

    def _let_next_go(self, seq_id: int) -> None:
        if (waited_for := self._without_turn.pop(seq_id, None)) is not None:
            waited_for.set()

    def note_sent(
        self, call: Call, request: TrainerRequest, *, release: Callable[[], None] | None
    ) -> None:
        """Note a call before its sending, for a replay. `release` is called when no replay can need
        it."""
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
        """Note the trainer's answer and wait for its snapshot."""
        if self.log is not None:
            seq_id, failure = call.operation.seq_id, reply.failure
            self.restoration.note_plan(seq_id, reply)
            self.log.note_answered(
                seq_id, seconds=reply.seconds, failure=failure.type, reason=failure.message
            )
        if isinstance(request, trainer_pb2.OptimStepRequest) and request.snapshot:
            if not reply.HasField("failure") and self.serves:
                self.taker.follow(self._serving.result(), request.snapshot)
            else:
                self.taker.not_begun()

    async def save(self) -> None:
        """Take a useful snapshot before the gateway stops the trainer."""
        if self.serves:
            with suppress(WorkerUnavailable, WorkerDied):  # it is lost, or the run has ended
                async with self.host.use():
                    if self.serves:
                        await self.taker.take(self._serving.result())

    async def close(self) -> None:
        self._closed = True
        if self._restore_task is not None:
            self._restore_task.cancel()
            await asyncio.gather(self._restore_task, return_exceptions=True)
        await self.taker.close()
        if self.log is not None:
            self.log.close()

    # --- Death and restoration ----------------------------------------------------------------

    async def _join(self) -> TrainerClient:
        exit_ = self._exit = asyncio.get_running_loop().create_future()
        return await self.host.join(self._run, on_exit=partial(self._note_exit, exit_))

    def _note_exit(self, exit_: asyncio.Future[str], reason: str) -> None:
        exit_.set_result(reason)
        if self.serves and exit_ is self._exit:
            self.lose(self._serving.result(), WorkerDied(f"the trainer died: {reason}"))

    def _serve(self, client: TrainerClient) -> None:
        self.restoration.doing = ""
        self.gone = asyncio.Future()
        self._serving.set_result(client)
        if self._exit.done():  # it died at this moment
            self.lose(client, WorkerDied(f"the trainer died: {self._exit.result()}"))

    def lose(self, client: TrainerClient, error: TandemError) -> None:
        """Give up a dead or useless trainer, and restore it if possible."""
        if self._closed or not self.serves or self._serving.result() is not client:
            return
        self._serving = asyncio.Future()
        self.gone.set_result(None)
        self.taker.trainer_lost()
        self._replace(error, client)

    async def _restore(self, error: TandemError, lost: TrainerClient | None) -> None:
        """End the lost process. Start trainers until one is restored, or give up."""
        log, restoration, began = self.log, self.restoration, time.monotonic()
        try:
            if log is None:
                raise GiveUp(error)
            at, failed = log.first_unanswered, 0
            if at is not None and (self.is_at_work or isinstance(error, OutOfMemory)):
                restoration.note_death_at(at, error)
            while True:
                self._log.warning("trainer_lost", reason=error.message)
                self.restoration.doing = f"{error.message}; it is started again"
                if lost is not None:
                    await self.host.end_process(lost, error.message)
                await self.taker.remove_left()
                restoration.at = lost = None
                try:
                    async with self.host.restoring:
                        client = lost = await self._join()
                        replayed = await restoration.bring_back(client, log)
                except (WorkerUnavailable, TandemError) as failure:
                    of_another = self.host.is_at_another(self._run.id)
                    error = await self._why(failure)
                    if isinstance(failure, DevicesLost):  # not a failure of the trainer
                        continue
                    if error.type in VARIABLE_FAILURES and len(self.host.hosted) > 1:
                        lost = None  # the process is sound: this run joins it anew
                        await asyncio.sleep(_PAUSE)
                    elif of_another:
                        restoration.blame_no_snapshot()
                        if isinstance(error, OperationTimedOut):
                            lost = None  # the other run still uses it
                        continue
                    elif restoration.at is not None:
                        restoration.note_death_at(restoration.at, error)
                        continue
                    failed += 1
                    if failed == _MOST_FAILURES:
                        raise GiveUp(error) from failure
                else:
                    break
        except Exception as given_up:  # noqa: BLE001 - a fault of ours must not hang the clients
            if isinstance(given_up, GiveUp):
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
            self.restoration.doing = ""
            self._serving.set_exception(RunBroken(final))
            self._serving.exception()  # avoids a warning if nobody waits
            self._on_lost(final)
            return
        self.restoration.doing = ""
        self.restored += 1
        self._metrics.restorations.labels(outcome="restored").inc()
        self._log.warning(
            "trainer_restored",
            step=self._run.step,
            replayed=replayed,
            seconds=round(time.monotonic() - began, 3),
        )
        self._serve(client)

    async def _why(self, failure: WorkerUnavailable | TandemError) -> TandemError:
        if isinstance(failure, TandemError):
            return failure
        await asyncio.wait({self._exit}, timeout=EXIT_REPORT_PATIENCE)
        return WorkerDied(
            f"the trainer died: {self._exit.result() if self._exit.done() else failure}"
        )

    async def final(self, error: TandemError) -> TandemError:
        """Return the error that ends the run, with the place of its newest state."""
        kept = None
        if self.log is not None and self.log.newest.folder:
            kept = await self._snapshots.keep(self._run, self.log.newest)
        hint = f"from {kept}" if kept else "from a checkpoint if there is one"
        return type(error)(f"{error.message}; create the run again, {hint}")
