"""The adapter of jobs: it starts them. A job keeps its devices until it ends."""

from __future__ import annotations

from gateway.workers.adapters import Found, WorkerAdapter, WorkerOwner
from gateway.workers.groups import WorkerGroup
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import CannotSleep
from tandem.v1 import common_pb2


class JobAdapter(WorkerAdapter[WorkerOwner]):
    """A job serves health checks only, so no decision asks it to sleep."""

    kind = "job"

    async def send_sleep(
        self, worker: Worker, row: WorkerRow, request: common_pb2.SleepRequest
    ) -> common_pb2.SwitchReply:
        raise CannotSleep("a job keeps its devices until it ends")

    async def send_wake(self, worker: Worker, row: WorkerRow) -> common_pb2.SwitchReply:
        raise CannotSleep("a job keeps its devices until it ends")

    async def find_state(self, worker: Worker, row: WorkerRow, group: WorkerGroup) -> Found:
        """Return that a job of an earlier gateway is awake: its launcher says that it runs."""
        return Found(state="awake")
