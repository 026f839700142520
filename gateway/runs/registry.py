"""Training runs: from `starting` over `ready` to `ended`, and the way of operations into them.

A run has one trainer. It ends with its session, or when the trainer dies; it is never started
again, since the trainer's state is gone: the client makes a new run, from a checkpoint if there
is one. What is asked of an ended run is accepted and fails with what ended it, so that the SDK
shows the reason at once (a status of 5xx it would repeat for minutes).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.versions import VersionStore
from gateway.futures.table import Future, FutureTable, Outcome, Waiting
from gateway.identifiers import relative_version_folder, request_id_of, run_id_of
from gateway.limits.quotas import Quotas
from gateway.metrics import Metrics
from gateway.runs.delivery import RunProgress, json_result
from gateway.runs.dispatcher import Call, Dispatcher, EndsRun, Send
from gateway.runs.executor import Executor
from gateway.runs.journal import Journal
from gateway.runs.operations import LoadWeights, LossDefinitions, Operation
from gateway.runs.run_rows import RunRows
from gateway.runs.training_run import TrainingRun
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sessions import SamplingSessionRegistry
from gateway.sessions.registry import SessionRegistry
from gateway.storage.database import Database
from gateway.usage.meter import RunMeter, Subject, UsageMeter
from gateway.workers.clients import TrainerClient, WorkerUnavailable
from gateway.workers.fleet import Fleet
from tandem.errors import (
    InternalError,
    SessionFinished,
    TandemError,
    WorkerDied,
)
from tandem.settings import GatewaySettings
from tandem.telemetry import get_log
from tandem.worker import TrainingSpec

_EXIT_REPORT_PATIENCE = 3.0
"""Seconds to wait for the launcher's word after the connection to a trainer broke."""


