"""The optimizer steps of training runs, one row each, with the trainer's measurements. They live as
long as their run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import func, select, tuple_

from gateway.storage.database import Database, from_row
from gateway.storage.tables import training_steps


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


class RunHistory:
    def __init__(self, *, database: Database) -> None:
        self._database = database
        self._insert = database.insert_once(training_steps)

    def record(self, step: TrainingStep) -> None:
        """Write a step without waiting. An existing row stays."""
        finite = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in step.metrics.items()
        }
        self._database.write_soon(self._insert, asdict(step) | {"metrics": finite})

    async def newest(self, run_id: str, *, limit: int, before: int | None) -> list[TrainingStep]:
        """Return the newest steps of a run in order, before the `seq_id` `before` if given."""
        wanted = select(training_steps).where(training_steps.c.run_id == run_id)
        if before is not None:
            wanted = wanted.where(training_steps.c.seq_id < before)
        await self._database.flush()
        rows = await self._database.read(
            wanted.order_by(training_steps.c.seq_id.desc()).limit(limit)
        )
        return [from_row(TrainingStep, row) for row in reversed(rows)]

    async def last_of(self, run_ids: Sequence[str]) -> dict[str, TrainingStep]:
        last = (
            select(training_steps.c.run_id, func.max(training_steps.c.seq_id))
            .where(training_steps.c.run_id.in_(run_ids))
            .group_by(training_steps.c.run_id)
        )
        this = tuple_(training_steps.c.run_id, training_steps.c.seq_id)
        await self._database.flush()
        rows = await self._database.read(select(training_steps).where(this.in_(last)))
        return {row["run_id"]: from_row(TrainingStep, row) for row in rows}
