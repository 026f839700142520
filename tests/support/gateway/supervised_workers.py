"""The model of `modelled_workers` under a supervisor.

Beside the model's own checks, each decision is checked against the rules of workers."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.workers.adapters import Found, Moved
from gateway.workers.demand import WorkerCalls
from gateway.workers.groups import CONTEXT_BYTES, WorkerGroup
from gateway.workers.overview import Budgets, Overview
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.steps import SleepPlan
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerRow
from gateway.workers.turns import queue
from tandem.errors import WorkerStartFailed
from tandem.settings.sharing import Sharing, SharingSettings
from tests.support.gateway.memory_table import MemoryTable
from tests.support.gateway.modelled_workers import Devices, Worker


class CheckedSupervisor(Supervisor):
    """Checks the rules after each decision. The event loop hides exceptions of its callbacks, so
    `fault` keeps the first one."""

    fault: Exception | None = None
    checks = 0

    def __init__(self, roster: Roster, **about: Any) -> None:
        super().__init__(roster, **about)
        self._decide_next, vars(self.loop)["_decide"] = self.loop._decide, self._checked

    def check_more(self, overview: Overview) -> None:
        """Check further rules of a test."""

    def _checked(self) -> None:
        try:
            self._decide_next()
            self.checks += 1
            overview = self.overview()
            check_rules(overview)
            self.check_more(overview)
        except Exception as error:
            self.fault = self.fault or error
            raise

    def raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault


def check_rules(overview: Overview) -> None:
    """Fail if an overview breaks a rule of `docs/design/workers.md`."""
    for group in overview.groups.values():
        rows = overview.on(group)
        runs = {row.request.run_name for row in rows}
        alone = any(group.sharing_of(row.request) == Sharing.EXCLUSIVE for row in rows)
        assert not alone or len(runs) == 1, "an exclusive run is beside another one"
        occupying = [row for row in rows if row.occupies]
        if not group.leased:
            continue
        assert len(occupying) <= group.awake, "more workers are awake than the group allows"
        needs = [row.request.device_bytes for row in occupying]
        if group.device_bytes:
            assert all(needs) or len(needs) == 1, "a worker of unknown need is not alone"
            asleep = [row for row in rows if row.state == "asleep"]
            left = sum(overview.left_on_device(row) for row in asleep)
            used = sum(needs) + group.context_bytes * len(needs) + left
            assert not all(needs) or used <= group.device_bytes, "a device has too little memory"
    for row in overview.rows.values():
        assert bool(row.group) == (row.state != "waiting")
        assert row.overtaken <= 8
        assert not row.has_process or row.process


@dataclass(eq=False)
class WorldAdapter:
    """The adapter of all kinds. It reaches the model's processes."""

    world: SupervisedWorld
    tokens: dict[str, int] = field(default_factory=dict)

    def _note_token(self, row: WorkerRow) -> None:
        assert row.token >= self.tokens.get(row.key, 0), "a token is older than one before"
        self.tokens[row.key] = row.token
        assert self.world.table.rows[row.key].token == row.token, "a token was not committed"

    async def start(self, row: WorkerRow, _group: WorkerGroup) -> None:
        self._note_token(row)
        worker = self.world.workers[row.key]
        await asyncio.sleep(0.002)
        assert worker.process is None, "two processes of one worker"
        try:
            worker.process = worker.devices.start(row.token, size=worker.size)
        except AssertionError as error:
            self.world.supervisor.fault = self.world.supervisor.fault or error
            raise
        worker.process_name = row.process

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        self._note_token(row)
        return await self.world.workers[row.key].sleep(row.token, plan)

    async def wake(self, row: WorkerRow) -> Moved:
        self._note_token(row)
        return await self.world.workers[row.key].wake(row.token)

    async def stop(self, row: WorkerRow, *, at_once: bool) -> None:
        worker = self.world.workers[row.key]
        if worker.process is not None:
            worker.killed_for.append(row.reason)
        await asyncio.sleep(0.05)
        worker.die()

    def new_process(self, row: WorkerRow) -> str:
        return f"{row.key}:{uuid.uuid4().hex[:8]}"

    async def find(self, row: WorkerRow, group: WorkerGroup) -> Found:
        worker = self.world.workers[row.key]
        process = worker.process
        await asyncio.sleep(0.01)
        if process is None or worker.process is not process or worker.process_name != row.process:
            return Found(state="gone")
        if process.frozen:
            return Found(state="silent")
        return Found(state="awake" if process.awake else "asleep", has=process.has())

    def explain(self, row: WorkerRow) -> str:
        return ""

    def silent_for(self, row: WorkerRow) -> float:
        return self.world.workers[row.key].silent_for


