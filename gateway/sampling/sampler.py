"""One sampler: brings samples and loads to its engine.

A sample that was under way when the engine died is sent once more to the next one (sampling
changes nothing, and its seed comes from the client); when that one dies, too, the sample fails
with `worker_died`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.futures.table import Future, Outcome, Result, Waiting
from gateway.identifiers import relative_version_folder
from gateway.limits.ledger import Rate
from gateway.metrics import Metrics
from gateway.sampling.engine_supervisor import EngineState, EngineSupervisor
from gateway.usage.samples import EngineMeter
from gateway.workers.clients import Tell
from gateway.workers.fleet import Fleet, Worker
from tandem.errors import (
    InternalError,
    SampleCancelled,
    TandemError,
    from_failure,
)
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2


@dataclass(eq=False)
class _Sample:
    """One that has not ended."""

    future: Future
    version: WeightVersion
    task: asyncio.Task[None] | None = None
    since: float = field(default_factory=time.monotonic)


class Sampler:
    """Serves the base model, versions of all weights one after the other, and, with a
    `max_lora_rank` above 0, adapters up to that rank side by side."""

    def __init__(
        self,
        *,
        session_id: str,
        model: BaseModelEntry,
        fleet: Fleet,
        metrics: Metrics,
        meter: EngineMeter,
        pins: Pins,
        operation_timeout: float,
        max_lora_rank: int,
        max_adapters: int,
    ) -> None:
        self.session_id = session_id
        self.model = model
        self.max_lora_rank = max_lora_rank
        self._metrics = metrics
        self._meter = meter
        self._pins = pins
        self._max_adapters = max_adapters
        self._weights = ""  # the base model's
        self._adapters: dict[str, None] = {}
        self._samples: dict[str, _Sample] = {}
        self._ends = Rate()
        self._engine = EngineSupervisor(
            session_id=session_id,
            model=model,
            fleet=fleet,
            max_lora_rank=max_lora_rank,
            operation_timeout=operation_timeout,
            on_exit=self._nothing_loaded,
        )
        self._log = get_log(session_id=session_id)

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def reason(self) -> str:
        """Why the engine ended or did not start, last."""
        return self._engine.reason

    @property
    def worker(self) -> Worker | None:
        return self._engine.worker

    @property
    def waiting(self) -> int:
        """Samples that have not ended."""
        return len(self._samples)

    @property
    def rate(self) -> float:
        """Samples that end in a second, of late."""
        return self._ends.per_second()

    @property
    def weights(self) -> str:
        """The version of all weights that is in the engine, `base/NAME` for the base model's."""
        return self._weights or f"base/{self.model.name}"

    @property
    def loaded(self) -> set[str]:
        """What was served last: the weights, and the newest of the adapters beside them. For the
        status alone: every load and every sample names its version, and the engine knows best
        what it has to load for it."""
        return {self.weights, *self._adapters}

    def submit(
        self,
        *,
        future: Future,
        version: WeightVersion,
        request: sampler_pb2.SampleRequest,
        tell: Tell | None = None,
    ) -> Callable[[], None]:
        """Takes a sample, and returns what sends it on its way. `tell` is given the tokens as
        they are drawn, before the whole answer; where it waits, so do they."""
        sample = _Sample(future=future, version=version)
        self._pins.pin(relative_version_folder(version.name))
        self._samples[future.request_id] = sample

        def start() -> None:
            if future.ended:  # cancelled, or its session has ended
                return
            sample.task = asyncio.create_task(self._answer(sample, request, tell))
            # Not within the task: one that is cancelled before it begins does nothing at all.
            sample.task.add_done_callback(lambda _: self._forget(sample))

        return start

    def cancel(self, request_id: str) -> bool:
        """Gives up a sample, here and in the engine. False: it is not here, or has ended."""
        sample = self._samples.get(request_id)
        if sample is None or sample.future.ended:
            return False
        sample.future.resolve(SampleCancelled("the sample was cancelled by its client"))
        self._give_up(sample)
        self._metrics.samples.labels(outcome=SampleCancelled.type).inc()
        return True

    def describe(self, request_id: str) -> Waiting:
        """What a sample is waiting for, in words for its client."""
        before = 0
        for other in self._samples:
            if other == request_id:
                break
            before += 1
        sample = self._samples.get(request_id)
        place = f"{before} sample{'' if before == 1 else 's'} before this one"
        if sample is not None:
            place += f", which has waited {time.monotonic() - sample.since:.0f} s"
        if self.state != "ready":
            age = time.monotonic() - self._engine.state_since
            why = f"; it failed before: {self.reason}" if self.reason else ""
            return Waiting(f"the sampler is starting ({age:.0f} s){why}; {place}", paused=True)
        return Waiting(f"the sampler is at work; {place}")

    async def load(self, version: WeightVersion) -> None:
        """Returns when the engine serves the version. Raises `LoadFailed` and its like; then
        the engine goes on serving what it served before."""
        request = sampler_pb2.LoadRequest(version=version.to_proto())
        with self._pins.pinned(relative_version_folder(version.name)):
            reply = await self._engine.call(lambda client: client.load(request), during="a load")
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
        """Ends the engine; what waits fails with the error."""
        for sample in list(self._samples.values()):
            sample.future.resolve(error)
            self._give_up(sample)
        await self._engine.stop(error)
        self._set_weights("")

    async def abandon(self) -> None:
        """Stops without telling anybody. The fleet ends the engine."""
        tasks = [s.task for s in self._samples.values() if s.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._engine.abandon(), *tasks, return_exceptions=True)

    async def _answer(
        self, sample: _Sample, request: sampler_pb2.SampleRequest, tell: Tell | None
    ) -> None:
        outcome: Outcome
        try:
            outcome = await self._sample(request, tell)
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

    def _give_up(self, sample: _Sample) -> None:
        if sample.task is not None:
            sample.task.cancel()
        else:
            self._forget(sample)

    def _forget(self, sample: _Sample) -> None:
        if self._samples.get(sample.future.request_id) is sample:
            del self._samples[sample.future.request_id]
            self._ends.note()
            self._pins.unpin(relative_version_folder(sample.version.name))

    async def _sample(self, request: sampler_pb2.SampleRequest, tell: Tell | None) -> Outcome:
        await self._engine.ready()  # start-up time is not billed
        if tell is None:
            answer = self._engine.call(lambda client: client.sample(request), during="this sample")
        else:
            answer = self._stream(request, tell)
        reply = await self._meter.measure(request, answer)
        if reply.HasField("failure"):
            return from_failure(reply.failure)
        self._note_loaded(reply.version.name, adapter=reply.version.adapter)
        self._metrics.sampled_tokens.inc(reply.sampled_tokens)
        return Result(media="protobuf", body=reply.response, weight_version=reply.version.name)

    async def _stream(
        self, request: sampler_pb2.SampleRequest, tell: Tell
    ) -> sampler_pb2.SampleReply:
        """A stream is begun again only while nothing was told: a sample without a seed would
        go on as another."""
        told = False

        async def tell_and_note(delta: sampler_pb2.SampleDelta) -> None:
            nonlocal told
            told = True
            await tell(delta)

        return await self._engine.call(
            lambda client: client.sample_stream(request, tell_and_note),
            during="this sample",
            may_repeat=lambda: not told,
        )

    def _note_loaded(self, name: str, *, adapter: bool) -> None:
        if not adapter:
            self._set_weights("" if name == f"base/{self.model.name}" else name)
            return
        self._set_weights("")  # an adapter is served on top of the base model's weights
        self._adapters.pop(name, None)
        self._adapters[name] = None
        if len(self._adapters) > self._max_adapters:
            del self._adapters[next(iter(self._adapters))]

    def _nothing_loaded(self) -> None:
        self._set_weights("")
        self._adapters.clear()

    def _set_weights(self, name: str) -> None:
        """Pins the weights that a failed load goes back to, as long as the engine has them."""
        if name and self.state != "stopped":
            self._pins.pin(relative_version_folder(name))
        else:
            name = ""
        if self._weights:
            self._pins.unpin(relative_version_folder(self._weights))
        self._weights = name
