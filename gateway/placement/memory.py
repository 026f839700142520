"""The memory of the host: how a worker is put to sleep, so that all of them fit.

A `Residence` is where the memory of one worker is, as it said at its last switch. `HostMemory` has
those of all workers, and decides where the state of the next one that sleeps goes: to host memory
while that is within the budget; else an engine drops its weights, and a trainer writes a file, if
the disk has room. What a sleep may take is reserved while it is under way, and the worker is told:
one that needs more stays awake, and the next way is tried.

On a CPU host and device are the same memory. A worker that falls asleep takes nothing there, and
leaves nothing; what counts is whether the next one fits beside those that are resident."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gateway.placement.groups import DeviceGroup
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2

if TYPE_CHECKING:
    from gateway.placement.lease import Switched

_DROP_WEIGHTS = 2
_GIB = 2**30
_LEFT_ON_DEVICE = _GIB
"""What a process keeps of a device while its state is elsewhere: its context and its libraries."""
_MOST_LEFT = 4
"""The part of a device that is left to workers that may still come: a quarter."""

_DISK_PATIENCE = 10.0
"""Seconds for a disk to say how much is free."""

Way = Literal["host", "drop", "disk"]
"""Where the state of a worker that sleeps goes; `drop`: nowhere, it is loaded again."""


@dataclass(frozen=True)
class SleepPlan:
    """How a worker is put to sleep: its state goes to host memory, unless an engine is to `drop`
    its weights, or a trainer to write a file in `spill_folder`. It frees `enough_bytes` of device
    memory, 0: all, and may take `most_bytes` where it goes to, 0: any number."""

    drop: bool = False
    spill_folder: str = ""
    enough_bytes: int = 0
    most_bytes: int = 0

    def request(self) -> common_pb2.SleepRequest:
        return common_pb2.SleepRequest(
            enough_bytes=self.enough_bytes,
            spill_folder=self.spill_folder,
            level=_DROP_WEIGHTS if self.drop else 0,
            most_bytes=self.most_bytes,
        )


@dataclass(eq=False, kw_only=True)
class Residence:
    """Where the memory of one worker is, in bytes, as of its last switch.

    `on_host`: its devices are cores, whose memory is the host's. Other devices have
    `device_capacity` each, 0 if that is not known. `host_need` is what its session said that it
    needs of the host at most, which counts until it was `measured`, and `device_need` what of each
    device; 0: nothing was said.
    `device_bytes`, `host_bytes` and `disk_bytes` are what it has now, and `awake_bytes` what it had
    on its devices when it was awake last. `sleep_way` is how it sleeps, None while it is awake, and
    `freed_all` whether that left on its devices only what cannot leave them.
    `reserved_host_bytes` and `reserved_disk_bytes` are what it may take in a switch that is under
    way, or when it is started again."""

    kind: str
    on_host: bool = False
    device_capacity: int = 0
    host_need: int = 0
    device_need: int = 0
    ranks: int = 1
    present: bool = False
    measured: bool = False
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    awake_bytes: int = 0
    sleep_way: Way | None = None
    freed_all: bool = False
    reserved_host_bytes: int = 0
    reserved_disk_bytes: int = 0

    @property
    def host_share(self) -> int:
        """What it has of the host's memory, or may take."""
        has = self.host_need
        if self.measured:
            has = self.host_bytes + (self.device_bytes if self.on_host else 0)
        return max(has if self.present else 0, self.reserved_host_bytes)

    @property
    def host_share_awake(self) -> int:
        """What it will have of the host's memory when it is awake."""
        if not self.on_host:
            return self.host_share
        return max(self.awake_bytes or self.host_need, self.host_share)

    @property
    def device_bytes_left(self) -> int:
        """What of its state is on its devices while it sleeps. (An engine's cannot be told from
        what others have there.)"""
        if self.sleep_way is None or self.on_host or self.kind == "sampler":
            return 0
        return self.device_bytes

    @property
    def ways(self) -> tuple[Way, Way]:
        return ("host", "drop" if self.kind == "sampler" else "disk")

    @property
    def can_leave_host(self) -> bool:
        """Whether it sleeps in the host's memory, as far as is known."""
        return self.host_share > 0 and self.sleep_way not in ("drop", "disk")

    def started(self) -> None:
        self.present = True
        self.measured = not self.on_host  # it has nothing of the host's memory yet

    def fell_asleep(self, way: Way, switched: Switched, *, freed_all: bool = False) -> None:
        kept = 0 if way != "host" or self.on_host else self.host_bytes  # pinned memory stays
        self.measured, self.sleep_way, self.freed_all = True, way, freed_all
        self.device_bytes, self.disk_bytes = switched.device_bytes, switched.disk_bytes
        self.host_bytes = max(kept, switched.host_bytes)

    def woke(self, switched: Switched) -> None:
        self.measured, self.sleep_way = True, None
        self.device_bytes = self.awake_bytes = switched.device_bytes
        kept = 0 if self.on_host else self.host_bytes  # pinned memory stays
        self.host_bytes = max(kept, switched.host_bytes)
        self.disk_bytes = 0

    def ended(self) -> None:
        self.present = self.measured = False
        self.device_bytes = self.host_bytes = self.disk_bytes = 0
        self.sleep_way = None


