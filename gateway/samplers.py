"""The samplers: one engine for each (session, base model), and the way of samples to it.

A sampler is started when a run or a sampling session will need it. It holds nothing that
cannot be loaded again, so that one that dies is started again, with back-off. A sample that
was under way is sent once more to the new engine (sampling changes nothing, and its seed comes
from the client); when that one dies, too, the sample fails with `worker_died`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from typing import Literal

from gateway.clients import SamplerClient, WorkerUnavailable
from gateway.fleet import FENCING_TOKEN, Fleet, Worker
from gateway.futures import Future, Outcome, Result, Waiting
from gateway.launchers.backoff import Backoff
from gateway.metrics import Metrics
from gateway.models import BaseModelEntry
from gateway.samples import SampleMeter, Samples
from gateway.versions import Version
from tandem.errors import (
    InternalError,
    Overloaded,
    SessionFinished,
    TandemError,
    WorkerDied,
    WorkerStartFailed,
    from_failure,
)
from tandem.settings import GatewaySettings
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2

SamplerState = Literal["starting", "ready", "failed", "stopped"]

_REPORT_PATIENCE = 5.0
"""Seconds to wait for the launcher's word after a connection broke."""


class Sampler:
    """Keeps one engine running while it is wanted."""

    def __init__(
        self,
        *,
        session_id: str,
        model: BaseModelEntry,
        fleet: Fleet,
        metrics: Metrics,
        meter: SampleMeter,
        operation_timeout: float,
        max_waiting: int,
    ) -> None:
        self.session_id = session_id
        self.model = model
        self.state: SamplerState = "starting"
        self.reason = ""
        self.loaded = ""
        self.worker: Worker | None = None
        self.state_since = time.monotonic()
        self._fleet = fleet
        self._metrics = metrics
        self._meter = meter
        self._timeout = operation_timeout
        self._max_waiting = max_waiting
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._died = asyncio.Event()
        self._client: asyncio.Future[SamplerClient] = asyncio.get_running_loop().create_future()
        self._samples: dict[asyncio.Task[None], Future] = {}
        self._versions: Counter[str] = Counter()
        self._keeper = asyncio.create_task(self._keep(), name=f"sampler-{session_id}")
        self._log = get_log(session_id=session_id)

    @property
    def waiting(self) -> int:
        """Samples that have not ended."""
        return len(self._samples)

    @property
    def versions_in_use(self) -> set[str]:
        """What is loaded, and what somebody waits for."""
        return set(self._versions) | ({self.loaded} if self.loaded else set())

    def submit(
        self, *, future: Future, version: Version, request: sampler_pb2.SampleRequest
    ) -> None:
        """Sends a sample on its way. Raises `Overloaded` when too many wait already."""
        if len(self._samples) >= self._max_waiting:
            raise Overloaded(f"{len(self._samples)} samples wait at this sampler already")
        self._versions[version.name] += 1
        task = asyncio.create_task(self._answer(future, version, request))
        self._samples[task] = future

    def describe(self) -> Waiting:
        """What a sample is waiting for, in words for its client."""
        if self.state != "ready":
            age = time.monotonic() - self.state_since
            why = f"; it failed before: {self.reason}" if self.reason else ""
            return Waiting(f"the sampler is starting ({age:.0f} s){why}", paused=True)
        return Waiting(f"{len(self._samples)} samples are at the sampler")

    async def load(self, version: Version) -> None:
        """Returns when the engine serves the version. Raises `LoadFailed` and its like; then
        the engine goes on serving what it served before."""
        self._versions[version.name] += 1
        try:
            reply = await self._load_twice(
                sampler_pb2.LoadRequest(version=version.to_proto(), fencing_token=FENCING_TOKEN)
            )
        finally:
            self._drop(version)
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        self.loaded = version.name
        self._log.info(
            "version_loaded",
            version=version.name,
            bytes=reply.bytes,
            seconds=round(reply.seconds, 4),
            canary_difference=reply.canary_difference,
        )

    async def stop(self, error: TandemError) -> None:
        """Ends the engine; what waits fails with the error."""
        self._set_state("stopped", error.message)
        self._keeper.cancel()
        samples = dict(self._samples)
        for task, future in samples.items():
            task.cancel()
            future.resolve(error)
        if not self._client.done():
            self._client.set_exception(error)
            self._client.exception()  # it may be that nobody waits
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self.worker is not None:
            await self._fleet.stop(self.worker, reason=error.message)
            self.worker = None

    async def abandon(self) -> None:
        """Stops without telling anybody. The fleet ends the engine."""
        self._keeper.cancel()
        for task in self._samples:
            task.cancel()
        await asyncio.gather(self._keeper, *self._samples, return_exceptions=True)

    async def _answer(
        self, future: Future, version: Version, request: sampler_pb2.SampleRequest
    ) -> None:
        outcome: Outcome
        try:
            outcome = await self._sample(request)
        except TandemError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
            self._log.exception("sample_failed", request_id=future.request_id)
            outcome = InternalError(f"{type(error).__name__} in the gateway: {error}")
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._samples.pop(task, None)
            self._drop(version)
        self._metrics.samples.labels(
            outcome=outcome.type if isinstance(outcome, TandemError) else "done"
        ).inc()
        future.resolve(outcome)

    async def _sample(self, request: sampler_pb2.SampleRequest) -> Outcome:
        client = await self._ready_client()
        with self._meter.measure(request) as measured:
            reply = measured.reply = await self._sample_twice(client, request)
        if reply.HasField("failure"):
            return from_failure(reply.failure)
        self.loaded = reply.version.name
        self._metrics.sampled_tokens.inc(reply.sampled_tokens)
        return Result(media="protobuf", body=reply.response, weight_version=reply.version.name)

    async def _sample_twice(
        self, client: SamplerClient, request: sampler_pb2.SampleRequest
    ) -> sampler_pb2.SampleReply:
        try:
            return await client.sample(request)
        except WorkerUnavailable:
            client = await self._next_client(client)
            try:
                return await client.sample(request)
            except WorkerUnavailable as again:
                raise WorkerDied(f"the sampler died twice during this sample: {again}") from again

    async def _load_twice(self, request: sampler_pb2.LoadRequest) -> sampler_pb2.LoadReply:
        client = await self._ready_client()
        try:
            return await client.load(request)
        except WorkerUnavailable:
            client = await self._next_client(client)
            try:
                return await client.load(request)
            except WorkerUnavailable as again:
                raise WorkerDied(f"the sampler died twice during a load: {again}") from again

    async def _ready_client(self) -> SamplerClient:
        """Raises the `WorkerStartFailed` of the start that was waited for."""
        self._wanted.set()
        return await asyncio.shield(self._client)

    async def _next_client(self, broken: SamplerClient) -> SamplerClient:
        """The client of the engine that comes after the broken one; the same one if the
        launcher does not report an end, since then it was the connection alone."""
        if self.worker is broken.worker:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_PATIENCE):
                    await self._died.wait()
        return await self._ready_client()

    def _drop(self, version: Version) -> None:
        self._versions[version.name] -= 1
        if self._versions[version.name] <= 0:
            del self._versions[version.name]

    def _set_state(self, state: SamplerState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self.state_since = time.monotonic()

    async def _keep(self) -> None:
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
                    on_exit=self._on_exit,
                )
            except WorkerStartFailed as error:
                self._set_state("failed", error.message)
                self._wanted.clear()  # it is tried again when somebody asks again
                self._replace_client().set_exception(error)
                await asyncio.sleep(backoff.failed())
                continue
            backoff.ready()
            self.worker = worker
            self._set_state("ready")
            self._client.set_result(SamplerClient(worker, timeout=self._timeout))
            await self._died.wait()
            await self._fleet.stop(worker, reason=self.reason)
            await asyncio.sleep(backoff.failed())

    def _replace_client(self) -> asyncio.Future[SamplerClient]:
        old, self._client = self._client, asyncio.get_running_loop().create_future()
        if not old.done():
            old.add_done_callback(lambda f: f.exception())  # it may be that nobody waits
        return old

    def _on_exit(self, reason: str) -> None:
        self.worker = None
        self.loaded = ""
        self._set_state("starting", reason)
        self._replace_client()
        self._died.set()


