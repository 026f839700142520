"""Adapters: the supervisor reaches each kind of worker through one.

An adapter knows the launcher that runs a worker and the client that calls it. The supervisor knows
neither. Each row has one process."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from gateway.workers.clients import WorkerUnavailable
from gateway.workers.groups import WorkerGroup
from gateway.workers.processes import Processes
from gateway.workers.spill import spill_folder
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import (
    OperationTimedOut,
    TandemError,
    WorkerMayRun,
    WorkerStartFailed,
    describe,
    from_failure,
)
from tandem.protocol.worker import WorkerKind, WorkerSpec
from tandem.telemetry import get_log
from tandem.v1 import common_pb2

_DROP_WEIGHTS = 2


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A worker's answer to a sleep or a wake: the bytes that it `moved`, and its bytes now."""

    moved: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0


class StillAtWork(Exception):
    """A worker is at calls of an earlier gateway, and stays awake until they have ended."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer to `find`. The connection to a `silent` worker broke, and its launcher says that
    it runs. A `useless` worker must end, for this `reason`."""

    state: Literal["awake", "asleep", "silent", "useless", "gone"]
    has: Moved = Moved()
    reason: str = ""


class WorkerOwner(Protocol):
    """Describes the processes of a row. Runs and samplers register one for each of their rows."""

    def specification(self, row: WorkerRow, group: WorkerGroup) -> WorkerSpec:
        """Return the specification of the row's next process. The adapter adds id, devices and
        token."""
        ...


Owner = TypeVar("Owner", bound=WorkerOwner)