async def free_on_disk(folder: Path) -> int:
    """Return how much a file in a folder, which need not exist, may take."""

    def ask() -> int:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        return shutil.disk_usage(there).free

    return await asyncio.to_thread(ask)


class HostMemory:
    """The host's memory, which all workers share. `budget` is what they may have of it together, 0:
    any number.
    Trainers spill into `spill_folder`, whose disk keeps `least_free` bytes."""

    def __init__(
        self,
        *,
        spill_folder: Path,
        least_free: int,
        free_on_disk: Callable[[Path], Awaitable[int]] = free_on_disk,
    ) -> None:
        self.budget = 0
        self.residences: list[Residence] = []
        self._spill_folder = spill_folder
        self._least_free = least_free
        self._free_on_disk = free_on_disk
        self._asking: asyncio.Future[int] | None = None

    @property
    def used(self) -> int:
        return sum(each.host_share for each in self.residences)

    def add(self, residence: Residence) -> None:
        self.residences.append(residence)

    def remove(self, residence: Residence) -> None:
        self.residences.remove(residence)

    async def reserve(
        self, residence: Residence, way: Way, *, following: Residence | None
    ) -> SleepPlan | str:
        """Return how a worker sleeps in this way, with what it may take reserved until `release`;
        or why it cannot. `following` is who needs its devices."""
        if way == "drop":
            return SleepPlan(drop=True)
        if way == "disk":
            try:
                async with asyncio.timeout(_DISK_PATIENCE):
                    free = await self._ask_disk()
            except OSError as error:  # `TimeoutError` is one
                why = error.strerror or f"no answer within {_DISK_PATIENCE:g} s"
                return f"the disk for its state cannot be asked: {why} (TANDEM_SPILL_DIR)"
            free -= self._least_free + sum(each.reserved_disk_bytes for each in self.residences)
            most = _grant(free, residence.device_bytes)
            if most <= 0:
                return f"the disk for its state has {_gib(max(0, free))} free (TANDEM_SPILL_DIR)"
            residence.reserved_disk_bytes = most
            return SleepPlan(spill_folder=str(self._spill_folder), most_bytes=most)
        if not self.budget:
            return SleepPlan()
        grows = following.host_share_awake - following.host_share if following is not None else 0
        free = self.budget - (self.used - residence.host_share) - grows
        if residence.on_host:
            return SleepPlan() if residence.host_share <= free else self.shortage()
        if residence.kind == "trainer":
            most = _grant(free, residence.device_bytes or residence.host_need)
        else:  # it is not told a bound
            expected = residence.host_bytes or residence.host_need or residence.device_capacity
            most = expected if expected <= free else 0
        if most <= 0:
            return self.shortage()
        residence.reserved_host_bytes = most
        return SleepPlan(most_bytes=most)

    async def _ask_disk(self) -> int:
        """Return how much is free. Whoever comes while it does not answer waits for the same: a
        mount that hangs keeps one thread, and no more."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._free_on_disk(self._spill_folder))
        return await asyncio.shield(self._asking)

    def release(self, residence: Residence) -> None:
        residence.reserved_host_bytes = residence.reserved_disk_bytes = 0

    def reserve_to_wake(self, residence: Residence) -> bool:
        """Whether a worker that is to wake fits beside all that is there. What it needs is reserved
        until it sleeps."""
        if not residence.on_host or not residence.host_share_awake:
            return True
        grows = residence.host_share_awake - residence.host_share
        known = residence.measured or not residence.present  # else it may have what it is to get
        if self.budget and (grows or not known) and self.used + grows > self.budget:
            return False
        residence.reserved_host_bytes = residence.host_share_awake
        return True

    def shortage(self) -> str:
        """Example: "workers have 118 GiB of the 120 GiB of host memory that they may have
        (TANDEM_HOST_MEMORY_BYTES)"."""
        return (
            f"workers have {_gib(self.used)} of the {_gib(self.budget)} of host memory that they "
            "may have (TANDEM_HOST_MEMORY_BYTES)"
        )


