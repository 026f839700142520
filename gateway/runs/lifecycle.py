"""The life of a run: its trainer starts, serves its operations, and ends with the run.

A run ends with its session, or when its trainer cannot be restored. Then the client creates a new
run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import update

from gateway.checkpoints.collector import GarbageCollector
from gateway.runs.operations import Call, RunBroken
from gateway.runs.run import Run
from gateway.runs.runner import OperationRunner
from gateway.runs.stopping import Stop, save_runs
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.runs.trainer_host import TrainerHost
from gateway.runs.trainer_hosts import TrainerHosts
from gateway.storage.tables import runs
from tandem.errors import GatewayRestarted, InternalError, SessionFinished, TandemError
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
        its client is `heard`. Its last optimizer step, or its creation, was `ago` seconds ago."""
        run.timeline = self.tools.timelines.open(run.id, session_id=run.session_id, ago=ago)
        trainer = RunTrainer(run=run, tools=self.tools, on_lost=partial(self.abort, run))
        self._trainers[run.id] = trainer
        run.life = asyncio.create_task(self._live(trainer, heard, ended), name=f"run-{run.id}")

    async def _live(self, trainer: RunTrainer, heard: asyncio.Event | None, ended: int) -> None:
        """Start the trainer when it has a place, and carry out operations until the run ends."""
        run = trainer.run
        if heard is not None:
            await heard.wait()
        try:
            runner = OperationRunner(trainer=trainer, tools=self.tools)
            begins = run.creation is not None and not run.creation.future.ended
            await self.hosts.place(run)
            if run.creation is not None and begins:
                await trainer.start_trainer()
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
        lives = [run.life for run in left if run.life is not None]
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
        run.error = error
        run.state = "ended"
        log = self._log.info if isinstance(error, SessionFinished) else self._log.error
        log(
            "run_ended",
            run_id=run.id,
            session_id=run.session_id,
            type=error.type,
            reason=error.message,
        )
        if run.creation is not None:
            self._journal.end(run.creation, error)
        run.dispatcher.end(error)
        if run.life is not None and run.life is not asyncio.current_task():
            run.life.cancel()
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
            await self.collector.collect(run.id, ended=True)
        except Exception:  # noqa: BLE001 - the other runs of its session must end all the same
            self._log.exception("run_not_removed", run_id=run.id)
