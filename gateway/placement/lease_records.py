"""The leases in the database: one row for each worker with a place on a leased group.

A lease is committed before its worker wakes, so that the next gateway takes no worker for asleep
that may be awake."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select, update

from gateway.storage.database import Database
from gateway.storage.tables import leases


@dataclass(frozen=True)
class LeaseRecord:
    """What an earlier gateway has left: whether the worker may be awake, since when it waits (in
    seconds since 1970; 0: it does not), and for how many seconds it has used the devices in all."""

    held: bool
    token: int
    since: float
    seconds: float


class LeaseRecords:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._left: dict[str, LeaseRecord] = {}

    async def open(self) -> None:
        """Read what an earlier gateway has left."""
        for row in await self._database.read(select(leases)):
            self._left[row["worker"]] = LeaseRecord(
                held=row["held"], token=row["token"], since=row["since"], seconds=row["seconds"]
            )

    def take_left(self, key: str) -> LeaseRecord | None:
        """Return what there is of a worker, once."""
        return self._left.pop(key, None)

    def forget_left(self) -> None:
        """Forget what nobody has taken: of those workers nothing is left."""
        for key in self._left:
            self.remove(key)
        self._left.clear()

    def add(self, key: str, *, group: str, kind: str, owner: str) -> None:
        row = {"worker": key, "group_name": group, "kind": kind, "owner": owner}
        self._database.write_soon(self._database.insert_once(leases), row)

    def wait(self, key: str, *, since: float) -> None:
        self._update(key, held=False, since=since)

    async def hold(self, key: str, *, token: int) -> None:
        """Return when it is committed that the worker has a lease. Raises `StorageFailed`."""
        change = update(leases).where(leases.c.worker == key)
        await self._database.write(change.values(held=True, token=token, since=0.0))

    def free(self, key: str, *, seconds: float) -> None:
        self._update(key, held=False, seconds=seconds)

    def remove(self, key: str) -> None:
        self._database.write_soon(delete(leases).where(leases.c.worker == key))

    def _update(self, key: str, **values: object) -> None:
        self._database.write_soon(update(leases).where(leases.c.worker == key).values(values))
