"""One sampler: sends samples and loads to its engine, and keeps the engine running.

An engine holds nothing that cannot be loaded again. One that dies is started again, with backoff,
and requests wait for the next one. If an engine cannot start, the waiting requests fail, and it is
started again at the next request.

A sample that was under way when the engine died is sent once more, to the next engine: sampling
changes nothing, and the client chose the seed. If that one dies too, the sample fails with
`worker_died`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.futures.table import Future, Outcome, Result, Waiting
from gateway.identifiers import relative_version_folder
from gateway.limits.ledger import Rate
from gateway.metrics import Metrics
from gateway.usage.samples import EngineMeter
from gateway.workers.clients import SamplerClient, Tell, WorkerUnavailable
from gateway.workers.fleet import Fleet, Worker
from tandem.errors import (
    InternalError,
    SampleCancelled,
    TandemError,
    WorkerDied,
    WorkerStartFailed,
    from_failure,
)
from tandem.settings import SamplerSettings
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2

EngineState = Literal["starting", "ready", "failed", "stopped"]

_Reply = TypeVar("_Reply")

_REPORT_PATIENCE = 5.0
"""Seconds within which the launcher reports the end of an engine whose connection broke."""
_FIRST_WAIT = 0.5
_JITTER = 0.2
_STABLE_AFTER = 60.0


@dataclass
class Backoff:
    """How long to wait before an engine that failed is started again. Durations in seconds.

    Literal use: `await asyncio.sleep(backoff.failed())`, start the engine again, and then
    `backoff.ready()`. The waits are about 0.5, 1, 2, 4, … 30, 30, each made shorter by up to a
    fifth, so that engines which failed together do not start together. After an engine that was
    ready for a minute they begin anew.
    """

    cap: float = 30.0
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[], float] = random.random
    failures: int = 0
    ready_at: float | None = None

    def ready(self) -> None:
        """Note that the engine serves from now on."""
        self.ready_at = self.clock()

    def failed(self) -> float:
        """Note that the engine failed or could not be started; return how long to wait."""
        if self.ready_at is not None and self.clock() - self.ready_at >= _STABLE_AFTER:
            self.failures = 0
        self.ready_at = None
        wait = min(self.cap, _FIRST_WAIT * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return wait * (1 - _JITTER * self.uniform())


@dataclass(eq=False)
class Sample:
    """A sample that has not ended. `tell` is given the tokens as they are drawn, before the whole
    answer; while it waits, so do they."""

    future: Future
    request: sampler_pb2.SampleRequest
    tell: Tell | None = None
    task: asyncio.Task[None] | None = None


class Sampler:
    """Serves the base model, versions of all weights one after the other, and, if `max_lora_rank`
    is above 0, adapters up to that rank side by side."""

    def __init__(
        self,
        *,
        session_id: str,
        model: BaseModelEntry,
        fleet: Fleet,
        metrics: Metrics,
        meter: EngineMeter,
        pins: Pins,
        settings: SamplerSettings,
        max_lora_rank: int,
    ) -> None:
        self.session_id = session_id
        self.model = model
        self.max_lora_rank = max_lora_rank
        self.state: EngineState = "starting"
        self.reason = ""  # why the engine last ended or did not start
        self.worker: Worker | None = None
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._meter = meter
        self._pins = pins
        self._weights = ""  # those of the base model
        self._adapters: dict[str, None] = {}
        self._samples: dict[str, Sample] = {}
        self._completions = Rate()
        self._state_since = time.monotonic()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._died = asyncio.Event()
        self._client: asyncio.Future[SamplerClient] = asyncio.get_running_loop().create_future()
        self._supervision = asyncio.create_task(self._supervise(), name=f"sampler-{session_id}")
        self._log = get_log(session_id=session_id)

    @property
    def waiting(self) -> int:
        """Samples that have not ended."""
        return len(self._samples)

    @property
    def rate(self) -> float:
        """Recent completions per second."""
        return self._completions.per_second()

    @property
    def weights(self) -> str:
        """The full weights in the engine: a version, or `base/NAME` for the base model."""
        return self._weights or f"base/{self.model.name}"

    @property
    def loaded(self) -> set[str]:
        """The full weights and the adapters that were served last. For the status only: every
        load and every sample names its version, and the engine loads what it needs for it."""
        return {self.weights, *self._adapters}

    def add(self, sample: Sample) -> None:
        """Take a sample, which waits until `start`. Its weight version is pinned meanwhile."""
        self._pins.pin(relative_version_folder(sample.request.version.name))
        self._samples[sample.future.request_id] = sample

    def start(self, sample: Sample) -> None:
        if sample.future.ended:  # cancelled, or its session has ended
            return
        sample.task = asyncio.create_task(self._answer(sample))
        # Not within the task: a task that is cancelled before it begins runs none of its code.
        sample.task.add_done_callback(lambda _: self._forget(sample))

    def cancel(self, request_id: str) -> bool:
        """Cancel a sample, here and in the engine; return False if it is not here or has ended."""
        sample = self._samples.get(request_id)
        if sample is None or sample.future.ended:
            return False
        sample.future.resolve(SampleCancelled("the sample was cancelled by its client"))
        self._discard(sample)
        self._metrics.samples.labels(outcome=SampleCancelled.type).inc()
        return True

    def describe(self, request_id: str) -> Waiting:
        """Say what a sample is waiting for."""
        before = 0
        for other in self._samples:
            if other == request_id:
                break
            before += 1
        sample = self._samples.get(request_id)
        queue = f"{before} sample{'' if before == 1 else 's'} before this one"
        if sample is not None:
            queue += f", which has waited {time.monotonic() - sample.future.accepted_at:.0f} s"
        if self.state != "ready":
            age = time.monotonic() - self._state_since
            why = f"; it failed before: {self.reason}" if self.reason else ""
            return Waiting(f"the sampler is starting ({age:.0f} s){why}; {queue}", paused=True)
        return Waiting(f"the sampler is at work; {queue}")

    async def load(self, version: WeightVersion) -> None:
        """Return when the engine serves the version. Raises `LoadFailed` and the like; the engine
        then still serves what it served before."""
        request = sampler_pb2.LoadRequest(version=version.to_proto())
        with self._pins.pinned(relative_version_folder(version.name)):
            reply = await self._call(lambda client: client.load(request), during="a load")
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

    async def stop(self, error: TandemError) -> None:
        """End the engine, and fail all samples, and requests that wait for it, with the error."""
        for sample in list(self._samples.values()):
            sample.future.resolve(error)
            self._discard(sample)
        self._set_state("stopped", error.message)
        self._supervision.cancel()
        if not self._client.done():
            self._fail_waiting(error)
        await asyncio.gather(self._supervision, return_exceptions=True)
        if self.worker is not None:
            await self._fleet.stop(self.worker, reason=error.message)
            self.worker = None
        self._set_weights("")

    async def abandon(self) -> None:
        """Cancel everything without an outcome. The fleet ends the engine."""
        tasks = [s.task for s in self._samples.values() if s.task is not None]
        for task in (self._supervision, *tasks):
            task.cancel()
        await asyncio.gather(self._supervision, *tasks, return_exceptions=True)

    # --- Samples ------------------------------------------------------------------------------

    async def _answer(self, sample: Sample) -> None:
        outcome: Outcome
        try:
            outcome = await self._draw(sample)
        except TandemError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
            self._log.exception("sample_failed", request_id=sample.future.request_id)
            outcome = InternalError(f"{type(error).__name__} in the gateway: {error}")
        self._metrics.samples.labels(
            outcome=outcome.type if isinstance(outcome, TandemError) else "done"
        ).inc()
        self._forget(sample)
        sample.future.resolve(outcome)

    def _discard(self, sample: Sample) -> None:
        if sample.task is not None:
            sample.task.cancel()
        else:
            self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        if self._samples.get(sample.future.request_id) is sample:
            del self._samples[sample.future.request_id]
            self._completions.note()
            self._pins.unpin(relative_version_folder(sample.request.version.name))

    async def _draw(self, sample: Sample) -> Outcome:
        request = sample.request
        await self._ready()  # start-up time is not billed
        if sample.tell is None:
            answer = self._call(lambda client: client.sample(request), during="this sample")
        else:
            answer = self._stream(request, sample.tell)
        reply = await self._meter.measure(request, answer)
        if reply.HasField("failure"):
            return from_failure(reply.failure)
        self._note_loaded(reply.version.name, adapter=reply.version.adapter)
        self._metrics.sampled_tokens.inc(reply.sampled_tokens)
        return Result(media="protobuf", body=reply.response, weight_version=reply.version.name)

    async def _stream(
        self, request: sampler_pb2.SampleRequest, tell: Tell
    ) -> sampler_pb2.SampleReply:
        """Stream a sample. It is sent to the next engine only if no token was told before the
        engine died, because without a seed the next one draws other tokens."""
        told = False

        async def tell_and_note(delta: sampler_pb2.SampleDelta) -> None:
            nonlocal told
            told = True
            await tell(delta)

        return await self._call(
            lambda client: client.sample_stream(request, tell_and_note),
            during="this sample",
            may_repeat=lambda: not told,
        )

    # --- Weights ------------------------------------------------------------------------------

    def _note_loaded(self, name: str, *, adapter: bool) -> None:
        if not adapter:
            self._set_weights("" if name == f"base/{self.model.name}" else name)
            return
        self._set_weights("")  # an adapter is served on top of the base model's weights
        self._adapters.pop(name, None)
        self._adapters[name] = None
        if len(self._adapters) > self._settings.max_adapters:  # for the status only
            del self._adapters[next(iter(self._adapters))]

    def _set_weights(self, name: str) -> None:
        """Note what the engine has, and pin it: a failed load goes back to it."""
        if name and self.state != "stopped":
            self._pins.pin(relative_version_folder(name))
        else:
            name = ""
        if self._weights:
            self._pins.unpin(relative_version_folder(self._weights))
        self._weights = name

    # --- The engine ---------------------------------------------------------------------------

    async def _ready(self) -> SamplerClient:
        """Return the client of an engine that serves. Raises the `WorkerStartFailed` of the start
        that was waited for, or the error that the engine was stopped with."""
        self._wanted.set()
        return await asyncio.shield(self._client)

    async def _call(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        during: str,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Reply:
        """Return the engine's answer. If the engine dies meanwhile and the call `may_repeat`,
        return that of the next engine. Raises `WorkerDied`, and as `_ready` and the call."""
        client = await self._ready()
        try:
            return await send(client)
        except WorkerUnavailable as error:
            if not may_repeat():
                raise WorkerDied(f"the sampler died during {during}: {error}") from error
            client = await self._next(client)
            try:
                return await send(client)
            except WorkerUnavailable as again:
                raise WorkerDied(f"the sampler died twice during {during}: {again}") from again

    async def _next(self, broken: SamplerClient) -> SamplerClient:
        """Return the client of the engine after the broken one; of the same engine if the launcher
        reports no end, because then only the connection broke."""
        if self.worker is broken.worker:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_PATIENCE):
                    await self._died.wait()
        return await self._ready()

    async def _supervise(self) -> None:
        backoff = Backoff()
        while True:
            await self._wanted.wait()
            self._died.clear()
            self._set_state("starting", self.reason)
            try:
                worker = await self._fleet.start(
                    kind="sampler",
                    session_id=self.session_id,
                    model=self.model,
                    max_lora_rank=self.max_lora_rank,
                    on_exit=self._on_exit,
                )
            except WorkerStartFailed as error:
                await self._fail_to_start(error, backoff)
                continue
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave clients waiting
                self._log.exception("start_failed")
                sentence = f"{type(error).__name__} while the sampler started; see the log"
                await self._fail_to_start(WorkerStartFailed(sentence), backoff)
                continue
            backoff.ready()
            if not self._died.is_set():  # it may have ended at the moment when it became ready
                self.worker = worker
                self._set_state("ready")
                self._client.set_result(
                    SamplerClient(worker, timeout=self._settings.operation_timeout)
                )
            await self._died.wait()
            try:
                await self._fleet.stop(worker, reason=self.reason)
            except Exception:  # noqa: BLE001 - the next one must start all the same
                self._log.exception("engine_not_stopped", worker_id=worker.worker_id)
            await asyncio.sleep(backoff.failed())

    async def _fail_to_start(self, error: WorkerStartFailed, backoff: Backoff) -> None:
        self._set_state("failed", error.message)
        self._wanted.clear()  # the next request starts it again
        self._fail_waiting(error)
        self._client = asyncio.get_running_loop().create_future()
        await asyncio.sleep(backoff.failed())

    def _fail_waiting(self, error: TandemError) -> None:
        self._client.set_exception(error)
        self._client.exception()  # marks it as retrieved, since nobody may be waiting

    def _on_exit(self, reason: str) -> None:
        self.worker = None
        self._set_weights("")
        self._adapters.clear()
        self._set_state("starting", reason)
        if self._client.done():  # otherwise requests wait on, for the next engine
            self._client = asyncio.get_running_loop().create_future()
        self._died.set()

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self._state_since = time.monotonic()
