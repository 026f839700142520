"""A run's trainer. After its death another one takes over.

`restoration` restores the next trainer, and `delivery` repeats unanswered calls. Clients only
notice a delay. See `docs/design/recovery.md`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress

from gateway.runs.operations import RunBroken
from gateway.runs.recovery.replay_log import VARIABLE_FAILURES
from gateway.runs.recovery.restoration import Restoration
from gateway.runs.recovery.snapshot_taker import SnapshotTaker
from gateway.runs.run import Run
from gateway.runs.tools import RunTools
from gateway.runs.trainer_host import DevicesLost
from gateway.workers.clients import EXIT_REPORT_PATIENCE, TrainerClient, WorkerUnavailable
from tandem.errors import (
    InternalError,
    OperationTimedOut,
    OutOfMemory,
    TandemError,
    WorkerDied,
    describe,
)
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2

_MOST_FAILURES = 5
"""Most trainers that fail in a row before one reaches an operation."""
_PAUSE = 5.0
"""Seconds before a run joins a shared trainer again, after its replay failed for a temporary
reason."""


class RunTrainer:
    """`on_lost` gets the error that ends the run. `gone` is done when the serving trainer is
    lost."""

    def __init__(
        self, *, run: Run, tools: RunTools, on_lost: Callable[[TandemError], None]
    ) -> None:
        self.run = run
        self._tools = tools
        self._on_lost = on_lost
        self.restoration = Restoration(run=run, tools=tools)
        self.taker = SnapshotTaker(run=run, tools=tools)
        self.gone: asyncio.Future[None] = asyncio.Future()
        self._serving: asyncio.Future[TrainerClient] = asyncio.Future()
        self._exited: asyncio.Future[str] = asyncio.Future()
        """The end of the process that the run has joined."""
        self._restoring: asyncio.Task[None] | None = None
        self._closed = False
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    @property
    def serves(self) -> bool:
        return self._serving.done() and self._serving.exception() is None

    @property
    def serving(self) -> TrainerClient:
        """The client of a trainer that `serves`."""
        return self._serving.result()

    async def client(self) -> TrainerClient:
        """Return the client of a serving trainer. Raises `RunBroken`."""
        serving = self._serving
        return serving.result() if serving.done() else await asyncio.shield(serving)

    async def start_trainer(self) -> None:
        """Start the first trainer. Raises `WorkerStartFailed` or `WorkerDied`."""
        try:
            client = await self._join()
            async with self.run.host.use():
                self.run.about = await client.describe()
        except WorkerUnavailable as error:
            why = await self._why(error)
            if self.run.log is None:
                raise why from error
            self._begin(self._restore(why, None))
        else:
            self._serve(client)

    def take_over(self, error: TandemError) -> None:
        """Continue with an earlier gateway's trainer. If it is useless, restore another one after
        this error."""
        self._begin(self._take_over(error))

    async def save(self) -> None:
        """Let the trainer finish its calls and take a snapshot if that spares a replay. Return when
        that is done or the trainer is lost."""
        drained = asyncio.create_task(self.run.dispatcher.drain())
        try:
            await asyncio.wait({drained, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if self.serves:
            with suppress(WorkerUnavailable, WorkerDied):  # it is lost, or the run has ended
                async with self.run.host.use():
                    if self.serves:
                        await self.taker.take(self.serving)

    async def close(self) -> None:
        self._closed = True
        self._exited.remove_done_callback(self._note_exit)
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        await self.taker.close()
        if self.run.log is not None:
            self.run.log.close()

    # --- Serving ------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._restoring = asyncio.create_task(work, name=f"restore-{self.run.id}")

    async def _join(self) -> TrainerClient:
        self._exited = asyncio.get_running_loop().create_future()
        client = await self.run.host.join(self.run)
        self._exited = self.run.host.exited
        return client

    def _serve(self, client: TrainerClient) -> None:
        self.run.restoring = ""
        self.gone = asyncio.Future()
        self._serving.set_result(client)
        self._exited.add_done_callback(self._note_exit)

    def _note_exit(self, exited: asyncio.Future[str]) -> None:
        if exited is self._exited and self.serves:
            self.lose(self.serving, WorkerDied(f"the trainer died: {exited.result()}"))

    def lose(self, client: TrainerClient, error: TandemError) -> None:
        """Give up a dead or useless trainer, and restore it if possible."""
        if self._closed or not self.serves or self.serving is not client:
            return
        self._serving = asyncio.Future()
        self.gone.set_result(None)
        self.taker.trainer_lost()
        self._begin(self._restore(error, client))

    async def _take_over(self, error: TandemError) -> None:
        try:
            client = await self._take_up_process()
        except Exception:  # noqa: BLE001 - a fault of ours must not hang the clients
            self._log.exception("trainer_not_taken_up")
            client = None
        if client is None:
            await self._restore(error, None)
            return
        self._tools.metrics.restorations.labels(outcome="taken_up").inc()
        self._log.warning("trainer_taken_up", step=self.run.step)
        self._serve(client)

    async def _take_up_process(self) -> TrainerClient | None:
        """Return the client of an earlier gateway's trainer once it is idle, or None if it is
        useless."""
        run, log = self.run, self.run.log
        assert log is not None
        answered = log.answered_up_to(log.newest)
        try:
            client = await run.host.take_up(run)
            if client is None:
                return None
            self._exited = run.host.exited
            async with run.host.use(), asyncio.timeout(run.host.patience):
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

    # --- Death and restoration ----------------------------------------------------------------

    async def _restore(self, error: TandemError, lost: TrainerClient | None) -> None:
        """End the lost process. Start trainers until one is restored, or give up."""
        run, began = self.run, time.monotonic()
        try:
            client, replayed = await self._next_trainer(error, lost)
        except Exception as fault:  # noqa: BLE001 - a fault of ours must not hang the clients
            if isinstance(fault, RunBroken):
                error = fault.error
            else:
                self._log.exception("restoration_failed")
                error = InternalError(f"{type(fault).__name__} in the gateway; see its log")
            await self._give_up(error)
            return
        run.restored += 1
        self._tools.metrics.restorations.labels(outcome="restored").inc()
        self._log.warning(
            "trainer_restored",
            step=run.step,
            replayed=replayed,
            seconds=round(time.monotonic() - began, 3),
        )
        self._serve(client)

    async def _next_trainer(
        self, error: TandemError, lost: TrainerClient | None
    ) -> tuple[TrainerClient, int]:
        """Return a restored trainer and the number of replayed operations. Raises `RunBroken`."""
        run, host, log, restoration = self.run, self.run.host, self.run.log, self.restoration
        if log is None:
            raise RunBroken(error)
        at, failed = log.first_unanswered, 0
        if at is not None and (host.was_at(run.id) or isinstance(error, OutOfMemory)):
            restoration.note_death_at(at, error)
        while True:
            self._log.warning("trainer_lost", reason=error.message)
            run.restoring = f"{error.message}; it is started again"
            if lost is not None:
                await host.end_process(lost, error.message)
            await self.taker.remove_left()
            restoration.at = lost = None
            try:
                async with host.restoring:
                    client = lost = await self._join()
                    return client, await restoration.bring_back(client, log)
            except (WorkerUnavailable, TandemError) as failure:
                of_another = host.is_at_another(run.id)
                error = await self._why(failure)
                if isinstance(failure, DevicesLost):  # not a failure of the trainer
                    continue
                if error.type in VARIABLE_FAILURES and len(host.hosted) > 1:
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
                    raise RunBroken(error) from failure

    async def _give_up(self, error: TandemError) -> None:
        self._tools.metrics.restorations.labels(outcome="given_up").inc()
        try:
            error = await self.final(error)
        except Exception:  # noqa: BLE001 - the clients must hear of the end all the same
            self._log.exception("snapshot_not_kept")
        self.run.restoring = ""
        self._serving.set_exception(RunBroken(error))
        self._serving.exception()  # avoids a warning if nobody waits
        self._on_lost(error)

    async def _why(self, failure: WorkerUnavailable | TandemError) -> TandemError:
        if isinstance(failure, TandemError):
            return failure
        await asyncio.wait({self._exited}, timeout=EXIT_REPORT_PATIENCE)
        why = self._exited.result() if self._exited.done() else failure
        return WorkerDied(f"the trainer died: {why}")

    async def final(self, error: TandemError) -> TandemError:
        """Return the error that ends the run, with the place of its newest state."""
        kept, log = None, self.run.log
        if log is not None and log.newest.folder:
            kept = await self._tools.snapshots.keep(self.run, log.newest)
        hint = f"from {kept}" if kept else "from a checkpoint if there is one"
        return type(error)(f"{error.message}; create the run again, {hint}")
