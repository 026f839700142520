"""Samplers: the samples of each, and the loads, on their way to its engine.

A session has one sampler for each base model and largest rank of adapters. One that can serve
what is asked for is reused: engines are slow to start, and each takes a share of the device.
Sessions whose runs share a trainer share a sampler, too; it ends with the last of them.

A sample that was under way when the engine died is sent once more, to the next engine: sampling
changes nothing, and the client chose the seed. If that one dies too, the sample fails with
`worker_died`.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.futures.table import Future, Outcome, Result, Waiting
from gateway.identifiers import relative_version_folder
from gateway.limits import Rate
from gateway.metrics import Metrics
from gateway.sampling.engine import SamplerEngine
from gateway.usage.meter import SampleMeter
from gateway.workers.clients import SamplerClient, Tell, WorkerUnavailable
from tandem.errors import InternalError, TandemError, WorkerDied, from_failure
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, sampler_pb2

_Reply = TypeVar("_Reply")


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
    """Serves the base model, versions of all weights one after the other, and, if the largest rank
    of its key is above 0, adapters up to that rank side by side.

    The session of its key is the one that it was made for; `users` are those that use it now.
    """

    key: SamplerKey
    users: set[str]
    owner: str
    model: BaseModelEntry
    engine: SamplerEngine
    metrics: Metrics
    meter: SampleMeter
    pins: Pins

    def __post_init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self._numbers: list[int] = []  # of the samples, ascending, to look up a place in the queue
        self.completions = Rate()
        self._log = get_log(session_id=self.key.session_id)

    @property
    def waiting(self) -> int:
        """Samples that have not ended."""
        return len(self.samples)

    # --- Samples ------------------------------------------------------------------------------

    def add(self, sample: Sample) -> None:
        """Take a sample, which waits until `start`. Its weight version is pinned until it ends."""
        self.pins.pin(relative_version_folder(sample.request.version.name))
        self.samples[sample.future.request_id] = sample
        sample.number = self._numbers[-1] + 1 if self._numbers else 0
        self._numbers.append(sample.number)
        self.engine.demand += 1
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
        engine = self.engine
        paused = engine.state != "ready" or engine.silence != ""
        return Waiting(f"{engine.explain()}; {queue}", paused=paused)

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
        await self.engine.ready()  # start-up time is not billed
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
            shares=self.engine.shares,
            owner=sample.future.owner,
            base_model=self.model.name,
        )
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        self.engine.note_loaded(reply.version.name, adapter=reply.version.adapter)
        self.metrics.sampled_tokens.inc(reply.sampled_tokens)
        return Result(media="protobuf", body=reply.response, weight_version=reply.version.name)

    def _ended(self, sample: Sample, outcome: Outcome) -> None:
        """Forget a sample, whoever ended it."""
        if sample.task is not None:
            sample.task.cancel()
        del self.samples[sample.future.request_id]
        del self._numbers[bisect_left(self._numbers, sample.number)]
        self.engine.demand -= 1
        self.completions.note()
        self.pins.unpin(relative_version_folder(sample.request.version.name))
        kind = outcome.type if isinstance(outcome, TandemError) else "done"
        self.metrics.samples.labels(outcome=kind).inc()

    # --- Loads --------------------------------------------------------------------------------

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
        self.engine.note_loaded(version.name, adapter=version.adapter)
        self._log.info(
            "version_loaded",
            version=version.name,
            bytes=reply.bytes,
            seconds=round(reply.seconds, 4),
            canary_difference=reply.canary_difference,
        )

    # --- Calls to the engine ------------------------------------------------------------------

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
        `SamplerEngine.ready` and the call."""
        self.engine.demand += 1
        try:
            return await self._call_twice(
                send, version=version, during=during, may_repeat=may_repeat
            )
        finally:
            self.engine.demand -= 1
            self.engine.used_at = time.monotonic()

    async def _call_twice(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        version: common_pb2.WeightVersion,
        during: str,
        may_repeat: Callable[[], bool],
    ) -> _Reply:
        try:
            async with self.engine.turn(version) as client:
                return await send(client)
        except WorkerUnavailable as error:
            if not may_repeat():
                raise WorkerDied(f"the sampler died during {during}: {error}") from error
        await self.engine.await_end_of(client)
        try:
            async with self.engine.turn(version) as client:
                return await send(client)
        except WorkerUnavailable as again:
            raise WorkerDied(f"the sampler died twice during {during}: {again}") from again

    # --- Ends ---------------------------------------------------------------------------------

    async def stop(self, error: TandemError) -> None:
        """End all samples with the error, and its engine. Returns when nothing of that is left."""
        for sample in self.samples.values():
            sample.future.resolve(error)
        await self.engine.stop(error)

    async def abandon(self) -> None:
        """Cancel everything without an outcome."""
        tasks = [sample.task for sample in self.samples.values() if sample.task is not None]
        for task in tasks:
            task.cancel()
        await self.engine.abandon()
        await asyncio.gather(*tasks, return_exceptions=True)
