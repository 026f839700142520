"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    """Waits for nothing, and adds up what it was to wait for."""

    waited = 0.0

    def select(self, timeout: float | None = None):
        self.waited += timeout or 0.0
        return super().select(0 if timeout is not None else None)


def run_in_virtual_time(main: Coroutine[None, None, Result]) -> Result:
    """Run what waits for timers alone: hours pass at once, each to the second."""

    def make_loop() -> asyncio.AbstractEventLoop:
        selector = _Selector()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.waited
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main)


def in_virtual_time(scenario: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Make a test of a coroutine."""

    def run() -> None:
        run_in_virtual_time(scenario())

    run.__name__ = scenario.__name__
    return run


def now() -> float:
    return asyncio.get_running_loop().time()
