"""Samplers: samples and loads on their way to engines.

A session has one sampler per base model and largest adapter rank, because engines start slowly and
take device memory. Sessions with a shared trainer also share a sampler. So do sessions that sample
the base model or adapters of checkpoints (`SamplerRouter.ensure`).

A sampler has `tandem.replicas` engines, each with its own devices. If an engine dies, its samples
are sent once more, because the client chose the seed. A second death fails them with `worker_died`.
A sample may also be taken back from a leaving or overfull engine."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.checkpoints.base_models import BaseModelEntry, BaseModels
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import relative_version_folder
from gateway.metrics import Metrics
from gateway.owners.limits import Rate
from gateway.owners.usage.meter import SampleMeter
from gateway.sampling.balancer import Work
from gateway.sampling.calls import AssignedCall, SamplerCalls
from gateway.sampling.engine import EngineLost, SamplerEngine
from gateway.storage.futures.table import Future, Outcome, Result, Waiting
from gateway.workers.clients import WorkerUnavailable
from gateway.workers.requests import WorkerRequest
from gateway.workers.sampler_client import SamplerClient, Tell
from tandem.errors import (
    InternalError,
    LoadFailed,
    OperationTimedOut,
    TandemError,
    describe,
    from_failure,
)
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, sampler_pb2
from tandem.weights import version_number

Check = Callable[[common_pb2.WeightVersion], None]

_OVERTAKING = 3.0
"""Seconds. Engines let later samples overtake a load for a little less."""


@dataclass(frozen=True)
class SamplerKey:
    """Example, as a place key: "s-ab12/qwen/8b/16". A session's second sampler of this model and
    rank has the `number` 1: "s-ab12/qwen/8b/16.1"."""

    session_id: str
    model_name: str
    max_lora_rank: int
    number: int = 0

    @classmethod
    def parse(cls, key: str) -> SamplerKey:
        rest, _, end = key.rpartition("/")
        session_id, _, model_name = rest.partition("/")
        rank, _, number = end.partition(".")
        return cls(session_id, model_name, int(rank), int(number or 0))

    def __str__(self) -> str:
        number = f".{self.number}" if self.number else ""
        return f"{self.session_id}/{self.model_name}/{self.max_lora_rank}{number}"


@dataclass(eq=False)
class SampleCall:
    """An unfinished sample. `check` raises if its version may no longer answer it. `tell` receives
    tokens as they are drawn. The engine waits for it."""

    future: Future
    request: sampler_pb2.SampleRequest
    check: Check
    tell: Tell | None = None
    told: bool = False
    number: int = 0
    task: asyncio.Task[None] | None = None
    end_span: Callable[[str], None] = lambda _version: None

    async def tell_and_note(self, delta: sampler_pb2.SampleDelta) -> None:
        assert self.tell is not None
        self.told = True
        await self.tell(delta)


@dataclass(eq=False, kw_only=True)
class Sampler:
    """Serves the base model, full weight versions one after the other, and adapters up to the key's
    rank side by side. The key names its creating session. `users` are its current sessions.
    `engine` is the first of its `engines`. `requests` returns the requests for a number of them."""

    key: SamplerKey
    users: set[str]
    owner: str
    model: BaseModelEntry
    models: BaseModels
    engine: SamplerEngine
    metrics: Metrics
    meter: SampleMeter
    pins: Pins
    requests: Callable[[int], Sequence[WorkerRequest]]

    def __post_init__(self) -> None:
        self.samples: dict[str, SampleCall] = {}
        self.waiting_of: Counter[str] = Counter()  # by owner, unfinished samples
        self._numbers: list[int] = []  # ascending numbers of samples, for positions in the queue
        self.completions = Rate()
        self.calls = SamplerCalls(first=self.engine, prepare=self._prepare, requests=self.requests)
        self.balancer, self.replicas = self.calls.balancer, self.calls.replicas
        self._newest: common_pb2.WeightVersion | None = None
        self._late: dict[tuple[SamplerEngine, str], asyncio.Task[None]] = {}
        """By engine and run, loads by engines that did not answer in time."""
        self._log = get_log(session_id=self.key.session_id)

    @property
    def engines(self) -> Sequence[SamplerEngine]:
        return self.replicas.engines

    @property
    def waiting(self) -> int:
        return len(self.samples)

    @property
    def unsent(self) -> int:
        """The number of samples that no engine has yet."""
        return len(self.samples) - self.calls.sent_samples

    @property
    def serves(self) -> bool:
        return any(engine.serves for engine in self.engines)

    def explain(self) -> str:
        return self.replicas.explain()

    def start(self) -> None:
        self.replicas.start()

    # --- Samples ------------------------------------------------------------------------------

    def queue_sample(self, sample: SampleCall) -> None:
        """Add a sample, which waits until `begin_sample`, and pin its weight version."""
        self.pins.pin(relative_version_folder(sample.request.version.name))
        self.samples[sample.future.request_id] = sample
        self.waiting_of[sample.future.owner] += 1
        sample.number = self._numbers[-1] + 1 if self._numbers else 0
        self._numbers.append(sample.number)
        self._demand(1)
        sample.end_span = self.meter.timelines.begin_sample(
            run_id=sample.request.version.run_id,
            session_id=sample.request.session_id,
            engines=[engine.key for engine in self.engines],
        )
        sample.future.on_end(lambda outcome: self._ended(sample, outcome))

    def begin_sample(self, sample: SampleCall) -> None:
        sample.task = asyncio.create_task(self._answer(sample))

    def end_samples_of(self, session_id: str, error: TandemError) -> None:
        for sample in [*self.samples.values()]:
            if sample.request.session_id == session_id:
                sample.future.resolve(error)

    def describe_sample(self, request_id: str) -> Waiting:
        sample = self.samples.get(request_id)
        before = 0 if sample is None else bisect_left(self._numbers, sample.number)
        queue = f"{before} sample{'' if before == 1 else 's'} before this one"
        if sample is not None:
            queue += f", which has waited {time.monotonic() - sample.future.accepted_at:.0f} s"
        return Waiting(f"{self.explain()}; {queue}", paused=not self.serves)

    async def _answer(self, sample: SampleCall) -> None:
        outcome: Outcome
        try:
            outcome = await self._draw(sample)
        except TandemError as error:
            # The traceback holds this frame, and with it the prompt, until a rare full collection.
            outcome = error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
            self._log.exception("sample_failed", request_id=sample.future.request_id)
            outcome = InternalError(f"{type(error).__name__} in the gateway; see its log")
        sample.future.resolve(outcome)

    async def _draw(self, sample: SampleCall) -> Result:
        request = sample.request
        work = Work.of_request(request, beginnings=len(self.engines) > 1)
        engine = await self.calls.assigned(work)  # start-up time is not billed
        tell = sample.tell_and_note if sample.tell is not None else None
        drawing = AssignedCall(
            work=work,
            version=request.version,
            during="this sample",
            engine=engine,
            # Without a seed, the next engine would draw other tokens than those already sent.
            may_repeat=lambda: not sample.told,
        )

        def send(client: SamplerClient) -> Awaitable[sampler_pb2.SampleReply]:
            sample.check(request.version)  # it, or its trainer, may have gone on
            return client.sample(request, tell)

        answer = self.calls.send_call(drawing, send)
        reply = await self.meter.measure(
            request,
            answer,
            shares=engine.shares,
            ranks=engine.ranks,
            owner=sample.future.owner,
            base_model=self.model.name,
        )
        self.models.note_longest(self.model.name, reply.max_length)
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        drawing.engine.note_loaded(reply.version.name, adapter=reply.version.adapter)
        self._newest = request.version
        self.metrics.sampled_tokens.inc(reply.sampled_tokens)
        return Result(media="protobuf", body=reply.response, weight_version=reply.version.name)

    def _ended(self, sample: SampleCall, outcome: Outcome) -> None:
        if sample.task is not None:
            sample.task.cancel()
        del self.samples[sample.future.request_id]
        self.waiting_of[sample.future.owner] -= 1
        del self._numbers[bisect_left(self._numbers, sample.number)]
        self._demand(-1)
        self.completions.note()
        self.pins.unpin(relative_version_folder(sample.request.version.name))
        sample.end_span(outcome.weight_version if isinstance(outcome, Result) else "")
        kind = outcome.type if isinstance(outcome, TandemError) else "done"
        self.metrics.samples.labels(outcome=kind).inc()

    # --- Loads --------------------------------------------------------------------------------

    async def load(
        self,
        version: WeightVersion,
        *,
        in_flight: bool = False,
        handoff: common_pb2.Handoff | None = None,
    ) -> None:
        """Return when the serving engines have the version, or refused it. An engine that refused
        gets no samples of it. Later engines load it before they get samples. Raises `LoadFailed`
        and similar errors if no engine could; then they still serve the old version.

        With `in_flight`, running samples continue with the new version, and a newer one also
        suffices. `handoff` offers the weights in memory to a single engine."""
        request = sampler_pb2.LoadRequest(
            version=version.to_proto(), in_flight=in_flight, handoff=handoff
        )
        self._demand(1)
        try:
            with self.pins.pinned(relative_version_folder(version.name)):
                replies = await self._load(request)
        finally:
            self._demand(-1)
        if handoff is not None:
            engine, reply = replies[0]
            if reply.handed_off or reply.handoff_failure or reply.HasField("failure"):
                engine.note_handoff(taken=reply.handed_off)
        loaded = [(e, reply) for e, reply in replies if not reply.HasField("failure")]
        if not loaded:
            raise from_failure(replies[0][1].failure)
        self._follow(request.version, led=in_flight)
        self._newest = request.version
        for engine in self.engines:
            if engine.silence:
                self._load_later(engine, request)
        for engine, reply in replies:
            self._end_late_load(engine, version.run_id)
            if reply.HasField("failure"):
                self._note_refused(engine, request, reply.failure)
        for engine, reply in loaded:
            engine.note_loaded(reply.version.name, adapter=version.adapter)
            self._log.info(
                "version_loaded",
                version=version.name,
                engine=engine.process,
                bytes=reply.bytes,
                seconds=round(reply.seconds, 4),
                canary_difference=reply.canary_difference,
                handed_off=reply.handed_off,
                handoff_failure=reply.handoff_failure,
            )

    def await_files(self, name: str, written: asyncio.Future[WeightVersion]) -> None:
        """Send a version that was handed over in memory to other engines once it is `written`."""
        self.calls.unwritten[name] = written
        written.add_done_callback(lambda _: self.calls.unwritten.pop(name, None))

    def _follow(self, version: common_pb2.WeightVersion, *, led: bool) -> None:
        """Move in-flight samples to a newer version of their run for their next sending. `led`: the
        version is for in-flight samples."""
        for sample in self.samples.values():
            old = sample.request.version
            if (
                sample.request.in_flight
                and (led or sample.request.updates)
                and old.run_id == version.run_id
                and version_number(old.name) < version_number(version.name)
            ):
                self.pins.pin(relative_version_folder(version.name))
                self.pins.unpin(relative_version_folder(old.name))
                old.CopyFrom(version)

    async def _load(
        self, request: sampler_pb2.LoadRequest
    ) -> list[tuple[SamplerEngine, sampler_pb2.LoadReply]]:
        """Return the engines' answers, without the failures of ended processes. There is at least
        one, because a dead engine is replaced. Without an answer in time, it is a failure."""
        work = Work(request.version.name, in_flight=request.in_flight)
        engine = await self.calls.assigned(work)
        load = AssignedCall(work=work, version=request.version, during="a load", engine=engine)
        others = [each for each in self.replicas.serving() if each is not load.engine]
        asked = {(each, each.process) for each in (engine, *others)}
        tasks = [asyncio.create_task(self._load_too(engine, request)) for engine in others]
        try:
            try:
                reply = await self.calls.send_call(
                    load,
                    lambda client: (
                        self._load_in_time(load.engine, client, request)
                        if others
                        else client.load(request)
                    ),
                )
            except TandemError as error:
                reply = sampler_pb2.LoadReply(failure=error.to_failure())
            also = zip(others, await asyncio.gather(*tasks), strict=True)
        finally:
            for task in tasks:
                task.cancel()
        replies = [(load.engine, reply), *((engine, each) for engine, each in also if each)]
        while late := [e for e in self.replicas.serving() if (e, e.process) not in asked]:
            for engine in late:
                asked.add((engine, engine.process))
                if found := await self._load_too(engine, request):
                    replies.append((engine, found))
        valid = [
            (engine, reply)
            for engine, reply in replies
            if not reply.HasField("failure") or (engine, engine.process) in asked
        ]
        return valid or replies

    async def _load_in_time(
        self, engine: SamplerEngine, client: SamplerClient, request: sampler_pb2.LoadRequest
    ) -> sampler_pb2.LoadReply:
        """Return an engine's answer. Raises `OperationTimedOut` if it is late, after the answers to
        earlier samples of other versions, which come first."""
        timeout = engine.settings.operation_timeout
        loading = asyncio.ensure_future(client.load(request))
        try:
            await asyncio.wait([loading], timeout=_OVERTAKING)
            before = self.calls.samples_at(engine, but=request.version.name)
            while not (await asyncio.wait([loading], timeout=timeout))[0]:
                before &= self.calls.samples_at(engine, but=request.version.name)
                if not before:
                    raise OperationTimedOut(
                        f"it did not load the weights within {timeout:g} s "
                        "(TANDEM_OPERATION_TIMEOUT)"
                    )
            return await loading
        finally:
            loading.cancel()

    async def _load_too(
        self, engine: SamplerEngine, request: sampler_pb2.LoadRequest
    ) -> sampler_pb2.LoadReply | None:
        """Return one engine's answer beside others, None if it leaves or its process ended."""
        if request.HasField("handoff"):  # that is for another engine
            await self.calls.until_written(request.version.name)
            request = sampler_pb2.LoadRequest(version=request.version, in_flight=request.in_flight)
        work = Work(request.version.name)
        load = AssignedCall(work=work, version=request.version, during="a load", engine=engine)
        with self.balancer.under_way(engine, work):
            try:
                return await self.calls.ask(load, lambda c: self._load_in_time(engine, c, request))
            except EngineLost:
                return None
            except (WorkerUnavailable, TandemError) as error:
                if load.worker not in (None, engine.worker):
                    return None
                if isinstance(error, OperationTimedOut):
                    return sampler_pb2.LoadReply(failure=error.to_failure())
                return sampler_pb2.LoadReply(failure=LoadFailed(describe(error)).to_failure())
            except asyncio.CancelledError:
                if not load.was_only_taken_back():
                    raise
                return None

    async def _prepare(self, engine: SamplerEngine) -> None:
        """Load the last used version into a new engine, which may change meanwhile."""
        while (version := self._newest) is not None:
            if version.name in engine.loaded or version.name in engine.refused:
                return
            await self.calls.until_written(version.name)
            request = sampler_pb2.LoadRequest(version=version)
            with self.pins.pinned(relative_version_folder(version.name)):
                reply = await self._load_too(engine, request)
            if reply is None:
                return
            if reply.HasField("failure"):
                self._note_refused(engine, request, reply.failure)
            else:
                engine.note_loaded(version.name, adapter=version.adapter)

    def _note_refused(
        self, engine: SamplerEngine, request: sampler_pb2.LoadRequest, failure: common_pb2.Failure
    ) -> None:
        self.calls.note_refused(engine, request.version.name, failure.message)
        if failure.type == OperationTimedOut.type:
            self._load_later(engine, request)

    def _load_later(self, engine: SamplerEngine, request: sampler_pb2.LoadRequest) -> None:
        self._end_late_load(engine, request.version.run_id)
        place = engine, request.version.run_id
        task = asyncio.create_task(self._load_late(engine, request), name="late-load")
        self._late[place] = task

        def forget(ended: asyncio.Task[None]) -> None:
            if self._late.get(place) is ended:
                del self._late[place]

        task.add_done_callback(forget)

    async def _load_late(self, engine: SamplerEngine, request: sampler_pb2.LoadRequest) -> None:
        """Ask an engine that did not answer for a version until it answers or ends."""
        version = request.version
        with self.pins.pinned(relative_version_folder(version.name)):
            while reply := await self._load_too(engine, request):
                if not reply.HasField("failure"):
                    engine.note_loaded(reply.version.name, adapter=version.adapter)
                    self.balancer.assign_waiting()
                elif reply.failure.type == OperationTimedOut.type:
                    continue
                else:
                    self.calls.note_refused(engine, version.name, reply.failure.message)
                return

    def _end_late_load(self, engine: SamplerEngine, run_id: str) -> None:
        if late := self._late.pop((engine, run_id), None):
            late.cancel()

    def _demand(self, change: int) -> None:
        for engine in self.engines:
            engine.demand += change

    # --- Ends ---------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Let the only engine rest until the next request, if it is idle."""
        if len(self.engines) == 1 and self.engine.serves and not self.engine.demand:
            await self.engine.rest()

    async def stop(self, error: TandemError) -> None:
        self.calls.stopped = error
        for sample in self.samples.values():
            sample.future.resolve(error)
        await self._end_late_loads()
        await self.replicas.stop(error)

    async def abandon(self) -> None:
        tasks = [sample.task for sample in self.samples.values() if sample.task is not None]
        for task in tasks:
            task.cancel()
        await self._end_late_loads()
        await self.replicas.abandon()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_late_loads(self) -> None:
        for task in self._late.values():
            task.cancel()
        await asyncio.gather(*self._late.values(), return_exceptions=True)