class RunRegistry:
    def __init__(
        self,
        *,
        settings: GatewaySettings,
        database: Database,
        log: Journal,
        futures: FutureTable,
        fleet: Fleet,
        samplers: SamplerRouter,
        sampling: SamplingSessionRegistry,
        sessions: SessionRegistry,
        checkpoints: CheckpointCatalog,
        versions: VersionStore,
        collector: GarbageCollector,
        loss_definitions: Mapping[str, LossDefinitions],
        metrics: Metrics,
        usage: UsageMeter,
        limits: Quotas,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._records = RunRows(database=database)
        self._oplog = log
        self._futures = futures
        self._fleet = fleet
        self._samplers = samplers
        self._sampling = sampling
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._versions = versions
        self._collector = collector
        self._loss_definitions = loss_definitions
        self._metrics = metrics
        self._usage = usage
        self._runs: dict[str, TrainingRun] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._log = get_log()

    async def open(self) -> list[str]:
        """Marks the runs of an earlier gateway ended; returns their ids."""
        return await self._records.end_all()

    def all(self) -> list[TrainingRun]:
        return list(self._runs.values())

    def get(self, run_id: str) -> TrainingRun | None:
        return self._runs.get(run_id)

    def write_request_times(self) -> None:
        """Hands over when runs were last asked for something, as far as that changed."""
        changed = [run for run in self._runs.values() if run.last_request_at != run.written_at]
        for run in changed:
            run.written_at = run.last_request_at
        self._records.note_requests(changed)

    async def create(
        self,
        *,
        session_id: str,
        model_seq_id: int,
        model: BaseModelEntry,
        training: TrainingSpec,
        load: LoadWeights | None,
        user_metadata: Mapping[str, object] | None,
        request: bytes,
    ) -> str:
        """Begins to start a run and returns the request_id of its creation, which ends when
        the trainer is ready and, if asked, has loaded a checkpoint. Its place in the log is 0.

        Raises `LimitExceeded` where its owner has as many runs or samplers as are allowed, and
        `SessionFinished`; then nothing is left of it."""
        run_id = run_id_of(session_id=session_id, model_seq_id=model_seq_id)
        request_id = request_id_of(owner=run_id, seq_id=0)
        known = await self._records.has(run_id)
        while (existing := self._runs.get(run_id)) is not None:  # the same request came before
            await existing.arrived(0)
            if self._runs.get(run_id) is existing:  # else it could not be written
                return request_id
        if known:
            return request_id  # of before a restart: the log says what became of it
        # From here to where the run is registered nothing is waited for.
        session = self._sessions.require(session_id)
        used = (run.session_id for run in self._runs.values() if run.state != "ended")
        self._limits.check("runs", used=self._sessions.count_of(session.owner, used))
        # Engine and trainer start side by side: the loop will need both.
        self._samplers.ensure(session_id=session_id, model=model, rank=training.rank)
        run = self._new_run(session_id=session_id, run_id=run_id, model=model, training=training)
        self._runs[run_id] = run
        future = Future(
            request_id=request_id,
            source="operation",
            kind="create_model" if load is None else "load_weights",
            describe=lambda: Waiting(self._not_ready(run), paused=True),
        )
        operation = Operation(
            run_id=run_id,
            seq_id=0,
            kind="create_model" if load is None else "load_weights",
            future=future,
            body=load,
        )
        arrival = run.arriving[0] = asyncio.get_running_loop().create_future()
        try:
            await self._records.add(run, session=session, user_metadata=user_metadata)
            await self._oplog.accept(
                run_id=run_id, seq_id=0, kind=operation.kind, request=request, payload=None
            )
        except BaseException:
            self._runs.pop(run_id, None)
            run.dispatcher.abandon()
            raise
        finally:
            del run.arriving[0]
            arrival.set_result(None)
        self._futures.add(future)
        if run.error is not None:  # its session has ended meanwhile
            self._on_outcome(operation, run.error)
            return request_id
        run.bring_up = asyncio.create_task(self._bring_up(run, operation), name=f"start-{run_id}")
        return request_id

    async def end_session(self, session_id: str, error: TandemError) -> list[str]:
        """Ends the session's runs and stops their trainers; returns their ids."""
        ending = [run for run in self._runs.values() if run.session_id == session_id]
        for run in ending:
            self._end(run, error)
        await asyncio.gather(*(self._stop_trainer(run, error.message) for run in ending))
        for run in ending:
            self._runs.pop(run.id, None)
            if run.facts.parent:
                self._checkpoints.pins.unpin(relative_version_folder(run.facts.parent))
        return [run.id for run in ending]

    async def close(self) -> None:
        """The gateway stops: nothing is failed (the next one does that), all is cancelled."""
        for run in self._runs.values():
            run.dispatcher.abandon()
            if run.bring_up is not None:
                run.bring_up.cancel()
        tasks = [run.bring_up for run in self._runs.values() if run.bring_up is not None]
        await asyncio.gather(*tasks, *self._stopping, return_exceptions=True)

    def _new_run(
        self, *, session_id: str, run_id: str, model: BaseModelEntry, training: TrainingSpec
    ) -> TrainingRun:
        facts = RunProgress(run_id=run_id, session_id=session_id, base_model=model.name)

        async def prepare(operation: Operation, /) -> Send:
            assert run.prepare is not None, "the dispatcher starts when the trainer is ready"
            return await run.prepare(operation)

        dispatcher = Dispatcher(
            window=self._settings.dispatch_window,
            gap_timeout=self._settings.sequence_gap_timeout,
            prepare=prepare,
            on_outcome=self._on_outcome,
            on_broken=lambda error: self._broken(run, error),
            not_ready=lambda: self._not_ready(run),
        )
        run = TrainingRun(facts=facts, model=model, training=training, dispatcher=dispatcher)
        return run

    async def _bring_up(self, run: TrainingRun, creation: Operation) -> None:
        outcome: Outcome
        try:
            worker = run.worker = await self._fleet.start(
                kind="trainer",
                session_id=run.session_id,
                run_id=run.id,
                model=run.model,
                training=run.training,
                on_exit=lambda reason: self._broken(run, WorkerDied(_died(reason))),
            )
            client = TrainerClient(worker, timeout=self._settings.trainer.operation_timeout)
            about = await client.describe()
            run.architecture = about.architecture
            run.parameters = about.parameters
            run.facts.trainable_parameters = about.trainable_parameters
            run.ranks = about.ranks
            executor = run.prepare = self._executor(run, client)
            if creation.body is not None:
                send = await executor(creation)
                call = Call(previous_seq_id=-1, gradients_incomplete="", release=lambda: None)
                outcome = await send(call)
            else:
                outcome = json_result(type="create_model", model_id=run.id)
        except WorkerUnavailable as error:
            outcome = await self._fate(run) or WorkerDied(f"the trainer is gone: {error}")
        except EndsRun as ending:
            outcome = ending.error
        except TandemError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave a client waiting
            self._log.exception("start_failed", run_id=run.id)
            outcome = InternalError(f"{type(error).__name__} while the run started; see the log")
        if run.error is not None:  # it ended while it started, and its creation with it
            outcome = run.error
        self._on_outcome(creation, outcome)
        if isinstance(outcome, TandemError):
            self._broken(run, outcome)
            return
        run.state = "ready"
        self._records.note_ready(run)
        run.dispatcher.start(sent=0 if creation.body is not None else -1)

    def _executor(self, run: TrainingRun, client: TrainerClient) -> Executor:
        return Executor(
            facts=run.facts,
            client=client,
            sampler=lambda: self._samplers.ensure(
                session_id=run.session_id, model=run.model, rank=run.training.rank
            ),
            sampling=self._sampling,
            checkpoints=self._checkpoints,
            versions=self._versions,
            loss_definitions=self._loss_definitions,
            metrics=self._metrics,
            meter=RunMeter(
                usage=self._usage,
                subject=Subject(id=run.id, session_id=run.session_id, base_model=run.model.name),
                ranks=run.ranks,
            ),
            settings=self._settings,
            fate=lambda: self._fate(run),
        )

    async def _fate(self, run: TrainingRun) -> TandemError | None:
        """What ended the run, if the launcher says so soon."""
        try:
            async with asyncio.timeout(_EXIT_REPORT_PATIENCE):
                await run.ended.wait()
        except TimeoutError:
            return None
        return run.error

    def _broken(self, run: TrainingRun, error: TandemError) -> None:
        """The trainer is of no use any more: ends the run, and the trainer if it still runs."""
        self._end(run, error)
        task = asyncio.create_task(self._stop_trainer(run, error.message))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _end(self, run: TrainingRun, error: TandemError) -> None:
        """Fails what has not ended. The first error counts."""
        if run.error is not None:
            return
        run.error = error
        run.state = "ended"
        run.ended.set()
        note = self._log.info if isinstance(error, SessionFinished) else self._log.error
        note(
            "run_ended",
            run_id=run.id,
            session_id=run.session_id,
            type=error.type,
            reason=error.message,
        )
        run.dispatcher.end(error)
        creation = self._futures.get(request_id_of(owner=run.id, seq_id=0))
        if creation is not None and not creation.ended:
            creation.resolve(error)
            self._oplog.end(run_id=run.id, seq_id=0, outcome=error, blob=None)
        self._records.note_end(run, error)

    async def _stop_trainer(self, run: TrainingRun, reason: str) -> None:
        if run.bring_up is not None and run.bring_up is not asyncio.current_task():
            run.bring_up.cancel()
            await asyncio.gather(run.bring_up, return_exceptions=True)
        worker, run.worker = run.worker, None
        try:
            if worker is not None:
                await self._fleet.stop(worker, reason=reason)
            await self._collector.collect_ended(run.id)
        except Exception:  # noqa: BLE001 - the other runs of its session must end all the same
            self._log.exception("trainer_not_stopped", run_id=run.id)

    def _on_outcome(self, operation: Operation, outcome: Outcome) -> None:
        if operation.future.ended:
            return
        failed = isinstance(outcome, TandemError)
        self._metrics.operations.labels(
            kind=operation.kind,
            outcome=outcome.type if isinstance(outcome, TandemError) else "done",
        ).inc()
        self._metrics.operation_seconds.labels(kind=operation.kind).observe(
            time.monotonic() - operation.accepted_at
        )
        operation.future.resolve(outcome)
        self._oplog.end(
            run_id=operation.run_id,
            seq_id=operation.seq_id,
            outcome=outcome,
            blob=operation.blob,
        )
        if failed:
            assert isinstance(outcome, TandemError)
            self._log.info(
                "operation_failed",
                run_id=operation.run_id,
                request_id=operation.future.request_id,
                kind=operation.kind,
                type=outcome.type,
                reason=outcome.message,
            )

    def _not_ready(self, run: TrainingRun) -> str:
        return f"the trainer is starting ({time.time() - run.created_at:.0f} s)"


def _died(reason: str) -> str:
    return f"the trainer died: {reason}; create the run again, from a checkpoint if there is one"
