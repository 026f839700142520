"""A model of workers on a group's devices, and of successive gateways.

Processes sleep, wake, freeze, die and get calls late. The model asserts the limits of awake workers
and memory."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.metrics import Metrics
from gateway.placement.lease import Lease, Switched
from gateway.placement.lease_records import LeaseRecord
from gateway.placement.leases import GroupLeases
from gateway.placement.memory import HostMemory, SleepPlan
from gateway.workers.clients import WorkerUnavailable
from tandem.errors import OutOfMemory, StorageFailed, StorageFull
from tandem.settings.sharing import SharingSettings

_TO_HOST_MEMORY = SleepPlan()
_LOOKS = 4
"""The number of checks of the process during a call."""


class MemoryRecords:
    """`LeaseRecords` with rows that outlive a gateway. The next `failing` commits fail."""

    def __init__(self) -> None:
        self.rows: dict[str, LeaseRecord] = {}
        self.failing = 0

    def take_left(self, key):
        return self.rows.get(key)

    def add(self, key, **_):
        self.rows.setdefault(key, LeaseRecord(held=False, token=0, since=0.0, seconds=0.0))

    def wait(self, key, *, since):
        self._change(key, held=False, since=since)

    async def hold(self, key, *, token):
        await asyncio.sleep(0.002)
        if self.failing:
            self.failing -= 1
            raise StorageFailed("the disk is away")
        self._change(key, held=True, token=token, since=0.0)

    def free(self, key, *, seconds):
        self._change(key, held=False, seconds=seconds)

    def remove(self, key):
        self.rows.pop(key, None)

    def _change(self, key, **values):
        if key in self.rows:
            self.rows[key] = LeaseRecord(**(vars(self.rows[key]) | values))


@dataclass(eq=False)
class Process:
    """A worker's process. A call takes `delay` to arrive, and a switch takes `work`.

    Directions in `fails` end in an error. A `frozen` process does nothing until it is killed. An
    `unreachable` one is dead, but unreported. It has `host` bytes of host memory and a file of
    `disk` bytes. Asleep, it leaves `left` bytes on the device, of which `stuck` never leave."""

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

    def refusal(self, plan: SleepPlan) -> Exception | None:
        """Return the reason to stay awake instead."""
        if plan.drop or (self.devices.on_host and not plan.spill_folder):
            return None
        if plan.spill_folder and self.devices.disk_fails:
            return StorageFailed("the disk fails")
        if plan.spill_folder and self.size > min(plan.most_bytes, self.devices.disk):
            return StorageFull("the disk is full")
        if 0 < plan.most_bytes < self.size:
            return OutOfMemory("its state is larger")
        return None

    def become(
        self, awake: bool, token: int, epoch: int, plan: SleepPlan, says: asyncio.Future[None]
    ) -> None:
        """Handle the arrival of a call, however late."""
        if not self.alive or self.frozen or epoch < self.epoch:
            return
        if token < self.newest:
            return
        self.newest = token
        if awake == self.awake:
            return
        if not awake and (refusal := self.refusal(plan)) is not None:
            if not says.cancelled():
                says.set_exception(refusal)
            return
        self.awake = awake
        moves = min(self.size - self.stuck, plan.enough_bytes or self.size)
        self.left = 0 if awake else self.size - moves
        if awake:
            self.host, self.disk = max(self.host, self.devices.on_host * self.size), 0
        elif plan.drop or plan.spill_folder:
            self.host, self.disk = 0, 0 if plan.drop else moves
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
    """The disk has room, but refuses writes."""
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
    """A worker's host in one gateway, as its lease sees it."""

    key: str
    devices: Devices
    kind: str = "trainer"
    size: int = 0
    says: int = 0
    process: Process | None = None
    lease: Lease | None = None
    silent_for: float = 0.0
    log: list[str] = field(default_factory=list)
    killed_for: list[str] = field(default_factory=list)

    async def sleep(self, token: int, plan: SleepPlan) -> Switched:
        return await self._switch("sleep", token, plan)

    async def wake(self, token: int) -> Switched:
        return await self._switch("wake", token)

    async def _switch(
        self, direction: str, token: int, plan: SleepPlan = _TO_HOST_MEMORY
    ) -> Switched:
        process = self.process
        assert process is not None
        if process.unreachable:
            raise WorkerUnavailable("the connection broke")
        loop = asyncio.get_running_loop()
        says: asyncio.Future[None] = loop.create_future()
        arrives = partial(
            process.become,
            direction == "wake",
            token,
            process.epoch,
            plan,
            says,
        )
        loop.call_later(process.delay, arrives)
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
        on_device = process.size if process.awake else process.left
        if self.devices.on_host:
            return Switched(bytes_moved=1, device_bytes=process.host, disk_bytes=process.disk)
        return Switched(
            bytes_moved=1,
            device_bytes=on_device,
            host_bytes=0 if process.awake else process.host,
            disk_bytes=process.disk,
        )

    async def end(self, reason: str) -> None:
        self.killed_for.append(reason)
        await asyncio.sleep(0.05)
        self.die()

    def die(self) -> None:
        if self.process is not None:
            self.process.alive = False
            self.process = None
            self.silent_for = 0.0
            if self.lease is not None:
                self.lease.worker_ended()

    def freeze(self) -> None:
        if self.process is not None and not self.process.frozen:
            self.process.frozen, self.silent_for = True, 1e3
            asyncio.get_running_loop().call_later(300, self._give_up, self.process)

    def _give_up(self, process: Process) -> None:
        if self.process is process:
            self.die()

    async def compute(self, seconds: float, **step: str) -> None:
        """Make one call, by a process that is started if needed. Repeats it after a death."""
        assert self.lease is not None
        while True:
            async with self.lease.use(**step) as token:
                if self.process is None:
                    self.process = self.devices.start(token, size=self.size)
                    self.lease.worker_started()
                process = self.process
                if process.newest < token:
                    process.newest = token
                left = _LOOKS
                while left and process.alive:
                    await asyncio.sleep(seconds / _LOOKS)
                    if not process.frozen:
                        left -= 1
                        assert process.awake or not process.alive, "it computed while asleep"
                if not left:
                    return


