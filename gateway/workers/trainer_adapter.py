"""The adapter of trainers: it starts them, and asks them to sleep and to wake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.workers.adapters import Moved, StillAtWork, WorkerAdapter, WorkerOwner
from gateway.workers.clients import DESCRIBE_TIMEOUT, call_worker
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import CannotSleep, OperationTimedOut
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc

_IDLE_SECONDS = 0.1
"""Seconds between two looks at a trainer with calls of an earlier gateway."""
_LOOK_TIMEOUT = 5.0
"""Seconds for an idle trainer to describe a run. A busy one answers after its call."""


class TrainerAdapter(WorkerAdapter[WorkerOwner]):
    """If a backend cannot sleep, the host suspends the trainer.

    A process of an earlier gateway may still be at that gateway's calls. It ends them before it
    sleeps. For each of its runs they may take `operation_timeout` seconds."""

    kind = "trainer"

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        try:
            return await super().sleep(row, plan)
        except CannotSleep:
            if plan.way == "disk":  # suspended state needs host memory, which has no room
                raise
            launcher = self._processes.launcher_of(row.process)
            await launcher.suspend(row.process, lease=row.token, timeout=self._timeout)
            return Moved(host=row.request.host_bytes)  # nobody measures it

    async def wake(self, row: WorkerRow) -> Moved:
        try:
            return await super().wake(row)
        except CannotSleep:
            launcher = self._processes.launcher_of(row.process)
            await launcher.resume(row.process, lease=row.token, timeout=self._timeout)
            return Moved()

    async def send_sleep(
        self, worker: Worker, row: WorkerRow, request: common_pb2.SleepRequest
    ) -> common_pb2.SwitchReply:
        if worker.busy:
            await self._check_idle(worker, row)
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        return await call_worker(worker, stub.Sleep, request, timeout=self._timeout)

    async def send_wake(self, worker: Worker, row: WorkerRow) -> common_pb2.SwitchReply:
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        request = common_pb2.WakeRequest()
        return await call_worker(worker, stub.Wake, request, timeout=self._timeout)

    async def _check_idle(self, worker: Worker, row: WorkerRow) -> None:
        """Raise `StillAtWork` unless a process has ended the calls of an earlier gateway, or
        `OperationTimedOut` if they take too long. Two looks in succession must find its runs idle
        after the same calls."""
        now = asyncio.get_running_loop().time()
        worker.busy_since = worker.busy_since or now
        run_ids = (await self._describe(worker, "", timeout=DESCRIBE_TIMEOUT)).run_ids
        last = await self._last_calls(worker, run_ids)
        await asyncio.sleep(_IDLE_SECONDS)
        if last is not None and last == await self._last_calls(worker, run_ids):
            worker.busy = False
            return
        limit = self._processes.settings.operation_timeout * max(1, len(run_ids))
        if now > worker.busy_since + limit:
            raise OperationTimedOut(
                f"it did not end the calls of an earlier gateway within {limit:g} s "
                "(TANDEM_OPERATION_TIMEOUT)"
            )
        await self.send_wake(worker, row)  # it is awake, and learns the row's token
        raise StillAtWork("it is at a call of an earlier gateway")

    async def _last_calls(self, worker: Worker, run_ids: Sequence[str]) -> dict[str, int] | None:
        """Return the last call of each run of an idle process, or None if it is busy."""
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        for run_id in run_ids:
            request = trainer_pb2.ProgressRequest(run_id=run_id)
            progress = await call_worker(worker, stub.Progress, request, timeout=DESCRIBE_TIMEOUT)
            if progress.seq_id:
                return None
        try:
            return {
                run_id: (await self._describe(worker, run_id, timeout=_LOOK_TIMEOUT)).last_seq_id
                for run_id in run_ids
            }
        except OperationTimedOut:  # its next call has begun
            return None

    async def _describe(
        self, worker: Worker, run_id: str, *, timeout: float
    ) -> trainer_pb2.DescribeTrainerReply:
        stub = trainer_pb2_grpc.TrainerStub(worker.channel)
        request = trainer_pb2.DescribeTrainerRequest(run_id=run_id)
        return await call_worker(worker, stub.Describe, request, timeout=timeout)
