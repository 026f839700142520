"""Runs and engines that ask a supervisor for places."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

from gateway.workers.adapters import Found, Moved
from gateway.workers.groups import WorkerGroup
from gateway.workers.overview import Budgets
from gateway.workers.request_maker import engine_key
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.run_options import RunOptions
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow
from tandem.settings.sharing import SharingSettings
from tests.support.gateway.memory_table import MemoryTable
from tests.support.gateway.supervised_workers import CheckedSupervisor
from tests.support.waiting import PATIENCE


class ObedientWorkers:
    """An adapter of workers without delays."""

    async def start(self, row: WorkerRow, group: WorkerGroup) -> None: ...

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        return Moved()

    async def wake(self, row: WorkerRow) -> Moved:
        return Moved()

    async def stop(self, row: WorkerRow, *, at_once: bool) -> None: ...

    def new_process(self, row: WorkerRow) -> str:
        return f"{row.key}:{uuid.uuid4().hex[:8]}"

    async def stop_strangers(self, is_known: object) -> None: ...

    async def find(self, row: WorkerRow, group: WorkerGroup) -> Found:
        return Found(state="asleep" if row.state == "asleep" else "awake")

    def explain(self, row: WorkerRow) -> str:
        return ""

    def silent_for(self, row: WorkerRow) -> float:
        return 0.0


def group(name: str, *roles: str, **changes: Any) -> WorkerGroup:
    """Return a group of cores for these roles, or for both."""
    kinds: Any = {"trainer": "trainer", "sampler": "engine"}
    number = sum(map(ord, name)) % 1000
    values = {"devices": (f"cpu:{number}",), "workers": 2, "on_host": True} | changes
    found = frozenset(kinds[role] for role in roles or kinds)
    return WorkerGroup(name=name, kinds=found, **values)


WHOLE = group("cpu", devices=(), workers=0, awake=0, most_ranks=8)
TRAIN, SAMPLE = group("train", "trainer"), group("sample", "sampler")


async def quiet() -> None:
    """Return when every task waits or has ended."""
    for _ in range(30):
        await asyncio.sleep(0)


class Asking:
    """A caller that asks for places, in a task of its own."""

    task: asyncio.Task[None]

    async def ask(self) -> Any:
        self.task = asyncio.create_task(self.take())
        await quiet()
        return self

    async def take(self) -> None:
        raise NotImplementedError

    @property
    def has(self) -> bool:
        """Whether it has all its places. Raises the error of a failed ask."""
        return self.task.done() and not self.task.cancelled() and self.task.result() is None

    async def granted(self) -> Any:
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)
        return self

    async def give_up(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class PlacesWorld:
    """A supervisor of some groups. `now` is added to the clock."""

    def __init__(self, *groups: WorkerGroup, host: int = 0):
        self.now = 0.0
        self.groups, self.host = groups, host
        self.table = MemoryTable()
        self.number = 0
        self.supervisor: CheckedSupervisor | None = None

    async def open(self) -> PlacesWorld:
        if self.supervisor is not None:
            await self.supervisor.close()
        workers = ObedientWorkers()
        roster = Roster(
            table=self.table,
            groups=self.groups,
            adapters={"trainer": workers, "engine": workers},
            settings=SharingSettings(),
            budgets=Budgets(host_bytes=self.host),
            epoch=1,
            clock=lambda: self.now + asyncio.get_running_loop().time(),
        )
        self.supervisor = CheckedSupervisor(roster)
        await self.supervisor.open()
        return self

    def place_of(self, key: str) -> SimpleNamespace:
        row = self.supervisor.roster.rows[key]
        group = next(each for each in self.groups if each.name == row.group)
        devices = group.devices_for(row.request.ranks)
        return SimpleNamespace(key=key, group=group, devices=devices)

    @property
    def placed(self) -> set[str]:
        """The keys of the rows in the table with a group."""
        return {key for key, row in self.table.rows.items() if row.group}

    def run(self, owner: str = "ann", run_id: str = "", **options: Any) -> PlacedRun:
        self.number += 1
        return PlacedRun(self, owner, run_id or f"run-{self.number}", RunOptions(**options))

    def engine(self, owner: str = "ann", **values: Any) -> PlacedEngine:
        self.number += 1
        return PlacedEngine(self, owner, f"sampler-{self.number}", **values)

    def keys(self, group: WorkerGroup) -> list[str]:
        rows = self.supervisor.roster.rows.values()
        return sorted(row.key for row in rows if row.group == group.name)


class _Placed(Asking):
    world: PlacesWorld
    key: str

    @property
    def supervisor(self) -> CheckedSupervisor:
        return self.world.supervisor

    @property
    def row(self) -> WorkerRow:
        return self.supervisor.roster.rows[self.key]

    @property
    def why(self) -> str:
        row = self.supervisor.roster.rows.get(self.key)
        explained = self.supervisor.explain(self.key)
        return explained.reason if row is not None and not row.group and explained else ""

    async def until_placed(self) -> None:
        while not self.row.group:
            await self.supervisor.roster.changed()


class PlacedRun(_Placed):
    """A run in a session of its own."""

    def __init__(self, world: PlacesWorld, owner: str, run_id: str, options: RunOptions) -> None:
        self.world, self.owner, self.key, self.options = world, owner, run_id, options
        self.sampler = f"sampler-of-{run_id}"

    def as_ask(self) -> list[WorkerRequest]:
        options = self.options
        numbers = range(options.replicas if options.sampler else 0)
        engines = [engine_key(self.sampler, number) for number in numbers]
        trainer = WorkerRequest(
            key=self.key,
            kind="trainer",
            owner=self.owner,
            session=f"session of {self.sampler}",
            ranks=options.ranks,
            device_bytes=options.memory,
            host_bytes=options.host_memory,
            groups=(options.group,) if options.group else (),
            sharing=options.sharing,
            priority=options.priority,
            together=tuple(engines),
            sampler=self.sampler if engines else "",
        )
        return [
            trainer,
            *(engine_request(self.sampler, key, self.owner, options) for key in engines),
        ]

    async def take(self) -> None:
        trainer, *engines = self.as_ask()
        if self.key in self.supervisor.roster.rows:
            return
        await self.supervisor.place(engines, holder=self.sampler)
        await self.supervisor.place([trainer], holder=self.key)
        try:
            await self.until_placed()
        except asyncio.CancelledError:
            self.end()
            raise

    @property
    def place(self) -> SimpleNamespace:
        return self.world.place_of(self.key)

    def end(self) -> None:
        self.supervisor.let_go(self.key, holder=self.key)


class PlacedEngine(_Placed):
    """An engine that serves until it is `idle`."""

    def __init__(
        self, world: PlacesWorld, owner: str, key: str, *, idle: bool = False,
        used_at: float = 0.0, options: RunOptions = RunOptions()  # noqa: B008
    ) -> None:  # fmt: skip
        self.world, self.owner, self.key, self.options = world, owner, key, options
        self.will_be_idle, self.used_at = idle, used_at
        self.using: asyncio.Task[AbstractAsyncContextManager[WorkerRow]] | None = None
        self.served = False

    def as_ask(self) -> list[WorkerRequest]:
        return [engine_request(self.key, self.key, self.owner, self.options)]

    async def take(self) -> None:
        await self.supervisor.place(self.as_ask(), holder="session")
        self.using = asyncio.create_task(self._use())
        await self.until_placed()

    async def _use(self) -> AbstractAsyncContextManager[WorkerRow]:
        using = self.supervisor.use(self.key)
        await using.__aenter__()
        self.served = True
        return using

    async def serve(self) -> PlacedEngine:
        await (await self.ask()).granted()
        assert self.using is not None
        await self.using
        if self.will_be_idle:
            await self.rest()
        return self

    async def rest(self) -> None:
        """End its call."""
        using, self.using = self.using, None
        if using is not None:
            await (await using).__aexit__(None, None, None)
            self.supervisor.roster.calls_of(self.key).idle_since = self.used_at

    async def give_up(self) -> None:
        await super().give_up()
        if self.using is not None:
            self.using.cancel()
        self.supervisor.let_go(self.key, holder="session")

    @property
    def retired(self) -> bool:
        row = self.supervisor.roster.rows.get(self.key)
        return self.served and row is not None and (row.ends_as == "waiting" or not row.group)


def engine_request(sampler: str, key: str, owner: str, options: RunOptions) -> WorkerRequest:
    return WorkerRequest(
        key=key,
        kind="engine",
        owner=owner,
        session=f"session of {sampler}",
        ranks=options.sampler_ranks,
        device_bytes=options.sampler_memory,
        host_bytes=options.sampler_host_memory,
        groups=(options.sampler_group,) if options.sampler_group else (),
        sharing=options.sharing,
        priority=options.priority,
        sampler=sampler,
    )
