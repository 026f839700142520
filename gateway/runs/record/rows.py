"""The record of training runs: their rows with their newest checkpoints, and their optimizer steps.

The scope `owned` means the caller's runs, `accessible` all that the caller may see. Others appear
not to exist."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    Text,
    case,
    cast,
    func,
    or_,
    select,
    tuple_,
    update,
)

from gateway.checkpoints.catalog import Checkpoint, checkpoint_of, not_expired
from gateway.identifiers import unknown_run
from gateway.owners.auth.identity import Caller, Scope, visible
from gateway.runs.record.identity import RunIdentity
from gateway.storage.database import Database, from_row
from gateway.storage.tables import (
    checkpoints,
    jobs,
    operations,
    run_records,
    runs,
    training_steps,
)
from tandem.errors import PLANNED_ENDS, SessionFinished
from tandem.protocol.worker import TrainingSpec

_UNHURT = {"", SessionFinished.type, *(error.type for error in PLANNED_ENDS)}
"""The ends of runs whose state is in checkpoints."""


@dataclass(frozen=True)
class Storage:
    count: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class RunRecord:
    """A row of `runs`. `failed`: the run ended before its session and lost its state. `framework`
    is that of a job, or "" for a run of Tandem's trainer."""

    id: str
    session_id: str
    base_model: str
    owner: str
    project_id: str
    training: TrainingSpec
    ranks: int
    state: str
    reason: str
    created_at: float
    ended_at: float | None
    failed: bool
    last_request_at: float
    identity: RunIdentity
    parent_run: str | None
    parent_step: int | None
    user_metadata: Mapping[str, str] | None
    last_training: Checkpoint | None
    last_sampler: Checkpoint | None
    framework: str


@dataclass(frozen=True)
class TrainingStep:
    """A row of `training_steps`. `metrics` come from the optimizer and the step's batches."""

    run_id: str
    seq_id: int
    step: int
    at: float
    seconds: float
    tokens: int
    weight_version: str
    metrics: Mapping[str, float | None]

    @property
    def numbers(self) -> dict[str, float | None]:
        """The step's own numbers. Metrics with a suffix are combined from batches, for the SDK."""
        own = {name: value for name, value in self.metrics.items() if ":" not in name}
        return {**own, "tokens": float(self.tokens)}


_this_job = jobs.c.run_id == runs.c.id
_active = runs.c.state == "active"
_shown_state: ColumnElement[str] = case(
    (runs.c.ending.is_not(None) & _active, "ending"),
    (_active, func.coalesce(select(jobs.c.state).where(_this_job).scalar_subquery(), "active")),
    else_=runs.c.state,
)
"""The state for people: an active run whose end is decided is ending. An active job is queued or
running."""


@dataclass(frozen=True)
class RunFilters:
    """`name` is a part of the name, in any case. `only` is `jobs`. None: not asked for."""

    project_id: str | None = None
    name: str | None = None
    tag: str | None = None
    state: str | None = None
    owner: str | None = None
    only: str | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        for column in (runs.c.project_id, runs.c.owner):
            if (value := getattr(self, column.name)) is not None:
                yield column == value
        if self.state == "active":  # also jobs
            yield _active & runs.c.ending.is_(None)
        elif self.state is not None:
            yield _shown_state == self.state
        if self.only == "jobs":
            yield select(jobs.c.run_id).where(_this_job).exists()
        if self.name is not None:
            yield runs.c.name.icontains(self.name, autoescape=True)
        if self.tag is not None:
            # LIKE ignores the case in SQLite. A tag begins the list or follows another.
            text, tag = cast(runs.c.tags, Text), json.dumps(self.tag)
            yield or_(*(func.replace(text, f"{begin}{tag}", "") != text for begin in ("[", ", ")))


_ACCEPTED_LAST = (
    select(operations.c.accepted_at)
    .where(operations.c.run_id == runs.c.id)
    .order_by(operations.c.seq_id.desc())
    .limit(1)
    .scalar_subquery()
)
"""Reads one row per journal, because a journal can be long."""
_RUNS = select(
    runs,
    func.coalesce(_ACCEPTED_LAST, runs.c.ended_at, runs.c.created_at).label("last_request_at"),
    _shown_state.label("shown_state"),
    func.coalesce(select(jobs.c.framework).where(_this_job).scalar_subquery(), "").label(
        "framework"
    ),
)

Sort = Literal["newest", "oldest", "name", "owner", "updated", "step"]
_ORDERS: Mapping[Sort, Sequence[ColumnElement[Any]]] = {
    "newest": (),
    "oldest": (runs.c.created_at, runs.c.id),
    "name": (func.lower(func.coalesce(runs.c.name, runs.c.id)),),
    "owner": (runs.c.owner,),
    "updated": (func.coalesce(run_records.c.updated_at, runs.c.created_at).desc(),),
    "step": (func.coalesce(run_records.c.step, -1).desc(),),
}
_MOST_RELATIVES = 100