def _grant(free: int, expected: int) -> int:
    """Return what a sleep may take: all that is free if nothing is known of it; else what it took
    before, or had on the device, and half of the rest, for it may have grown, and others may want
    to sleep at the same time. 0 or less: it does not fit."""
    if expected <= 0:
        return free
    return expected + (free - expected) // 2 if expected <= free else 0


def room_on_device(residence: Residence, others: Sequence[Residence]) -> int | None:
    """Return what of each device of a group is left beside a worker that is awake there and all
    others, which sleep; below 0, it does not fit. None: it is not known what it needs."""
    if not residence.device_need or not residence.device_capacity:
        return None
    left = sum(_LEFT_ON_DEVICE + each.device_bytes_left // each.ranks for each in others)
    return residence.device_capacity - residence.device_need - _LEFT_ON_DEVICE - left


def enough_bytes(leaving: Residence, following: Residence, others: Sequence[Residence]) -> int:
    """Return how much a trainer needs to free for the next worker of its group, which is among the
    others; 0: all."""
    room = room_on_device(following, [leaving, *(each for each in others if each is not following)])
    if leaving.kind != "trainer" or not leaving.device_bytes or room is None or room <= 0:
        return 0
    return max(1, leaving.device_bytes // leaving.ranks - room) * leaving.ranks


def _gib(size: int) -> str:
    return f"{size / _GIB:.4g} GiB"


def engine_settings(
    settings: SamplerSettings, *, group: DeviceGroup, device_need: int, others: Sequence[Residence]
) -> SamplerSettings:
    """Return the settings of an engine on a group, with its share of the device in bytes: its
    `device_need`, or, where workers take turns, what those that are asleep leave, also those that
    may still come. What an administrator has set counts before."""
    chosen = {"gpu_memory_bytes", "gpu_memory_utilization"} & settings.model_fields_set
    if not group.memory_bytes or not any(each.cuda for each in group.devices) or chosen:
        return settings
    share = device_need
    if not share and group.leased:
        left = sum(_LEFT_ON_DEVICE + each.device_bytes_left for each in others)
        itself_and_more = _LEFT_ON_DEVICE * (group.workers - len(others))
        most_left = group.memory_bytes // _MOST_LEFT
        share = (
            group.memory_bytes - max(left + _LEFT_ON_DEVICE, min(left + itself_and_more, most_left))
        ) // group.awake
    return settings.model_copy(update={"gpu_memory_bytes": share}) if share else settings
