"""The engine thread of rank 0: starts the trainer and applies jobs to it, one after the other.

It alone touches torch, so that the asyncio side stays free to answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from trainer_service.operations import Operations

Result = TypeVar("Result")
Job = Callable[["Operations"], None]


class EngineThread:
    """Runs `start` and then jobs in one thread; while idle it beats, every `beat` seconds.

    `on_broken` hears of every error that no job answered: the process group is of no use then.
    """

    def __init__(
        self,
        *,
        start: Callable[[], Operations],
        beat: float,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._start = start
        self._beat = beat
        self._on_broken = on_broken
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.started: Future[Operations] = Future()
        # A daemon: it may hang in a collective when the process is to end.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def run(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[Operations], Result]) -> Future[Result]:
        """Queues a job. Its future carries the result, or the error that broke the group."""
        future: Future[Result] = Future()

        def carry_out(operations: Operations) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = job(operations)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(result)

        self._jobs.put(carry_out)
        return future

    def _run(self) -> None:
        try:
            operations = self._start()
        except BaseException as error:  # noqa: BLE001 (handed to whoever waits for the start)
            self.started.set_exception(error)
            return
        self.started.set_result(operations)
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=self._beat if operations.ranks > 1 else None)
                except queue.Empty:
                    operations.beat()
                else:
                    job(operations)
        except BaseException as error:  # noqa: BLE001 (whatever it was, the group is broken)
            self._on_broken(error)
