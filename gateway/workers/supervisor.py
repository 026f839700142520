"""The supervisor: the interface of all workers.

Only the active gateway has one. Callers know keys and holders. They know no group, token or
launcher. See `docs/design/workers.md`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from gateway.workers.demand import WorkerCalls
from gateway.workers.groups import WorkerGroup
from gateway.workers.holdings import Holdings
from gateway.workers.loop import DecisionLoop
from gateway.workers.overview import Budgets
from gateway.workers.roster import RETRY_SECONDS, Roster
from gateway.workers.steps import StopWorker
from gateway.workers.table import WorkerRow
from tandem.errors import WorkerDied

_SETTLE_SECONDS = 10.0
"""Seconds that the start of a gateway waits for the ends of needless workers."""
StepMark = Literal["", "begin", "end"]
"""`begin`: a call computes gradients that wait for their step. `end`: it applies or drops them."""


class Supervisor(Holdings):
    """`free_on_disk` returns the bytes that the state of sleepers may take on disk."""

    def __init__(
        self, roster: Roster, *, free_on_disk: Callable[[], Awaitable[int]] | None = None
    ) -> None:
        super().__init__(DecisionLoop(roster, free_on_disk=free_on_disk))
        self.poke = self.loop.poke
        self.overview = self.loop.overview
        self.explain = self.loop.explain
        self.note_exit = self.runner.note_exit
        self._settling: list[asyncio.Task[None]] = []

    # --- Life ---------------------------------------------------------------------------------

    def declare(self, groups: Iterable[WorkerGroup], budgets: Budgets) -> None:
        """Set the groups and the limits of the machine, before `open`."""
        self.roster.groups = {group.name: group for group in groups}
        self.roster.budgets = budgets

    async def open(self) -> None:
        """Continue from the table. No step of a worker begins before that worker was found."""
        await self.loop.open()

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
            *(asyncio.create_task(self.gone(key)) for key in ending),
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
        self.loop.only_ends = True

    async def close(self) -> None:
        """Stop acting, and leave workers and rows to the next gateway."""
        for task in self._settling:
            task.cancel()
        await self.loop.close()

    async def drain(self, group: str, *, drained: bool) -> None:
        """Place nobody on a group, or undo that. Raises `StorageFailed`."""
        await self.roster.table.set_drained(group, drained=drained)
        self.roster.groups[group] = replace(self.roster.groups[group], drained=drained)
        self.poke()

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
            if self.roster.somebody_waits():  # perhaps for the end of this step
                self.poke()
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
            self.roster.note_arrival(row)
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
        return awake and not calls.yielding and row.key not in self.runner.busy

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

    def note_failure(self, key: str, process: str, reason: str) -> None:
        """End a useless process, after its step under way."""
        row = self.roster.rows.get(key)
        if row is None or row.process != process or not self.loop.opened:
            return
        if key in self.runner.busy:
            self._event_loop.call_later(RETRY_SECONDS, self.note_failure, key, process, reason)
        elif row.state in ("awake", "asleep"):
            self.runner.begin(StopWorker(key, reason))

    def drop_step(self, key: str, caller: str) -> None:
        """Forget a caller's mark of gradients that wait for their step."""
        if key in self.roster.rows:
            self.roster.calls_of(key).open_steps.discard(caller)

    async def end_process(self, key: str, process: str, reason: str) -> None:
        """Kill a process, and return when nothing is left of it. Its calls fail."""
        while (row := self.roster.rows.get(key)) is not None and row.process == process:
            rests = self.roster.calls_of(key).rests_until - self.roster.clock()
            if key in self.runner.busy:
                await self.runner.await_steps([key])
            elif row.state not in ("awake", "asleep"):
                await self.roster.changed()
            elif rests > 0:  # its launcher did not answer
                await asyncio.sleep(rests)
            else:
                self.note_failure(key, process, reason)

    async def await_found(self, keys: Iterable[str]) -> None:
        """Return when these workers of an earlier gateway were found, or are gone or lost."""
        await self.runner.await_steps(keys)

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
