"""What the database knows of training runs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sqlalchemy import bindparam, insert, select, update

from gateway.runs.training_run import TrainingRun
from gateway.sessions.registry import Session
from gateway.storage.database import Database
from gateway.storage.tables import runs
from tandem.errors import GatewayRestarted, TandemError

_NOTE_REQUEST = (
    update(runs)
    .where(runs.c.id == bindparam("this_run"))
    .values(last_request_at=bindparam("this_time"))
)


class RunRows:
    """The rows of runs: each is written when its run begins, becomes ready, and ends."""

    def __init__(self, *, database: Database) -> None:
        self._database = database

    async def end_all(self) -> list[str]:
        """Marks the runs of an earlier gateway ended; returns their ids."""
        open_runs = await self._database.read(select(runs.c.id).where(runs.c.state != "ended"))
        if open_runs:
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
        return [row["id"] for row in open_runs]

    async def has(self, run_id: str) -> bool:
        """Whether there is, or ever was, such a run."""
        row = await self._database.read_one(select(runs.c.id).where(runs.c.id == run_id))
        return row is not None

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
                "error_type": "",
                "reason": "",
                "user_metadata": user_metadata,
                "created_at": run.created_at,
                "last_request_at": run.created_at,
            },
        )

    def note_ready(self, run: TrainingRun) -> None:
        self._database.write_soon(update(runs).where(runs.c.id == run.id).values(state="ready"))

    def note_end(self, run: TrainingRun, error: TandemError) -> None:
        self._database.write_soon(
            update(runs)
            .where(runs.c.id == run.id)
            .values(
                state="ended",
                error_type=error.type,
                reason=error.message,
                ended_at=time.time(),
                last_request_at=run.last_request_at,
            )
        )

    def note_requests(self, changed: list[TrainingRun]) -> None:
        """When these runs were last asked for something."""
        if changed:
            self._database.write_soon(
                _NOTE_REQUEST,
                *({"this_run": run.id, "this_time": run.last_request_at} for run in changed),
            )
