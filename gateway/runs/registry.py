"""Training runs: how they are created, how operations enter them, and how they end.

A run has one trainer, which is restored when it dies (`trainer`). The next gateway goes on with
the runs of this one (`resumption`). A run ends with its session, or when its trainer cannot be
restored: the client creates a new run, from a checkpoint if there is one. Operations of an ended
run are accepted and fail with what ended it, so that the SDK shows the reason at once (it would
repeat a 5xx for minutes).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.collector import GarbageCollector
from gateway.futures.table import digest_of
from gateway.identifiers import (
    relative_version_folder,
    request_id_of,
    run_id_of,
)
from gateway.limits import Quotas, overloaded
from gateway.placement.asks import Asks, default_asks, settled_asks
from gateway.placement.places import Places
from gateway.runs.dispatcher import Dispatcher
from gateway.runs.journal import Journal
from gateway.runs.operations import Body, Call, Kind, LoadWeights, Operation, RunBroken
from gateway.runs.replay import recovery_of
from gateway.runs.resumption import RunResumption
from gateway.runs.runner import OperationRunner, RunnerTools
from gateway.runs.snapshots import SnapshotStore
from gateway.runs.trainer import RunTrainer
from gateway.runs.trainer_host import TrainerHost
from gateway.runs.trainer_hosts import TrainerHosts
from gateway.runs.training_run import TrainingRun
from gateway.sessions.registry import SessionRegistry
from gateway.storage.data_directory import relative_path
from gateway.storage.database import Database
from gateway.storage.tables import runs, sessions
from gateway.workers.fleet import Fleet
from gateway.workers.launchers.kubernetes.resources import read_ahead
from tandem.errors import (
    GatewayRestarted,
    InternalError,
    InvalidRequest,
    SessionFinished,
    TandemError,
    UnknownRun,
)
from tandem.model_config import read_json, why_undivided, why_untrained
from tandem.settings import GatewaySettings, RecoverySettings
from tandem.telemetry import get_log
from tandem.worker import TrainingSpec

_PAYLOAD_SHARE = 0.5
"""Of what an owner may hold in memory, for payloads that need not be read back then."""


@dataclass(eq=False, repr=False, kw_only=True)
class RunRegistry:
    settings: GatewaySettings
    database: Database
    journal: Journal
    sessions: SessionRegistry
    limits: Quotas
    fleet: Fleet
    places: Places
    hosts: TrainerHosts
    collector: GarbageCollector
    snapshots: SnapshotStore
    tools: RunnerTools

    def __post_init__(self) -> None:
        self._data_dir = self.settings.data_dir
        self._runs: dict[str, TrainingRun] = {}
        self._arriving: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stopping: set[asyncio.Task[None]] = set()
        self._resumption = RunResumption(
            database=self.database,
            journal=self.journal,
            limits=self.limits,
            snapshots=self.snapshots,
            pins=self.tools.checkpoints.pins,
            data_dir=self.settings.private,
        )
        self._log = get_log()

    async def shared_trainers(self) -> set[str]:
        """Return the keys of the trainers that an earlier gateway's runs share."""
        shared = (runs.c.state == "active") & (runs.c.host != runs.c.id)
        rows = await self.database.read(select(runs.c.host).where(shared))
        return {row["host"] for row in rows}

    async def open(self) -> None:
        """Go on with the runs of an earlier gateway that can be restored; end the others."""
        over = runs.c.session_id.in_(select(sessions.c.id).where(sessions.c.state != "active"))
        active = runs.c.state == "active"
        for row in await self.database.read(select(runs.c.id).where(active, over)):
            self._write_end(row["id"], SessionFinished("its session has ended"))
        found = await self.database.read(select(runs).where(active, ~over))
        restored: list[RowMapping] = []
        others: list[RowMapping] = []
        for row in found:
            recovery = recovery_of(row["user_metadata"], self.settings.recovery)
            (restored if recovery.enabled else others).append(row)
        for row in others:
            self._write_end(row["id"], _restarted())
        await self.database.flush()
        await self.snapshots.open()
        lost = await self.journal.abandon()
        for row in restored:
            try:
                await self._resume(row)
            except Exception as error:  # noqa: BLE001 - the other runs go on
                self._log.exception("run_not_resumed", run_id=row["id"])
                what = f"{type(error).__name__} in the gateway when it restarted; see its log"
                self._write_end(row["id"], InternalError(what))
                if (host := self.hosts.get(row["host"] or row["id"])) is not None:
                    await self._leave(host, row["id"], what)
                await self.database.flush()
                lost += await self.journal.abandon()
        await self.fleet.stop_left(except_of=self.hosts.keys())
        if found:
            self._log.warning(
                "restarted", resumed=len(restored), ended=len(others), operations_failed=lost
            )

    async def _resume(self, row: RowMapping) -> None:
        """Take up a run where an earlier gateway left it. Its trainer is started when its session
        is heard of."""
        model = row["model"]
        run = self._new_run(
            id=row["id"],
            session_id=row["session_id"],
            owner=row["owner"],
            model=BaseModelEntry(**model | {"path": str(self._data_dir / model["path"])}),
            training=TrainingSpec.model_validate(row["training"]),
            asks=Asks(**row["asks"]) if row["asks"] else default_asks(self.settings),
            recovery=recovery_of(row["user_metadata"], self.settings.recovery),
        )
        await read_ahead(run.model.path, self.settings)
        host = self.hosts.for_left(run, key=row["host"] or run.id)
        run.trainer = self._trainer_of(run, host)
        left = await self._resumption.resume(run, row)
        if host.place is None and self.places.get(host.key) is None:
            await self.fleet.stop_left_of(host.key)
        run.creation = next((each for each in left.waiting if each.seq_id == 0), None)
        self._runs[run.id] = run
        run.life = asyncio.create_task(self._live_again(run, left.ended), name=f"run-{run.id}")

    async def _live_again(self, run: TrainingRun, ended: int) -> None:
        """As `_live`, for a run of an earlier gateway, once its client is heard of."""
        if (session := self.sessions.get(run.session_id)) is not None:
            await session.heard.wait()
            await self._live(run, ended=ended)

    async def close(self, *, patience: float) -> None:
        """Cancel everything. The next gateway goes on with what has not ended, and stops the
        trainers that have not ended within `patience` seconds, though their runs have."""
        lives = [run.life for run in self._runs.values() if run.life is not None]
        for life in lives:  # first: what ends without its log is not replayed
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        if stopping := tuple(self._stopping):
            _, late = await asyncio.wait(stopping, timeout=patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
        trainers = [run.trainer for run in self._runs.values() if run.trainer is not None]
        await asyncio.gather(*(trainer.close() for trainer in trainers))

    def all(self) -> list[TrainingRun]:
        return list(self._runs.values())

    def get(self, run_id: str) -> TrainingRun | None:
        return self._runs.get(run_id)

    # --- Creation -----------------------------------------------------------------------------

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
        admin: bool = False,
    ) -> str:
        """Begin to start a run, and return the request_id of its creation, which is operation 0
        of the run: it ends when the trainer is ready and has loaded the checkpoint, if any.

        `user_metadata` may say how the run is restored (`recovery_of`), and with that of its
        session what it asks for (`settled_asks`), for an `admin` or another caller.

        Idempotent: a repeated `model_seq_id` with the same request returns the original
        request_id. Raises `SequenceTaken` for another request, `LimitExceeded` if the owner may
        not have another run, `InvalidRequest`, also for a model that cannot be trained and for what
        no group can give, `PermissionDenied` and `SessionFinished`.
        """
        recovery = recovery_of(user_metadata, self.settings.recovery)
        run_id = run_id_of(session_id=session_id, model_seq_id=model_seq_id)
        request_id = request_id_of(owner=run_id, seq_id=0)
        kind: Kind = "create_model" if load is None else "load_weights"
        digest = digest_of(kind, request)
        known = await self._ended_with(run_id) is not None
        async with self._arrival(request_id):
            if known or run_id in self._runs:
                await self.journal.has(run_id=run_id, seq_id=0, digest=digest)
                await self.database.sync()
                return request_id
            folder = self.settings.data_dir / model.path
            config = await asyncio.to_thread(_config_of, folder)
            _check_trained(config, model.name)
            await read_ahead(model.path, self.settings, anew=True)
            # Nothing is awaited from here to where the run is registered.
            session = self.sessions.require(session_id)
            used = (run.session_id for run in self._runs.values() if run.state != "ended")
            self.limits.check("runs", used=self.sessions.count_of(session.owner, used))
            asks = settled_asks(
                user_metadata,
                session.user_metadata,
                model=model.name,
                model_path=model.path,
                settings=self.settings,
                groups=self.places.groups,
                admin=admin,
                training=training,
                max_lora_rank=training.rank,
            )
            _check_divided(config, model.name, ranks=asks.tensor_parallel)
            run = self._new_run(
                id=run_id,
                session_id=session_id,
                owner=session.owner,
                model=model,
                training=asks.training(training),
                asks=asks,
                recovery=recovery,
            )
            host = self.hosts.for_new(run)
            self._runs[run_id] = run
            creation = Operation(
                run_id=run_id,
                seq_id=0,
                kind=kind,
                future=run.new_future(0),
                body=load,
                digest=digest,
            )
            row = {
                "id": run_id,
                "session_id": session_id,
                "base_model": model.name,
                "model": vars(model) | {"path": relative_path(Path(model.path), self._data_dir)},
                "training": run.training.model_dump(),
                "asks": run.asks.model_dump(),
                "host": host.key,
                "owner": session.owner,
                "project_id": session.project_id,
                "state": "active",
                "user_metadata": user_metadata,
                "created_at": time.time(),
            }
            try:
                await self.journal.accept_creation(creation, run=insert(runs).values(row))
            except BaseException:
                self._runs.pop(run_id, None)
                self._in_background(self._leave(host, run_id, "its run was not created"))
                raise
        run.creation = creation
        if run.error is not None:  # its session has ended meanwhile
            self._in_background(self._leave(host, run_id, run.error.message))
            self.journal.end(creation, run.error)
        else:
            run.trainer = self._trainer_of(run, host)
            run.life = asyncio.create_task(self._live(run), name=f"run-{run_id}")
        await self.database.sync()
        return request_id

    def _new_run(
        self,
        *,
        id: str,
        session_id: str,
        owner: str,
        model: BaseModelEntry,
        training: TrainingSpec,
        asks: Asks,
        recovery: RecoverySettings,
    ) -> TrainingRun:
        return TrainingRun(
            id=id,
            session_id=session_id,
            owner=owner,
            model=model,
            training=training,
            asks=asks,
            recovery=recovery,
            dispatcher=Dispatcher(
                window=self.settings.dispatch_window,
                window_bytes=self.settings.dispatch_window_bytes,
                gap_timeout=self.settings.sequence_gap_timeout,
                end=self.journal.end,
            ),
        )

    def _trainer_of(self, run: TrainingRun, host: TrainerHost) -> RunTrainer:
        return RunTrainer(
            run=run,
            host=host,
            settings=self.settings,
            journal=self.journal,
            snapshots=self.snapshots,
            metrics=self.tools.metrics,
            definition_of=partial(self.tools.definition_of, session_id=run.session_id),
            on_lost=lambda error: self._break(run, error),
        )

    def _arrival(self, request_id: str) -> asyncio.Lock:
        """Return the lock that makes equal requests come one after the other: the second finds
        what the first has written, or goes on if that failed."""
        return self._arriving.setdefault(request_id, asyncio.Lock())

    async def _live(self, run: TrainingRun, *, ended: int = -1) -> None:
        """Start the trainer once there is a place for it, and carry out operations until one of
        them ends the run. Of a run of an earlier gateway, those up to `ended` have ended."""
        assert run.trainer is not None
        try:
            runner = OperationRunner(run=run, trainer=run.trainer, tools=self.tools)
            begins = run.creation is not None and not run.creation.future.ended
            if begins:
                await run.trainer.host.discard_left()
            await run.trainer.host.take_place(self.hosts.ask_of(run))
            if run.creation is not None and begins:
                await run.trainer.start()
                call = Call(run.creation)
                call.begin()
                self.journal.end(run.creation, await runner.carry_out(call))
                ended = 0 if call.sent else -1
            else:
                why = "the gateway restarted, and the trainer ended with it"
                run.trainer.take_over(GatewayRestarted(why))
            run.state = "ready"
            await run.dispatcher.serve(runner.carry_out, sent=ended)
        except RunBroken as broken:
            error = broken.error
        except TandemError as failed:
            error = failed
        except Exception as fault:  # noqa: BLE001 - a fault of ours must not leave a client waiting
            self._log.exception("run_failed", run_id=run.id)
            error = InternalError(f"{type(fault).__name__} in the gateway; see its log")
        self._break(run, error)

    # --- Operations ---------------------------------------------------------------------------

    async def submit(
        self,
        *,
        run_id: str,
        seq_id: int,
        kind: Kind,
        body: Body | None = None,
        request: bytes = b"",
        payload: bytes | None = None,
        refused: TandemError | None = None,
    ) -> str:
        """Accept an operation, and return its request_id once it is in the journal.

        Idempotent: a repeated `seq_id` with the same request returns the original request_id. A
        `refused` operation consumes its `seq_id` and fails with that error at its turn. Raises
        `SequenceTaken` for another request, or `UnknownRun`, `SessionFinished` or `Overloaded`,
        which leave the `seq_id` free, or `StorageFailed`: then the client asks again.
        """
        digest = digest_of(kind, request if payload is None else payload)
        run = self._runs.get(run_id)
        if run is None:
            return await self._submit_to_lost(
                run_id=run_id, seq_id=seq_id, kind=kind, digest=digest
            )
        request_id = request_id_of(owner=run_id, seq_id=seq_id)
        async with self._arrival(request_id):
            known = self.journal.has_future(request_id)
            if known or run.dispatcher.passed(seq_id):
                known |= await self.journal.has(run_id=run_id, seq_id=seq_id, digest=digest)
            if known:
                await self.database.sync()
                return request_id
            if run.error is not None:
                await self.journal.accept_failed(
                    run_id=run_id, seq_id=seq_id, kind=kind, digest=digest, error=run.error
                )
                return request_id
            # The operation that a run waits for is let in whatever the limits say: without it,
            # those that are there already could not go on, and would never make room.
            forced = run.dispatcher.awaits(seq_id)
            if not forced:
                self._check_queue(run)
            size = len(request if payload is None else payload)
            in_memory = payload is None or self.limits.held.has_room(
                run.owner, size, share=_PAYLOAD_SHARE
            )
            operation = Operation(
                run_id=run_id,
                seq_id=seq_id,
                kind=kind,
                future=run.new_future(seq_id),
                body=body,
                payload=payload if in_memory else None,
                has_payload=payload is not None,
                size=size,
                digest=digest,
                refused=refused,
            )
            with self.limits.reserve(
                run.owner,
                (self.limits.operations, 1),
                (self.limits.operation_bytes, size),
                (self.limits.held, size if in_memory else 0),
                forced=forced,
            ) as reserved:
                try:
                    await self.journal.accept(operation, payload=payload)
                except IntegrityError:  # the journal has this seq_id; memory has forgotten it
                    await self.journal.has(run_id=run_id, seq_id=seq_id, digest=digest)
                    await self.database.sync()
                    return request_id
                release = reserved.pop_all().close  # not now, but when the operation ends
        operation.future.on_end(lambda _outcome: release())
        run.dispatcher.put(operation)
        await self.database.sync()  # while it is carried out
        return request_id

    def _check_queue(self, run: TrainingRun) -> None:
        queued, limit = run.dispatcher.queued, self.settings.max_queued_operations
        if queued >= limit:
            self.limits.note_refusal("run_operations")
            raise overloaded(
                f"{queued} operations of this run wait already, {limit} at most "
                "(TANDEM_MAX_QUEUED_OPERATIONS)",
                limit="run_operations",
                waiting=queued,
                per_second=run.dispatcher.rate,
            )
        if run.trainer is not None and run.trainer.makes_room:
            self.limits.note_refusal("recovery_log_bytes")
            raise overloaded(
                "a snapshot is being written, after which there is room for more batches to replay "
                "(TANDEM_RECOVERY_LOG_BYTES)",
                limit="recovery_log_bytes",
                waiting=queued,
                per_second=run.dispatcher.rate,
            )

    async def _submit_to_lost(self, *, run_id: str, seq_id: int, kind: Kind, digest: bytes) -> str:
        """Accept an operation of a run that a restart of the gateway ended: it has failed."""
        ended_with = await self._ended_with(run_id)
        if ended_with is None:
            raise UnknownRun(f"there is no training run {run_id!r} on this server")
        error_type, reason = ended_with
        if error_type != GatewayRestarted.type:
            raise SessionFinished(f"training run {run_id} has ended: {reason}")
        await self.journal.accept_failed(
            run_id=run_id,
            seq_id=seq_id,
            kind=kind,
            digest=digest,
            error=GatewayRestarted(reason),
        )
        return request_id_of(owner=run_id, seq_id=seq_id)

    async def _ended_with(self, run_id: str) -> tuple[str, str] | None:
        """Return the error type and the reason of a run, or None if there never was one."""
        row = await self.database.read_one(
            select(runs.c.error_type, runs.c.reason).where(runs.c.id == run_id)
        )
        return None if row is None else (row["error_type"], row["reason"])

    # --- End ----------------------------------------------------------------------------------

    async def end_session(self, session_id: str, error: TandemError) -> list[str]:
        """End the session's runs and stop their trainers; return the ids of the runs."""
        ending = [run for run in self._runs.values() if run.session_id == session_id]
        for run in ending:
            self._end(run, error)
        await asyncio.gather(*(self._stopped(run, error.message) for run in ending))
        for run in ending:
            self._runs.pop(run.id, None)
            if run.parent:
                self.tools.checkpoints.pins.unpin(relative_version_folder(run.parent))
        return [run.id for run in ending]

    def _break(self, run: TrainingRun, error: TandemError) -> None:
        """End a run whose trainer is of no use any more, and the trainer if it still runs."""
        self._end(run, error)
        self._stopped(run, error.message)

    def _end(self, run: TrainingRun, error: TandemError) -> None:
        """Fail what has not ended. The first error counts."""
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
            self.journal.end(run.creation, error)
        run.dispatcher.end(error)
        if run.life is not None and run.life is not asyncio.current_task():
            run.life.cancel()
        self._write_end(run.id, error)

    def _write_end(self, run_id: str, error: TandemError) -> None:
        self.journal.forget_run(run_id)
        self.database.write_soon(
            update(runs)
            .where(runs.c.id == run_id)
            .values(
                state="ended", error_type=error.type, reason=error.message, ended_at=time.time()
            )
        )

    def _stopped(self, run: TrainingRun, reason: str) -> asyncio.Task[None]:
        """Stop the run's trainer, and then collect its files. Whoever asks again waits for the
        same end: nothing is collected while the trainer may still write."""
        if run.stopping is None:
            run.stopping = self._in_background(self._stop_trainer(run, reason))
        return run.stopping

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Do what goes on though whoever asked for it does not wait any more."""
        task = asyncio.create_task(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        return task

    async def _leave(self, host: TrainerHost, run_id: str, reason: str) -> None:
        """Give up the trainer of a run for which nothing was done yet."""
        try:
            await self.hosts.leave(host, run_id, reason)
        except Exception:  # noqa: BLE001 - nobody waits for it
            self._log.exception("trainer_not_stopped", run_id=run_id)

    async def _stop_trainer(self, run: TrainingRun, reason: str) -> None:
        if run.life is not None:
            await asyncio.gather(run.life, return_exceptions=True)
        if run.trainer is not None:
            await run.trainer.close()
        try:
            if run.trainer is not None:
                await self.hosts.leave(run.trainer.host, run.id, reason)
            await self.snapshots.remove_all(run)
            await self.journal.remove_payloads(run.id)
            await self.collector.collect(run.id, ended=True)
        except Exception:  # noqa: BLE001 - the other runs of its session must end all the same
            self._log.exception("trainer_not_stopped", run_id=run.id)


def _config_of(folder: Path) -> Mapping[str, object]:
    """Return a model's configuration. Of one that cannot be read nothing is known, and what is
    wrong with it is said when it is loaded."""
    with suppress(OSError, ValueError):
        return read_json(folder / "config.json")
    return {}


def _check_trained(config: Mapping[str, object], name: str) -> None:
    """Raise `InvalidRequest` for a model whose configuration says that it cannot be trained."""
    if reason := why_untrained(config):
        raise InvalidRequest(f"the model {name} {reason}")


def _check_divided(config: Mapping[str, object], name: str, *, ranks: int) -> None:
    """Raise `InvalidRequest` for a model whose configuration says that so many ranks cannot divide
    its matrices."""
    if ranks > 1 and (reason := why_undivided(config, ranks)):
        raise InvalidRequest(
            f"tandem.tensor_parallel is {ranks}, and the model {name} cannot be divided among so "
            f"many ranks: {reason}. Choose another number, or shard alone (tandem.shards)"
        )


def _restarted() -> GatewayRestarted:
    return GatewayRestarted(
        "the gateway restarted, and the trainer, which is not to be restored, ended with it; "
        "create the run again, from a checkpoint if there is one"
    )
