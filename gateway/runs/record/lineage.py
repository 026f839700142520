"""The parents of runs: a run that loads another run's checkpoint continues its curves."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import select, update

from gateway.storage.database import Database
from gateway.storage.tables import runs

_MOST_ANCESTORS = 20
_RUN = select(runs.c.owner, runs.c.parent_run, runs.c.parent_step)

Ancestor = tuple[str, int | None]
"""A run, and the step of its checkpoint from which the next run continued."""


def note_parent(database: Database, run_id: str, parent: str, step: int) -> None:
    """Write the run whose checkpoint of a step this run has loaded, without waiting."""
    if parent != run_id:
        values = {"parent_run": parent, "parent_step": step}
        database.write_soon(update(runs).where(runs.c.id == run_id).values(**values))


async def ancestors_of(
    database: Database, run_id: str, may_see: Callable[[str], bool]
) -> list[Ancestor]:
    """Return a run's visible ancestors, the oldest first. `may_see` decides by the owner."""
    found: list[Ancestor] = []
    seen = {run_id}
    row = await database.read_one(_RUN.where(runs.c.id == run_id))
    while row is not None and (parent := row["parent_run"]) and len(found) < _MOST_ANCESTORS:
        step = row["parent_step"]
        row = await database.read_one(_RUN.where(runs.c.id == parent))
        if parent in seen or row is None or not may_see(row["owner"]):
            break
        seen.add(parent)
        found.insert(0, (parent, step))
    return found
