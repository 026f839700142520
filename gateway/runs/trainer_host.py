"""A trainer process, and the runs that share it: where it runs, when it has its devices, how it
starts and ends.

Most processes have one run. Those that train adapters on the same base model may share one
(`trainer_hosts`): the first starts it, and the others are added. When it ends, each of them brings
itself back, to the next process.

The host stands for the process towards the lease (`gateway.placement.lease.Tenant`): whoever
replaces a process that was lost makes the next one under the same lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from gateway.placement.lease import Lease, Switched
from gateway.placement.leases import Leases
from gateway.placement.memory import SleepPlan
from gateway.placement.places import Places
from gateway.placement.room import Place, PlaceRequest
from gateway.runs import dispatcher
from gateway.runs.operations import Kind
from gateway.workers.clients import CallOrder, TrainerClient, WorkerUnavailable
from gateway.workers.fleet import Fleet
from gateway.workers.worker import Worker
from tandem.errors import CannotSleep, TandemError, WorkerDied, describe, from_failure
from tandem.protocol.worker import WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2

if TYPE_CHECKING:
    from gateway.runs.training_run import TrainingRun


class DevicesLost(WorkerUnavailable):
    """The process ended while its devices were waited for."""


class TrainerHost:
    """`key` names its place and its lease: it is the id of the run that it was made for. `runs` are
    the ids of those that share it. `worker` is the process, while there is one, and `hosted` the
    runs that it has. `lease` is there once it is known on which group it runs (`settle`). `sampler`
    is the key of the sampler that serves what its runs train, and whose place they keep; "" if they
    keep none.

    `restoring` is held by the one run that is being brought back: what goes wrong meanwhile is that
    run's. It is taken before a use of the lease, never within one."""

    def __init__(
        self,
        key: str,
        *,
        first: TrainingRun,
        sampler: str,
        fleet: Fleet,
        settings: GatewaySettings,
        places: Places,
        leases: Leases,
    ) -> None:
        self.key = key
        self.first = first
        self.sampler = sampler
        self.runs = {first.id}
        self.place: Place | None = None
        self.worker: Worker | None = None
        self.hosted: set[str] = set()
        self.restoring = asyncio.Lock()
        self._fleet = fleet
        self._settings = settings
        self._places = places
        self._leases = leases
        self._lease: Lease | None = None
        self._calls = CallOrder()
        self._told: dict[str, Callable[[str], None]] = {}
        """By run, who is told when the process ends."""
        self._endings: set[asyncio.Task[None]] = set()
        self._placing = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._log = get_log(trainer=key)

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "nothing is done with a trainer that has no group yet"
        return self._lease

    @property
    def silence(self) -> str:
        """Say that the process does not answer its heartbeat; "" if it does."""
        return self.worker.silence if self.worker is not None else ""

    @property
    def waits_for_place(self) -> str:
        """Say what it waits for before it has its place; "" if it does not."""
        return self._places.queue.explain(self.key)

    def explain(self) -> str:
        """Say what it waits for before it has its devices, or has started; "" if it does not."""
        if self._lease is not None and (queue := self._lease.explain()):
            return queue
        waits = self._fleet.explain(self.key)
        return f"the trainer is starting: {waits}" if waits else ""

    def was_at(self, run_id: str) -> bool:
        """Whether a process that ended was at an operation of this run, as far as can be known."""
        return len(self.runs) == 1 or self._calls.first == run_id

    def is_at_another(self, run_id: str) -> bool:
        """Whether the process is at an operation of another run, as far as can be known."""
        return self._calls.first not in ("", run_id)

    @property
    def patience(self) -> float:
        """Seconds after which it is at an operation of each of its runs."""
        return self._settings.operation_timeout * max(1, len(self.hosted))

    # --- Its place ----------------------------------------------------------------------------

    async def take_place(self, ask: PlaceRequest) -> None:
        """Wait for its place, unless it has that."""
        async with self._placing:
            if self.place is None:
                self.settle(await self._places.take(ask))

    def settle(self, place: Place) -> None:
        """Note where the process runs, or ran for an earlier gateway."""
        self.place, self.sampler = place, place.keeps
        self._lease = self._leases.of(place.group.name).register(
            key=self.key,
            kind="trainer",
            owner=self.first.owner,
            session_id=self.first.session_id,
            priority=self.first.asks.priority,
            ranks=place.ranks,
            memory=place.memory,
            host_memory=place.host_memory,
            tenant=self,
            present=self._fleet.has_left(self.key),
        )

    # --- Its devices --------------------------------------------------------------------------

    def turn(self, run_id: str, kind: Kind) -> AbstractAsyncContextManager[int]:
        """Have the devices while the block runs, for an operation of a run."""
        begins, ends = kind == "forward_backward", kind in ("optim_step", "load_weights")
        return self.lease.use(
            begins_step=run_id if begins else "", ends_step=run_id if ends else ""
        )

    # --- Its runs -----------------------------------------------------------------------------

    async def join(self, run: TrainingRun, *, on_exit: Callable[[str], None]) -> TrainerClient:
        """Have the process host a run, as it is before its first operation. It starts if there is
        none. Called within a use of the lease. `on_exit` is called with a sentence when the process
        has ended. Raises `WorkerStartFailed`, or as a call to a trainer."""
        async with self._changing:
            if self.worker is None and self._fleet.has_left(self.key):
                await self._adopt()
            await self._remove(run.id, "its run begins anew")
            self._told[run.id] = on_exit
            if self.worker is None:
                await self._start(run)
            else:
                await self._add(run)
            return self._client_of(run)

    async def adopt(
        self, run: TrainingRun, *, on_exit: Callable[[str], None]
    ) -> TrainerClient | None:
        """Take over the process that an earlier gateway has left; None if there is none, or none
        that hosts the run."""
        async with self._changing:
            if self.worker is None:
                await self._adopt()
            if run.id not in self.hosted:
                return None
            self._told[run.id] = on_exit
            return self._client_of(run)

    async def remove(self, run_id: str, reason: str) -> None:
        """Free what the process has of a run that is to begin anew. One that has no other run
        ends."""
        async with self._changing:
            await self._remove(run_id, reason)

    async def end_process(self, client: TrainerClient, reason: str) -> None:
        """Kill the process that a client calls, if it still runs: it is of no use to any run."""
        async with self._changing:
            if self.worker is client.worker:
                await self._end(reason, at_once=True)

    async def discard_left(self) -> None:
        """End the process that an earlier gateway has left, unless runs share it."""
        if len(self.runs) == 1:
            await self._stop_left()

    async def leave(self, run_id: str, reason: str) -> None:
        """End what the process has of a run; with the last one, all that there is of it. It keeps
        its place and its lease until nothing of it is left."""
        self.runs.discard(run_id)
        async with self._changing:
            self._told.pop(run_id, None)
            if self.runs:
                await self._remove(run_id, reason)
                return
            await self._stop_left()
            if self.worker is not None:
                await self._end(reason, at_once=False)
            if self._lease is not None:  # none if it waits for its place
                self._lease.close()
        self._places.release_trainer(self.key)

    def _client_of(self, run: TrainingRun) -> TrainerClient:
        assert self.worker is not None
        return self._client(self.worker, run_id=run.id)

    def _client(self, worker: Worker, *, run_id: str = "") -> TrainerClient:
        return TrainerClient(
            worker,
            run_id=run_id,
            timeout=self._settings.operation_timeout,
            window=dispatcher.DISPATCH_WINDOW,
            calls=self._calls,
        )

    # --- The process --------------------------------------------------------------------------

    async def _start(self, run: TrainingRun) -> None:
        assert self.place is not None
        self._calls.clear()
        spec = WorkerSpec(
            worker_id="",
            secret="",
            kind="trainer",
            session_id=run.session_id,
            model_name=run.model.name,
            model_path=run.model.path,
            run_id=self.key,
            first_run=run.id,
            training=run.training,
            trainer=run.asks.trainer_settings(self._settings),
            group=self.place.group.name,
            devices=self.place.devices,
            host_memory=self.place.host_memory,
            lease=self.lease.token,
            start_timeout=run.asks.trainer_start_timeout,
        )
        self.worker = await self._fleet.start(spec, place=self.key, on_exit=self._note_end)
        self.hosted = {run.id}
        self.lease.worker_started()

    async def _add(self, run: TrainingRun) -> None:
        assert self.worker is not None
        request = trainer_pb2.AddRunRequest(run_id=run.id, training=run.training.model_dump_json())
        self.hosted.add(run.id)  # it may have it though no answer comes
        try:
            reply = await self._client(self.worker).add_run(request)
        except WorkerDied as error:  # of the others' work
            raise WorkerUnavailable(error.message) from error
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        self._log.info("trainer_shared", run_id=run.id, runs=len(self.hosted))

    async def _remove(self, run_id: str, reason: str) -> None:
        """Free what the process has of a run. The last one is not removed: the process ends."""
        if self._lease is not None:
            self._lease.in_step.discard(run_id)
        if self.worker is None or run_id not in self.hosted:
            return
        if self.hosted == {run_id}:
            await self._end(reason, at_once=True)
            return
        try:
            await self._client(self.worker).remove_run(run_id)
        except (WorkerUnavailable, TandemError) as error:
            self._log.warning("run_not_removed", run_id=run_id, reason=describe(error))
            if self.worker is not None:
                await self._end("it did not let go of a run that had ended", at_once=True)
        else:
            self.hosted.discard(run_id)
            self._calls.forget(run_id)

    async def _adopt(self) -> None:
        """Take over the process that an earlier gateway has left, without runs that have ended."""
        self.worker = await self._fleet.adopt(self.key, on_exit=self._note_end)
        if self.worker is None:
            self.lease.worker_ended()
            return
        self.worker.lease = self.lease.token  # it may have been woken before
        try:
            about = await self._client(self.worker).describe()
        except (WorkerUnavailable, TandemError) as error:
            if self.worker is not None:
                await self._end(
                    f"it did not answer the next gateway: {describe(error)}", at_once=True
                )
            return
        self.hosted = set(about.run_ids)
        for run_id in self.hosted - self.runs:
            await self._remove(run_id, "its run has ended")

    async def _stop_left(self) -> None:
        await self._fleet.stop_left_of(self.key)
        if self._lease is not None and self.worker is None:
            self._lease.worker_ended()

    async def _end(self, reason: str, *, at_once: bool) -> None:
        """Return when nothing of the process is left. It goes on when whoever waits for it does not
        any more: others wait for the devices."""
        assert self.worker is not None
        self.lease.worker_stops()
        ending = asyncio.create_task(self._stop(self.worker, reason, at_once=at_once))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)

    async def _stop(self, worker: Worker, reason: str, *, at_once: bool) -> None:
        await self._fleet.stop(worker, reason=reason, at_once=at_once)
        if self.worker is worker:  # else another one who ended it was first
            self._note_end(reason)

    def _note_end(self, reason: str) -> None:
        """Note that nothing is left of the process."""
        self.worker = None
        self.hosted = set()
        self.lease.worker_ended()
        told, self._told = self._told, {}
        for tell in told.values():
            tell(reason)

    # --- Towards the lease --------------------------------------------------------------------

    @property
    def silent_for(self) -> float:
        return self.worker.silent_for if self.worker is not None else 0.0

    async def sleep(self, token: int, plan: SleepPlan) -> Switched:
        async with self._reached() as worker:
            if worker is not self.worker:
                await self._until_idle(worker)
            worker.lease = token
            request = plan.request()
            try:
                return Switched.of(
                    await self._client(worker).sleep(request, timeout=self._patience)
                )
            except CannotSleep:
                if plan.spill_folder:  # the host would keep it in memory, and there is none
                    raise
                await self._fleet.suspend(worker, timeout=self._patience)
                return Switched(host_bytes=self.lease.residence.host_need)  # nobody measures it

    async def wake(self, token: int) -> Switched:
        async with self._reached() as worker:
            worker.lease = token
            request = common_pb2.WakeRequest()
            try:
                return Switched.of(await self._client(worker).wake(request, timeout=self._patience))
            except CannotSleep:
                await self._fleet.resume(worker, timeout=self._patience)
                return Switched()

    async def end(self, reason: str) -> None:
        if self.worker is not None:
            await self._fleet.end(self.worker, reason=reason)
        else:
            await self._stop_left()

    @property
    def _patience(self) -> float:
        return self._settings.sharing.switch_timeout

    async def _until_idle(self, worker: Worker) -> None:
        """Wait until a process has ended what an earlier gateway has sent it."""
        for run_id in tuple(self.runs):  # one of them may end meanwhile
            with suppress(TandemError):  # it does not host this one
                await self._client(worker, run_id=run_id).when_idle()

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[Worker]:
        """Reach the process, also one of an earlier gateway that was not adopted yet."""
        if self.worker is not None:
            yield self.worker
        else:
            async with self._fleet.left_trainer(self.key) as worker:
                yield worker