@dataclass
class World:
    """One group, and the successive gateways that schedule it."""

    awake: int = 1
    settings: SharingSettings = field(default_factory=lambda: SharingSettings(quantum=0.5))
    on_host: bool = False
    budget: int = 0
    disk: int = 0
    device_memory: int = 0
    """In addition to the share that each of `processes` keeps of a device."""
    processes: int = 0

    def __post_init__(self) -> None:
        memory = self.device_memory
        self.devices = Devices(self.awake, self.on_host, self.budget, self.disk, memory)
        self.records = MemoryRecords()
        self.tokens = itertools.count(1)
        self.workers: dict[str, Worker] = {}
        self.new_gateway()

    def new_gateway(self) -> None:
        self.memory = HostMemory(
            spill_folder=Path("/spill"), least_free=0, free_on_disk=self._free_on_disk
        )
        self.memory.budget = self.budget
        self.metrics = Metrics()
        self.group = GroupLeases(
            name="g",
            awake=self.awake,
            on_host=self.on_host,
            device_memory=self.device_memory and self.device_memory + self.processes * 2**30,
            memory=self.memory,
            settings=self.settings,
            records=self.records,  # type: ignore[arg-type]
            metrics=self.metrics,
            next_token=lambda: next(self.tokens),
        )
        for worker in self.workers.values():
            self._register(worker, worker.lease.owner)

    async def _free_on_disk(self, _folder: Path) -> int:
        await asyncio.sleep(0.001)
        return self.devices.disk

    async def restart(self) -> None:
        """Replace the gateway. Its pending work is lost."""
        await self.group.close_all()
        for worker in self.workers.values():  # all workers hear of the next gateway before it asks
            if worker.process is not None:
                worker.process.epoch += 1
        self.new_gateway()

    def worker(
        self,
        key: str,
        *,
        owner: str = "ann",
        priority: int = 0,
        kind: str = "trainer",
        size: int = 0,
        says: int = 0,
    ) -> Worker:
        """`says` is the session's stated need of device memory."""
        worker = self.workers[key] = Worker(key, self.devices, kind, size, says)
        self._register(worker, owner, priority)
        return worker

    def _register(self, worker: Worker, owner: str, priority: int = 0) -> None:
        worker.lease = self.group.register(
            key=worker.key,
            kind=worker.kind,
            owner=owner,
            session_id="s",
            priority=priority,
            memory=worker.says,
            host_memory=worker.size,
            tenant=worker,
            present=worker.process is not None,
        )


def not_leased() -> GroupLeases:
    """Return a group on which nobody waits."""
    return World(awake=0).group


def not_leased_groups() -> Any:
    """Return groups on which nobody waits."""
    return SimpleNamespace(of=lambda _name: not_leased())
