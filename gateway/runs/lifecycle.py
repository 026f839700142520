"""The life of a run: its trainer starts, serves its operations, and ends with the run.

A run ends with its session, by a decision (`ending`), or when its trainer cannot be restored. Then
the client creates a new run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import update

from gateway.checkpoints.collector import GarbageCollector
from gateway.runs.early_engines import start_engines
from gateway.runs.ending import decision, finish, without_checkpoint
from gateway.runs.operations import Call, RunBroken
from gateway.runs.run import Run, RunEnding
from gateway.runs.runner import OperationRunner
from gateway.runs.stopping import Stop, save_runs
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.runs.trainer_host import TrainerHost
from gateway.runs.trainer_hosts import TrainerHosts
from gateway.storage.tables import runs
from tandem.errors import (
    PLANNED_ENDS,
    GatewayRestarted,
    InternalError,
    SessionFinished,
    TandemError,
)
from tandem.telemetry import get_log


@dataclass(eq=False, repr=False, kw_only=True)
class RunLifecycle:
    hosts: TrainerHosts
    collector: GarbageCollector
    tools: RunTools

    def __post_init__(self) -> None:
        self._journal = self.tools.journal
        self._trainers: dict[str, RunTrainer] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._log = get_log()

    def begin(
        self, run: Run, *, heard: asyncio.Event | None = None, ended: int = -1, ago: float = 0.0
    ) -> None:
        """Start serving a run. An earlier gateway's run continues after its operation `ended`, once
        its client is `heard` or its end is decided. Its last optimizer step, or its creation, was
        `ago` seconds ago."""
        run.timeline = self.tools.timelines.open(run.id, session_id=run.session_id, ago=ago)
        trainer = RunTrainer(run=run, tools=self.tools, on_lost=partial(self.abort, run))
        self._trainers[run.id] = trainer
        run.life = asyncio.create_task(self._live(trainer, heard, ended), name=f"run-{run.id}")
        if run.ending is not None:
            self._carry_out_end(run)

    def end_as_planned(self, run: Run, ending: RunEnding) -> None:
        """Decide that a run ends. Idempotent. A later decision to discard is the only other one
        that counts."""
        decided = run.ending
        if run.error is not None or (decided and (decided.discard or not ending.discard)):
            return
        run.ending = ending if decided is None else RunEnding(decided.error, discard=True)
        self._journal.database.write_soon(decision(run, run.ending))
        self._log.info("run_ending", run_id=run.id, type=ending.error.type, discard=ending.discard)
        unfinished = run.creation is not None and not run.creation.future.ended
        if run.life is None or unfinished:  # there is nothing to save
            self.abort(run, run.ending.error)
        else:
            self._carry_out_end(run)

    def _carry_out_end(self, run: Run) -> None:
        assert run.ending is not None
        run.end_asked.set()
        run.dispatcher.refuse(run.ending.error)
        if run.finishing is not None:
            run.finishing.cancel()
        run.finishing = asyncio.create_task(self._finish(run), name=f"end-{run.id}")

    async def _finish(self, run: Run) -> None:
        # An operation and the save may each take their whole time.
        patience = 2 * self.tools.settings.operation_timeout
        try:
            error = await finish(self._trainers[run.id], self.tools, patience=patience)
        except Exception as fault:  # noqa: BLE001 - the run must end all the same
            self._log.exception("end_failed", run_id=run.id)
            error = InternalError(f"{type(fault).__name__} in the gateway; see its log")
        self.abort(run, error)

    async def wait_for_ends(self, runs_: Sequence[Run], *, timeout: float | None = None) -> None:
        """Wait until the runs with a decided end have ended, for at most `timeout` seconds."""
        if ending := [run.finishing for run in runs_ if run.finishing is not None]:
            await asyncio.wait(ending, timeout=timeout)

    async def _live(self, trainer: RunTrainer, heard: asyncio.Event | None, ended: int) -> None:
        """Start the trainer when it has a place, and carry out operations until the run ends."""
        run = trainer.run
        if heard is not None:
            await _wait_for_either(heard, run.end_asked)
        try:
            runner = OperationRunner(trainer=trainer, tools=self.tools)
            begins = run.creation is not None and not run.creation.future.ended
            await self.hosts.place(run)
            if run.creation is not None and begins:
                await trainer.start_trainer()
                await start_engines(run, self.tools)
                call = Call(run.creation)
                call.begin()
                self._journal.end(run.creation, await runner.carry_out(call))
                ended = 0 if call.sent else -1
            else:
                why = "the gateway restarted, and the trainer ended with it"
                trainer.take_over(GatewayRestarted(why))
            run.state = "ready"
            await run.dispatcher.serve(runner.carry_out, sent=ended)
        except RunBroken as broken:
            error = broken.error
        except TandemError as failed:
            error = failed
        except Exception as fault:  # noqa: BLE001 - a fault of ours must not leave a client waiting
            self._log.exception("run_failed", run_id=run.id)
            error = InternalError(f"{type(fault).__name__} in the gateway; see its log")
        self.abort(run, error)

    async def save(self, stop: Stop, *, timeout: float) -> None:
        """Save the serving runs before their trainers are stopped, as `save_runs`."""
        await save_runs(self._trainers.values(), stop, timeout=timeout)

    def abort(self, run: Run, error: TandemError) -> None:
        self._end(run, error)
        self._stopped(run)

    async def end_all(self, ending: Sequence[Run], error: TandemError) -> None:
        for run in ending:
            self._end(run, error)
        await asyncio.gather(*(self._stopped(run) for run in ending))

    def write_end(self, run_id: str, error: TandemError) -> None:
        self._journal.forget_run(run_id)
        self._journal.database.write_soon(
            update(runs)
            .where(runs.c.id == run_id)
            .values(
                state="ended", error_type=error.type, reason=error.message, ended_at=time.time()
            )
        )
        self.tools.record.identity_files.write_soon(run_id)

    async def leave(self, host: TrainerHost, run_id: str) -> None:
        try:
            await self.hosts.leave(host, run_id)
        except Exception:  # noqa: BLE001 - the rest of a run must end all the same
            self._log.exception("trainer_not_stopped", run_id=run_id)

    def leave_soon(self, run: Run) -> None:
        self._in_background(self.leave(run.host, run.id))

    async def close(self, left: Sequence[Run], *, patience: float) -> None:
        """Cancel everything. The next gateway continues unfinished work, and stops the trainers of
        ended runs that outlast `patience` seconds."""
        both = [task for run in left for task in (run.finishing, run.life)]
        lives = [task for task in both if task is not None]
        for life in lives:  # first: operations that end without a log are not replayed
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        if stopping := tuple(self._stopping):
            _, late = await asyncio.wait(stopping, timeout=patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
        await asyncio.gather(*(trainer.close() for trainer in self._trainers.values()))

    def _end(self, run: Run, error: TandemError) -> None:
        if run.error is not None:
            return
        planned = isinstance(error, (SessionFinished, *PLANNED_ENDS))
        if run.ending is not None and not planned:
            error = without_checkpoint(run.ending.error, error.message)
        run.error = error
        run.state = "ended"
        log = self._log.info if planned else self._log.error
        log(
            "run_ended",
            run_id=run.id,
            session_id=run.session_id,
            type=error.type,
            reason=error.message,
        )
        if run.creation is not None:
            self._journal.end(run.creation, error)
        if run.last_save is not None:
            self._journal.end(run.last_save, error)
        run.dispatcher.end(error)
        if run.life is not None and run.life is not asyncio.current_task():
            run.life.cancel()
        if run.finishing is not None and run.finishing is not asyncio.current_task():
            run.finishing.cancel()
        self.write_end(run.id, error)

    def _stopped(self, run: Run) -> asyncio.Task[None]:
        """Stop the run's trainer, then collect its files, since it may write until then. Repeated
        calls return one task."""
        if run.stopping is None:
            run.stopping = self._in_background(self._stop_trainer(run))
        return run.stopping

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        return task

    async def _stop_trainer(self, run: Run) -> None:
        if run.life is not None:
            await asyncio.gather(run.life, return_exceptions=True)
        if (trainer := self._trainers.get(run.id)) is not None:
            await trainer.close()
            del self._trainers[run.id]
        await self.leave(run.host, run.id)
        try:
            await self.tools.snapshots.remove_all(run)
            await self._journal.remove_payloads(run.id)
            await self._journal.database.flush()  # the end of the last save unpins its files
            await self.collector.collect(run.id, ended=True)
        except Exception:  # noqa: BLE001 - the other runs of its session must end all the same
            self._log.exception("run_not_removed", run_id=run.id)


async def _wait_for_either(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
