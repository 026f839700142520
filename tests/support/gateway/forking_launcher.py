"""A launcher whose trainers are real ones, forked from a process that has imported everything."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from tandem.protocol.worker import WorkerHandle, WorkerReport, WorkerSpec
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.waiting import PATIENCE, wait_until

_CONTEXT = multiprocessing.get_context("forkserver")


class ForkingLauncher(FakeLauncher):
    def __init__(self) -> None:
        super().__init__()
        self._processes: dict[str, tuple[WorkerSpec, ForkServerProcess]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        _CONTEXT.set_forkserver_preload(["tests.support.gateway.forked_trainer"])

    def kill_trainer(self, run_id: str) -> None:
        """Kill the trainer of a run once there is one."""
        os.kill(wait_until(lambda: self._pid_of(run_id)), signal.SIGKILL)

    def _pid_of(self, run_id: str) -> int:
        found = [p for spec, p in [*self._processes.values()] if spec.run_id == run_id]
        return next((process.pid or 0 for process in found if process.is_alive()), 0)

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        if spec.kind != "trainer":
            return await super().start(spec)
        reports, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_serve, args=(spec, theirs), daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        self._processes[spec.worker_id] = spec, process
        watch = asyncio.create_task(self._watch(spec.worker_id, process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        report = await asyncio.to_thread(_report_of, reports)
        return WorkerHandle.of(spec, address=report.address, pid=process.pid or 0, log_path="log")

    async def _watch(self, worker_id: str, process: ForkServerProcess) -> None:
        await asyncio.to_thread(process.join)
        if self._processes.pop(worker_id, None):
            await self.kill(worker_id, "it was killed by SIGKILL")

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        if found := self._processes.pop(worker_id, None):
            found[1].kill()
            await asyncio.to_thread(found[1].join)
        await super().stop(worker_id, at_once=at_once)

    async def close(self) -> None:
        for worker_id in tuple(self._processes):
            await self.stop(worker_id)
        forkserver._forkserver._stop()
        await super().close()


def _report_of(reports: Connection) -> WorkerReport:
    try:
        assert reports.poll(PATIENCE)
        return WorkerReport.model_validate_json(reports.recv_bytes())
    except EOFError:  # it was killed
        return WorkerReport()


def _serve(spec: WorkerSpec, reports: Connection) -> None:
    from tests.support.gateway.forked_trainer import serve_trainer

    serve_trainer(spec, reports)
