"""The trainer process of a run: where it runs, when it has its devices, how it starts and ends.

It stands for the process towards the lease (`gateway.placement.leases.Tenant`): whoever replaces a
process that was lost makes the next one under the same lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.placement.lease import Lease, Switched
from gateway.placement.leases import Leases
from gateway.placement.memory import SleepPlan
from gateway.placement.places import Place
from gateway.runs.training_run import TrainingRun
from gateway.workers.clients import TrainerClient
from gateway.workers.fleet import Fleet, Worker
from tandem.errors import CannotSleep
from tandem.settings import GatewaySettings
from tandem.v1 import common_pb2


class TrainerHost:
    """Of one run. `lease` is there once it is known on which group the trainer runs (`settle`)."""

    def __init__(self, *, run: TrainingRun, fleet: Fleet, settings: GatewaySettings) -> None:
        self._run = run
        self._fleet = fleet
        self._settings = settings
        self._devices: tuple[str, ...] = ()
        self._lease: Lease | None = None

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "nothing is done with a trainer that has no group yet"
        return self._lease

    def explain(self) -> str:
        """Say what it waits for before it has its devices; "" if it does not."""
        return self._lease.explain() if self._lease is not None else ""

    def settle(self, place: Place, *, leases: Leases) -> None:
        """Note where the trainer runs, or ran for an earlier gateway."""
        run = self._run
        self._devices = place.devices
        self._lease = leases.of(place.group.name).register(
            key=run.id,
            kind="trainer",
            owner=run.owner,
            session_id=run.session_id,
            priority=run.asks.priority,
            tenant=self,
            present=self._fleet.has_left(run.id),
        )

    async def start(self, *, on_exit: Callable[[str], None]) -> TrainerClient:
        """Start a process, within a use of the lease."""
        run = self._run
        run.worker = await self._fleet.start(
            kind="trainer",
            session_id=run.session_id,
            run_id=run.id,
            model=run.model,
            training=run.training,
            trainer=run.asks.trainer_settings(self._settings.trainer),
            start_timeout=run.asks.start_timeout,
            devices=self._devices,
            lease=self.lease.token,
            on_exit=on_exit,
        )
        self.lease.worker_started()
        return self.client_of(run.worker)

    async def adopt(self, *, on_exit: Callable[[str], None]) -> TrainerClient | None:
        """Take over the process that an earlier gateway has left; None if there is none."""
        run = self._run
        run.worker = await self._fleet.adopt(run.id, on_exit=on_exit)
        if run.worker is None:
            self.lease.worker_ended()
            return None
        return self.client_of(run.worker)

    async def stop(self, reason: str, *, at_once: bool) -> None:
        """End the process, if there is one."""
        self.lease.worker_stops()
        worker, self._run.worker = self._run.worker, None
        if worker is not None:
            await self._fleet.stop(worker, reason=reason, at_once=at_once)
        self.lease.worker_ended()

    async def stop_left(self) -> None:
        """End the process that an earlier gateway has left, if there is one."""
        await self._fleet.stop_left_of(self._run.id)
        if self._lease is not None:
            self.lease.worker_ended()

    async def close(self, reason: str) -> None:
        """End the process, whoever started it, and give up its lease."""
        await self.stop_left()
        if self._lease is not None:  # a run that ends while it waits for its place has none
            await self.stop(reason, at_once=False)
            self.lease.close()

    def client_of(self, worker: Worker) -> TrainerClient:
        return TrainerClient(
            worker,
            run_id=self._run.id,
            timeout=self._settings.trainer.operation_timeout,
            window=self._settings.dispatch_window,
        )

    # --- Towards the lease --------------------------------------------------------------------

    @property
    def silent_for(self) -> float:
        return self._run.worker.silent_for if self._run.worker is not None else 0.0

    async def sleep(self, token: int, plan: SleepPlan) -> Switched:
        async with self._worker() as worker:
            worker.lease = token
            request = plan.request()
            try:
                return Switched.of(
                    await self.client_of(worker).sleep(request, timeout=self._patience)
                )
            except CannotSleep:
                if plan.spill_folder:  # the host would keep it in memory, and there is none
                    raise
                await self._fleet.suspend(worker, timeout=self._patience)
                return Switched()

    async def wake(self, token: int) -> Switched:
        async with self._worker() as worker:
            worker.lease = token
            request = common_pb2.WakeRequest()
            try:
                return Switched.of(
                    await self.client_of(worker).wake(request, timeout=self._patience)
                )
            except CannotSleep:
                await self._fleet.resume(worker, timeout=self._patience)
                return Switched()

    async def end(self, reason: str) -> None:
        worker = self._run.worker
        if worker is not None:
            await self._fleet.end(worker, reason=reason)
        else:
            await self.stop_left()

    @property
    def _patience(self) -> float:
        return self._settings.sharing.switch_timeout

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[Worker]:
        """Reach the process, also one of an earlier gateway that was not adopted yet."""
        if self._run.worker is not None:
            yield self._run.worker
        else:
            async with self._fleet.left_trainer(self._run.id) as worker:
                yield worker
