"""A thread that does what an event loop gives it.

Each operation is handed to such threads three times. An executor of one thread would do as well, at
almost twice the processor time: it goes through two futures, of which this needs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


class WorkThread:
    """Does one piece of work after another, from the first `run` until `shutdown`."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)

    def run(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Return the future of what `work` returns or raises."""
        if self._thread.ident is None:
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def carry_out() -> None:
            try:
                tell = partial(_settle, done, work())
            except Exception as error:  # noqa: BLE001 - raised again to whoever gave the work
                tell = partial(_fail, done, error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(tell)

        self._given.put(carry_out)
        return done

    def shutdown(self) -> None:
        """End the thread when it has done what it was given."""
        if self._thread.ident is not None:
            self._given.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (carry_out := self._given.get()) is not None:
            carry_out()


def _settle(done: asyncio.Future[Result], result: Result) -> None:
    if not done.done():  # whoever waited was cancelled
        done.set_result(result)


def _fail(done: asyncio.Future[Result], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