class Samplers:
    """All samplers of this gateway."""

    def __init__(
        self, *, settings: GatewaySettings, fleet: Fleet, metrics: Metrics, samples: Samples
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._samples = samples
        self._samplers: dict[tuple[str, str], Sampler] = {}

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    def get(self, *, session_id: str, model_name: str) -> Sampler | None:
        return self._samplers.get((session_id, model_name))

    def ensure(self, *, session_id: str, model: BaseModelEntry) -> Sampler:
        """The session's sampler for this base model; its engine begins to start."""
        key = (session_id, model.name)
        sampler = self._samplers.get(key)
        if sampler is None:
            sampler = self._samplers[key] = Sampler(
                session_id=session_id,
                model=model,
                fleet=self._fleet,
                metrics=self._metrics,
                meter=SampleMeter(samples=self._samples, base_model=model.name),
                operation_timeout=self._settings.sampler.operation_timeout,
                max_waiting=self._settings.max_waiting_samples,
            )
        return sampler

    def versions_in_use(self) -> set[str]:
        return {name for sampler in self._samplers.values() for name in sampler.versions_in_use}

    async def end_session(self, session_id: str, error: TandemError | None = None) -> None:
        """Stops the session's samplers."""
        keys = [key for key in self._samplers if key[0] == session_id]
        samplers = [self._samplers.pop(key) for key in keys]
        reason = error or SessionFinished(f"session {session_id} has ended")
        await asyncio.gather(*(sampler.stop(reason) for sampler in samplers))

    async def close(self) -> None:
        """The gateway stops: what waits is told nothing, and asks the next one."""
        samplers, self._samplers = list(self._samplers.values()), {}
        await asyncio.gather(*(sampler.abandon() for sampler in samplers))
