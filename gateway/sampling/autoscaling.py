"""Autoscaling: the number of a sampler's engines follows its unfinished samples.

The autoscaler reads the demand of each sampler with a `ReplicaRange` every `_INTERVAL` seconds.
`wanted_engines` decides from the readings. It adds engines if the median of `UP_AFTER` seconds
wants more. It removes engines if no reading of `DOWN_AFTER` seconds wants them. So a demand that
rises and falls quickly keeps its engines. After `REST_AFTER` seconds without a sample, a sampler
with the minimum 0 gives back its last place until the next request.

Without room for more engines, the present ones serve, and the autoscaler tries again later."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median_low

from gateway.sampling.replicas import ReplicaRange
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sampler import Sampler
from tandem.errors import InvalidRequest, LimitExceeded, NoRoom, TandemError, describe
from tandem.telemetry import get_log

UP_AFTER = 10.0
DOWN_AFTER = 120.0
REST_AFTER = 600.0
RETRY_AFTER = 30.0
_INTERVAL = 2.0
"""Seconds."""


@dataclass(frozen=True)
class Reading:
    """`engines` could compute all samples that were unfinished at this time, in seconds."""

    at: float
    engines: int


def wanted_engines(
    readings: Sequence[Reading], *, engines: int, allowed: ReplicaRange, now: float
) -> int:
    """Return the number of engines for a sampler that has `engines`. The readings ascend in time.
    A rule only acts if they cover its whole time. Without an engine, the next request starts one.
    """
    if engines == 0:
        return 0

    def covered(seconds: float) -> list[int]:
        covers = bool(readings) and readings[0].at <= now - seconds
        return [each.engines for each in readings if each.at >= now - seconds] if covers else []

    wanted = engines
    if recent := covered(UP_AFTER):
        wanted = max(wanted, median_low(recent))
    if recent := covered(DOWN_AFTER):
        wanted = min(wanted, max(1, *recent))
    if not any(covered(REST_AFTER) or [1]):
        wanted = 0
    return min(max(wanted, allowed.least), allowed.most)


@dataclass(eq=False)
class _History:
    readings: deque[Reading] = field(default_factory=deque)
    change: asyncio.Task[None] | None = None
    not_before: float = 0.0
    trouble: str = ""


class Autoscaler:
    """Changes the samplers of a router. Its readings are lost with the gateway, and then it changes
    nothing for the time of its rules."""

    def __init__(self, samplers: SamplerRouter) -> None:
        self._samplers = samplers
        self._histories: dict[Sampler, _History] = {}
        self._log = get_log()

    async def follow_demand(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as changes:
            while True:
                now = asyncio.get_running_loop().time()
                ranged = [s for s in self._samplers.all() if s.replicas.allowed is not None]
                self._histories = {s: self._histories.get(s, _History()) for s in ranged}
                for sampler, history in self._histories.items():
                    wanted = self._read(sampler, history, now)
                    free = history.change is None or history.change.done()
                    if free and now >= history.not_before and wanted != sampler.replicas.running:
                        history.not_before = now + RETRY_AFTER
                        history.change = changes.create_task(self._change(sampler, history, wanted))
                await asyncio.sleep(_INTERVAL)

    def _read(self, sampler: Sampler, history: _History, now: float) -> int:
        """Note a reading, and return the wanted number of engines."""
        capacity = sampler.engine.settings.max_num_seqs
        samples = sum(each.request.num_samples for each in sampler.samples.values())
        busy = ceil(samples / capacity) or int(bool(sampler.engine.demand))
        readings, allowed = history.readings, sampler.replicas.allowed
        readings.append(Reading(now, busy))
        while len(readings) > 1 and readings[1].at <= now - REST_AFTER:
            readings.popleft()
        assert allowed is not None
        return wanted_engines(readings, engines=sampler.replicas.running, allowed=allowed, now=now)

    async def _change(self, sampler: Sampler, history: _History, wanted: int) -> None:
        had, trouble = sampler.replicas.running, ""
        try:
            if wanted > had:
                await self._add(sampler, wanted)
            elif wanted < len(sampler.engines):
                await self._samplers.scale(sampler, max(1, wanted), wait=0)
            if wanted == 0:
                await sampler.rest()
        except TandemError as error:
            trouble = describe(error)
        except Exception:  # noqa: BLE001 - a later round tries again
            self._log.exception("autoscaling_failed", sampler=str(sampler.key))
        if trouble and trouble != history.trouble:
            self._log.info("autoscaling_waits", sampler=str(sampler.key), reason=trouble)
        history.trouble, now = trouble, sampler.replicas.running
        if now != had:
            self._log.info("autoscaled", sampler=str(sampler.key), engines=now, before=had)

    async def _add(self, sampler: Sampler, wanted: int) -> None:
        """Add as many engines as there is room for. Raises as `SamplerRouter.scale` without room
        for one."""
        for number in range(wanted, sampler.replicas.running, -1):
            try:
                await self._samplers.scale(sampler, number, wait=0)
                return
            except (NoRoom, InvalidRequest, LimitExceeded):
                if number == sampler.replicas.running + 1:
                    raise
