"""A trainer process, and the runs that share it.

Most processes have one run. LoRA runs of one base model may share one (`trainer_hosts`): the
process starts with one of them, and the others are added. When it ends, each run restores itself in
the next process.

The supervisor starts, wakes and ends the process (`gateway.workers`). A host describes the process
and knows its runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import KW_ONLY, dataclass, field

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.runs import dispatcher
from gateway.runs.operations import Kind
from gateway.workers.clients import CallOrder, TrainerClient, WorkerUnavailable
from gateway.workers.groups import WorkerGroup
from gateway.workers.requests import WorkerRequest
from gateway.workers.run_options import RunOptions
from gateway.workers.standing import reason_of_wait
from gateway.workers.supervisor import StepMark, Supervisor
from gateway.workers.table import WorkerRow
from gateway.workers.trainer_adapter import TrainerAdapter
from gateway.workers.worker import Worker
from tandem.errors import TandemError, WorkerDied, WorkerStartFailed, describe, from_failure
from tandem.protocol.worker import TrainingSpec, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2

_STEPS: dict[Kind, StepMark] = {
    "forward_backward": "begin",
    "optim_step": "end",
    "load_weights": "end",
}
"""Operations that begin gradients, and operations that apply or drop them."""


class DevicesLost(WorkerUnavailable):
    """The process ended while a call waited for its devices."""


@dataclass(eq=False, kw_only=True)
class HostedRun:
    """A run as its trainer sees it. `options` are its settled options. `about` is the trainer's
    description of itself."""

    id: str
    session_id: str
    owner: str
    model: BaseModelEntry
    training: TrainingSpec
    options: RunOptions = field(default_factory=RunOptions)
    about: trainer_pb2.DescribeTrainerReply = field(
        default_factory=trainer_pb2.DescribeTrainerReply
    )


@dataclass(eq=False, repr=False)
class TrainerHost:
    """`key` names its row, and is the id of its first run. `runs` are its runs, by id. `sampler` is
    the key of their sampler, or "" without one. `hosted` has the ids of the runs in the process.
    `exited` is the end of the process, with a sentence that explains it. `_began_with` is the first
    run of the last process. `_untouched` is that of the present one, until it joins.

    A run holds `restoring` while it restores itself, and is blamed for a death meanwhile. It takes
    the lock before a use of the worker, never within one."""

    key: str
    _: KW_ONLY
    first: HostedRun
    sampler: str
    settings: GatewaySettings
    supervisor: Supervisor
    adapter: TrainerAdapter
    runs: dict[str, HostedRun] = field(default_factory=dict)
    hosted: set[str] = field(default_factory=set)
    exited: asyncio.Future[str] = field(default_factory=asyncio.Future)
    restoring: asyncio.Lock = field(default_factory=asyncio.Lock)
    _calls: CallOrder = field(default_factory=CallOrder)
    _process: str = ""
    _began_with: str = ""
    _untouched: str = ""
    _joining: dict[str, None] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.runs[self.first.id] = self.first
        self._log = get_log(trainer=self.key)
        self._register()

    def _register(self) -> None:
        self.adapter.register(self.key, self)
        self.supervisor.watch_ends(self.key, self._note_end)

    # --- Its row ------------------------------------------------------------------------------

    @property
    def row(self) -> WorkerRow | None:
        return self.supervisor.roster.rows.get(self.key)

    @property
    def group(self) -> WorkerGroup | None:
        """The group of its place, or None while it waits for one."""
        row = self.row
        return self.supervisor.roster.groups.get(row.group) if row is not None else None

    @property
    def worker(self) -> Worker | None:
        """Its process, if any."""
        return self.adapter.worker(self.key)

    @property
    def silence(self) -> str:
        """A sentence if the process does not answer its heartbeat, or ""."""
        worker = self.worker
        return worker.silence if worker is not None else ""

    @property
    def has_place(self) -> bool:
        row = self.row
        return row is not None and bool(row.group)

    def explain(self) -> str:
        """Return why it waits for its place, its devices or its start, or ""."""
        row = self.row
        if row is not None and row.state == "starting" and (why := self.adapter.explain(row)):
            age = self.supervisor.roster.clock() - row.since
            return f"the trainer is starting ({age:.0f} s): {why}"
        return reason_of_wait(self.supervisor.overview(), self.key)

    async def place(self, request: WorkerRequest, run_id: str) -> None:
        """Ask for its place, if it has none, and hold it for a run."""
        await self.supervisor.place([request], holder=run_id)
        self._register()

    def specification(self, row: WorkerRow, group: WorkerGroup) -> WorkerSpec:
        """Describe a process that begins with the first waiting run."""
        wanting = [*self._joining, *self.runs]
        run = next((self.runs[run_id] for run_id in wanting if run_id in self.runs), self.first)
        self._began_with = run.id
        trainer = run.options.trainer_settings(self.settings)
        if row.request.device_bytes and not group.on_host and group.awake != 1:
            trainer = trainer.model_copy(update={"memory_bytes": row.request.device_bytes})
        return WorkerSpec(
            worker_id="",
            secret="",
            kind="trainer",
            session_id=run.session_id,
            model_name=run.model.name,
            model_path=run.model.path,
            run_id=self.key,
            first_run=run.id,
            training=run.training,
            trainer=trainer,
        )

    # --- Its calls ----------------------------------------------------------------------------

    def was_at(self, run_id: str) -> bool:
        """Whether a process that ended may have worked on this run."""
        return len(self.runs) == 1 or self._calls.first == run_id

    def is_at_another(self, run_id: str) -> bool:
        """Whether the process works on another run, by the order of the calls."""
        return self._calls.first not in ("", run_id)

    @property
    def patience(self) -> float:
        """Seconds within which it comes to an operation of each of its runs."""
        return self.settings.operation_timeout * max(1, len(self.hosted))

    def turn(self, run_id: str, kind: Kind) -> AbstractAsyncContextManager[WorkerRow]:
        """Keep the process awake for the block, for an operation of a run."""
        return self.use(step=_STEPS.get(kind, ""), caller=run_id)

    @asynccontextmanager
    async def use(self, *, step: StepMark = "", caller: str = "") -> AsyncIterator[WorkerRow]:
        """Keep the process awake for the block. Raises `DevicesLost` if another process had to
        start before it, and could not."""
        try:
            async with self.supervisor.use(self.key, step=step, caller=caller) as row:
                yield row
        except WorkerStartFailed as error:
            raise DevicesLost(error.message) from error

    # --- Its runs -----------------------------------------------------------------------------

    async def join(self, run: HostedRun) -> TrainerClient:
        """Let the process host a run in the state before its first operation.

        Never call this within a use. Raises `WorkerStartFailed`, and as a call to a trainer."""
        with self._joins(run):
            while True:
                try:
                    async with self._current_process() as worker:
                        if await self._begin(run, worker):
                            return self._client(worker, run_id=run.id)
                except WorkerStartFailed:
                    if self._began_with in ("", run.id):
                        raise
                    continue  # its first run may be at fault
                await self.supervisor.end_process(self.key, worker.worker_id, "its run begins anew")

    async def take_up(self, run: HostedRun) -> TrainerClient | None:
        """Continue with the process of an earlier gateway, if it hosts the run. Otherwise return
        None, perhaps after the start of another process for `join`."""
        with self._joins(run), suppress(WorkerStartFailed):
            async with self._current_process() as worker:
                if run.id in self.hosted and run.id != self._untouched:
                    return self._client(worker, run_id=run.id)
        return None

    @contextmanager
    def _joins(self, run: HostedRun) -> Iterator[None]:
        """Let a process that starts during the block begin with this run."""
        self._joining[run.id] = None
        try:
            yield
        finally:
            self._joining.pop(run.id, None)

    @asynccontextmanager
    async def _current_process(self) -> AsyncIterator[Worker]:
        """Keep the process awake for the block, in which nobody else changes its runs."""
        async with self.supervisor.use(self.key) as row, self._changing:
            yield await self._look_at(row)

    async def end_process(self, client: TrainerClient, reason: str) -> None:
        """Kill the client's process, if it still runs, because it is useless."""
        await self.supervisor.end_process(self.key, client.worker.worker_id, reason)

    async def leave(self, run_id: str) -> None:
        """Remove a run from the process. After its last run, return when nothing is left of the
        process."""
        self.runs.pop(run_id, None)
        try:
            if self.runs:
                async with self._changing:
                    with suppress(WorkerUnavailable):  # it ends, and the others restore themselves
                        await self._remove(run_id)
        finally:
            await self.supervisor.release(self.key, holder=run_id)
            if not self.runs:
                self.adapter.unregister(self.key)

    async def _look_at(self, row: WorkerRow) -> Worker:
        """Return the process of a row. Find out the runs of a new process."""
        worker = self.adapter.require(row)
        if self._process == row.process:
            return worker
        self._calls.clear()
        self._untouched = ""
        if worker.left:
            self.hosted = await self._runs_of_earlier_gateway(worker)
        else:
            self.hosted, self._untouched = {self._began_with}, self._began_with
        self._process = row.process
        self.exited = asyncio.Future()
        for run_id in self.hosted - self.runs.keys():
            await self._remove(run_id)
        return worker

    async def _runs_of_earlier_gateway(self, worker: Worker) -> set[str]:
        """Return the ids of the runs of a process. If it does not answer, it ends."""
        try:
            return set((await self._client(worker).describe()).run_ids)
        except (WorkerUnavailable, TandemError) as error:
            why = f"it did not answer the next gateway: {describe(error)}"
            self.supervisor.note_failure(self.key, worker.worker_id, why)
            raise WorkerUnavailable(why) from error

    async def _begin(self, run: HostedRun, worker: Worker) -> bool:
        """Begin a run anew in the process. Return False if the process has only this run, and must
        end for that."""
        if run.id == self._untouched:
            self._untouched = ""
            return True
        if self.hosted == {run.id}:
            return False
        await self._remove(run.id)
        await self._add(run, worker)
        return True

    async def _add(self, run: HostedRun, worker: Worker) -> None:
        request = trainer_pb2.AddRunRequest(run_id=run.id, training=run.training.model_dump_json())
        self.hosted.add(run.id)  # it may have the run even without an answer
        try:
            reply = await self._client(worker).add_run(request)
        except WorkerDied as error:  # while it worked on another run
            raise WorkerUnavailable(error.message) from error
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        self._log.info("trainer_shared", run_id=run.id, runs=len(self.hosted))

    async def _remove(self, run_id: str) -> None:
        """Remove a run from a process with other runs."""
        self.supervisor.drop_step(self.key, run_id)
        worker = self.worker
        if worker is None or worker.worker_id != self._process or run_id not in self.hosted:
            return
        try:
            await self._client(worker).remove_run(run_id)
        except (WorkerUnavailable, TandemError) as error:
            self._log.warning("run_not_removed", run_id=run_id, reason=describe(error))
            self.supervisor.note_failure(
                self.key, worker.worker_id, "it did not let go of a run that had ended"
            )
            raise WorkerUnavailable("it did not let go of a run that had ended") from error
        self.hosted.discard(run_id)
        self._calls.forget(run_id)

    def _note_end(self, process: str, reason: str) -> None:
        """Note that nothing is left of a process."""
        if process != self._process:
            return
        self._process = ""
        self.hosted = set()
        self.exited.set_result(reason)

    def _client(self, worker: Worker, *, run_id: str = "") -> TrainerClient:
        return TrainerClient(
            worker,
            run_id=run_id,
            timeout=self.settings.operation_timeout,
            window=dispatcher.DISPATCH_WINDOW,
            calls=self._calls,
        )
