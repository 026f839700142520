"""The adapter of trainers: it starts them, and asks them to sleep and to wake."""

from __future__ import annotations

import asyncio

from gateway.workers.adapters import Moved
from gateway.workers.clients import DESCRIBE_TIMEOUT, call_worker
from gateway.workers.process_adapter import ProcessAdapter, WorkerOwner
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import CannotSleep
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc

_IDLE_SECONDS = 0.1
"""Seconds between two looks at a trainer with calls of an earlier gateway."""


class TrainerAdapter(ProcessAdapter[WorkerOwner]):
    """Implements `WorkerAdapter`. If a backend cannot sleep, the host suspends the trainer.

    A process of an earlier gateway may still be at that gateway's calls. It ends them before it
    sleeps."""

    kind = "trainer"

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        try:
            return await super().sleep(row, plan)
        except CannotSleep:
            if plan.way == "disk":  # suspended state needs host memory, which has no room
                raise
            await self._processes.suspend(row.process, lease=row.token, timeout=self._timeout)
            return Moved(host=row.request.host_bytes)  # nobody measures it

    async def wake(self, row: WorkerRow) -> Moved:
        try:
            return await super().wake(row)
        except CannotSleep:
            await self._processes.resume(row.process, lease=row.token, timeout=self._timeout)
            return Moved()

    async def send_sleep(
        self, worker: Worker, row: WorkerRow, request: common_pb2.SleepRequest
    ) -> common_pb2.SwitchReply:
        if worker.busy:
            await self._until_idle(worker)
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        return await call_worker(worker, stub.Sleep, request, timeout=self._timeout)

    async def send_wake(self, worker: Worker, row: WorkerRow) -> common_pb2.SwitchReply:
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        request = common_pb2.WakeRequest()
        return await call_worker(worker, stub.Wake, request, timeout=self._timeout)

    async def _until_idle(self, worker: Worker) -> None:
        """Return when a process has ended the calls of an earlier gateway. Two looks in succession
        must find its runs idle after the same calls."""
        stub, last = trainer_pb2_grpc.TrainerStub(worker.channel), dict[str, int]()
        hosted = await self._describe(worker, "")
        while True:
            after: dict[str, int] = {}
            for run_id in hosted.run_ids:
                request = trainer_pb2.ProgressRequest(run_id=run_id)
                progress = await call_worker(
                    worker, stub.Progress, request, timeout=DESCRIBE_TIMEOUT
                )
                if not progress.seq_id:
                    after[run_id] = (await self._describe(worker, run_id)).last_seq_id
            if len(after) == len(hosted.run_ids) and after == last:
                worker.busy = False
                return
            last = after
            await asyncio.sleep(_IDLE_SECONDS)

    async def _describe(self, worker: Worker, run_id: str) -> trainer_pb2.DescribeTrainerReply:
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        request = trainer_pb2.DescribeTrainerRequest(run_id=run_id)
        return await call_worker(worker, stub.Describe, request, timeout=DESCRIBE_TIMEOUT)
