"""The decision loop: it decides, begins the steps, and decides again.

It also asks for the free bytes of the disk. See `docs/design/workers.md`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from gateway.workers.overview import Overview
from gateway.workers.roster import RETRY_SECONDS, Roster
from gateway.workers.schedule import WaitReason, explain_wait, schedule
from gateway.workers.step_runner import StepRunner
from gateway.workers.steps import (
    AskToYield,
    FindWorker,
    ForgetRow,
    KeepAwake,
    RefuseCalls,
    StopWorker,
    TakeGroup,
)

_DISK_SECONDS = 5.0
"""Seconds between two looks at the free bytes on the disk for sleepers."""
_SHORTEST_PAUSE = 0.001
"""The least seconds between two decisions by the clock."""
_IN_MEMORY = (AskToYield, KeepAwake, RefuseCalls, TakeGroup, ForgetRow)
"""Steps that are done at once. The next decision follows at once, too."""
_ENDS = (StopWorker, ForgetRow)


class DecisionLoop:
    """`free_on_disk` returns the bytes that the state of sleepers may take on disk."""

    def __init__(
        self, roster: Roster, *, free_on_disk: Callable[[], Awaitable[int]] | None = None
    ) -> None:
        self.roster = roster
        self.runner = StepRunner(roster, on_end=self.poke)
        self.opened = False
        self.poked = False
        self.only_ends = False
        """Begin only ends from now on, because the gateway ends."""
        self._free_on_disk = free_on_disk
        self._watching: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[int] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Continue from the table. No step of a worker begins before that worker was found."""
        await self.roster.read()
        if self._free_on_disk is not None:
            await self._look_at_disk(self._free_on_disk)
            watching = self._watch_disk(self._free_on_disk)
            self._watching = asyncio.create_task(watching, name="worker-disk")
        self.opened = True
        for row in list(self.roster.rows.values()):
            if row.has_process and row.state != "stopping":
                self.runner.begin(FindWorker(row.key))
        self.poke()

    async def close(self) -> None:
        """Stop acting, and leave workers and rows to the next gateway."""
        self.opened = False
        self._stop_timer()
        for asking in (self._watching, self._asking):
            if asking is not None:
                asking.cancel()
        await self.runner.close()

    def overview(self) -> Overview:
        return self.roster.overview(busy=self.runner.busy)

    def explain(self, key: str) -> WaitReason | None:
        """Return why a worker is not awake, or None if it is awake or gone."""
        row = self.roster.rows.get(key)
        return None if row is None else explain_wait(self.overview(), row)

    def poke(self) -> None:
        """Decide soon: something has changed."""
        if self.opened and not self.poked:
            self.poked = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self.poked = False
        if not self.opened:
            return
        self._stop_timer()
        self._timer = self._loop.call_later(RETRY_SECONDS, self.poke)  # if this decision fails
        overview = self.overview()
        steps, again_at = schedule(overview)
        if self.only_ends:
            steps = [step for step in steps if isinstance(step, _ENDS)]
        for step in steps:
            self.runner.begin(step)
        self._stop_timer()
        if any(isinstance(step, _IN_MEMORY) for step in steps):
            self.poke()
        if again_at < math.inf:
            delay = max(_SHORTEST_PAUSE, again_at - overview.now)
            self._timer = self._loop.call_later(delay, self.poke)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _watch_disk(self, free_on_disk: Callable[[], Awaitable[int]]) -> None:
        while True:
            await asyncio.sleep(_DISK_SECONDS)
            await self._look_at_disk(free_on_disk)

    async def _look_at_disk(self, free_on_disk: Callable[[], Awaitable[int]]) -> None:
        """Ask for the free bytes of the disk. A disk that fails or does not answer has none. One
        that hangs is not asked again, since each question would take a thread."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(free_on_disk())
        done, _ = await asyncio.wait({self._asking}, timeout=_DISK_SECONDS)
        free = 0
        if done:
            asked, self._asking = self._asking, None
            with suppress(OSError):
                free = asked.result()
        self.roster.budgets = replace(self.roster.budgets, disk_bytes=free)
