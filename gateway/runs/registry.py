"""The registry of training runs, from creation or resumption until their session ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from sqlalchemy import RowMapping, insert, select

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.identifiers import (
    relative_version_folder,
    request_id_of,
    run_id_of,
)
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import SessionRegistry
from gateway.runs.dispatcher import Dispatcher
from gateway.runs.ending import ending_of, left_to_do, without_checkpoint
from gateway.runs.lifecycle import RunLifecycle
from gateway.runs.operations import Kind, LoadWeights, Operation
from gateway.runs.record.identity import identity_of
from gateway.runs.recovery.replay_log import recovery_of
from gateway.runs.recovery.resumption import LeftRun, RunResumption
from gateway.runs.run import Run, RunEnding
from gateway.runs.tools import RunTools
from gateway.runs.trainer_hosts import TrainerHosts
from gateway.storage.data_directory import relative_path
from gateway.storage.futures.table import digest_of
from gateway.storage.tables import jobs, runs, sessions
from gateway.workers.groups import WorkerGroup
from gateway.workers.model_sizes import read_ahead
from gateway.workers.run_options import RunOptions, options_of
from tandem.errors import (
    DeadlineExceeded,
    GatewayRestarted,
    InternalError,
    InvalidRequest,
    SessionFinished,
    TandemError,
    UnsuitableLora,
)
from tandem.protocol.worker import LORA_FLAGS, TrainingSpec
from tandem.telemetry import get_log
from tandem.weights.model_config import (
    head_alone,
    read_json,
    why_undivided,
    why_unsharded,
    why_untrained,
)

_READ_TOGETHER = 16
"""The number of runs in one reading of rows. A run may have 100,000 calls, which need memory."""


@dataclass(eq=False, repr=False, kw_only=True)
class RunRegistry:
    sessions: SessionRegistry
    limits: Quotas
    groups: Callable[[], Sequence[WorkerGroup]]
    hosts: TrainerHosts
    lifecycle: RunLifecycle
    tools: RunTools

    def __post_init__(self) -> None:
        self._settings, self._data_dir = self.tools.settings, self.tools.settings.data_dir
        self._journal, self._database = self.tools.journal, self.tools.journal.database
        self._runs: dict[str, Run] = {}
        self.others_of: Callable[[str], int] = lambda owner: 0
        """Returns the number of an owner's runs of other frameworks (`gateway.jobs`)."""
        self._arriving: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._resumption = RunResumption(self.limits, self.tools)
        self._log = get_log()
        self.tools.metrics.watch(
            "runs",
            "Training runs that have not ended.",
            lambda: sum(run.state != "ended" for run in self.all()),
        )
        self.tools.metrics.watch(
            "queued_operations",
            "Operations that have not ended.",
            lambda: sum(run.dispatcher.queued for run in self.all()),
        )

    async def resume_runs(self) -> None:
        """Resume an earlier gateway's restorable runs and end the others, except jobs."""
        over = runs.c.session_id.in_(select(sessions.c.id).where(sessions.c.state != "active"))
        active = runs.c.state == "active"
        for row in await self._database.read(select(runs.c.id).where(active, over)):
            self.lifecycle.write_end(row["id"], SessionFinished("the session of the run has ended"))
        trained_here = runs.c.id.not_in(select(jobs.c.run_id))
        found = await self._database.read(select(runs).where(active, ~over, trained_here))
        restored: list[RowMapping] = []
        for row in found:
            error: TandemError | None = None
            if (ending := ending_of(row)) is not None:
                error = await left_to_do(self._database, row, ending)
            if error is None and recovery_of(row["user_metadata"], self._settings) is None:
                why = _restarted()
                error = without_checkpoint(ending.error, why.message) if ending else why
            if error is None:
                restored.append(row)
            else:
                self.lifecycle.write_end(row["id"], error)
        await self._database.flush()
        await self.tools.snapshots.remove_ended()
        lost = await self._journal.abandon()
        for start in range(0, len(restored), _READ_TOGETHER):
            together = restored[start : start + _READ_TOGETHER]
            for left in await self._resumption.read_runs(together):
                lost += await self._resume_or_end(left)
        if found:
            self._log.warning(
                "restarted",
                resumed=len(restored),
                ended=len(found) - len(restored),
                operations_failed=lost,
            )

    async def _resume_or_end(self, left: LeftRun) -> int:
        """Resume a run, or end it if that fails. Return the number of its failed operations."""
        row = left.row
        try:
            await self._resume(left)
            return 0
        except Exception as error:  # noqa: BLE001 - the other runs go on
            self._log.exception("run_not_resumed", run_id=row["id"])
            what = f"{type(error).__name__} in the gateway when it restarted; see its log"
        self.lifecycle.write_end(row["id"], InternalError(what))
        if (host := self.hosts.get(row["host"])) is not None:
            await self.lifecycle.leave(host, row["id"])
        await self._database.flush()
        return await self._journal.abandon()

    async def _resume(self, left: LeftRun) -> None:
        row = left.row
        model, session = row["model"], self.sessions.require(row["session_id"])
        run = Run(
            id=row["id"],
            session_id=session.id,
            owner=row["owner"],
            model=BaseModelEntry(**model | {"path": str(self._data_dir / model["path"])}),
            training=TrainingSpec.model_validate(row["training"]),
            options=RunOptions(**row["asks"]),
            dispatcher=self._dispatcher(row["owner"]),
            ending=ending_of(row),
        )
        await read_ahead(run.model.path, self._settings)
        self.hosts.for_left(run, key=row["host"])
        if recovery := recovery_of(row["user_metadata"], self._settings):
            run.log = self._journal.open_log(run.id, recovery)
        await self._resumption.resume_run(run, left)
        last = left.last_step
        ago = time.time() - (last.at if last is not None else row["created_at"])
        run.deadline = run.options.deadline_at(row["created_at"])
        self._runs[run.id] = run
        self.lifecycle.begin(run, heard=session.heard, ended=left.ended, ago=max(0.0, ago))
        if left.sampled is not None:
            run.timeline.note_published(left.sampled.name, step=left.sampled.step)
        self._end_if_due(run)

    def end_due(self) -> None:
        """Begin the ends of the runs with a passed deadline or a used-up budget."""
        for run in self.all():
            self._end_if_due(run)

    def _end_if_due(self, run: Run) -> None:
        error: TandemError | None = self.limits.exhausted.get(run.owner)
        if error is None and run.deadline is not None and time.time() >= run.deadline:
            error = DeadlineExceeded(
                f"the run has reached its tandem.deadline ({run.options.deadline})"
            )
        if error is not None and run.why_over is None:
            self.lifecycle.end_as_planned(run, RunEnding(error))

    def _dispatcher(self, owner: str) -> Dispatcher:
        """A budget is overrun by one operation at most, so none is sent ahead."""
        return Dispatcher(
            end=self._journal.end, one_at_a_time=lambda: owner in self.limits.budgeted
        )

    def all(self) -> list[Run]:
        return list(self._runs.values())

    def count_of(self, owner: str) -> int:
        """Return the number of an owner's runs that have not ended."""
        used = (run.session_id for run in self._runs.values() if run.state != "ended")
        return self.sessions.count_of(owner, used)

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    async def create(
        self,
        *,
        session_id: str,
        model_seq_id: int,
        model: BaseModelEntry,
        training: TrainingSpec,
        load: LoadWeights | None,
        loaded: str = "",
        user_metadata: Mapping[str, object] | None,
        request: bytes,
        admin: bool = False,
    ) -> str:
        """Start a run and return the request_id of operation 0, its creation. It ends when the
        trainer is ready and has loaded the checkpoint, if any. Its folder, `loaded`, stays until
        then.

        `user_metadata` may choose the recovery (`recovery_of`) and the options (`options_of`), an
        `admin` more of them. Idempotent: a repeated `model_seq_id` with an equal request returns
        the original. Raises `SequenceTaken`, `LimitExceeded`, `UnsuitableLora`, `InvalidRequest`
        (also for an untrainable model or missing devices), `PermissionDenied` and
        `SessionFinished`."""
        recovery = recovery_of(user_metadata, self._settings)
        identity, others = identity_of(user_metadata)
        run_id = run_id_of(session_id=session_id, model_seq_id=model_seq_id)
        request_id = request_id_of(owner=run_id, seq_id=0)
        kind: Kind = "create_model" if load is None else "load_weights"
        digest = digest_of(kind, request)
        known = await self._database.read_one(select(runs.c.id).where(runs.c.id == run_id))
        async with self._arriving.setdefault(request_id, asyncio.Lock()):
            if known or run_id in self._runs:
                await self._journal.has(run_id=run_id, seq_id=0, digest=digest)
                await self._database.sync()
                return request_id
            folder = self._data_dir / model.path
            config = await asyncio.to_thread(_config_of, folder)
            _check_model(config, model.name, training)
            await read_ahead(model.path, self._settings, anew=True)
            # No await from here until the run is registered.
            session = self.sessions.require(session_id)
            used = self.count_of(session.owner) + self.others_of(session.owner)
            self.limits.check("runs", owner=session.owner, used=used)
            self.limits.check_budget(session.owner)
            options = options_of(
                user_metadata,
                session.user_metadata,
                model=model.name,
                settings=self._settings,
                groups=self.groups(),
                admin=admin,
                training=training,
            )
            _check_layout(config, model.name, options)
            run = Run(
                id=run_id,
                session_id=session_id,
                owner=session.owner,
                model=model,
                training=options.training(training),
                options=options,
                dispatcher=self._dispatcher(session.owner),
            )
            created_at = time.time()
            run.deadline = options.deadline_at(created_at)
            if run.deadline is not None and run.deadline <= created_at:
                raise InvalidRequest(
                    f"tandem.deadline is {options.deadline}, which has passed; choose a later one"
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
                "asks": run.options.model_dump(),
                "host": host.key,
                "owner": session.owner,
                "project_id": session.project_id,
                "state": "active",
                **vars(identity),
                "user_metadata": others,
                "created_at": created_at,
            }
            try:
                await self._journal.accept_creation(creation, run=insert(runs).values(row))
            except BaseException:
                self._runs.pop(run_id, None)
                self.lifecycle.leave_soon(run)
                raise
        self.tools.record.identity_files.write_soon(run_id)
        run.creation = creation
        if loaded:
            self.tools.checkpoints.pins.pin_until(creation.future.on_end, loaded)
        if run.error is not None:  # its session ended meanwhile
            self._journal.end(creation, run.error)
        else:
            if recovery is not None:
                run.log = self._journal.open_log(run_id, recovery)
            self.lifecycle.begin(run)
        await self._database.sync()
        return request_id

    async def finish_ends(self, session_id: str) -> None:
        """Wait until the session's runs with a decided end have ended, and saved their state.

        Others record the outcomes that clients have already."""
        await asyncio.gather(
            *(run.dispatcher.until_recorded() for run in self._of_session(session_id))
        )
        await self.lifecycle.wait_for_ends(self._of_session(session_id))

    def _of_session(self, session_id: str) -> list[Run]:
        return [run for run in self._runs.values() if run.session_id == session_id]

    async def end_session(self, session_id: str, error: TandemError) -> list[str]:
        ending = self._of_session(session_id)
        await self.lifecycle.end_all(ending, error)
        for run in ending:
            self._runs.pop(run.id, None)
            if run.parent:
                self.tools.checkpoints.pins.unpin(relative_version_folder(run.parent))
        return [run.id for run in ending]


