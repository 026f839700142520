"""A lease: the right of one worker to have its state on the devices of its group now.

Whoever needs the devices makes a `use` of it; `GroupLeases` decides when that begins. A `Tenant`
stands for the worker, whatever process that is by now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from gateway.placement.memory import Residence, SleepPlan
from tandem.errors import from_failure
from tandem.v1 import common_pb2

if TYPE_CHECKING:
    from gateway.placement.leases import GroupLeases

LeaseState = Literal["free", "waking", "held", "giving_way", "sleeping"]
"""`free`: it is not held. `waking` and `sleeping`: its worker moves on to the devices, or off them.
`giving_way`: no use begins any more."""


@dataclass(frozen=True)
class Switched:
    """What a worker says of a switch."""

    bytes_moved: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    @classmethod
    def of(cls, reply: common_pb2.SwitchReply) -> Switched:
        """Raises the failure that the worker reports; it is as it was then."""
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        return cls(
            bytes_moved=reply.bytes_moved,
            device_bytes=reply.device_bytes,
            host_bytes=reply.host_bytes,
            disk_bytes=reply.disk_bytes,
        )


class Tenant(Protocol):
    """What stands for the worker of a lease. All methods may be cancelled."""

    @property
    def silent_for(self) -> float:
        """Seconds for which the worker has not answered its heartbeat; 0 if it does."""
        ...

    async def sleep(self, token: int, plan: SleepPlan) -> Switched:
        """Put the worker to sleep; return when it is. Raises whatever went wrong."""
        ...

    async def wake(self, token: int) -> Switched:
        """Wake the worker; return when it is awake. Raises whatever went wrong."""
        ...

    async def end(self, reason: str) -> None:
        """Kill the worker; return when nothing of it is left, and `worker_ended` was called."""
        ...


@dataclass(eq=False, kw_only=True)
class Lease:
    """The right of one worker, named by `key`, to its group's devices. It stays the same when the
    worker's process is replaced.

    `present`: there is a process. `left`: an earlier gateway has left it held, and the worker may
    be awake, asleep or in between. `stopping`: whoever started the worker is ending it. `uses`
    counts the calls under way; `in_step` has the runs whose gradients were computed and not applied
    yet. `since` is when it began to wait, `granted_at` when it got the devices, `idle_since` when
    its last use ended, `served_at` when it last gave them up, all in the time of the event loop.
    `seconds` is how long it used them in all. `why_not` says why there was no room for its worker
    to sleep, since `refused_since`, or to wake; it stays awake, or asleep as it is, until
    `stays_until`."""

    key: str
    kind: str
    owner: str
    session_id: str
    priority: int
    tenant: Tenant
    group: GroupLeases
    residence: Residence
    state: LeaseState = "free"
    token: int = 0
    closed: bool = False
    left: bool = False
    stopping: bool = False
    uses: int = 0
    in_step: set[str] = field(default_factory=set)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    since: float = 0.0
    granted_at: float = 0.0
    idle_since: float = 0.0
    served_at: float = 0.0
    busy_since: float = 0.0
    seconds: float = 0.0
    stays_until: float = 0.0
    refused_since: float = 0.0
    why_not: str = ""

    @property
    def present(self) -> bool:
        return self.residence.present

    @asynccontextmanager
    async def use(self, *, begins_step: str = "", ends_step: str = "") -> AsyncIterator[int]:
        """Have the devices while the block runs; wait for them first. Yields the fencing token.

        `begins_step` names a run whose gradients are computed in the block, `ends_step` one whose
        gradients are applied or dropped: between the two, the lease rather stays."""
        await self.enter()
        if begins_step:
            self.in_step.add(begins_step)
        self.in_step.discard(ends_step)
        try:
            yield self.token
        finally:
            self.leave()

    async def enter(self) -> None:
        """Begin a use, once the worker has the devices; `leave` ends it."""
        if self.group.awake:
            await self.group.enter(self)

    def leave(self) -> None:
        if self.group.awake:
            self.group.leave(self)

    def worker_started(self) -> None:
        """Note that there is a process, which is awake. Call it within a use."""
        self.residence.started()

    def worker_stops(self) -> None:
        """Note that the worker is being ended: a switch may fail, and nobody needs to kill it."""
        self.stopping = True

    def worker_ended(self) -> None:
        """Note that nothing is left of the worker's process."""
        self.stopping = False
        self.in_step.clear()
        self.residence.ended()
        self.group.reschedule()

    def close(self) -> None:
        """Give it up for good. Nothing of the worker may be left."""
        self.group.close(self)

    def explain(self) -> str:
        """Say what it waits for; "" if it does not wait."""
        return self.group.explain(self)
