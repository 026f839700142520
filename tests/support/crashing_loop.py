"""An event loop in virtual time, for processes that can die between any two steps."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakSet

Result = TypeVar("Result")

_MOST_STEPS = 200_000
"""The limit of one life's steps, against endless loops."""
_EPOCH = 1_700_000_000.0


class Crash(SystemExit):
    """The process is dead: nothing of it runs, not even a `finally`.

    asyncio raises only a `SystemExit` through."""


@dataclass
class Clock:
    """Seconds since the machine's start. The death of a process does not stop it."""

    now: float = 1e6

    @contextmanager
    def everywhere(self):
        """Replace `time.time` and `time.monotonic` during the block."""
        with (
            patch("time.monotonic", lambda: self.now),
            patch("time.time", lambda: _EPOCH + self.now),
        ):
            yield


_PROCESS: ContextVar[str] = ContextVar("process", default="")
"""The process of the running code."""


class CrashingLoop(asyncio.SelectorEventLoop):
    """Runs one callback per step, and jumps to the next timer when idle.

    All code belongs to a process: that of `live`, or a named one (`as_process`) that survives it.
    Nothing of a dead process runs. Work for threads runs in this thread after a random delay."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__()
        self._clock = clock
        self._rng = rng
        self._at_step: Callable[[int], None] = lambda _number: None
        self._tasks: defaultdict[str, WeakSet[asyncio.Task[Any]]] = defaultdict(WeakSet)
        self._dead: dict[str, Any] = {}
        self._undone: list[asyncio.Handle] = []
        self._buried = False
        self.steps = 0

    def time(self) -> float:
        return self._clock.now

    def step(self) -> None:
        """Count a step. The process may die before it."""
        self.steps += 1
        assert self.steps < _MOST_STEPS, "this does not end"
        self._at_step(self.steps)

    def create_task(self, coro, *, name=None, context=None):
        context = context or copy_context()
        task = super().create_task(coro, name=name, context=context)
        self._tasks[context.get(_PROCESS, "")].add(task)
        return task

    def run_in_executor(self, executor, func, *args):
        done = self.create_future()

        def work() -> None:
            if self._buried:
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - its caller is told
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self._rng.choice((0.0, 0.0, 0.001, 0.01)), work)
        return done

    def _run_once(self) -> None:
        while not self._ready:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            if not self._is_over(timer):
                self._clock.now = max(self._clock.now, timer._when)
                self._ready.append(timer)
        if self._is_over(self._ready[0]):
            self._ready.popleft()
            return
        self.step()
        handle = self._ready.popleft()
        if not handle._cancelled:
            handle._run()

    def _is_over(self, handle) -> bool:
        if dead := handle._context.get(_PROCESS, "") in self._dead:
            self._undone.append(handle)
        return handle._cancelled or dead

    def _timer_handle_cancelled(self, handle) -> None:
        """Do nothing: cancelled timers are skipped when due."""

    def live(
        self,
        process: str,
        main: Coroutine[None, None, Result],
        *,
        at_step: Callable[[int], None] = lambda _number: None,
    ) -> Result:
        """Run until a process's `main` ends. `at_step` is called before each step, and may raise
        `Crash`."""
        self._at_step, self.steps = at_step, 0
        task = self.create_task(main, context=as_process(process))
        try:
            self.run_until_complete(task)
        except Crash:
            if task.done():  # ended just before, and the loop is about to stop
                self._at_step = lambda _number: None
                self.run_forever()
            # Keep the tasks until `bury`: the garbage collector would run their `finally`.
            self._dead[process] = list(self._tasks.pop(process))
            raise
        self._end(process)
        return task.result()

    def bury(self) -> None:
        """Free dead processes' tasks and end the others, without effects."""
        self._buried, self._at_step, self.steps = True, lambda _number: None, 0
        kept, self._dead = self._dead, {}
        self._ready.extend(self._undone)
        for process, tasks in (kept | self._tasks).items():
            self._tasks[process] = WeakSet(tasks)
            self._end(process)
        self.close()

    def _end(self, process: str) -> None:
        for _ in range(10):
            if not (tasks := [task for task in self._tasks[process] if not task.done()]):
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=60))
        raise AssertionError(f"these tasks cannot be cancelled: {tasks}")


def as_process(name: str) -> Context:
    context = copy_context()
    context.run(_PROCESS.set, name)
    return context
