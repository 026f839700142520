"""The engine thread: the only thread of rank 0 that touches torch.

It applies operations one after the other, and batches of several runs that wait at the same time in
one pass. A second thread reads the next requests."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainer_service.service.batch_call import BatchCall

if TYPE_CHECKING:
    from trainer_service.batches.validation import Batch
    from trainer_service.service.hosted_runs import HostedRuns

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Job:
    """A job of one run, or of all runs if `run_id` is empty. `call` is a batch's."""

    carry_out: Callable[[HostedRuns], None]
    run_id: str
    call: BatchCall | None


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
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
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

    def submit(
        self, job: Callable[[HostedRuns], T], *, run_id: str = "", call: BatchCall | None = None
    ) -> Future[T]:
        """Queue a job. Its future gets the result, or the error that broke the group.

        Jobs keep their order, except that batches of other runs join the pass of an earlier `call`.
        None passes a job without `run_id`, or one of its own run."""
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

        with self._changed:
            self._jobs.append(_Job(carry_out, run_id, call))
            self._changed.notify()
        return future

    def read_ahead(self, call: BatchCall) -> None:
        """Start reading the batch of a later job."""

        def read() -> Batch:
            return self.started.result().operations_of(call.run_id).read_batch(call.request)

        call.read = self._reader.submit(read)

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
                with self._changed:
                    waiting = self._changed.wait_for(lambda: tuple(self._jobs), idle_limit)
                if not waiting:
                    runs.heartbeat()
                    continue
                places = runs.compute_together([(job.run_id, job.call) for job in waiting])
                jobs = [waiting[place] for place in places]
                with self._changed:
                    for job in jobs:
                        self._jobs.remove(job)
                for job in jobs:
                    job.carry_out(runs)
        except BaseException as error:  # noqa: BLE001 (any error breaks the group)
            self._on_broken(error)
