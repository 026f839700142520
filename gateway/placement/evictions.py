"""Making room for a worker that is to wake: others of its group, which sleep, leave what they still
have of the devices, or of the host's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from gateway.placement.accounts import Accounts
from gateway.placement.lease import Lease
from gateway.placement.memory import HostMemory, Way, room_on_device
from gateway.placement.switches import Switches
from tandem.settings.sharing import SharingSettings
from tandem.telemetry import get_log

REFUSED_PAUSE = 5.0
"""Seconds until a worker whose sleep found no room is asked again."""


class Evictions:
    """Makes room on one group's devices, and in host memory, for a worker that is to wake.
    `on_host`: its devices' memory is the host's. `carry_out` awaits what one of the `leases` goes
    through, and takes up what follows from that."""

    def __init__(
        self,
        *,
        leases: Sequence[Lease],
        on_host: bool,
        settings: SharingSettings,
        accounts: Accounts,
        switches: Switches,
        memory: HostMemory,
        carry_out: Callable[[Lease, Coroutine[None, None, None]], Coroutine[None, None, None]],
    ) -> None:
        self._leases = leases
        self._on_host = on_host
        self._max_wait = settings.max_wait
        self._accounts = accounts
        self._switches = switches
        self._memory = memory
        self._carry_out = carry_out
        self._loop = asyncio.get_running_loop()

    async def made_room_for(self, lease: Lease) -> bool:
        """Let sleeping workers of the group leave the devices, and the host's memory, those that
        were served longest ago first, until one that is to wake fits. Where it still does not, it
        waits: what others have may be free soon. After `max_wait`, sleeping workers are ended for
        it."""
        memory, residence = self._memory, lease.residence
        if lease.left:
            return True
        overdue = self._loop.time() - lease.since >= self._max_wait
        others = sorted(self._leases, key=lambda each: each.served_at)
        others.remove(lease)
        for other in sorted(others, key=lambda each: each.residence.freed_all):
            if self._is_in_the_way(other, of=lease) and (overdue or not other.residence.freed_all):
                other.state = "sleeping"
                await self._carry_out(other, self._leave_devices(other))
        if any(self._is_in_the_way(other, of=lease) for other in others):
            lease.why_not = "another worker has left some of its state on the devices"
            return False
        for other in others:
            if memory.reserve_to_wake(residence):
                return True
            may_be_asked = overdue or other.stays_until <= self._loop.time()
            if other.state == "free" and other.residence.can_leave_host and may_be_asked:
                other.state = "sleeping"
                await self._carry_out(other, self._leave_host(other, overdue=overdue))
        if memory.reserve_to_wake(residence):
            return True
        lease.why_not = memory.shortage()
        if not overdue or any(e.state == "free" and e.residence.can_leave_host for e in others):
            return False
        # It is workers of other groups that have the memory, and they know nothing of this one.
        log = get_log(group=lease.group.name)
        log.warning("host_memory_exceeded", worker=lease.key, reason=lease.why_not)
        return True

    def _is_in_the_way(self, other: Lease, *, of: Lease) -> bool:
        """Whether a worker has left so much on the devices that another one may not fit."""
        if other.state != "free" or not other.present:
            return False
        if not other.residence.measured:  # it did not say what an earlier gateway has left of it
            return not self._on_host and other.kind == "trainer"
        if not other.residence.device_bytes_left:
            return False
        others = [each.residence for each in self._leases if each is not of]
        room = room_on_device(of.residence, others)
        if room is None:  # it gets what can be freed
            return not other.residence.freed_all
        return room < 0

    async def _leave_devices(self, lease: Lease) -> None:
        """Let a worker that sleeps free all of the devices that it can; end one that has done so
        already."""
        if not lease.residence.freed_all:
            await self._sleep_again(lease, lease.residence.ways)
            return
        await self._switches.end(lease, "another one needs what it has left on the devices")
        self._accounts.note_free(lease)

    async def _leave_host(self, lease: Lease, *, overdue: bool) -> None:
        """Wake a worker that sleeps in the host's memory, and put it to sleep without it. Where
        that cannot be, it is ended if that is `overdue`, else it sleeps as it did, and is left
        alone for a while."""
        memory, deeper = self._memory, lease.residence.ways[-1]
        plan = await memory.reserve(lease.residence, deeper, following=None)
        memory.release(lease.residence)
        if isinstance(plan, str):
            if overdue:
                await self._switches.end(
                    lease, f"another one needs the memory of its state: {plan}"
                )
            self._accounts.note_free(lease)
            return
        await self._sleep_again(lease, (deeper,) if overdue else (deeper, "host"))
        if lease.residence.can_leave_host:  # it was found only when it was tried
            lease.stays_until = self._loop.time() + REFUSED_PAUSE

    async def _sleep_again(self, lease: Lease, ways: Sequence[Way]) -> None:
        """Wake a worker, and put the whole of it to sleep."""
        if not await self._accounts.hold(lease):
            self._accounts.note_free(lease)
            return
        lease.granted_at = self._loop.time()
        if lease.present:
            await self._switches.wake(lease)
        if why_not := await self._switches.put_to_sleep(lease, ways):
            await self._switches.end(lease, f"it could not sleep again: {why_not}")
        self._accounts.note_free(lease)