@dataclass(eq=False)
class RunRecords:
    """The rows of `runs` and `training_steps`. Steps live as long as their run."""

    database: Database

    def __post_init__(self) -> None:
        self._insert = self.database.insert_once(training_steps)

    async def storage_of(self, session_ids: Sequence[str]) -> dict[str, Storage]:
        rows = await self.database.read(
            select(
                runs.c.session_id,
                func.count().label("found"),
                func.sum(checkpoints.c.bytes).label("bytes"),
            )
            .join(runs, runs.c.id == checkpoints.c.run_id)
            .where(runs.c.session_id.in_(session_ids), not_expired())
            .group_by(runs.c.session_id)
        )
        return {
            row["session_id"]: Storage(count=row["found"], bytes=int(row["bytes"])) for row in rows
        }

    async def run(self, run_id: str, caller: Caller, *, scope: Scope = "accessible") -> RunRecord:
        """Return a run. Raises `UnknownRun`. A run with a published checkpoint is accessible to
        everybody."""
        await self.database.flush()
        seen = visible(runs.c.owner, caller, scope)
        if scope == "accessible":
            published = select(checkpoints.c.path).where(
                checkpoints.c.run_id == run_id, checkpoints.c.public, not_expired()
            )
            seen = or_(seen, published.exists())
        rows = await self.database.read(_RUNS.where(runs.c.id == run_id, seen))
        if not rows:
            raise unknown_run(run_id)
        return (await self._described(rows))[0]

    async def runs(
        self,
        caller: Caller,
        *,
        scope: Scope,
        filters: RunFilters = RunFilters(),
        sort: Sort = "newest",
        limit: int,
        offset: int,
    ) -> tuple[list[RunRecord], int]:
        wanted = [visible(runs.c.owner, caller, scope), *filters.conditions()]
        await self.database.flush()
        total = await self.database.read_value(
            select(func.count()).select_from(runs).where(*wanted)
        )
        rows = await self.database.read(
            _RUNS.outerjoin(run_records, run_records.c.run_id == runs.c.id)
            .where(*wanted)
            .order_by(*_ORDERS[sort], runs.c.created_at.desc(), runs.c.id.desc())
            .limit(limit)
            .offset(offset)
        )
        return await self._described(rows), total

    async def of_ids(self, run_ids: Sequence[str], caller: Caller) -> list[RunRecord]:
        """Return the runs of these ids that the caller owns, or all of them for an admin."""
        seen = visible(runs.c.owner, caller, "accessible")
        return await self._described(
            await self.database.read(_RUNS.where(runs.c.id.in_(run_ids), seen))
        )

    async def relatives(self, run: RunRecord, caller: Caller) -> list[RunRecord]:
        """Return the run that this one continues, and those that continue it, if the caller may see
        them."""
        wanted = or_(runs.c.id == run.parent_run, runs.c.parent_run == run.id)
        seen = visible(runs.c.owner, caller, "accessible")
        query = _RUNS.where(wanted, seen).order_by(runs.c.created_at.desc()).limit(_MOST_RELATIVES)
        return await self._described(await self.database.read(query))

    async def change(self, run_id: str, identity: Mapping[str, object]) -> None:
        """Replace columns of a run's identity or its `user_metadata`."""
        await self.database.write(
            update(runs).where(runs.c.id == run_id).values(**identity), durable=True
        )

    async def _described(self, rows: Sequence[RowMapping]) -> list[RunRecord]:
        newest = await self._newest_checkpoints([row["id"] for row in rows])
        return [
            from_row(
                RunRecord,
                row,
                training=TrainingSpec.model_validate(row["training"]),
                ranks=(row["asks"] or {}).get("ranks", 1),
                state=row["shown_state"],
                failed=row["state"] == "ended" and row["error_type"] not in _UNHURT,
                identity=RunIdentity(row["name"], row["tags"], row["config"]),
                last_training=newest.get((row["id"], "weights")),
                last_sampler=newest.get((row["id"], "sampler_weights")),
            )
            for row in rows
        ]

    async def names(self, run_ids: Sequence[str], caller: Caller) -> dict[str, str]:
        """Return the names of the caller's named runs by id, for an admin everybody's."""
        if not run_ids:
            return {}
        await self.database.flush()
        mine = visible(runs.c.owner, caller, "accessible")
        named = runs.c.id.in_(run_ids), runs.c.name.is_not(None)
        rows = await self.database.read(select(runs.c.id, runs.c.name).where(mine, *named))
        return {row["id"]: row["name"] for row in rows}

    async def _newest_checkpoints(
        self, run_ids: Sequence[str]
    ) -> dict[tuple[str, str], Checkpoint]:
        table = checkpoints.c
        from_newest = func.row_number().over(
            partition_by=(table.run_id, table.kind),
            order_by=(table.created_at.desc(), table.path.desc()),
        )
        ranked = (
            select(checkpoints, from_newest.label("rank"))
            .where(table.run_id.in_(run_ids), not_expired())
            .subquery()
        )
        rows = await self.database.read(select(ranked).where(ranked.c.rank == 1))
        return {(row["run_id"], row["kind"]): checkpoint_of(row) for row in rows}

    # --- Optimizer steps ----------------------------------------------------------------------

    def record_step(self, step: TrainingStep) -> None:
        """Write a step without waiting. An existing row stays."""
        finite = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in step.metrics.items()
        }
        self.database.write_soon(self._insert, asdict(step) | {"metrics": finite})

    async def newest_steps(
        self, run_id: str, *, limit: int, before: int | None
    ) -> list[TrainingStep]:
        """Return the newest steps of a run in order, before the `seq_id` `before` if given."""
        wanted = select(training_steps).where(training_steps.c.run_id == run_id)
        if before is not None:
            wanted = wanted.where(training_steps.c.seq_id < before)
        await self.database.flush()
        rows = await self.database.read(
            wanted.order_by(training_steps.c.seq_id.desc()).limit(limit)
        )
        return [from_row(TrainingStep, row) for row in reversed(rows)]

    async def last_steps(self, run_ids: Sequence[str]) -> dict[str, TrainingStep]:
        last = (
            select(training_steps.c.run_id, func.max(training_steps.c.seq_id))
            .where(training_steps.c.run_id.in_(run_ids))
            .group_by(training_steps.c.run_id)
        )
        this = tuple_(training_steps.c.run_id, training_steps.c.seq_id)
        await self.database.flush()
        rows = await self.database.read(select(training_steps).where(this.in_(last)))
        return {row["run_id"]: from_row(TrainingStep, row) for row in rows}
