"""An engine of a sampler: the process that serves it, from its start to its end.

It starts with the first request, when it has a place on a device group and a slot to run in
(`gateway.placement.places`), or was started by an earlier gateway and is adopted. It holds nothing
that cannot be loaded again. One that dies is started again, with backoff. If an engine cannot
start, it is started again at the next request. Which engine a request goes to, and what becomes of
those that wait, is for the `Sampler` to say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.identifiers import relative_version_folder
from gateway.owners.usage.meter import TimeShares
from gateway.placement.asks import Asks
from gateway.placement.lease import Lease, Switched
from gateway.placement.leases import Leases
from gateway.placement.memory import SleepPlan, engine_settings
from gateway.placement.places import Places
from gateway.placement.queue import EngineSlot
from gateway.placement.room import Place
from gateway.workers.backoff import Backoff
from gateway.workers.clients import (
    EXIT_REPORT_PATIENCE,
    WorkerUnavailable,
    this_task_is_cancelled,
)
from gateway.workers.fleet import Fleet
from gateway.workers.sampler_client import SamplerClient
from gateway.workers.worker import Worker
from tandem.errors import TandemError, WorkerDied, WorkerStartFailed, describe
from tandem.protocol.worker import WorkerHandle, WorkerSpec
from tandem.settings.sharing import SharingSettings
from tandem.settings.workers import SamplerSettings
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, sampler_pb2

EngineState = Literal["idle", "queued", "starting", "ready", "failed", "stopped"]
"""`idle`: it starts with the next request. `queued`: it waits for its place, or for its start."""

_Reply = TypeVar("_Reply")
_LOADING_INTERVAL = 0.1
_ON_ITS_WAY = (sampler_pb2.SAMPLER_STATE_LOADING, sampler_pb2.SAMPLER_STATE_WAKING)
"""States of an engine that another one follows soon."""


class EngineLost(Exception):
    """The engine ended while its devices were waited for: nothing was sent to it."""


@dataclass(eq=False, kw_only=True)
class SamplerEngine:
    """Serves one full set of weights at a time, and adapters of up to `max_lora_rank` on top of
    those of the base model.

    `key` is that of its place and of its lease, and `replica` its number among those of its
    sampler; `session_id` is the session that the sampler was made for. `reason` says why it last
    ended or did not start. `weights` names the full weights that it has: a version, or `base/NAME`
    for the base model. `demand` counts the sampler's samples and loads that have not ended: while
    there are any, it stays, and the next one is started if it dies. `used_at` is when the last call
    ended, on the monotonic clock. `on_change` is called when it serves, and with an error when it
    did not start, or is stopped."""

    key: str
    replica: int = 0
    session_id: str
    owner: str
    model: BaseModelEntry
    max_lora_rank: int
    settings: SamplerSettings
    sharing: SharingSettings
    asks: Asks
    fleet: Fleet
    places: Places
    leases: Leases
    pins: Pins

    def __post_init__(self) -> None:
        self.state: EngineState = "idle"
        self.reason = ""
        self.demand = 0
        self.on_change: Callable[[TandemError | None], None] = lambda _error: None
        self.used_at = time.monotonic()
        self.worker: Worker | None = None
        self.weights = f"base/{self.model.name}"
        self.shares = TimeShares()
        self._adapters: dict[str, None] = {}
        self._state_since = time.monotonic()
        self._backoff = Backoff()
        self._start_at = 0.0
        self._died = asyncio.Event()
        self._slot: EngineSlot | None = None
        self._retiring: EngineSlot | None = None
        self._client: SamplerClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._adopted: WorkerHandle | None = None
        """The engine that an earlier gateway has left, until it serves or is of no use."""
        self._lease: Lease | None = None
        self._wanted: list[common_pb2.WeightVersion] = []
        """What the calls need that wait for the devices."""
        self._log = get_log(session_id=self.session_id)
        self.pins.pin(relative_version_folder(self.weights))

    @property
    def idle(self) -> bool:
        """Whether it serves, and nothing needs it now."""
        return self.state == "ready" and not self.demand

    @property
    def has_devices(self) -> bool:
        """Whether a call could begin at once."""
        lease = self._lease
        return lease is not None and (not lease.group.awake or lease.state == "held")

    @property
    def waits_for_devices(self) -> bool:
        """Whether calls wait for its devices."""
        return self._lease is not None and bool(self._lease.waiting)

    @property
    def has_place(self) -> bool:
        return self.places.get(self.key) is not None

    def is_beside(self, trainer: Place) -> bool:
        """Whether it serves on the only device of a trainer, which is awake meanwhile."""
        place = self.places.get(self.key)
        return self.serves and place is not None and place.has_device_of(trainer)

    @property
    def ranks(self) -> int:
        """Over how many devices its weights are split."""
        return self._slot.place.ranks if self._slot is not None else 1

    @property
    def process(self) -> str:
        """The id of the worker that it is now; "" if there is none."""
        return self.worker.worker_id if self.worker is not None else ""

    @property
    def serves(self) -> bool:
        """Whether it answers calls, as far as is known."""
        return self.state == "ready" and not self.silence

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "nothing is done with an engine that has no place yet"
        return self._lease

    @property
    def silence(self) -> str:
        """Say that the engine does not answer its heartbeat; "" if it does."""
        return self.worker.silence if self.worker is not None else ""

    def explain(self) -> str:
        """Say what the engine is doing, and why it does not serve yet."""
        waits = self._lease.explain() if self._lease is not None else ""
        if self.state == "ready":
            return self.silence or waits or "the sampler is at work"
        age = time.monotonic() - self._state_since
        if queue := self.places.queue.explain(self.key):
            return f"the sampler waits for its place ({age:.0f} s): {queue}"
        if waits:
            return f"the sampler is not started yet ({age:.0f} s): {waits}"
        why = f"; it failed before: {self.reason}" if self.reason else ""
        starts = f": {waits}" if (waits := self.fleet.explain(self.key)) else ""
        return f"the sampler is starting ({age:.0f} s){starts}{why}"

    # --- What is asked of it ------------------------------------------------------------------

    async def call(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        version: common_pb2.WeightVersion,
    ) -> _Reply:
        """Return the answer of the engine that serves, once it has its devices, to a call that
        needs a `version`. Raises `EngineLost`, and as the call."""
        self._wanted.append(version)
        try:
            await self.lease.enter()
        except asyncio.CancelledError:
            if this_task_is_cancelled():  # and not by closing the lease, which cancels its waits
                raise
            raise EngineLost from None
        finally:
            self._wanted.remove(version)
        try:
            if self._client is None:
                raise EngineLost
            reply = await send(self._client)
            self._backoff.worked()
            return reply
        finally:
            self.lease.leave()
            self.used_at = time.monotonic()

    async def await_end_of(self, worker: Worker) -> None:
        """Return when it is known that the worker, which has not answered, has ended, or after a
        while."""
        if self.worker is worker:
            await self.fleet.await_exit(self._died, patience=EXIT_REPORT_PATIENCE)

    # --- Its weights --------------------------------------------------------------------------

    @property
    def loaded(self) -> set[str]:
        """The full weights and the adapters that were served last. For the status only: every
        load and every sample names its version, and the engine loads what it needs for it."""
        return {self.weights, *self._adapters}

    def note_loaded(self, name: str, *, adapter: bool) -> None:
        """Note what it has answered with."""
        if self.state == "stopped":
            return
        # An adapter is served on top of the base model's weights.
        self._set_weights(f"base/{self.model.name}" if adapter else name)
        if adapter:
            self._adapters.pop(name, None)
            self._adapters[name] = None
            if len(self._adapters) > self.settings.max_adapters:
                del self._adapters[next(iter(self._adapters))]

    def _set_weights(self, name: str) -> None:
        """Note what the engine has, and pin it: a failed load goes back to it."""
        self.pins.pin(relative_version_folder(name))
        self.pins.unpin(relative_version_folder(self.weights))
        self.weights = name

    # --- From its start to its end ------------------------------------------------------------

    def start(self) -> None:
        """Start it, unless it runs or starts already."""
        if self.state not in ("idle", "failed"):
            return
        self._set_state("queued", self.reason)
        self._starting = asyncio.create_task(self._start(), name=f"sampler-{self.session_id}")

    def adopt(self, handle: WorkerHandle, slot: EngineSlot) -> asyncio.Task[None]:
        """Take over the engine that an earlier gateway has left; the task ends when it serves, or
        is of no use. Then another one starts if it is needed."""
        assert self.state == "idle"
        self._slot = slot
        self._settle(slot.place, left=True)
        self._set_state("starting")
        self._adopted = handle
        self._starting = asyncio.create_task(self._adopt(handle), name=f"adopt-{handle.worker_id}")
        return self._starting

    def retire(self) -> Coroutine[None, None, None]:
        """Return what stops an idle engine, whose place another worker needs. The next request,
        which may come before that has begun, starts another engine."""
        worker, slot = self.worker, self._slot
        assert worker is not None and slot is not None, "only an engine that serves is idle"
        self._slot, self._retiring = None, slot
        self.lease.worker_stops()
        self._forget_engine()
        self._set_state("idle")
        return self._stop_retired(worker, slot)

    async def _stop_retired(self, worker: Worker, slot: EngineSlot) -> None:
        await self.fleet.stop(worker, reason="another worker needed its place")
        self.lease.worker_ended()
        self.places.give_back(slot)

    async def stop(self, error: TandemError) -> None:
        """End it. Returns when nothing of it is left; until then it keeps its place and its
        lease."""
        self._set_state("stopped", error.message)
        if self._lease is not None:
            self._lease.worker_stops()
        self.on_change(error)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        worker = self.worker
        self._forget_engine()
        if self._adopted is not None:
            await self.fleet.stop_left_worker(self._adopted, error.message)
        if worker is not None:
            await self.fleet.stop(worker, reason=error.message)
        self._leave_slot()
        if self._retiring is not None and self._retiring.retiring is not None:
            await asyncio.wait({self._retiring.retiring})
        if self._lease is not None:
            self._lease.close()

    async def abandon(self) -> None:
        """Go on with nothing. The fleet ends the process, or leaves it to the next gateway."""
        self._set_state("stopped")
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    async def _start(self) -> None:
        """Start an engine, for all who wait for it."""
        await asyncio.sleep(self._start_at - time.monotonic())
        try:
            self._slot = await self._take_slot()
            self._settle(self._slot.place)
            async with self.lease.use() as token:
                self._set_state("starting", self.reason)
                worker = await self.fleet.start(
                    self._specification(self._slot.place, lease=token),
                    place=self.key,
                    on_exit=self._on_exit,
                )
                self.lease.worker_started()
                self._serve(worker)
        except asyncio.CancelledError:
            self._leave_slot()
            raise
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave clients waiting
            self._leave_slot()
            if not isinstance(error, WorkerStartFailed):
                self._log.exception("start_failed")
                sentence = f"{type(error).__name__} while the sampler started; see the log"
                error = WorkerStartFailed(sentence)
            self._note_failed("failed", error.message)
            self.on_change(error)

    async def _adopt(self, handle: WorkerHandle) -> None:
        try:
            worker = await self.fleet.adopt_engine(
                handle, check=self._find_out, on_exit=self._on_exit
            )
        except Exception as error:  # noqa: BLE001 - as above
            self._adopted = None
            if not isinstance(error, TandemError):
                self._log.exception("adoption_failed")
            self._on_exit(
                f"the sampler was of no use after the gateway's restart: {describe(error)}"
            )
        else:
            self._adopted = None
            self._serve(worker)

    async def _find_out(self, worker: Worker) -> None:
        """Note what an engine has, once a load or a wake that is under way has ended. One that is
        asleep is woken by its next use. Raises if it is of no use."""
        assert self._slot is not None
        self.places.note_started(self._slot)  # what it does now keeps no other from its start
        client = self._client_of(worker)
        try:
            async with asyncio.timeout(self.settings.operation_timeout):
                while True:
                    about = await client.describe()
                    self._set_weights(about.version.name)
                    if about.state not in _ON_ITS_WAY:
                        break
                    await asyncio.sleep(_LOADING_INTERVAL)
        except (WorkerUnavailable, TimeoutError) as error:
            raise WorkerDied(str(error) or "it did not end a load or a wake") from error
        if about.state == sampler_pb2.SAMPLER_STATE_ASLEEP and not self.lease.group.awake:
            raise WorkerDied("its engine is asleep, and nobody on its group sleeps any more")
        if about.state not in (sampler_pb2.SAMPLER_STATE_AWAKE, sampler_pb2.SAMPLER_STATE_ASLEEP):
            raise WorkerDied("its engine has failed")
        self._adapters = dict.fromkeys(about.adapters)

    def _serve(self, worker: Worker) -> None:
        assert self._slot is not None
        self.worker = worker
        self._died.clear()
        self._set_state("ready")
        self.places.note_started(self._slot)
        self._client = self._client_of(worker)
        self.on_change(None)

    def _client_of(self, worker: Worker) -> SamplerClient:
        return SamplerClient(
            worker,
            timeout=self.settings.operation_timeout,
            give_up=lambda reason: self.fleet.give_up(worker, reason=reason),
        )

    def _on_exit(self, reason: str) -> None:
        self._forget_engine()
        self.lease.worker_ended()
        self._died.set()
        self._leave_slot()
        if self.state != "stopped":
            self._note_failed("idle", reason)
            if self.demand:
                self.start()

    def _forget_engine(self) -> None:
        self.worker = self._client = None
        self._set_weights(f"base/{self.model.name}")
        self._adapters.clear()

    def _note_failed(self, state: EngineState, reason: str) -> None:
        self._set_state(state, reason)
        self._start_at = time.monotonic() + self._backoff.failed()

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self._state_since = time.monotonic()

    # --- Its place ----------------------------------------------------------------------------

    @property
    def asked(self) -> Asks:
        """What its next place must be: calls that outlived an engine wait for devices."""
        if self._lease is None or not self.waits_for_devices:
            return self.asks
        return self.asks.model_copy(update={"sampler_group": self._lease.group.name})

    async def _take_slot(self) -> EngineSlot:
        patience = self.settings.operation_timeout
        try:
            async with asyncio.timeout(patience):
                return await self.places.take_for_engine(self, self.asked)
        except TimeoutError:
            raise WorkerStartFailed(
                f"there was no place for another engine within {patience:g} s; try again later"
            ) from None

    def _leave_slot(self) -> None:
        if self._slot is not None:
            self.places.give_back(self._slot)
            self._slot = None

    def _settle(self, place: Place, *, left: bool = False) -> None:
        """Note where it is to run, or runs if an earlier gateway has `left` it."""
        if self._lease is not None and self._lease.group.name == place.group.name:
            return
        if self._lease is not None:  # nobody waits for it, see `asked`
            self._lease.close()
        self._lease = self.leases.of(place.group.name).register(
            key=self.key,
            kind="sampler",
            owner=self.owner,
            session_id=self.session_id,
            priority=self.asks.priority,
            ranks=place.ranks,
            memory=place.memory,
            host_memory=place.host_memory,
            tenant=self,
            present=left,
        )

    def _specification(self, place: Place, *, lease: int) -> WorkerSpec:
        """Return what is to be started there."""
        return WorkerSpec(
            worker_id="",
            secret="",
            kind="sampler",
            session_id=self.session_id,
            model_name=self.model.name,
            model_path=self.model.path,
            replica=self.replica,
            sampler=self._engine_settings(place),
            group=place.group.name,
            devices=place.devices,
            host_memory=place.host_memory,
            lease=lease,
            start_timeout=self.asks.start_timeout,
        )

    def _engine_settings(self, place: Place) -> SamplerSettings:
        """Return those of an engine there, with its share of the device."""
        there = (lease for lease in self.lease.group.leases if lease is not self.lease)
        about = {"ranks": place.ranks, "max_lora_rank": self.max_lora_rank}
        return engine_settings(
            self.settings.model_copy(update=about),
            group=place.group,
            device_need=self.asks.sampler_memory,
            others=[lease.residence for lease in there],
        )

    # --- Towards the lease --------------------------------------------------------------------

    @property
    def silent_for(self) -> float:
        return self.worker.silent_for if self.worker is not None else 0.0

    async def sleep(self, token: int, plan: SleepPlan) -> Switched:
        async with self._reached() as client:
            client.worker.lease = token
            return Switched.of(await client.sleep(plan.request(), timeout=self._patience))

    async def wake(self, token: int) -> Switched:
        """The version that is wanted first is loaded at once, instead of the one before; that one
        serves if it fails."""
        async with self._reached() as client:
            client.worker.lease = token
            version = self._wanted[0] if self._wanted else None
            request = common_pb2.WakeRequest(version=version)
            reply = await client.wake(request, timeout=self._patience)
            if reply.HasField("version"):
                self.note_loaded(reply.version.name, adapter=False)
            return Switched.of(reply)

    async def end(self, reason: str) -> None:
        if self.worker is not None:
            await self.fleet.end(self.worker, reason=reason)
        elif self._adopted is not None:
            await self.fleet.stop_left_worker(self._adopted, reason)
            self.lease.worker_ended()

    @property
    def _patience(self) -> float:
        return self.sharing.switch_timeout

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[SamplerClient]:
        """Reach the engine, also one of an earlier gateway that was not adopted yet."""
        if self.worker is not None:
            yield self._client_of(self.worker)
        else:
            assert self._adopted is not None
            async with self.fleet.reach(self._adopted) as worker:
                yield self._client_of(worker)
