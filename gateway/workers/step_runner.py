"""Carrying out: one step of one row, from its intention to its result.

The row's new state is in memory as soon as a step begins. It is committed before the worker hears
of it. A step has a deadline. A worker that fails a step is killed, and keeps its devices until its
launcher says that nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gateway.workers.adapters import Found, Moved, StillAtWork, WorkerAdapter
from gateway.workers.clients import EXIT_REPORT_PATIENCE, WorkerUnavailable
from gateway.workers.roster import RETRY_SECONDS, Roster
from gateway.workers.steps import (
    AskToYield,
    FindWorker,
    ForgetRow,
    KeepAwake,
    PlaceRows,
    PutToSleep,
    RefuseCalls,
    SleepPlan,
    StartWorker,
    Step,
    StopWorker,
    TakeGroup,
    WakeWorker,
)
from gateway.workers.table import TRANSITIONS, EndState, State, WorkerRow
from tandem.errors import (
    CannotSleep,
    OperationTimedOut,
    OutOfMemory,
    StorageFailed,
    TandemError,
    WorkerCrashed,
    WorkerMayRun,
    WorkerStartFailed,
    describe,
)
from tandem.telemetry import get_log

ASK_AGAIN_SECONDS = 5.0
"""Seconds until a worker that could not sleep, or a silent launcher, is asked again."""
_NO_ROOM = (OutOfMemory, StorageFailed, CannotSleep)
"""Errors of a worker that found no room to sleep and is still awake."""

_Commit = Callable[[], Awaitable[bool]]


async def _unless_connection_breaks(call: Callable[[], Awaitable[Moved]]) -> Moved:
    """Repeat a call if only its connection broke. After the first one had its effect, the worker
    answers at once. If the worker died, its end is reported meanwhile, with the cause."""
    given_up = 0
    while True:
        try:
            return await call()
        except WorkerUnavailable:
            given_up += 1
            if given_up * RETRY_SECONDS > EXIT_REPORT_PATIENCE:
                raise
            await asyncio.sleep(RETRY_SECONDS)


async def _at_once() -> bool:
    return True


class StepRunner:
    """Carries out steps on the rows of a `roster`. `on_end` is called after each step."""

    def __init__(self, roster: Roster, *, on_end: Callable[[], None]) -> None:
        self._roster = roster
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By row, its step under way. A placement has several rows."""
        self._stopping: set[str] = set()
        self._held: frozenset[str] = frozenset()
        self._log = get_log()

    @property
    def busy(self) -> frozenset[str]:
        return frozenset(self._tasks) | self._held

    async def await_steps(self, keys: Iterable[str]) -> None:
        """Return when the present steps of these rows have ended."""
        tasks = {self._tasks[key] for key in keys if key in self._tasks}
        if tasks:
            await asyncio.wait(tasks)

    @contextmanager
    def holding(self, keys: Collection[str]) -> Iterator[None]:
        """Begin no step of these rows during the block."""
        self._held |= frozenset(keys)
        try:
            yield
        finally:
            self._held -= frozenset(keys)

    async def close(self) -> None:
        """Cancel all steps, and leave the workers to the next gateway."""
        tasks = {*self._tasks.values()}
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- Beginning ----------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Change the row in memory, and begin the rest of the step as a task."""
        match step:
            case PlaceRows(rows):
                commit = self._roster.intend(*rows)
                self._begin(step.placed, commit)
            case TakeGroup(key):
                row = replace(self._row(key), ends_as="waiting")
                self._roster.note(row.ended(at=self._now(), reason="its place was taken"))
            case ForgetRow(key):
                self._move(key, "gone")
            case AskToYield(key):
                self._roster.calls_of(key).yielding = True
            case RefuseCalls(key, reason):
                running = self._row(key).has_process
                error = OperationTimedOut if running else WorkerStartFailed
                self._roster.calls_of(key).refuse(error(reason))
            case KeepAwake(key, reason):
                self._keep_awake(key, reason)
            case StartWorker(key):
                process = self._adapter(self._row(key)).new_process(self._row(key))
                commit = self._intend(
                    key, "starting", durable=self._takes_turns(key), process=process
                )
                self._begin([key], lambda: self._start(key, commit))
            case WakeWorker(key):
                commit = self._intend(key, "waking")
                self._begin([key], lambda: self._wake(key, commit))
            case PutToSleep(key, plans):
                self._roster.calls_of(key).note_reserved(plans[0])
                commit = self._intend(key, "falling_asleep")
                self._begin([key], lambda: self._sleep(step, commit))
            case StopWorker(key):
                self._begin_stop(step)
            case FindWorker(key):
                self._begin([key], lambda: self._find(key))

    def _begin(self, keys: list[str], work: Callable[[], Awaitable[object]]) -> None:
        assert self._tasks.keys().isdisjoint(keys), "a row has one step at a time"
        task = asyncio.create_task(self._guarded(keys, work), name=f"worker-{keys[0]}")
        self._tasks.update(dict.fromkeys(keys, task))
        task.add_done_callback(lambda _: self._note_done(keys, task))

    def _note_done(self, keys: list[str], task: asyncio.Task[None]) -> None:
        for key in keys:
            if self._tasks.get(key) is task:
                del self._tasks[key]
        self._on_end()

    async def _guarded(self, keys: list[str], work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception:  # noqa: BLE001 - our own error must not keep the devices from others
            self._log.exception("worker_step_failed", workers=keys)
            for key in keys:
                row = self._roster.rows.get(key)
                if row is not None and row.has_process:
                    await self._kill(key, "the gateway failed in the middle of a step; see its log")

    def _row(self, key: str) -> WorkerRow:
        return self._roster.rows[key]

    def _now(self) -> float:
        return self._roster.clock()

    def _move(self, key: str, state: State, *, reason: str = "") -> None:
        self._roster.note(self._row(key).moved(state, at=self._now(), reason=reason))

    def _intend(self, key: str, state: State, *, durable: bool = True, **changes: str) -> _Commit:
        """Move a row to a state between two others, with a new token. Unless that is `durable`, it
        is written soon, and nobody waits for it."""
        token = self._roster.next_token()
        row = self._row(key).moved(state, at=self._now(), token=token, **changes)
        if durable:
            return self._roster.intend(row)
        self._roster.note(row)
        return _at_once

    def _takes_turns(self, key: str) -> bool:
        return self._roster.groups[self._row(key).group].leased

    # --- Start and wake -----------------------------------------------------------------------

    async def _start(self, key: str, commit: _Commit) -> None:
        if not await commit():
            return
        row, calls = self._row(key), self._roster.calls_of(key)
        try:
            await self._adapter(row).start(row, self._roster.groups[row.group])
        except Exception as error:  # noqa: BLE001 - after any error it does not serve
            await self._end_start(key, self._why_not_started(row, error))
            return
        calls.note_started(on_host=self._roster.on_host(row))
        self._note_awake(key)

    def _why_not_started(self, row: WorkerRow, error: Exception) -> WorkerStartFailed:
        if isinstance(error, WorkerStartFailed):
            return error
        if not isinstance(error, TandemError):
            self._log.error("start_failed", worker=row.key, exc_info=error)
            name = type(error).__name__
            return WorkerStartFailed(f"{name} in the gateway while it started; see its log")
        return WorkerStartFailed(error.message)

    async def _end_start(self, key: str, error: WorkerStartFailed) -> None:
        """Kill a worker that did not start, and fail its waiting calls. After a first crash in
        native code they wait for another start."""
        calls, crashed = self._roster.calls_of(key), isinstance(error, WorkerCrashed)
        if not crashed or calls.crashed:
            calls.refuse(error)
        calls.crashed = crashed
        await self._kill(key, error.message)

    async def _wake(self, key: str, commit: _Commit) -> None:
        if not await commit():
            return
        row = self._row(key)
        said = await self._switched(row, "wake", lambda: self._adapter(row).wake(row))
        if said is not None:
            self._roster.calls_of(key).note_awake(said, on_host=self._roster.on_host(row))
            self._note_awake(key)

    def _note_awake(self, key: str) -> None:
        self._move(key, "awake")
        self._admit(key)

    def _admit(self, key: str) -> None:
        """Begin the calls that wait for an awake worker, unless it ends."""
        if self._row(key).ends_as == "placed":
            self._roster.calls_of(key).admit()

    # --- Sleep --------------------------------------------------------------------------------

    async def _sleep(self, step: PutToSleep, commit: _Commit) -> None:
        """Try the ways in turn, each with its own token."""
        key, faults = step.key, list[str]()
        calls = self._roster.calls_of(key)
        for plan in step.plans:
            if faults:
                calls.note_reserved(plan)
                commit = self._intend(key, "falling_asleep")
            if not await commit():
                calls.note_not_asleep()
                if faults:  # the worker refused the first way, so it is awake
                    self._note_awake(key)
                return
            try:
                if await self._sleep_in_one_way(self._row(key), plan):
                    self._move(key, "asleep")
                return
            except StillAtWork as error:
                calls.note_not_asleep()
                calls.stays_until = self._now() + ASK_AGAIN_SECONDS
                self._move(key, "awake", reason=str(error))
                self._admit(key)
                return
            except _NO_ROOM as error:
                faults.append(error.message)
        calls.note_not_asleep()
        why = "; ".join(faults)
        if step.or_kill:
            await self._kill(key, f"others need its devices, and it could not sleep: {why}")
        else:
            self._move(key, "awake")
            self._keep_awake(key, why)

    async def _sleep_in_one_way(self, row: WorkerRow, plan: SleepPlan) -> bool:
        said = await self._switched(row, "sleep", lambda: self._adapter(row).sleep(row, plan))
        if said is None:
            return False
        on_host = self._roster.on_host(row)
        self._roster.calls_of(row.key).note_asleep(plan, said, on_host=on_host)
        return True

    def _keep_awake(self, key: str, reason: str) -> None:
        calls = self._roster.calls_of(key)
        if reason:
            self._log.warning("sleep_refused", worker=key, reason=reason)
            if self._roster.metrics is not None:
                self._roster.metrics.note_refusal(self._row(key))
            calls.stays_until = self._now() + ASK_AGAIN_SECONDS
            calls.refused_at = calls.refused_at or self._now()
            self._roster.note(replace(self._row(key), reason=reason))
        self._admit(key)

    async def _switched(
        self, row: WorkerRow, name: str, call: Callable[[], Awaitable[Moved]]
    ) -> Moved | None:
        """Return the answer to a sleep or a wake, or None if the worker failed it and was killed.

        Raises `StillAtWork`, or an error of `_NO_ROOM` if the worker found no room and is awake."""
        began, limit = self._now(), self._roster.settings.switch_timeout
        try:
            async with asyncio.timeout(limit):
                said = await _unless_connection_breaks(call)
        except TimeoutError:
            await self._kill(row.key, f"it did not {name} within {limit:g} s")
            return None
        except StillAtWork:
            raise
        except Exception as error:
            if name == "sleep" and isinstance(error, _NO_ROOM):
                raise
            await self._kill(row.key, f"it did not {name}: {describe(error)}")
            return None
        self._roster.note_switch(row, name, self._now() - began, said.moved)
        return said

    # --- Ends ---------------------------------------------------------------------------------

    def _begin_stop(self, step: StopWorker) -> None:
        """Begin to end a worker, also in the middle of its start."""
        before = self._tasks.pop(step.key, None)
        if before is not None:
            before.cancel()
        self._note_stopping(step.key, step.reason, ends_as=step.ends_as)
        self._begin([step.key], lambda: self._stop_after(before, step))

    async def _stop_after(self, before: asyncio.Task[None] | None, step: StopWorker) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        await self._stop(step.key, at_once=step.at_once)

    async def _kill(self, key: str, reason: str) -> None:
        self._note_stopping(key, reason, ends_as="placed")
        await self._stop(key, at_once=True)

    def _note_stopping(self, key: str, reason: str, *, ends_as: EndState) -> None:
        row = self._row(key)
        ends_as = ends_as if row.ends_as == "placed" else row.ends_as
        if row.occupies_until_it_ends:
            row = row.moved("stopping", at=self._now())
        self._log.info("worker_stopping", worker=key, reason=reason)
        self._roster.note(replace(row, reason=reason, ends_as=ends_as))

    async def _stop(self, key: str, *, at_once: bool) -> None:
        """End a process. If nobody can confirm its end, the row keeps its state for a while."""
        row = self._row(key)
        self._stopping.add(key)
        try:
            async with asyncio.timeout(self._roster.settings.switch_timeout):
                await self._adapter(row).stop(row, at_once=at_once)
        except Exception as error:  # noqa: BLE001 - the stop is repeated until it is confirmed
            why = describe(error) or self._adapter(row).explain(row) or "its launcher is silent"
            self._log.error("worker_not_stopped", worker=key, reason=why)
            self._roster.calls_of(key).rests_until = self._now() + ASK_AGAIN_SECONDS
            return
        finally:
            self._stopping.discard(key)
        self._roster.note_ended(self._row(key), row.reason)

    def note_exit(self, key: str, process: str, reason: str) -> None:
        """Note a launcher's report that nothing is left of this process."""
        row = self._roster.rows.get(key)
        if row is None or row.process != process or not row.has_process:
            return
        if key in self._stopping:
            return  # the answer to its stop follows
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()
        if row.state == "starting":
            self._roster.calls_of(key).refuse(WorkerStartFailed(reason))
        self._roster.note_ended(row, reason)
        self._on_end()

    # --- Workers of an earlier gateway --------------------------------------------------------

    async def _find(self, key: str) -> None:
        row = self._row(key)
        try:
            limit = row.request.start_timeout + self._roster.settings.switch_timeout
            async with asyncio.timeout(limit):  # it may still start, and then move its state
                group = self._roster.groups[row.group]
                found = await self._adapter(row).find(row, group)
        except (WorkerMayRun, TimeoutError) as error:
            self._roster.calls_of(key).rests_until = self._now() + ASK_AGAIN_SECONDS
            if self._row(key).state not in ("lost", "asleep"):
                self._move(key, "lost", reason=describe(error))
            return
        if self._adapter(row).silent_for(row):
            self._roster.calls_of(key).rests_until = self._now() + ASK_AGAIN_SECONDS
        await self._take_up(key, found)

    async def _take_up(self, key: str, found: Found) -> None:
        """Continue with a worker in the state that was found."""
        row, calls = self._row(key), self._roster.calls_of(key)
        if found.state == "gone":
            self._roster.note_ended(row, "it ended before this gateway looked for it")
            return
        if found.state != "silent" and not calls.started_at:  # else its bytes are as they were
            calls.note_started(on_host=self._roster.on_host(row))
        if found.state == "asleep" and (row.state == "asleep" or self._may_become(row, "asleep")):
            plan = SleepPlan("disk" if found.has.disk else "host")
            calls.note_asleep(plan, found.has, on_host=self._roster.on_host(row))
            if row.state != "asleep":
                self._move(key, "asleep")
        elif found.state == "awake" and row.state == "awake":
            self._admit(key)
        elif found.state == "awake" and self._may_become(row, "awake"):
            self._note_awake(key)
        elif found.state != "silent" or row.state not in ("awake", "asleep"):
            await self._kill(key, found.reason or f"it was {found.state} when it was looked for")

    def _may_become(self, row: WorkerRow, state: State) -> bool:
        return state in TRANSITIONS[row.state]

    def _adapter(self, row: WorkerRow) -> WorkerAdapter[Any]:
        return self._roster.adapters[row.kind]