class WorkerAdapter(Generic[Owner]):
    """The adapter of one kind of workers. Each method may be cancelled. Each call carries the row's
    token and the gateway's epoch. A sleep or a wake may take `switch_timeout` seconds."""

    kind: ClassVar[WorkerKind]

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._spill_folder = str(spill_folder(processes.settings))
        self._timeout = processes.settings.sharing.switch_timeout
        self._workers: dict[str, Worker] = {}
        self._owners: dict[str, Owner] = {}
        self._log = get_log()

    def worker(self, key: str) -> Worker | None:
        """Return the running process of a row, if any."""
        worker = self._workers.get(key)
        return worker if worker is not None and self._processes.has(worker) else None

    def require(self, row: WorkerRow) -> Worker:
        """Return the process of a row that has one. Raises `WorkerUnavailable`."""
        worker = self.worker(row.key)
        if worker is None or worker.worker_id != row.process:
            raise WorkerUnavailable("its process has ended")
        return worker

    def register(self, key: str, owner: Owner) -> None:
        """Let an owner describe the processes of a row."""
        self._owners[key] = owner

    def unregister(self, key: str) -> None:
        self._owners.pop(key, None)

    @abstractmethod
    async def send_sleep(
        self, worker: Worker, row: WorkerRow, request: common_pb2.SleepRequest
    ) -> common_pb2.SwitchReply: ...

    @abstractmethod
    async def send_wake(self, worker: Worker, row: WorkerRow) -> common_pb2.SwitchReply: ...

    # --- For the supervisor -------------------------------------------------------------------

    def new_process(self, row: WorkerRow) -> str:
        """Return a unique id for the next process of a row. Literal example:
        "trainer-s-ab12-5f0c91d2"."""
        return f"{self.kind}-{row.session}-{secrets.token_hex(4)}"

    async def start(self, row: WorkerRow, group: WorkerGroup) -> None:
        """Start the row's process on its group, and return when it serves. The launcher sets the
        deadline. Raises `WorkerStartFailed`."""
        if (owner := self._owners.get(row.key)) is None:
            raise WorkerStartFailed(f"nobody describes the worker {row.key} any more")
        spec = owner.specification(row, group).model_copy(
            update={
                "worker_id": row.process,
                "group": group.name,
                "sharing": group.sharing_of(row.request),
                "devices": group.devices_for(row.request.ranks),
                "lease": row.token if group.leased else 0,
                "host_memory": row.request.host_bytes,
                "start_timeout": row.request.start_timeout,
            }
        )
        self._workers[row.key] = await self._processes.start(spec, key=row.key)

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        """Return when the worker is asleep.

        Raises `OutOfMemory`, `StorageFailed` or `CannotSleep` if the worker found no room and is
        still awake, and `StillAtWork`. After any other error it is useless."""
        worker = self.require(row)
        worker.lease = row.token
        return moved_of(await self.send_sleep(worker, row, self.sleep_request(plan)))

    async def wake(self, row: WorkerRow) -> Moved:
        """Return when the worker is awake. After an error it is useless."""
        worker = self.require(row)
        worker.lease = row.token
        return moved_of(await self.send_wake(worker, row))

    async def stop(self, row: WorkerRow, *, at_once: bool) -> None:
        """Return when nothing is left of the row's process. Raises `WorkerMayRun` if nobody knows
        that now. Then the supervisor asks again."""
        worker = self._workers.get(row.key)
        if worker is not None and worker.worker_id == row.process:
            del self._workers[row.key]
        await self._processes.stop(row.process, at_once=at_once)

    def explain(self, row: WorkerRow) -> str:
        """Return the reason for the wait for a start or an end, or ""."""
        return self._processes.explain(row.process)

    async def find(self, row: WorkerRow, group: WorkerGroup) -> Found:
        """Take up a process of an earlier gateway, with the row's token. Return its state after it
        ended its last sleep or wake.

        A sleeper is asked to sleep once more, and answers with its bytes. Any other worker is asked
        to wake. If it is awake, that does nothing. Raises `WorkerMayRun` if neither worker nor
        launcher answers."""
        try:
            worker = await self._processes.take_up(
                row.process, key=row.key, lease=row.token, timeout=row.request.start_timeout
            )
            if worker is None:
                return Found(state="gone")
            self._workers[row.key] = worker
            return await self.find_state(worker, row, group)
        except WorkerMayRun:
            raise
        except (WorkerUnavailable, TandemError) as error:
            unanswered = isinstance(error, WorkerUnavailable | OperationTimedOut)
            if unanswered and not self._processes.launcher_of(row.process).reports:
                raise WorkerMayRun(describe(error)) from error
            if isinstance(error, WorkerUnavailable):  # it runs, as its launcher says
                return Found(state="silent")
            self._log.warning("worker_not_taken_up", worker_id=row.process, reason=describe(error))
            return Found(state="useless", reason=describe(error))

    async def find_state(self, worker: Worker, row: WorkerRow, group: WorkerGroup) -> Found:
        """Return the state of an earlier gateway's process."""
        if not group.leased:
            return Found(state="awake")
        if row.state == "asleep":
            worker.busy = False  # it ended all calls before it slept
            return Found(state="asleep", has=await self.sleep(row, SleepPlan("host")))
        return Found(state="awake", has=await self.wake(row))

    async def stop_strangers(self, is_known: Callable[[str], bool]) -> None:
        """Stop each process of this kind that no row names. `is_known` is asked after the launcher
        has listed its processes, since others may start meanwhile."""
        await self._processes.stop_strangers(self.kind, is_known)

    def silent_for(self, row: WorkerRow) -> float:
        """Return the seconds since the last answered heartbeat, or 0 if the worker answers."""
        worker = self.worker(row.key)
        return worker.silent_for if worker is not None else 0.0

    def sleep_request(self, plan: SleepPlan) -> common_pb2.SleepRequest:
        return common_pb2.SleepRequest(
            spill_folder=self._spill_folder if plan.way == "disk" else "",
            level=_DROP_WEIGHTS if plan.way == "drop" else 0,
            most_bytes=plan.most_bytes,
        )


def moved_of(reply: common_pb2.SwitchReply) -> Moved:
    """Return a worker's answer, or raise its failure. After a failure its state is unchanged."""
    if reply.HasField("failure"):
        raise from_failure(reply.failure)
    return Moved(
        moved=reply.bytes_moved,
        device=reply.device_bytes,
        host=reply.host_bytes,
        disk=reply.disk_bytes,
    )
