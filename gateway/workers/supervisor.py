"""The supervisor: the loop that decides and acts, and the interface of all workers.

Only the active gateway has one. Callers know keys and holders. They know no group, token or
launcher. See `docs/design/workers.md`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Literal

from gateway.workers.carrying_out import StepRunner
from gateway.workers.demand import WorkerCalls
from gateway.workers.groups import WorkerGroup
from gateway.workers.holdings import Holdings
from gateway.workers.overview import Budgets, Overview
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import RETRY_SECONDS, Roster
from gateway.workers.schedule import WaitReason, explain_wait, schedule
from gateway.workers.steps import (
    AskToYield,
    ForgetRow,
    KeepAwake,
    RefuseCalls,
    StopWorker,
    TakeGroup,
)
from gateway.workers.table import WorkerRow
from tandem.errors import WorkerDied

_DISK_SECONDS = 5.0
"""Seconds between two looks at the free bytes on the disk for sleepers."""
_SETTLE_SECONDS = 10.0
"""Seconds that the start of a gateway waits for the ends of needless workers."""
_SHORTEST_PAUSE = 0.001
"""The least seconds between two decisions by the clock."""
_IN_MEMORY = (AskToYield, KeepAwake, RefuseCalls, TakeGroup, ForgetRow)
"""Steps that are done at once. The next decision follows at once, too."""

_ENDS = (StopWorker, ForgetRow)

StepMark = Literal["", "begin", "end"]
"""`begin`: a call computes gradients that wait for their step. `end`: it applies or drops them."""


class Supervisor:
    """`free_on_disk` returns the bytes that the state of sleepers may take on disk."""

    def __init__(
        self, roster: Roster, *, free_on_disk: Callable[[], Awaitable[int]] | None = None
    ) -> None:
        self.roster = roster
        self._runner = StepRunner(roster, on_end=self.poke)
        self._holdings = Holdings(
            roster,
            self._runner,
            poke=self.poke,
            will_decide=lambda: self._poked,
            explain=self.explain,
        )
        self._free_on_disk = free_on_disk
        self._watching: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[int] | None = None
        self._settling: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False
        self._open = False
        self._only_ends = False

    # --- Life ---------------------------------------------------------------------------------

    def declare(self, groups: Iterable[WorkerGroup], budgets: Budgets) -> None:
        """Set the groups and the limits of the machine, before `open`."""
        self.roster.groups = {group.name: group for group in groups}
        self.roster.budgets = budgets

    async def open(self) -> None:
        """Continue from the table. No step of a worker begins before that worker was found."""
        await self.roster.read()
        if self._free_on_disk is not None:
            await self._look_at_disk(self._free_on_disk)
            watching = self._watch_disk(self._free_on_disk)
            self._watching = asyncio.create_task(watching, name="worker-disk")
        self._open = True
        for row in list(self.roster.rows.values()):
            if row.has_process and row.state != "stopping":
                self._runner.find(row.key)
        self.poke()

    async def settle(self, holders: Collection[str]) -> None:
        """Release the rows of holders that are not among these, and stop processes without a row.

        Call it when all runs, sessions and samplers were read. Return when nothing is left of the
        workers, or after a while."""
        for row in list(self.roster.rows.values()):
            for holder in row.holders:
                if holder not in holders:
                    self.let_go(row.key, holder=holder)
        ending = [row.key for row in self.roster.rows.values() if row.ends_as == "gone"]
        self._settling = [
            *(asyncio.create_task(self._holdings.gone(key)) for key in ending),
            *(
                asyncio.create_task(adapter.stop_strangers(self._is_known))
                for adapter in {*self.roster.adapters.values()}
            ),
        ]
        await asyncio.wait(self._settling, timeout=_SETTLE_SECONDS)

    def _is_known(self, process: str) -> bool:
        return any(row.process == process for row in self.roster.rows.values())

    def only_end(self) -> None:
        """Begin only ends from now on, because the gateway ends."""
        self._only_ends = True

    async def close(self) -> None:
        """Stop acting, and leave workers and rows to the next gateway."""
        self._open = False
        self._stop_timer()
        for asking in (self._watching, self._asking):
            if asking is not None:
                asking.cancel()
        for task in self._settling:
            task.cancel()
        await self._runner.close()

    # --- Rows ---------------------------------------------------------------------------------

    def check(self, requests: Sequence[WorkerRequest]) -> None:
        """Raise `InvalidRequest` for requests that empty groups cannot serve."""
        self._holdings.check(requests)

    async def place(self, requests: Sequence[WorkerRequest], *, holder: str) -> None:
        """As `Holdings.place`."""
        await self._holdings.place(requests, holder=holder)

    async def release(self, key: str, *, holder: str) -> None:
        """As `Holdings.release`."""
        await self._holdings.release(key, holder=holder)

    def let_go(self, key: str, *, holder: str) -> None:
        """Let go of a worker, and do not wait for its end."""
        self._holdings.let_go(key, holder=holder)

    async def resize(
        self,
        holder: str,
        requests: Sequence[WorkerRequest],
        *,
        within: float,
        keeping: Collection[str] = (),
    ) -> None:
        """As `Holdings.resize`."""
        await self._holdings.resize(holder, requests, within=within, keeping=keeping)

    def held_by(self, holder: str) -> list[str]:
        """Return the keys of the rows of a holder."""
        return self._holdings.held_by(holder)

    async def drain(self, group: str, *, drained: bool) -> None:
        """Place nobody on a group, or undo that. Raises `StorageFailed`."""
        await self.roster.table.set_drained(group, drained=drained)
        self.roster.groups[group] = replace(self.roster.groups[group], drained=drained)
        self.poke()

    def explain(self, key: str) -> WaitReason | None:
        """Return why a worker is not awake, or None if it is awake or gone."""
        row = self.roster.rows.get(key)
        return None if row is None else explain_wait(self.overview(), row)

    def overview(self) -> Overview:
        return self.roster.overview(busy=self._runner.busy)

    # --- Use ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(
        self, key: str, *, step: StepMark = "", caller: str = ""
    ) -> AsyncIterator[WorkerRow]:
        """Wait until a worker is awake, and keep it awake for the block. Yields its row with the id
        of its `process`.

        `step` marks the gradients of a `caller`. Never wait for one use inside another. Raises
        `WorkerStartFailed` if a process did not start during the wait, and `WorkerDied` if the
        worker was released. If nobody can serve an engine for long, raises `WorkerStartFailed`, or
        `OperationTimedOut` if it has a process."""
        row, calls = await self._begin_use(key)
        if step == "begin":
            calls.open_steps.add(caller)
        elif step == "end":
            calls.open_steps.discard(caller)
        worked = False
        try:
            yield row
            worked = True
        finally:
            self.roster.end_use(row, calls, worked=worked)
            if self._is_contended(row, calls):
                self.poke()

    async def _begin_use(self, key: str) -> tuple[WorkerRow, WorkerCalls]:
        """Return the row and the calls of a worker that is awake, with one more call counted."""
        while True:
            row = self.roster.rows.get(key)
            if row is None or row.ends_as == "gone":
                raise WorkerDied(f"worker {key} was released")
            calls = self.roster.calls_of(key)
            if self._is_awake(row, calls):
                calls.begin_use()
                return row, calls
            await self._wait(row, calls)
            row = self.roster.rows.get(key)
            if row is not None and row.state == "awake":
                return row, calls
            calls.end_use()  # its process ended just now

    def _is_awake(self, row: WorkerRow, calls: WorkerCalls) -> bool:
        awake = row.state == "awake" and row.ends_as == "placed"
        return awake and not calls.yielding and row.key not in self._runner.busy

    def _is_contended(self, row: WorkerRow, calls: WorkerCalls) -> bool:
        """Whether the end of a call may matter to a decision."""
        if calls.uses:
            return False
        group = self.roster.groups.get(row.group)
        sleeps = self.roster.settings.policy != "deferred" or (group is not None and group.drained)
        return sleeps or calls.yielding or self.roster.somebody_waits()

    async def _wait(self, row: WorkerRow, calls: WorkerCalls) -> None:
        self.roster.note_active(row.owner)
        turn = calls.wait()
        self.poke()
        try:
            await turn
        except asyncio.CancelledError:
            calls.give_up(turn)
            self.poke()
            raise

    # --- From launchers -----------------------------------------------------------------------

    def note_exit(self, key: str, process: str, reason: str) -> None:
        """Note that nothing is left of a process that ended by itself."""
        self._runner.note_exit(key, process, reason)

    def note_failure(self, key: str, process: str, reason: str) -> None:
        """End a useless process, after its step under way."""
        row = self.roster.rows.get(key)
        if row is None or row.process != process or not self._open:
            return
        if key in self._runner.busy:
            self._loop.call_later(RETRY_SECONDS, self.note_failure, key, process, reason)
        elif row.state in ("awake", "asleep"):
            self._runner.begin(StopWorker(key, reason))

    def drop_step(self, key: str, caller: str) -> None:
        """Forget a caller's mark of gradients that wait for their step."""
        if key in self.roster.rows:
            self.roster.calls_of(key).open_steps.discard(caller)

    async def end_process(self, key: str, process: str, reason: str) -> None:
        """Kill a process, and return when nothing is left of it. Its calls fail."""
        while (row := self.roster.rows.get(key)) is not None and row.process == process:
            rests = self.roster.calls_of(key).rests_until - self.roster.clock()
            if key in self._runner.busy:
                await self._runner.await_steps([key])
            elif row.state not in ("awake", "asleep"):
                await self.roster.changed()
            elif rests > 0:  # its launcher did not answer
                await asyncio.sleep(rests)
            else:
                self.note_failure(key, process, reason)

    async def await_found(self, keys: Iterable[str]) -> None:
        """Return when these workers of an earlier gateway were found, or are gone or lost."""
        await self._runner.await_steps(keys)

    def watch_ends(self, key: str, told: Callable[[str, str], None]) -> None:
        """Call `told` with id and reason whenever a process of a row has ended, until the row is
        gone."""
        self.roster.told_of_ends[key] = told

    def note_launcher(self, launcher: str, *, answers: bool) -> None:
        """Note whether a launcher answers. While it does not, nobody is placed or started there."""
        if answers:
            self.roster.silent_launchers.pop(launcher, None)
        else:
            self.roster.silent_launchers.setdefault(launcher, self.roster.clock())
        self.poke()

    # --- The loop -----------------------------------------------------------------------------

    def poke(self) -> None:
        """Decide soon: something has changed."""
        if self._open and not self._poked:
            self._poked = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._poked = False
        if not self._open:
            return
        self._stop_timer()
        self._timer = self._loop.call_later(RETRY_SECONDS, self.poke)  # if this decision fails
        overview = self.overview()
        steps, again_at = schedule(overview)
        if self._only_ends:
            steps = [step for step in steps if isinstance(step, _ENDS)]
        for step in steps:
            self._runner.begin(step)
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