def _config_of(folder: Path) -> Mapping[str, object]:
    """Return a model's configuration, {} if unreadable. The load reports the error."""
    with suppress(OSError, ValueError):
        return read_json(folder / "config.json")
    return {}


def _check_model(config: Mapping[str, object], name: str, training: TrainingSpec) -> None:
    """Raise `InvalidRequest` for an untrainable model, and `UnsuitableLora` for adapters that no
    sampler would serve."""
    if reason := why_untrained(config):
        raise InvalidRequest(f"the model {name} {reason}")
    if training.lora is None or not head_alone(config):
        return
    kinds = ("attention", "mlp")
    if off := [LORA_FLAGS[kind] for kind in kinds if getattr(training.lora, kind)]:
        flags = " and ".join(f"{flag}=False" for flag in off)
        raise UnsuitableLora(
            f"samplers of the model {name} serve LoRA adapters of the output head only. Pass "
            f"{flags}, or train all parameters ({name}:full)"
        )


def _check_layout(config: Mapping[str, object], name: str, options: RunOptions) -> None:
    """Raise `InvalidRequest` if the ranks cannot divide the model's matrices, or cannot hold a copy
    of the model."""
    ranks, shards = options.tensor_parallel, options.shards or 1
    if ranks > 1 and (reason := why_undivided(config, ranks)):
        raise InvalidRequest(
            f"tandem.tensor_parallel is {ranks}, and the model {name} cannot be divided among so "
            f"many ranks: {reason}. Choose another number, or shard alone (tandem.shards)"
        )
    if reason := why_unsharded(config, ranks=shards, divided=ranks):
        raise InvalidRequest(
            f"a copy of the model {name} cannot be on {shards} ranks: {reason}. Choose fewer "
            "(tandem.shards)"
        )


def _restarted() -> GatewayRestarted:
    return GatewayRestarted(
        "the gateway restarted and the trainer of the run ended. The run cannot be restored: "
        "create it again, from a checkpoint if there is one"
    )
