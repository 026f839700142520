"""One training run: what memory holds of it while its session is active, and its row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import bindparam, insert, select, update

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.runs.dispatcher import Dispatcher
from gateway.runs.operations import Operation
from gateway.sessions.registry import Session
from gateway.storage.database import Database
from gateway.storage.tables import runs
from gateway.workers.fleet import Worker
from tandem.errors import GatewayRestarted, TandemError
from tandem.worker import TrainingSpec

RunState = Literal["starting", "ready", "ended"]


@dataclass(eq=False)
class TrainingRun:
    """`life` is the task that starts the trainer and serves the run; `creation` the operation of
    the run's own creation, once it is in the journal.

    `published` counts the weight versions; `parent` is the newest, which is pinned, and `newest`
    the newest that can be sampled from. `version_bytes` is the size of the last one.
    """

    id: str
    session_id: str
    owner: str
    model: BaseModelEntry
    training: TrainingSpec
    dispatcher: Dispatcher
    state: RunState = "starting"
    error: TandemError | None = None
    created_at: float = field(default_factory=time.time)
    creation: Operation | None = None
    life: asyncio.Task[None] | None = None
    worker: Worker | None = None
    architecture: str = ""
    parameters: int = 0
    trainable_parameters: int = 0
    ranks: int = 0
    step: int = 0
    published: int = 0
    parent: str = ""
    newest: str = ""
    version_bytes: int = 0
    last_request_at: float = field(default_factory=time.time)
    saved_request_at: float = 0.0
    _arriving: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    @property
    def expected_version_bytes(self) -> int:
        """The size of the next weight version: that of the last one, or 4 bytes a parameter."""
        return self.version_bytes or 4 * self.trainable_parameters

    @property
    def expected_state_bytes(self) -> int:
        """The size of a trainer's state: parameters and two moments of each, 4 bytes each."""
        return max(12 * self.trainable_parameters, 3 * self.version_bytes)

    async def arrived(self, seq_id: int) -> None:
        """Return when no operation with this `seq_id` is being written."""
        while seq_id in self._arriving:
            await asyncio.shield(self._arriving[seq_id])

    @contextmanager
    def arriving(self, seq_id: int) -> Iterator[None]:
        """Mark that an operation with this `seq_id` is being written while the block runs."""
        arrival = self._arriving[seq_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._arriving[seq_id]
            arrival.set_result(None)


_SAVE_REQUEST_TIME = (
    update(runs)
    .where(runs.c.id == bindparam("this_run"))
    .values(last_request_at=bindparam("this_time"))
)


class RunRows:
    """The rows of runs, written when a run is created, becomes ready, and ends."""

    def __init__(self, *, database: Database) -> None:
        self._database = database

    async def end_all(self) -> list[str]:
        """Mark the runs of an earlier gateway as ended; return their ids."""
        rows = await self._database.read(select(runs.c.id).where(runs.c.state != "ended"))
        if rows:
            await self._database.write(
                update(runs)
                .where(runs.c.state != "ended")
                .values(
                    state="ended",
                    error_type=GatewayRestarted.type,
                    reason="the gateway restarted, and the trainer ended with it; create the "
                    "run again, from a checkpoint if there is one",
                    ended_at=time.time(),
                )
            )
        return [row["id"] for row in rows]

    async def ended_with(self, run_id: str) -> tuple[str, str] | None:
        """Return the error type and the reason of a run, or None if there never was one."""
        row = await self._database.read_one(
            select(runs.c.error_type, runs.c.reason).where(runs.c.id == run_id)
        )
        return None if row is None else (row["error_type"], row["reason"])

    async def add(
        self, run: TrainingRun, *, session: Session, user_metadata: Mapping[str, object] | None
    ) -> None:
        await self._database.write(
            insert(runs),
            {
                "id": run.id,
                "session_id": session.id,
                "base_model": run.model.name,
                "training": run.training.model_dump(),
                "owner": session.owner,
                "project_id": session.project_id,
                "state": "starting",
                "user_metadata": user_metadata,
                "created_at": run.created_at,
                "last_request_at": run.created_at,
            },
        )

    def set_ready(self, run: TrainingRun) -> None:
        self._update(run, state="ready")

    def set_ended(self, run: TrainingRun, error: TandemError) -> None:
        self._update(
            run,
            state="ended",
            error_type=error.type,
            reason=error.message,
            ended_at=time.time(),
            last_request_at=run.last_request_at,
        )

    def _update(self, run: TrainingRun, **values: object) -> None:
        self._database.write_soon(update(runs).where(runs.c.id == run.id).values(**values))

    def save_request_times(self, changed: Sequence[TrainingRun]) -> None:
        """Write when these runs last received a request."""
        if changed:
            self._database.write_soon(
                _SAVE_REQUEST_TIME,
                *({"this_run": run.id, "this_time": run.last_request_at} for run in changed),
            )
