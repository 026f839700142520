"""Samplers: the engine of each, and the samples that it takes.

A session has one sampler for each base model and largest rank of adapters. One that can serve
what is asked for is reused: engines are slow to start, and each takes a share of the device.
Sessions whose runs share a trainer share a sampler, too; it ends with the last of them.

An engine starts with the first request, when it has a place on a device group and a slot to run in
(`gateway.placement.places`), or was started by an earlier gateway and is adopted. It holds nothing
that cannot be loaded again. One that dies is started again, with backoff, and requests wait for the
next one. If an engine cannot start, the waiting requests fail, and it is started again at the next
request.

A sample that was under way when the engine died is sent once more, to the next engine: sampling
changes nothing, and the client chose the seed. If that one dies too, the sample fails with
`worker_died`.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.futures.table import Future, Outcome, Result, Waiting
from gateway.identifiers import relative_version_folder
from gateway.limits import Rate
from gateway.metrics import Metrics
from gateway.placement.asks import Asks
from gateway.placement.lease import Lease, Switched
from gateway.placement.leases import Leases
from gateway.placement.memory import SleepPlan, engine_settings
from gateway.placement.places import EngineSlot, Places
from gateway.placement.room import Place
from gateway.usage.meter import SampleMeter, TimeShares
from gateway.workers.clients import (
    EXIT_REPORT_PATIENCE,
    SamplerClient,
    Tell,
    WorkerUnavailable,
)
from gateway.workers.fleet import Backoff, Fleet, Worker
from tandem.errors import (
    InternalError,
    TandemError,
    WorkerDied,
    WorkerStartFailed,
    from_failure,
)
from tandem.settings import SamplerSettings, SharingSettings
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, sampler_pb2
from tandem.worker import WorkerHandle

EngineState = Literal["idle", "queued", "starting", "ready", "failed", "stopped"]
"""`idle`: it starts with the next request. `queued`: it waits for its place, or for its start."""

_Reply = TypeVar("_Reply")

_LOADING_INTERVAL = 0.1
_ON_ITS_WAY = (sampler_pb2.SAMPLER_STATE_LOADING, sampler_pb2.SAMPLER_STATE_WAKING)
"""States of an engine that another one follows soon."""


@dataclass(frozen=True)
class SamplerKey:
    """Literal example, as the key of a place: "s-ab12/qwen/8b/16"."""

    session_id: str
    model_name: str
    max_lora_rank: int

    @classmethod
    def parse(cls, key: str) -> SamplerKey:
        rest, _, rank = key.rpartition("/")
        session_id, _, model_name = rest.partition("/")
        return cls(session_id, model_name, int(rank))

    def __str__(self) -> str:
        return f"{self.session_id}/{self.model_name}/{self.max_lora_rank}"


@dataclass(eq=False)
class Sample:
    """A sample that has not ended. `tell` is given the tokens as they are drawn, before the whole
    answer; while it waits, so do they."""

    future: Future
    request: sampler_pb2.SampleRequest
    tell: Tell | None = None
    told: bool = False
    number: int = 0
    task: asyncio.Task[None] | None = None

    async def tell_and_note(self, delta: sampler_pb2.SampleDelta) -> None:
        assert self.tell is not None
        self.told = True
        await self.tell(delta)


@dataclass(eq=False, kw_only=True)
class Sampler:
    """Serves the base model, versions of all weights one after the other, and, if `max_lora_rank`
    is above 0, adapters up to that rank side by side.

    `session_id` is the session that it was made for, and `users` those that use it now.
    `reason` says why the engine last ended or did not start. `weights` names the full weights in
    the engine: a version, or `base/NAME` for the base model.
    """

    session_id: str
    users: set[str]
    owner: str
    model: BaseModelEntry
    max_lora_rank: int
    settings: SamplerSettings
    fleet: Fleet
    places: Places
    leases: Leases
    asks: Asks
    metrics: Metrics
    meter: SampleMeter
    pins: Pins
    sharing: SharingSettings

    def __post_init__(self) -> None:
        self.state: EngineState = "idle"
        self.reason = ""
        self.used_at = time.monotonic()
        self.worker: Worker | None = None
        self.weights = f"base/{self.model.name}"
        self._adapters: dict[str, None] = {}
        self.samples: dict[str, Sample] = {}
        self._numbers: list[int] = []  # of the samples, ascending, to look up a place in the queue
        self._shares = TimeShares()
        self.completions = Rate()
        self._state_since = time.monotonic()
        self._backoff = Backoff()
        self._start_at = 0.0
        self._died = asyncio.Event()
        self._calls = 0
        self._slot: EngineSlot | None = None
        self._retiring: EngineSlot | None = None
        self._client: asyncio.Future[SamplerClient] = asyncio.get_running_loop().create_future()
        self._starting: asyncio.Task[None] | None = None
        self._adopted: WorkerHandle | None = None
        """The engine that an earlier gateway has left, until it serves or is of no use."""
        self._lease: Lease | None = None
        self._wanted: list[common_pb2.WeightVersion] = []
        """What the calls need that wait for the devices."""
        self._log = get_log(session_id=self.session_id)
        self.pins.pin(relative_version_folder(self.weights))

    @property
    def key(self) -> str:
        """That of its place and of its lease."""
        return str(SamplerKey(self.session_id, self.model.name, self.max_lora_rank))

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "nothing is done with an engine that has no place yet"
        return self._lease

    def _settle(self, place: Place, *, left: bool = False) -> None:
        """Note where its engine is to run, or runs if an earlier gateway has `left` one."""
        if self._lease is not None and self._lease.group.name == place.group.name:
            return
        if self._lease is not None:  # nobody waits for it, see `_take_slot`
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

    @property
    def waiting(self) -> int:
        """Samples that have not ended."""
        return len(self.samples)

    @property
    def idle(self) -> bool:
        """Whether the engine serves, and nothing needs it now."""
        return self.state == "ready" and not self._needed

    @property
    def _needed(self) -> bool:
        return bool(self.samples or self._calls)

    @property
    def loaded(self) -> set[str]:
        """The full weights and the adapters that were served last. For the status only: every
        load and every sample names its version, and the engine loads what it needs for it."""
        return {self.weights, *self._adapters}

    # --- Samples ------------------------------------------------------------------------------

    def add(self, sample: Sample) -> None:
        """Take a sample, which waits until `start`. Its weight version is pinned until it ends."""
        self.pins.pin(relative_version_folder(sample.request.version.name))
        self.samples[sample.future.request_id] = sample
        sample.number = self._numbers[-1] + 1 if self._numbers else 0
        self._numbers.append(sample.number)
        sample.future.on_end(lambda outcome: self._ended(sample, outcome))

    def start(self, sample: Sample) -> None:
        if not sample.future.ended:  # cancelled, or its session has ended
            sample.task = asyncio.create_task(self._answer(sample))

    def end_samples_of(self, session_id: str, error: TandemError) -> None:
        for sample in [*self.samples.values()]:
            if sample.request.session_id == session_id:
                sample.future.resolve(error)

    def describe(self, request_id: str) -> Waiting:
        """Say what a sample is waiting for."""
        sample = self.samples.get(request_id)
        before = 0 if sample is None else bisect_left(self._numbers, sample.number)
        queue = f"{before} sample{'' if before == 1 else 's'} before this one"
        if sample is not None:
            queue += f", which has waited {time.monotonic() - sample.future.accepted_at:.0f} s"
        paused = self.state != "ready" or self.silence != ""
        return Waiting(f"{self.explain()}; {queue}", paused=paused)

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
        if queue := self.places.explain(self.key):
            return f"the sampler waits for its place ({age:.0f} s): {queue}"
        if waits:
            return f"the sampler is not started yet ({age:.0f} s): {waits}"
        why = f"; it failed before: {self.reason}" if self.reason else ""
        starts = f": {waits}" if (waits := self.fleet.explain(self.key)) else ""
        return f"the sampler is starting ({age:.0f} s){starts}{why}"

    async def _answer(self, sample: Sample) -> None:
        outcome: Outcome
        try:
            outcome = await self._draw(sample)
        except TandemError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
            self._log.exception("sample_failed", request_id=sample.future.request_id)
            outcome = InternalError(f"{type(error).__name__} in the gateway; see its log")
        sample.future.resolve(outcome)

    async def _draw(self, sample: Sample) -> Result:
        request = sample.request
        tell = sample.tell_and_note if sample.tell is not None else None
        await self._ready()  # start-up time is not billed
        # Without a seed, the next engine draws other tokens than those that were told.
        answer = self._call(
            lambda client: client.sample(request, tell),
            version=request.version,
            during="this sample",
            may_repeat=lambda: not sample.told,
        )
        reply = await self.meter.measure(
            request,
            answer,
            shares=self._shares,
            owner=sample.future.owner,
            base_model=self.model.name,
        )
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        self._note_loaded(reply.version.name, adapter=reply.version.adapter)
        self.metrics.sampled_tokens.inc(reply.sampled_tokens)
        return Result(media="protobuf", body=reply.response, weight_version=reply.version.name)

    def _ended(self, sample: Sample, outcome: Outcome) -> None:
        """Forget a sample, whoever ended it."""
        if sample.task is not None:
            sample.task.cancel()
        del self.samples[sample.future.request_id]
        del self._numbers[bisect_left(self._numbers, sample.number)]
        self.completions.note()
        self.pins.unpin(relative_version_folder(sample.request.version.name))
        kind = outcome.type if isinstance(outcome, TandemError) else "done"
        self.metrics.samples.labels(outcome=kind).inc()

    # --- Weights ------------------------------------------------------------------------------

    async def load(self, version: WeightVersion) -> None:
        """Return when the engine serves the version. Raises `LoadFailed` and the like; the engine
        then still serves what it served before."""
        request = sampler_pb2.LoadRequest(version=version.to_proto())
        with self.pins.pinned(relative_version_folder(version.name)):
            reply = await self._call(
                lambda client: client.load(request), version=request.version, during="a load"
            )
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        self._note_loaded(version.name, adapter=version.adapter)
        self._log.info(
            "version_loaded",
            version=version.name,
            bytes=reply.bytes,
            seconds=round(reply.seconds, 4),
            canary_difference=reply.canary_difference,
        )

    def _note_loaded(self, name: str, *, adapter: bool) -> None:
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

    # --- The engine ---------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Start the engine, unless it runs or starts already."""
        if self.state not in ("idle", "failed"):
            return
        if self._client.done():  # by the engine before
            self._client = asyncio.get_running_loop().create_future()
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
        """End the engine, and fail all samples, and requests that wait for it, with the error.
        Returns when nothing of the engine is left; until then it keeps its place and its lease."""
        self._set_state("stopped", error.message)
        if self._lease is not None:
            self._lease.worker_stops()
        for sample in self.samples.values():
            sample.future.resolve(error)
        if self._client.done():
            self._client = asyncio.get_running_loop().create_future()
        self._fail_waiting(error)
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
                self._note_loaded(reply.version.name, adapter=False)
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

    async def abandon(self) -> None:
        """Cancel everything without an outcome. The fleet ends the engine."""
        self._set_state("stopped")
        tasks = [
            task
            for task in (self._starting, *(sample.task for sample in self.samples.values()))
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ready(self) -> SamplerClient:
        """Return the client of an engine that serves, started if needed. Raises the
        `WorkerStartFailed` of the start that was waited for, or the error that the engine was
        stopped with."""
        self.start_engine()
        return await asyncio.shield(self._client)

    async def _call(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        version: common_pb2.WeightVersion,
        during: str,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Reply:
        """Return the engine's answer to a call that needs a `version`. If the engine dies meanwhile
        and the call `may_repeat`, return that of the next engine. Raises `WorkerDied`, and as
        `_ready` and the call."""
        self._calls += 1
        try:
            answer = await self._call_twice(
                send, version=version, during=during, may_repeat=may_repeat
            )
            self._backoff.worked()
            return answer
        finally:
            self._calls -= 1
            self.used_at = time.monotonic()

    async def _call_twice(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        version: common_pb2.WeightVersion,
        during: str,
        may_repeat: Callable[[], bool],
    ) -> _Reply:
        try:
            async with self._turn(version) as client:
                return await send(client)
        except WorkerUnavailable as error:
            if not may_repeat():
                raise WorkerDied(f"the sampler died during {during}: {error}") from error
        if self.worker is client.worker:
            await self.fleet.await_exit(self._died, patience=EXIT_REPORT_PATIENCE)
        try:
            async with self._turn(version) as client:
                return await send(client)
        except WorkerUnavailable as again:
            raise WorkerDied(f"the sampler died twice during {during}: {again}") from again

    @asynccontextmanager
    async def _turn(self, version: common_pb2.WeightVersion) -> AsyncIterator[SamplerClient]:
        """Have an engine that serves, on its devices, while the block runs. Raises as `_ready`."""
        while True:
            await self._ready()
            self._wanted.append(version)
            try:
                await self.lease.enter()
            finally:
                self._wanted.remove(version)
            try:
                if self.worker is not None and self.state == "ready":  # it has not died meanwhile
                    yield self._client.result()
                    return
            finally:
                self.lease.leave()

    async def _start(self) -> None:
        """Start an engine, for all who wait for its client."""
        await asyncio.sleep(self._start_at - time.monotonic())
        try:
            self._slot = await self._take_slot()
            self._settle(self._slot.place)
            async with self.lease.use() as token:
                self._set_state("starting", self.reason)
                worker = await self.fleet.start(
                    kind="sampler",
                    session_id=self.session_id,
                    model=self.model,
                    sampler=self._engine_settings(self._slot.place),
                    max_lora_rank=self.max_lora_rank,
                    place=self.key,
                    group=self._slot.place.group.name,
                    devices=self._slot.place.devices,
                    host_memory=self._slot.place.host_memory,
                    lease=token,
                    start_timeout=self.asks.start_timeout,
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
            self._fail_waiting(error)

    def _engine_settings(self, place: Place) -> SamplerSettings:
        """Return those of an engine there, with its share of the device."""
        there = (lease for lease in self.lease.group.leases if lease is not self.lease)
        return engine_settings(
            self.settings,
            group=place.group,
            said=self.asks.sampler_memory,
            others=[lease.residence for lease in there],
        )

    async def _adopt(self, handle: WorkerHandle) -> None:
        try:
            worker = await self.fleet.adopt_engine(
                handle, check=self._find_out, on_exit=self._on_exit
            )
        except Exception as error:  # noqa: BLE001 - as above
            self._adopted = None
            if not isinstance(error, TandemError):
                self._log.exception("adoption_failed")
            self._on_exit(f"the sampler was of no use after the gateway's restart: {error}")
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
        self._client.set_result(self._client_of(worker))

    def _client_of(self, worker: Worker) -> SamplerClient:
        return SamplerClient(
            worker,
            timeout=self.settings.operation_timeout,
            give_up=lambda reason: self.fleet.give_up(worker, reason=reason),
        )

    async def _take_slot(self) -> EngineSlot:
        patience, asks = self.settings.operation_timeout, self.asks
        if self._lease is not None and self._lease.waiting:  # of calls that outlived an engine
            asks = asks.model_copy(update={"sampler_group": self._lease.group.name})
        try:
            async with asyncio.timeout(patience):
                return await self.places.take_for_engine(self, asks)
        except TimeoutError:
            raise WorkerStartFailed(
                f"there was no place for another engine within {patience:g} s; try again later"
            ) from None

    def _leave_slot(self) -> None:
        if self._slot is not None:
            self.places.give_back(self._slot)
            self._slot = None

    def _on_exit(self, reason: str) -> None:
        self._forget_engine()
        self.lease.worker_ended()
        self._died.set()
        self._leave_slot()
        if self.state != "stopped":
            self._note_failed("idle", reason)
            if self._needed:
                self.start_engine()

    def _forget_engine(self) -> None:
        self.worker = None
        self._set_weights(f"base/{self.model.name}")
        self._adapters.clear()

    def _note_failed(self, state: EngineState, reason: str) -> None:
        self._set_state(state, reason)
        self._start_at = time.monotonic() + self._backoff.failed()

    def _fail_waiting(self, error: TandemError) -> None:
        self._client.set_exception(error)
        self._client.exception()  # marks it as retrieved, since nobody may be waiting

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self._state_since = time.monotonic()
