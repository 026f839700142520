"""The accounts of a group's leases: who has had its devices for how long, who waits since when.

They are kept in memory, since the next turn depends on them, in the database (`lease_records`) and
in the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.metrics import Metrics
from gateway.placement.lease import Lease
from gateway.placement.lease_records import LeaseRecord, LeaseRecords
from gateway.placement.memory import HostMemory
from gateway.placement.switches import RECENT
from tandem.errors import StorageFailed
from tandem.settings.sharing import SharingSettings
from tandem.telemetry import get_log


class Accounts:
    """How long the `leases` of a group, of which some come and go, had its devices and waited for
    them."""

    def __init__(
        self,
        *,
        group: str,
        leases: Sequence[Lease],
        settings: SharingSettings,
        records: LeaseRecords,
        memory: HostMemory,
        metrics: Metrics,
        next_token: Callable[[], int],
    ) -> None:
        self.hold_seconds = settings.quantum
        """For how long a worker has had the devices lately."""
        self._group = group
        self._leases = leases
        self._weights = settings.weights
        self._records = records
        self._memory = memory
        self._metrics = metrics
        self._next_token = next_token
        self._shares: dict[str, float] = {}
        self._log = get_log(group=group)
        self._loop = asyncio.get_running_loop()

    def add(self, lease: Lease) -> None:
        """Go on with what an earlier gateway has left of a lease, if there is something."""
        if (left := self._records.take_left(lease.key)) is not None:
            self._take_up(lease, left)
        self._records.add(lease.key, group=self._group, kind=lease.kind, owner=lease.owner)
        self._memory.add(lease.residence)

    def remove(self, lease: Lease) -> None:
        if lease.state != "free":
            self.note_free(lease)
        self._memory.remove(lease.residence)
        self._records.remove(lease.key)

    def _take_up(self, lease: Lease, left: LeaseRecord) -> None:
        now = self._loop.time()
        lease.seconds, lease.token = left.seconds, left.token
        self._add_share(lease.owner, left.seconds)
        if left.held and lease.present:
            lease.state, lease.granted_at, lease.idle_since = "held", now, now
            lease.left = True
        elif left.since:
            lease.since = now - max(0.0, time.time() - left.since)

    def note_active(self, owner: str) -> None:
        """Let an owner that wanted nothing for a while not catch up for that time."""
        active = {each.owner for each in self._leases if each.state != "free" or each.waiting}
        if owner not in active and active:
            fewest = min(self.share(other) for other in active)
            self._shares[owner] = max(self._shares.get(owner, 0.0), fewest)

    def note_used(self, lease: Lease, seconds: float) -> None:
        lease.seconds += seconds
        self._add_share(lease.owner, seconds)

    def note_waiting(self, lease: Lease) -> None:
        lease.since = lease.since or self._loop.time()
        self._records.wait(lease.key, since=time.time() - (self._loop.time() - lease.since))

    def note_given_up(self, lease: Lease) -> None:
        """Note that nobody waits for the devices any more: whoever comes later waits from then
        on."""
        lease.since = 0.0
        self._records.wait(lease.key, since=0.0)

    async def hold(self, lease: Lease) -> bool:
        """Return when it is committed that the worker has a lease, with a new token. False: the
        storage fails."""
        lease.token = self._next_token()
        try:
            await self._records.hold(lease.key, token=lease.token)
        except StorageFailed as error:
            self._log.warning("lease_not_granted", worker=lease.key, reason=error.message)
            return False
        return True

    def note_free(self, lease: Lease) -> None:
        """Note that the devices are free of the worker."""
        now = self._loop.time()
        lease.state, lease.left, lease.served_at = "free", False, now
        self._memory.release(lease.residence)
        if lease.granted_at:
            seconds = now - lease.granted_at
            self.hold_seconds += RECENT * (seconds - self.hold_seconds)
            self._metrics.lease_hold_seconds.labels(self._group).observe(seconds)
            self._records.free(lease.key, seconds=lease.seconds)
            lease.granted_at = 0.0
        if lease.waiting:
            self.note_waiting(lease)

    def _add_share(self, owner: str, seconds: float) -> None:
        self._shares[owner] = self._shares.get(owner, 0.0) + seconds / self._weight(owner)

    def _weight(self, owner: str) -> float:
        return self._weights.get(owner, 1.0)

    def share(self, owner: str) -> float:
        """Return the seconds for which an owner has used the devices, divided by its weight."""
        running = sum(self.running(lease) for lease in self._leases if lease.owner == owner)
        return self._shares.get(owner, 0.0) + running / self._weight(owner)

    def running(self, lease: Lease) -> float:
        """Return for how many seconds its worker has been at work; 0 if it is idle."""
        return self._loop.time() - lease.busy_since if lease.uses else 0.0
