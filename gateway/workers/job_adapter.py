"""The adapter of jobs: it starts them, and its host suspends and resumes them."""

from __future__ import annotations

from dataclasses import replace

from gateway.workers.adapters import Found, Moved, StillAtWork, WorkerAdapter, WorkerOwner
from gateway.workers.groups import WorkerGroup
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import CannotSleep
from tandem.v1 import common_pb2


class JobAdapter(WorkerAdapter[WorkerOwner]):
    """A job serves health checks only, also while it is suspended."""

    kind = "job"

    async def send_sleep(
        self, worker: Worker, row: WorkerRow, request: common_pb2.SleepRequest
    ) -> common_pb2.SwitchReply:
        launcher = self._processes.launcher_of(row.process)
        try:
            await launcher.suspend(row.process, lease=row.token, timeout=self._timeout)
        except CannotSleep as error:
            raise StillAtWork(f"its program is loading: {error.message}") from error
        return common_pb2.SwitchReply(host_bytes=request.most_bytes)  # nobody measures it

    async def send_wake(self, worker: Worker, row: WorkerRow) -> common_pb2.SwitchReply:
        launcher = self._processes.launcher_of(row.process)
        await launcher.resume(row.process, lease=row.token, timeout=self._timeout)
        return common_pb2.SwitchReply()

    async def find_state(self, worker: Worker, row: WorkerRow, group: WorkerGroup) -> Found:
        if group.no_suspender and row.state != "asleep":  # its launcher resumes nothing
            return Found(state="awake")
        found = await super().find_state(worker, row, group)
        if found.state == "asleep":
            return replace(found, has=Moved(host=group.device_bytes + row.request.host_bytes))
        return found
