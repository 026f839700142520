"""An event loop with a clock that jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import patch

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    """Waits only for threads, and adds up all other waits."""

    waited = 0.0
    threads_at_work = 0

    def select(self, timeout: float | None = None):
        if timeout is None or (timeout > 0 and self.threads_at_work):
            return super().select(None)
        self.waited += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """No time passes while a thread works, because its progress depends on the machine."""

    def __init__(self, selector: _Selector) -> None:
        super().__init__(selector)
        self._of_time = selector

    def time(self) -> float:
        return self._of_time.waited

    def run_in_executor(self, executor, func, *args):
        self._of_time.threads_at_work += 1
        done = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._note_done)
        return done

    def _note_done(self, _done: asyncio.Future) -> None:
        self._of_time.threads_at_work -= 1


def run_in_virtual_time(main: Coroutine[None, None, Result]) -> Result:
    """The coroutine waits only for timers and threads. Hours pass at once."""
    with asyncio.Runner(loop_factory=lambda: _Loop(_Selector())) as runner:
        return runner.run(main)


def in_virtual_time(scenario: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Make a test of a coroutine. It takes the coroutine's fixtures."""

    @wraps(scenario)
    def run(**fixtures: object) -> None:
        run_in_virtual_time(scenario(**fixtures))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@contextmanager
def heartbeats_in_virtual_time() -> Iterator[None]:
    """Let the silence of workers follow the virtual clock within the block."""
    clock = SimpleNamespace(monotonic=now, time=time.time)
    with (
        patch("gateway.workers.worker.time", clock),
        patch("gateway.workers.processes.time", clock),
    ):
        yield
