"""Switches: how one worker is put to sleep, woken or ended, once `leases` has decided that it is.

A switch ends when the worker says that it is done. A worker that fails to, or does not answer in
time, is killed: afterwards nothing is left of it, and its devices are free all the same. Only one
that finds no room to sleep stays awake, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from gateway.metrics import Metrics
from gateway.placement.lease import Lease, Switched
from gateway.placement.memory import HostMemory, Residence, SleepPlan, Way
from gateway.workers.clients import EXIT_REPORT_PATIENCE, WorkerUnavailable
from tandem.errors import CannotSleep, OutOfMemory, StorageFailed, describe
from tandem.settings.sharing import SharingSettings
from tandem.telemetry import get_log

RECENT = 0.3
"""The weight of the newest of several measurements."""
PAUSE = 0.5
"""Seconds until something that failed is tried again, and between looks at a heartbeat."""

_NO_ROOM = (OutOfMemory, StorageFailed, CannotSleep)
"""What a worker that cannot sleep in one way, and stays awake, says."""


class Switches:
    """Puts the workers of one group to sleep, and wakes them. `next_token` returns a token above
    all before."""

    def __init__(
        self,
        *,
        group: str,
        settings: SharingSettings,
        memory: HostMemory,
        metrics: Metrics,
        next_token: Callable[[], int],
    ) -> None:
        self.count = 0
        self.seconds = 0.0
        """What a switch has cost lately: to put one worker to sleep, and to wake another."""
        self._group = group
        self._settings = settings
        self._memory = memory
        self._metrics = metrics
        self._next_token = next_token
        self._loop = asyncio.get_running_loop()
        self._log = get_log(group=group)

    async def wake(self, lease: Lease) -> None:
        """Wake a worker. Where it fails, nothing is left of it."""
        switched = await self._switch(lease, "wake", lambda: lease.tenant.wake(lease.token))
        if switched is not None and lease.present:
            lease.residence.woke(switched)

    async def put_to_sleep(
        self,
        lease: Lease,
        ways: Sequence[Way],
        *,
        following: Residence | None = None,
        enough: Callable[[], int] = lambda: 0,
    ) -> str:
        """Put a worker to sleep in the first of the ways for which there is room, as far as who is
        `following` needs its devices, for whom it frees `enough` bytes of these (0: all); return
        why there is none, and it is awake. Where it fails otherwise, nothing is left of the
        worker."""
        why: list[str] = []
        for way in ways:
            if not lease.present:
                return ""
            plan = await self._memory.reserve(lease.residence, way, following=following)
            if isinstance(plan, str):
                why.append(plan)
                continue
            lease.token = self._next_token()
            plan = replace(plan, enough_bytes=enough())
            carry_out = partial(lease.tenant.sleep, lease.token, plan)
            try:
                switched = await self._switch(lease, "sleep", carry_out)
            except _NO_ROOM as error:
                why.append(error.message)
                continue
            finally:
                self._memory.release(lease.residence)
            if switched is not None and lease.present:
                lease.residence.fell_asleep(way, switched, freed_all=not plan.enough_bytes)
            return ""
        return "; ".join(why) if lease.present else ""

    async def measure(self, lease: Lease) -> None:
        """Ask a worker that an earlier gateway has left asleep where its state is. It answers that
        to another sleep, and moves nothing."""
        lease.token = self._next_token()
        try:
            async with asyncio.timeout(self._settings.switch_timeout):
                switched = await lease.tenant.sleep(lease.token, SleepPlan())
        except Exception as error:  # noqa: BLE001 - what is wrong shows when it is to wake
            self._log.warning("worker_not_measured", worker=lease.key, reason=describe(error))
            return
        if lease.state == "free" and lease.present:
            lease.residence.fell_asleep("disk" if switched.disk_bytes else "host", switched)

    async def end(self, lease: Lease, reason: str) -> None:
        """Kill a worker; return when nothing of it is left, however long that takes: until then,
        nobody else may have its devices."""
        while lease.present:
            if not lease.stopping:
                self._log.error("lease_holder_ended", worker=lease.key, reason=reason)
                try:
                    async with asyncio.timeout(self._settings.switch_timeout):
                        await lease.tenant.end(reason)
                except TimeoutError:  # it goes on (`Fleet`), and says so in the log
                    pass
                except Exception:  # noqa: BLE001 - it is tried again, until it is known to be gone
                    self._log.exception("lease_holder_not_ended", worker=lease.key)
            if lease.present:
                await asyncio.sleep(PAUSE)

    async def _switch(
        self,
        lease: Lease,
        direction: Literal["sleep", "wake"],
        carry_out: Callable[[], Coroutine[None, None, Switched]],
    ) -> Switched | None:
        """Put a worker to sleep or wake it; return None if that fails, and nothing is left of it.
        Raises what is of `_NO_ROOM`: the worker stays awake."""
        began = self._loop.time()
        try:
            async with asyncio.timeout(self._settings.switch_timeout):
                switched = await self._unless_connection_breaks(lease, carry_out)
        except TimeoutError:
            limit = self._settings.switch_timeout
            await self.end(lease, f"it did not {direction} within {limit:g} s")
            return None
        except Exception as error:
            if direction == "sleep" and isinstance(error, _NO_ROOM):
                raise
            await self.end(lease, f"it did not {direction}: {describe(error)}")  # it is of no use
            return None
        seconds = self._loop.time() - began
        self.count += 1
        # A switch is one of each.
        self.seconds += RECENT * (2 * seconds - self.seconds)
        self._metrics.switch_seconds.labels(self._group, lease.kind, direction).observe(seconds)
        self._metrics.moved_bytes.labels(self._group, direction).inc(switched.bytes_moved)
        return switched

    async def _unless_connection_breaks(
        self, lease: Lease, carry_out: Callable[[], Coroutine[None, None, Switched]]
    ) -> Switched:
        """Ask a worker again that lives, if only the connection broke: it answers at once if it
        has done it already. One that has died is reported with its own cause, soon."""
        given_up = 0.0
        while True:
            try:
                return await carry_out()
            except WorkerUnavailable:
                given_up = given_up or self._loop.time() + EXIT_REPORT_PATIENCE
                await asyncio.sleep(PAUSE)
                if not lease.present or lease.stopping or self._loop.time() > given_up:
                    raise
