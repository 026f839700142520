"""What the database knows of leases: who has one or waits for one, and who had one when.

One row for each worker that has a place on a leased group. That a worker has a lease is committed
before it wakes, so that the next gateway takes no worker for asleep that may be awake.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import delete, insert, select, update

from gateway.storage.database import Database
from gateway.storage.tables import lease_spans, leases


@dataclass(frozen=True)
class LeaseRecord:
    """What an earlier gateway has left: whether the worker may be awake, since when it waits (in
    seconds since 1970; 0: it does not), and for how many seconds it has used the devices in all."""

    held: bool
    token: int
    since: float
    seconds: float


@dataclass(frozen=True)
class Span:
    """A time in which a worker had the devices of a group, its wake and its sleep included. Times
    in seconds since 1970. It used them for `busy_seconds`."""

    worker: str
    group_name: str
    kind: str
    owner: str
    session_id: str
    began: float
    wake_seconds: float
    busy_seconds: float
    sleep_seconds: float
    ended: float


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

    def free(self, key: str, *, seconds: float, span: Span) -> None:
        self._update(key, held=False, seconds=seconds)
        self._database.write_soon(insert(lease_spans), asdict(span))

    def remove(self, key: str) -> None:
        self._database.write_soon(delete(leases).where(leases.c.worker == key))

    def _update(self, key: str, **values: object) -> None:
        self._database.write_soon(update(leases).where(leases.c.worker == key).values(values))