class SupervisedWorker(Worker):
    """A worker of the model, and its callers. `process_name` is the id of its process. Every worker
    has a place, since these tests are about turns."""

    world: SupervisedWorld
    process_name = ""
    owner = "ann"
    priority = 0

    @property
    def row(self) -> WorkerRow:
        return self.world.supervisor.roster.rows[self.key]

    @property
    def calls(self) -> WorkerCalls:
        return self.world.supervisor.roster.calls_of(self.key)

    @property
    def busy_seconds(self) -> float:
        """Seconds of its calls under all gateways."""
        events = self.world.table.events
        past = sum(event.busy_seconds for event in events if event.row.key == self.key)
        return past + self.calls.busy_seconds + self.calls.running_seconds

    def explain(self) -> str:
        """Return why its calls wait, or nothing if none waits."""
        explained = self.world.supervisor.explain(self.key)
        return explained.reason if explained is not None and self.calls.waiting else ""

    async def placed(self) -> None:
        await self.world.opened()
        roster = self.world.supervisor.roster
        if self.key not in roster.rows:
            request = WorkerRequest(
                key=self.key,
                kind="engine" if self.kind == "sampler" else "trainer",
                owner=self.owner,
                session="s",
                device_bytes=self.says or (0 if self.world.device_memory else self.size),
                host_bytes=self.size,
                priority=self.priority,
            )
            keeper = replace(
                request, key="keeper", kind="trainer", together=tuple(self.world.workers)
            )
            for each in (request, keeper):  # so that an idle engine keeps its place
                roster.note(WorkerRow(request=each, state="placed", group="g", holders=("run",)))

    def die(self) -> None:
        if self.process is not None:
            super().die()
            self.world.supervisor.note_exit(self.key, self.process_name, "it died")

    def freeze(self) -> None:
        super().freeze()
        self.world.supervisor.poke()

    async def compute(self, seconds: float, *, begins_step: str = "", ends_step: str = "") -> None:
        self.world.supervisor.raise_fault()
        await self.placed()
        mark: Any = "begin" if begins_step else "end" if ends_step else ""
        while True:
            use = self.world.supervisor.use(self.key, step=mark, caller=begins_step or ends_step)
            try:
                async with use as row:
                    if await self._computed(seconds, row):
                        return
            except WorkerStartFailed:
                await asyncio.sleep(0.1)

    async def _computed(self, seconds: float, row: WorkerRow) -> bool:
        process, left = self.process, 4
        if process is None:  # its end was not reported yet
            await asyncio.sleep(0.1)
            return False
        assert self.process_name == row.process
        while left and process.alive:
            await asyncio.sleep(seconds / 4)
            if not process.frozen:
                left -= 1
                assert process.awake or not process.alive, "it computed while asleep"
        return not left


@dataclass
class SupervisedWorld:
    """One group, and the gateways that supervise it one after the other. A device has
    `device_memory` beside the contexts of `processes`."""

    awake: int = 1
    settings: SharingSettings = field(default_factory=lambda: SharingSettings(quantum=0.5))
    on_host: bool = False
    budget: int = 0
    disk: int = 0
    device_memory: int = 0
    processes: int = 0

    def __post_init__(self) -> None:
        self.table = MemoryTable(commit_seconds=0.002)
        self.epoch = 0
        self.adapter = WorldAdapter(self)
        memory = self.device_memory
        self.devices = Devices(self.awake, self.on_host, self.budget, self.disk, memory)
        self.workers: dict[str, SupervisedWorker] = {}
        self.new_gateway()

    def new_gateway(self) -> None:
        self.epoch += 1
        spare = self.processes * CONTEXT_BYTES
        group = WorkerGroup(
            name="g",
            kinds=frozenset({"trainer", "engine"}),
            awake=self.awake,
            workers=99,
            device_bytes=self.device_memory and self.device_memory + spare,
            on_host=self.on_host,
            host="here",
        )
        roster = Roster(
            table=self.table,
            groups=[group],
            adapters={"trainer": self.adapter, "engine": self.adapter},
            settings=self.settings,
            budgets=Budgets(starts=99, silence=60),
            epoch=self.epoch,
            clock=asyncio.get_running_loop().time,
        )
        self.supervisor = CheckedSupervisor(roster, free_on_disk=self._free_for_state)
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        await self.supervisor.open()
        roster = self.supervisor.roster
        roster.budgets = Budgets(
            host_bytes=self.budget, disk_bytes=self.devices.disk, starts=99, silence=60
        )

    async def opened(self) -> None:
        await asyncio.shield(self._opening)

    async def _free_for_state(self) -> int:
        await asyncio.sleep(0.001)
        return self.devices.disk

    def queue(self) -> list[str]:
        """Return the keys of the workers that wait for their turn, the next one first."""
        overview = self.supervisor.overview()
        return [row.key for row in queue(overview, overview.groups["g"])]

    @property
    def host_bytes(self) -> int:
        return self.supervisor.overview().host_bytes_in_use

    async def restart(self) -> None:
        await self._opening
        await self.supervisor.close()
        for worker in self.workers.values():
            if worker.process is not None:
                worker.process.epoch += 1
        self.new_gateway()
        await self._opening

    def worker(
        self,
        key: str,
        *,
        owner: str = "ann",
        priority: int = 0,
        kind: str = "trainer",
        size: int = 0,
        says: int = 0,
    ) -> SupervisedWorker:
        if self.device_memory:
            says = min(says, self.device_memory)
        worker = SupervisedWorker(key, self.devices, kind, size, says)
        worker.world, worker.owner, worker.priority = self, owner, priority
        self.workers[key] = worker
        return worker
