"""An event loop in virtual time whose process can die between any two steps."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

Result = TypeVar("Result")

_MOST_STEPS = 200_000
"""Of one life: more say that something goes round in circles."""
_EPOCH = 1_700_000_000.0


class Crash(SystemExit):
    """The process is dead: nothing of it runs any more, no `finally` either. (A `SystemExit`,
    because asyncio hands every other error to a task or a log.)"""


@dataclass
class Clock:
    """Seconds since the machine started; they go on when a process dies."""

    now: float = 1e6

    @contextmanager
    def everywhere(self):
        """Let `time.time` and `time.monotonic` tell this clock's time while the block runs."""
        with (
            patch("time.monotonic", lambda: self.now),
            patch("time.time", lambda: _EPOCH + self.now),
        ):
            yield


class CrashingLoop(asyncio.SelectorEventLoop):
    """Runs one callback a step, and jumps to the next timer when nothing else is to be done.

    Work for threads is done in this thread, a random while later: its caller hears of it in a
    further step. `at_step` is called before each step, and wherever `step` is called.
    """

    def __init__(self, clock: Clock, rng: random.Random, at_step: Callable[[int], None]) -> None:
        super().__init__()
        self._clock = clock
        self._rng = rng
        self._at_step = at_step
        self._dead = False
        self._kept: Any = ()
        self.steps = 0

    def time(self) -> float:
        return self._clock.now

    def step(self) -> None:
        """Count a step, before which the process may die."""
        if self._dead:
            return
        self.steps += 1
        assert self.steps < _MOST_STEPS, "this does not end"
        try:
            self._at_step(self.steps)
        except Crash:
            self._dead = True
            # What a garbage collector would close, running its `finally`, is kept until `bury`.
            self._kept = asyncio.all_tasks(self)
            raise

    def run_in_executor(self, executor, func, *args):
        done = self.create_future()

        def work() -> None:
            if self._dead:
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
            if not timer._cancelled:
                self._clock.now = max(self._clock.now, timer._when)
                self._ready.append(timer)
        if not self._ready[0]._cancelled:
            self.step()
        handle = self._ready.popleft()
        if not handle._cancelled:
            handle._run()

    def _timer_handle_cancelled(self, handle) -> None:
        """Cancelled timers are passed over when they are due."""

    def live(self, main: Coroutine[None, None, Result]) -> Result:
        """Run until `main` ends. Raises `Crash`."""
        try:
            result = self.run_until_complete(main)
            self._end()
            return result
        finally:
            if not self._dead:
                self.close()

    def bury(self) -> None:
        """Free what the dead process held. What its tasks do now must have no effect any more."""
        self._kept = ()
        self._end()
        self.close()

    def _end(self) -> None:
        for _ in range(10):
            if not (tasks := asyncio.all_tasks(self)):
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=60))
        raise AssertionError(f"these tasks cannot be cancelled: {tasks}")
