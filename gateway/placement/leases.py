"""Leases: which workers have their state on the devices of a group now.

A `GroupLeases` schedules one group. Whoever needs a worker's devices makes a `use` of its lease,
which waits until the worker is awake; the lease stays with the worker until another one needs the
devices more (`policy`). Then it gives way: no further use begins, those under way end, and the
worker is put to sleep (`switches`).

The next worker wakes only when the one before is known to be asleep, or to have ended. No clock
decides that: what does not answer in time is killed, and keeps its lease until nothing of it is
left. The database has each lease before its worker wakes, so that the next gateway knows who may be
awake (`lease_records`)."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace

from gateway.metrics import Metrics
from gateway.placement.accounts import Accounts
from gateway.placement.evictions import REFUSED_PAUSE, Evictions
from gateway.placement.groups import DeviceGroup
from gateway.placement.lease import Lease, Tenant
from gateway.placement.lease_records import LeaseRecords
from gateway.placement.memory import HostMemory, Residence, enough_bytes
from gateway.placement.policy import Holder, Waiter, gives_way_at, in_turn
from gateway.placement.switches import PAUSE, Switches
from gateway.storage.database import Database
from tandem.settings.sharing import SharingSettings
from tandem.telemetry import get_log

_SILENCE = 15.0
"""Seconds without an answer, after which a worker that others wait for is killed."""
_TOKEN_BITS = 20
"""Of a token, for the changes of one gateway; the rest is its epoch. More than these only reach
into the next millisecond's."""


