"""The engine thread: the only thread of rank 0 that touches torch.

It applies operations one after the other. A second thread reads the next requests."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from trainer_service.service.hosted_runs import HostedRuns

T = TypeVar("T")


class EngineThread:
    """Runs `start` and then jobs in one thread, with a heartbeat every `heartbeat` seconds of
    idleness.

    `on_broken` gets every error that escapes a job. The process group is unusable then."""

    def __init__(
        self,
        *,
        start: Callable[[], HostedRuns],
        heartbeat: float,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._start = start
        self._heartbeat = heartbeat
        self._on_broken = on_broken
        self._jobs: queue.SimpleQueue[Callable[[HostedRuns], None]] = queue.SimpleQueue()
        self.started: Future[HostedRuns] = Future()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        # A daemon: it may hang in a collective when the process is to end.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # carries the service's log context
            args=(self._run,),
            name="engine",
            daemon=True,
        )

    def run(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[HostedRuns], T]) -> Future[T]:
        """Queue a job. Its future gets the result, or the error that broke the group."""
        future: Future[T] = Future()

        def carry_out(runs: HostedRuns) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = job(runs)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(result)

        self._jobs.put(carry_out)
        return future

    def read_ahead(self, read: Callable[[HostedRuns], T]) -> Future[T]:
        """Start reading input of a later job, which no job changes."""
        return self._reader.submit(lambda: read(self.started.result()))

    def _run(self) -> None:
        try:
            runs = self._start()
        except BaseException as error:  # noqa: BLE001 (passed on by the future)
            self.started.set_exception(error)
            return
        self.started.set_result(runs)
        idle_limit = self._heartbeat if runs.ranks > 1 else None
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=idle_limit)
                except queue.Empty:
                    runs.heartbeat()
                else:
                    job(runs)
        except BaseException as error:  # noqa: BLE001 (any error breaks the group)
            self._on_broken(error)
