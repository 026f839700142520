"""A model of groups, processes and failing launchers, and of their users.

After each change, the model checks the device rule on the processes themselves. It also checks that
the table has each awake process in an occupying row."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.workers.adapters import Found, Moved
from gateway.workers.groups import WorkerGroup
from gateway.workers.overview import Budgets, Overview
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.schedule import explain_wait
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow
from tandem.errors import (
    OperationTimedOut,
    OutOfMemory,
    StorageFailed,
    WorkerDied,
    WorkerMayRun,
    WorkerStartFailed,
)
from tandem.settings.sharing import SharingSettings
from tests.support.gateway.memory_table import MemoryTable
from tests.support.gateway.supervised_workers import CheckedSupervisor

KINDS = frozenset({"trainer", "engine"})
TRAINER = WorkerRequest(key="t", kind="trainer", owner="ann", session="s")


@dataclass(eq=False)
class ModelProcess:
    """A process of the model. A `frozen` one answers nothing until it is killed."""

    row: WorkerRow
    group: WorkerGroup
    token: int
    awake: bool = True
    frozen: bool = False
    silent_since: float = 0.0


@dataclass(eq=False)
class Cluster:
    """Each step takes `seconds`. The next `failing` steps fail. A `full` host has no room for
    sleepers. `silent` launchers do not answer."""

    groups: list[WorkerGroup]
    settings: SharingSettings
    table: MemoryTable = field(default_factory=lambda: MemoryTable(commit_seconds=0.002))
    processes: dict[str, ModelProcess] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.05
    failing: int = 0
    full: bool = False
    silent: bool = False
    epoch: int = 0

    async def new_gateway(self) -> None:
        self.epoch += 1
        roster = Roster(
            table=self.table,
            groups=self.groups,
            adapters={"trainer": self, "engine": self},
            settings=self.settings,
            budgets=Budgets(starts=2, silence=60, patience=100),
            epoch=self.epoch,
            clock=asyncio.get_running_loop().time,
        )
        self.supervisor = CheckedCluster(roster)
        await self.supervisor.open()

    async def restart(self, *, holders: set[str]) -> None:
        """Kill the gateway in the middle of its steps, and let another one continue."""
        await self.supervisor.close()
        await self.new_gateway()
        await self.supervisor.settle(holders)

    # --- The adapter --------------------------------------------------------------------------

    async def start(self, row: WorkerRow, group: WorkerGroup) -> None:
        self._note_token(row)
        await self._work()
        if self.silent:
            raise WorkerMayRun("the launcher does not answer")
        assert row.process not in self.processes
        others = [p for p in self.processes.values() if p.row.key == row.key]
        assert not others, "a worker has two processes"
        self.processes[row.process] = ModelProcess(row, group, row.token)
        self.check_devices()
        await self._work()
        self._fail_sometimes(WorkerStartFailed("the model cannot be read"))

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        process = await self._reached(row)
        if self.full and plan.way == "host":
            raise OutOfMemory("its state is too large")
        process.awake = False
        await self._work()
        self._fail_sometimes(ConnectionError("it did not answer"))
        return Moved(moved=1, host=1)

    async def wake(self, row: WorkerRow) -> Moved:
        process = await self._reached(row)
        process.awake = True
        self.check_devices()
        await self._work()
        self._fail_sometimes(ConnectionError("it did not answer"))
        return Moved(moved=1, device=row.request.device_bytes)

    async def stop(self, row: WorkerRow, *, at_once: bool) -> None:
        await self._work()
        if self.silent:
            raise WorkerMayRun("the launcher does not answer")
        self.processes.pop(row.process, None)

    def new_process(self, row: WorkerRow) -> str:
        return f"{row.key}:{uuid.uuid4().hex[:8]}"

    async def find(self, row: WorkerRow, group: WorkerGroup) -> Found:
        await self._work()
        process = self.processes.get(row.process)
        if self.silent and (process is None or process.frozen):
            raise WorkerMayRun("neither answers")
        if process is None:
            return Found(state="gone")
        if process.frozen:
            return Found(state="silent")
        return Found(state="awake" if process.awake else "asleep")

    async def stop_strangers(self, is_known: Callable[[str], bool]) -> None:
        await self._work()
        for process in [each for each in self.processes if not is_known(each)]:
            del self.processes[process]

    def explain(self, row: WorkerRow) -> str:
        return ""

    def silent_for(self, row: WorkerRow) -> float:
        process = self.processes.get(row.process)
        frozen = process is not None and process.frozen
        return asyncio.get_running_loop().time() - process.silent_since if frozen else 0.0

    async def _reached(self, row: WorkerRow) -> ModelProcess:
        self._note_token(row)
        await self._work()
        process = self.processes.get(row.process)
        if process is None:
            raise ConnectionError("it has died")
        if process.frozen:
            await asyncio.sleep(1e6)
        assert row.token >= process.token
        process.token = row.token
        return process

    def _note_token(self, row: WorkerRow) -> None:
        assert row.token >= self.tokens.get(row.key, 0), "a token has not grown"
        self.tokens[row.key] = row.token
        assert self.table.rows[row.key].token == row.token, "a token was not committed"

    async def _work(self) -> None:
        await asyncio.sleep(self.seconds)

    def _fail_sometimes(self, error: Exception) -> None:
        if self.failing:
            self.failing -= 1
            raise error

    # --- Faults -------------------------------------------------------------------------------

    def die(self, process: ModelProcess) -> None:
        self.processes.pop(process.row.process, None)
        if not self.silent:
            self.supervisor.note_exit(process.row.key, process.row.process, "it died")

    def freeze(self, process: ModelProcess) -> None:
        if not process.frozen:
            process.frozen = True
            process.silent_since = asyncio.get_running_loop().time() - 1.0  # one heartbeat
            self.supervisor.poke()

    def answer(self) -> None:
        """Let the launchers answer again, and report the ends of processes meanwhile."""
        self.silent = False
        self.supervisor.note_launcher("agent", answers=True)
        for row in [*self.supervisor.roster.rows.values()]:
            starts = row.state == "starting"
            if row.has_process and not starts and row.process not in self.processes:
                self.supervisor.note_exit(row.key, row.process, "it died")

    # --- Checks -------------------------------------------------------------------------------

    def check_devices(self) -> None:
        try:
            for group in self.groups:
                self._check_group(group)
        except AssertionError as error:
            self.supervisor.fault = self.supervisor.fault or error
            raise

    def _check_group(self, group: WorkerGroup) -> None:
        awake = [p for p in self.processes.values() if p.group.name == group.name and p.awake]
        for process in awake:
            written = self.table.rows.get(process.row.key)
            assert written is not None and written.occupies, "the table calls its devices free"
        if not group.leased:
            return
        assert len(awake) <= group.awake, f"{len(awake)} workers are awake on {group.name}"
        needs = [process.row.request.device_bytes for process in awake]
        if group.device_bytes and len(needs) > 1:
            assert all(needs), "a worker of unknown need is not alone"
            assert sum(needs) <= group.device_bytes, "a device has too little memory"


class CheckedCluster(CheckedSupervisor):
    """Checks that no run has half of its places, and each wait has a reason."""

    def check_more(self, overview: Overview) -> None:
        for row in overview.rows.values():
            kept = [overview.rows[k] for k in row.request.together if k in overview.rows]
            if row.group and row.kind == "trainer" and row.ends_as != "gone":
                assert all(each.group for each in kept), "a run has half of its places"
            if overview.demand_of(row).waiting or row.state == "waiting":
                explained = explain_wait(overview, row)
                assert explained is not None and explained.reason


async def opened(*names: str, **about: Any) -> Cluster:
    """Return a cluster with these groups, by default `g`, and a gateway."""
    groups = [WorkerGroup(name=name, kinds=KINDS, host="here", **about) for name in names or ("g",)]
    cluster = Cluster(groups, SharingSettings(quantum=0.5, switch_timeout=3))
    await cluster.new_gateway()
    return cluster


async def use(cluster: Cluster, key: str, seconds: float = 0.0) -> str:
    """Use a worker, and return the id of its process."""
    async with cluster.supervisor.use(key) as row:
        if seconds:
            await asyncio.sleep(seconds)
        return row.process


@dataclass(eq=False)
class User:
    """Has one session after the other, each with these engines, and perhaps a trainer."""

    cluster: Cluster
    number: int
    trainer: WorkerRequest | None
    engines: list[WorkerRequest]
    chance: random.Random
    done: int = 0

    @property
    def holder(self) -> str:
        return f"user-{self.number}"

    async def live(self) -> None:
        """Have one session after the other. In between, others get places."""
        while True:
            for _ in range(self.chance.randint(1, 12)):
                try:
                    await self._place()
                    await self._use()
                except (StorageFailed, WorkerStartFailed, WorkerDied, OperationTimedOut):
                    await asyncio.sleep(0.3)
            for request in reversed(self._requests()):  # a trainer keeps its engines
                await self.cluster.supervisor.release(request.key, holder=self.holder)
            await asyncio.sleep(self.chance.choice([0, 1, 20]))

    def _requests(self) -> list[WorkerRequest]:
        return [*self.engines, *([self.trainer] if self.trainer is not None else [])]

    async def _place(self) -> None:
        supervisor = self.cluster.supervisor
        for request in self._requests():
            await supervisor.place([request], holder=self.holder)

    async def _use(self) -> None:
        workers = [self.trainer] if self.trainer is not None else []
        worker = self.chance.choice([*workers, *self.engines])
        step = self.chance.choice(["", "begin", "end"]) if worker is self.trainer else ""
        use = self.cluster.supervisor.use(worker.key, step=step, caller=self.holder)
        async with use as row:
            process = self.cluster.processes.get(row.process)
            seconds = self.chance.choice([0.01, 0.3, 2])
            await asyncio.sleep(seconds)
            if process is not None and self.cluster.processes.get(row.process) is process:
                while process.frozen and row.process in self.cluster.processes:  # noqa: ASYNC110
                    await asyncio.sleep(1)
                alive = row.process in self.cluster.processes
                assert process.awake or not alive or self._was_stopped(row), "it was not awake"
        self.done += 1
        await asyncio.sleep(self.chance.choice([0, 0, 0.05, 3]))

    def _was_stopped(self, row: WorkerRow) -> bool:
        """Whether its worker was killed or released meanwhile."""
        now = self.cluster.supervisor.roster.rows.get(row.key)
        return now is None or now.process != row.process or now.state == "stopping"

    async def end(self) -> None:
        for request in reversed(self._requests()):
            self.cluster.supervisor.let_go(request.key, holder=self.holder)
