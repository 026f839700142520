"""A model of workers on the devices of a group. Processes sleep, wake, freeze, die and get calls
late. They fail the test if too many are awake, or if they exceed the host's memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.workers.adapters import Moved
from gateway.workers.clients import WorkerUnavailable
from gateway.workers.steps import SleepPlan
from tandem.errors import OutOfMemory, StorageFailed, StorageFull


@dataclass(eq=False)
class Process:
    """A process. A call takes `delay` seconds to arrive, and a switch takes `work` seconds.

    `fails` has the directions of failing switches. A `frozen` process does nothing until it is
    killed. An `unreachable` one is dead, and its end was not reported yet. The process has `host`
    bytes in host memory, a file of `disk` bytes, and in its sleep `left` bytes on its device. Of
    these, `stuck` bytes never leave."""

    devices: Devices
    newest: int
    size: int = 0
    host: int = 0
    disk: int = 0
    left: int = 0
    stuck: int = 0
    epoch: int = 0
    delay: float = 0.001
    work: float = 0.05
    fails: set[str] = field(default_factory=set)
    alive: bool = True
    frozen: bool = False
    unreachable: bool = False
    awake: bool = True

    def __post_init__(self) -> None:
        self.host = self.size if self.devices.on_host else 0

    def has(self, *, moved: int = 0) -> Moved:
        """Return its bytes at each place, after it `moved` some."""
        if self.devices.on_host:
            return Moved(moved=moved, device=self.host, disk=self.disk)
        device, host = (self.size, 0) if self.awake else (self.left, self.host)
        return Moved(moved=moved, device=device, host=host, disk=self.disk)

    def refusal(self, plan: SleepPlan) -> Exception | None:
        """Why it stays awake instead of a sleep."""
        to_disk = plan.way == "disk"
        if plan.way == "drop" or (self.devices.on_host and not to_disk):
            return None
        if to_disk and self.devices.disk_fails:
            return StorageFailed("the disk fails")
        if to_disk and self.size > min(plan.most_bytes, self.devices.disk):
            return StorageFull("the disk is full")
        if 0 < plan.most_bytes < self.size:
            return OutOfMemory("its state is larger")
        return None

    def become(
        self, plan: SleepPlan | None, token: int, epoch: int, says: asyncio.Future[None]
    ) -> None:
        """Carry out a call when it arrives, even if its sender is gone. Without a plan, wake."""
        if not self.alive or self.frozen or epoch < self.epoch:
            return
        if token < self.newest:
            return
        self.newest = token
        if self.awake == (plan is None):
            return
        if plan is not None and (refusal := self.refusal(plan)) is not None:
            if not says.cancelled():
                says.set_exception(refusal)
            return
        self.awake = plan is None
        moves = self.size - self.stuck
        self.left = 0 if self.awake else self.size - moves
        if plan is None:
            self.host, self.disk = max(self.host, self.devices.on_host * self.size), 0
        elif plan.way != "host":
            self.host, self.disk = 0, moves if plan.way == "disk" else 0
        else:
            self.host = max(self.host, moves)
        self.devices.check()


@dataclass
class Devices:
    most: int
    on_host: bool = False
    budget: int = 0
    disk: int = 0
    memory: int = 0
    disk_fails: bool = False
    """Whether writes fail although the disk has room."""
    processes: list[Process] = field(default_factory=list)

    def start(self, token: int, **about) -> Process:
        process = Process(self, token, **about)
        self.processes.append(process)
        self.check()
        return process

    def check(self) -> None:
        awake = [each for each in self.processes if each.alive and each.awake]
        assert len(awake) <= self.most, f"{len(awake)} workers are awake at once"
        alive = [each for each in self.processes if each.alive]
        there = sum(each.size if each.awake else each.left for each in alive)
        assert not self.memory or there <= self.memory, f"{there} bytes are on the device"
        used = sum(each.host for each in self.processes if each.alive)
        assert not self.budget or used <= self.budget, f"{used} bytes of {self.budget} are used"


@dataclass(eq=False)
class Worker:
    """A worker with one process after the other."""

    key: str
    devices: Devices
    kind: str = "trainer"
    size: int = 0
    says: int = 0
    process: Process | None = None
    silent_for: float = 0.0
    log: list[str] = field(default_factory=list)
    killed_for: list[str] = field(default_factory=list)

    async def sleep(self, token: int, plan: SleepPlan) -> Moved:
        return await self._switch("sleep", token, plan)

    async def wake(self, token: int) -> Moved:
        return await self._switch("wake", token, None)

    async def _switch(self, direction: str, token: int, plan: SleepPlan | None) -> Moved:
        process = self.process
        assert process is not None
        if process.unreachable:
            raise WorkerUnavailable("the connection broke")
        loop = asyncio.get_running_loop()
        says: asyncio.Future[None] = loop.create_future()
        loop.call_later(process.delay, process.become, plan, token, process.epoch, says)
        await asyncio.sleep(process.delay + process.work)
        if not process.alive:
            raise ConnectionError("the worker died")
        if process.frozen:
            await asyncio.sleep(1e6)
        if direction in process.fails:
            raise ConnectionError(f"{direction} failed")
        if says.done() and (refusal := says.exception()) is not None:
            self.log.append("refuse")
            raise refusal
        self.log.append(direction if not process.disk else "spill")
        return process.has(moved=1)

    def die(self) -> None:
        if self.process is not None:
            self.process.alive, self.process, self.silent_for = False, None, 0.0

    def freeze(self) -> None:
        """Stop its process without an end. The gateway finds out after a while."""
        if self.process is not None and not self.process.frozen:
            self.process.frozen, self.silent_for = True, 1e3
            asyncio.get_running_loop().call_later(300, self._give_up, self.process)

    def _give_up(self, process: Process) -> None:
        if self.process is process:
            self.die()