class GroupLeases:
    """The leases of one group, of which `awake` may be held at once; 0: it is not leased, and
    nobody ever waits. `on_host`: its devices' memory is the host's; else each has `device_memory`,
    if that is known. `next_token` returns a token above all before."""

    def __init__(
        self,
        *,
        name: str,
        awake: int,
        on_host: bool = True,
        device_memory: int = 0,
        settings: SharingSettings,
        records: LeaseRecords,
        memory: HostMemory,
        metrics: Metrics,
        next_token: Callable[[], int],
    ) -> None:
        self.name = name
        self.awake = awake
        self._on_host = on_host
        self._device_memory = device_memory
        self.leases: list[Lease] = []
        self.drained = False
        self.switches = Switches(
            group=name, settings=settings, memory=memory, metrics=metrics, next_token=next_token
        )
        self.accounts = Accounts(
            group=name,
            leases=self.leases,
            settings=settings,
            records=records,
            memory=memory,
            metrics=metrics,
            next_token=next_token,
        )
        self._evictions = Evictions(
            leases=self.leases,
            on_host=on_host,
            settings=settings,
            accounts=self.accounts,
            switches=self.switches,
            memory=memory,
            carry_out=self._carry_out,
        )
        self._settings = self._configured = settings
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._log = get_log(group=name)

    def register(
        self,
        *,
        key: str,
        kind: str,
        owner: str,
        session_id: str,
        tenant: Tenant,
        priority: int = 0,
        ranks: int = 1,
        memory: int = 0,
        host_memory: int = 0,
        present: bool = False,
    ) -> Lease:
        """Return the lease of a worker, which is said to need `memory` of each device, and
        `host_memory`, at most. One that an earlier gateway has left is `present`, and may be awake
        if it held the lease there."""
        lease = Lease(
            key=key,
            kind=kind,
            owner=owner,
            session_id=session_id,
            priority=priority,
            tenant=tenant,
            group=self,
            residence=Residence(
                kind=kind,
                on_host=self._on_host,
                device_capacity=self._device_memory,
                host_need=host_memory,
                device_need=memory,
                ranks=ranks,
                present=present,
            ),
        )
        if self.awake:
            self.accounts.add(lease)
            self.leases.append(lease)
            if present and not lease.left:
                self._begin_task(lease, self.switches.measure(lease))
        return lease

    @property
    def policy(self) -> str:
        return self._settings.policy

    def drain(self, drained: bool) -> None:
        """Put workers to sleep as soon as they have nothing to do, or no more."""
        self.drained = drained
        policy = "eager" if drained else self._configured.policy
        self._settings = self._configured.model_copy(update={"policy": policy})
        self.reschedule()

    def explain(self, lease: Lease) -> str:
        if not lease.waiting:
            return ""
        if lease.why_not and lease.state in ("waking", "free"):
            return f"there is no room for its worker: {lease.why_not}"
        if lease.state == "waking":
            return f"its worker moves on to the devices of group {self.name}"
        queue, now = self.queue(), self._loop.time()
        for other in self.leases:
            if other.stays_until > now and other.state == "held":
                return (
                    f"who has the devices of group {self.name} cannot be put to sleep: "
                    f"{other.why_not}"
                )
        if lease not in queue:  # it gives way, and is in the queue then
            return f"its worker makes room for another one on group {self.name}"
        before = queue.index(lease)
        expected = self.expected_wait(before)
        return (
            f"the devices of group {self.name} are used by others: {before} before it in the "
            f"queue, {now - lease.since:.0f} s so far, about {expected:.0f} s more"
        )

    def expected_wait(self, before: int) -> float:
        """Return how long, in seconds, one with so many before it will wait, by how things went
        lately."""
        return (before + 1) * (self.accounts.hold_seconds + self.switches.seconds)

    def queue(self) -> list[Lease]:
        """Return those that wait, in turn."""
        now = self._loop.time()
        waiting = {_waiter(lease): lease for lease in self.leases if _waits(lease)}
        return [waiting[each] for each in self._sorted(waiting, now)]

    def _sorted(self, waiting: Iterable[Waiter], now: float) -> list[Waiter]:
        return in_turn(
            waiting,
            now=now,
            max_wait=self._settings.max_wait,
            share_of=self.accounts.share,
        )

    def watch(self) -> None:
        """Let the metrics say how it is."""
        leases = self.leases
        values = {
            "lease_holders": lambda: sum(lease.state != "free" for lease in leases),
            "lease_waiters": lambda: sum(_waits(lease) for lease in leases),
            "resident_bytes": lambda: sum(lease.residence.device_bytes for lease in leases),
            "sleeping_bytes": lambda: sum(lease.residence.host_bytes for lease in leases),
            "sleeping_disk_bytes": lambda: sum(lease.residence.disk_bytes for lease in leases),
        }
        self._metrics.watch_group(self.name, values)

    async def close_all(self) -> None:
        """Cancel everything, and leave all as it is to the next gateway."""
        self._closed = True
        self._stop_timer()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- Uses ---------------------------------------------------------------------------------

    async def enter(self, lease: Lease) -> None:
        """Return when the worker has the devices, with one more use counted."""
        self.reschedule()
        if lease.state == "held" and not lease.left:
            self._begin_use(lease)
            return
        if lease.state == "free" and not lease.waiting:
            lease.why_not = ""
            self.accounts.note_active(lease.owner)
            self.accounts.note_waiting(lease)
        turn: asyncio.Future[None] = self._loop.create_future()
        lease.waiting.append(turn)
        self.reschedule()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in lease.waiting:
                lease.waiting.remove(turn)
            elif not turn.cancelled():  # it was admitted in this very moment
                self.leave(lease)
            self._note_given_up(lease)
            self.reschedule()
            raise

    def _begin_use(self, lease: Lease) -> None:
        if not lease.uses:
            lease.busy_since = self._loop.time()
        lease.uses += 1

    def leave(self, lease: Lease) -> None:
        lease.uses -= 1
        if not lease.uses:
            lease.idle_since = self._loop.time()
            self.accounts.note_used(lease, lease.idle_since - lease.busy_since)
        self.reschedule()

    def close(self, lease: Lease) -> None:
        lease.closed = True
        lease.residence.ended()
        for turn in lease.waiting:
            turn.cancel()
        lease.waiting.clear()
        if lease in self.leases and lease.state not in ("waking", "sleeping"):
            self._remove(lease)
        self.reschedule()

    def _remove(self, lease: Lease) -> None:
        self.accounts.remove(lease)
        self.leases.remove(lease)

    def _admit(self, lease: Lease) -> None:
        lease.state = "held"
        turns, lease.waiting = lease.waiting, []
        for turn in turns:
            if not turn.done():  # it is cancelled, and its task has not heard of it yet
                self._begin_use(lease)
                turn.set_result(None)

    # --- Decisions ----------------------------------------------------------------------------

    def reschedule(self) -> None:
        """Decide what is to be done now, begin it, and do so again when that may have changed."""
        if not self.awake or self._closed:
            return
        self._stop_timer()
        now, queue = self._loop.time(), self.queue()
        free = self.awake - sum(lease.state != "free" for lease in self.leases)
        left = [each for each in self.leases if each.left and each.state == "held" and each.waiting]
        for lease in [*left, *queue[: max(0, free)]]:
            lease.state = "waking"
            self._begin(lease, self._wake(lease))
        queue = queue[max(0, free) :]
        again_at = self._ask_to_give_way(queue, now)
        for lease in self.leases:
            if lease.state == "giving_way" and not lease.uses:
                lease.state = "sleeping"
                self._begin(lease, self._sleep(lease))
        if queue:
            self._end_silent()
            again_at = min(again_at, now + PAUSE)
        if again_at < math.inf:
            self._timer = self._loop.call_at(again_at, self.reschedule)

    def _ask_to_give_way(self, queue: list[Lease], now: float) -> float:
        """Ask as many holders as others wait; return when the next is to be asked."""
        wanted = len(queue) - sum(
            lease.state in ("giving_way", "sleeping") for lease in self.leases
        )
        waiting = [_waiter(lease) for lease in queue]
        due: list[tuple[float, Lease]] = []
        for lease in self.leases:
            if lease.state == "giving_way" and not queue and lease.present and lease.uses:
                self._admit(lease)  # nobody needs the devices any more
            elif lease.state == "held" and not lease.present and not lease.uses:
                lease.state = "giving_way"  # there is nothing to put to sleep
                wanted -= 1
            elif lease.state == "held":
                at = gives_way_at(
                    _holder(lease),
                    waiting=waiting,
                    switch_seconds=self.switches.seconds,
                    settings=self._settings,
                )
                due.append((max(at, lease.stays_until), lease))
        for at, lease in sorted(due, key=lambda each: each[0]):
            if queue and wanted <= 0:
                break
            if at > now:
                return at
            if not lease.uses or not queue or self._goes_before(queue[0], lease, now):
                lease.state = "giving_way"
                wanted -= 1
        return math.inf

    def _goes_before(self, lease: Lease, holder: Lease, now: float) -> bool:
        """Whether a busy holder would not get the devices back at once if it gave them up."""
        again = replace(_waiter(holder), since=now, served_at=now)
        return self._sorted([_waiter(lease), again], now)[0] is not again

    def _end_silent(self) -> None:
        """Kill the holders that others wait for and that do not answer."""
        for lease in self.leases:
            silent_for = lease.tenant.silent_for
            if lease.state in ("held", "giving_way") and silent_for > _SILENCE:
                lease.state, lease.left = "sleeping", False
                reason = (
                    f"it did not answer for {silent_for:.0f} s, while others needed its devices"
                )
                self._begin(lease, self._end_holder(lease, reason))

    # --- From one worker to the next ----------------------------------------------------------

    def _begin(self, lease: Lease, switch: Coroutine[None, None, None]) -> None:
        self._begin_task(lease, self._carry_out(lease, switch))

    def _begin_task(self, lease: Lease, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"lease-{lease.key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, lease: Lease, switch: Coroutine[None, None, None]) -> None:
        try:
            await switch
        except Exception:  # noqa: BLE001 - a fault of ours must not keep the devices from others
            self._log.exception("switch_failed", worker=lease.key)
            await self.switches.end(
                lease, "the gateway failed in the middle of a switch; see its log"
            )
            self.accounts.note_free(lease)
        if lease.closed:
            self._remove(lease)
        self.reschedule()

    async def _wake(self, lease: Lease) -> None:
        began = self._loop.time()
        if not await self._evictions.made_room_for(lease) or not await self.accounts.hold(lease):
            await asyncio.sleep(PAUSE)
            lease.state = "held" if lease.left else "free"
            self._note_given_up(lease)
            return
        left, lease.left, lease.why_not, lease.stays_until = lease.left, False, "", 0.0
        if lease.present:
            await self.switches.wake(lease)
            if left and not lease.present:  # for its next process, room must be made
                self.accounts.note_free(lease)
                return
        lease.granted_at = lease.idle_since = self._loop.time()
        if lease.since:  # else an earlier gateway has granted it
            self._metrics.lease_wait_seconds.labels(self.name).observe(began - lease.since)
        lease.since = 0.0
        self._admit(lease)

    async def _sleep(self, lease: Lease) -> None:
        following = next((each.residence for each in self.queue()), None)
        why_not = await self.switches.put_to_sleep(
            lease,
            lease.residence.ways,
            following=following,
            enough=lambda: self._enough_bytes(lease, following),
        )
        if why_not:
            if not self._refused_for_long(lease):
                self._log.warning("sleep_refused", worker=lease.key, reason=why_not)
                self._metrics.sleeps_refused.labels(self.name).inc()
                lease.why_not, lease.stays_until = why_not, self._loop.time() + REFUSED_PAUSE
                if lease.left:  # nobody knows whether it is awake: its next use wakes it
                    lease.state = "held"
                else:
                    self._admit(lease)
                return
            reason = f"others need its devices, and it could not sleep: {why_not}"
            await self.switches.end(lease, reason)
        lease.why_not, lease.refused_since, lease.stays_until = "", 0.0, 0.0
        self.accounts.note_free(lease)

    def _enough_bytes(self, lease: Lease, following: Residence | None) -> int:
        """Return how much a worker has to free for the one `following`; 0: all."""
        if following is None or self.awake != 1:
            return 0
        others = [each.residence for each in self.leases if each is not lease]
        return enough_bytes(lease.residence, following, others)

    def _refused_for_long(self, lease: Lease) -> bool:
        """Whether others have waited for `max_wait` for a worker that finds no room to sleep."""
        now, queue = self._loop.time(), self.queue()
        lease.refused_since = lease.refused_since if lease.refused_since and queue else now
        waited = [now - max(each.since, lease.refused_since) for each in queue]
        return max(waited, default=0.0) >= self._settings.max_wait

    async def _end_holder(self, lease: Lease, reason: str) -> None:
        await self.switches.end(lease, reason)
        lease.state = "giving_way"  # the calls under way are about to fail

    def _note_given_up(self, lease: Lease) -> None:
        """What is cancelled as the gateway ends goes on to wait in the next one."""
        if lease.state == "free" and not lease.waiting and lease.since and not self._closed:
            self.accounts.note_given_up(lease)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Leases:
    """The leases of all groups, from `open` on. `epoch` is that of the gateway: tokens are above
    all of the gateways before."""

    def __init__(
        self,
        *,
        database: Database,
        settings: SharingSettings,
        memory: HostMemory,
        metrics: Metrics,
        epoch: int,
    ) -> None:
        self.records = LeaseRecords(database)
        self.memory = memory
        self._settings = settings
        self._metrics = metrics
        self._tokens = itertools.count((epoch << _TOKEN_BITS) + 1)
        self._groups: dict[str, GroupLeases] = {}

    async def open(self, groups: Iterable[DeviceGroup], *, host_memory_bytes: int) -> None:
        """Read what an earlier gateway has left. `host_memory_bytes` is what all workers may have
        of the host; 0: any number."""
        self.memory.budget = host_memory_bytes
        await self.records.open()
        for group in groups:
            self._groups[group.name] = GroupLeases(
                name=group.name,
                awake=group.awake,
                on_host=not any(device.cuda for device in group.devices),
                device_memory=group.memory_bytes,
                settings=self._settings,
                records=self.records,
                memory=self.memory,
                metrics=self._metrics,
                next_token=lambda: next(self._tokens),
            )
            self._groups[group.name].watch()

    def of(self, group: str) -> GroupLeases:
        return self._groups[group]

    def all(self) -> list[GroupLeases]:
        return list(self._groups.values())

    async def close(self) -> None:
        """Move nothing any more; the next gateway goes on from the records."""
        await asyncio.gather(*(group.close_all() for group in self._groups.values()))


def _waits(lease: Lease) -> bool:
    return lease.state == "free" and bool(lease.waiting)


def _waiter(lease: Lease) -> Waiter:
    return Waiter(
        key=lease.key,
        owner=lease.owner,
        priority=lease.priority,
        since=lease.since,
        served_at=lease.served_at,
    )


def _holder(lease: Lease) -> Holder:
    return Holder(
        granted_at=lease.granted_at,
        idle_since=None if lease.uses else lease.idle_since,
        in_step=bool(lease.in_step),
    )
