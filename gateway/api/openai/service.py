"""Answers requests: prompts, an engine, and samples in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from gateway.api.bounds import check_may_bound, version_check
from gateway.api.errors import InvalidParameter
from gateway.api.openai.models import ModelDirectory, SamplingTarget
from gateway.api.openai.parsing import message_parsing
from gateway.api.openai.prompts import make_sample_request, prompts_of, sampling_params
from gateway.api.openai.recording import TurnRecording
from gateway.api.openai.responses import ResponseBuilder
from gateway.api.openai.schemas import InferenceRequest, Json
from gateway.api.openai.tokenizer import ModelTokenizer
from gateway.core import Gateway
from gateway.identifiers import request_id_of
from gateway.owners.auth.identity import Caller
from gateway.sampling.implicit_sessions import ImplicitSessions
from gateway.sampling.sampler import Check, Sampler
from gateway.sampling.sessions import SamplingSession
from gateway.storage.fair_queue import FairSemaphore
from gateway.storage.futures.table import Future, Outcome
from gateway.workers.model_sizes import read_ahead
from tandem.errors import GatewayRestarted, OperationTimedOut, TandemError, WorkerStartFailed
from tandem.protocol.sample_limits import SampleLimits
from tandem.settings.chosen_names import is_run_id
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

START_TIMEOUT = 240.0
"""Seconds that a request waits for an engine to start."""
MAX_CHOICES = 1024
_MOST_PREPARING = 2
"""Concurrent preparations of prompts. They share threads with all owners' file writes."""


class EngineStarting(WorkerStartFailed):
    """The engine is still starting, so a retry helps."""

    type = "engine_starting"
    status = 503


class InferenceService:
    """Answers completions and chats. `models` resolves model names."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.tokenizer = lru_cache(maxsize=8)(  # a model that is added again has a new key
            lambda model: ModelTokenizer(model.name, Path(model.path))
        )
        self._preparation = FairSemaphore(slots=_MOST_PREPARING)
        self._implicit_sessions = ImplicitSessions(
            sessions=gateway.sessions,
            display_name="OpenAI-compatible requests",
            user_metadata={"tandem_made_for": "/v1"},
            ttl=gateway.settings.openai_idle_ttl,
        )
        self.models = ModelDirectory(gateway)

    @asynccontextmanager
    async def start_sampling(
        self,
        request: InferenceRequest,
        *,
        caller: Caller,
        receive: Receive,
        recording: TurnRecording | None = None,
    ) -> AsyncIterator[SamplesInProgress]:
        """Start sampling. The block's end cancels the rest. An invalid request starts nothing.
        `recording` continues the tokens of a trace. Raises a `TandemError`."""
        gateway = self._gateway
        if request.in_flight and not is_run_id(request.model):
            raise InvalidParameter(
                "in_flight needs a run's id as the model, because other weights never change; "
                "leave it out",
                param="in_flight",
            )
        async with self.models.resolve(request.model, caller) as target:
            asked, version = request.bounds, target.version
            await check_may_bound(gateway, version, asked, owner=caller.owner)
            check = version_check(gateway, asked)
            check(version.to_proto())  # before the work of the prompts
            limits = await gateway.models.limits(target.model)
            async with self._preparation.turn(caller.owner):
                sample_requests, builder = await asyncio.to_thread(
                    self._prepare, request, target, limits, recording
                )
            choices = len(sample_requests) * (request.n or 1)
            if choices > MAX_CHOICES:
                raise InvalidParameter(
                    f"{len(sample_requests)} prompts with {request.n or 1} choices each are "
                    f"{choices}; {MAX_CHOICES} at most",
                    param="n",
                )
            async with self._implicit_sessions.place(caller.owner, request.model) as (
                owned,
                number,
            ):
                session = await gateway.sampling.serve(
                    session_id=owned,
                    number=number,
                    model_path=request.model if target.version.run_id else "",
                    version=target.version,
                    rank=target.rank,
                )
            await read_ahead(target.model.path, gateway.settings)
            sampler = gateway.samplers.ensure(
                session_id=session.session_id,
                model=target.model,
                rank=target.rank,
                all_weights=session.all_weights,
            )
            generation = SamplesInProgress(
                gateway,
                session=session,
                sampler=sampler,
                owner=caller.owner,
                builder=builder,
                check=check,
                recording=recording,
            )
            try:
                for sample_request in sample_requests:
                    seq_id = next(session.seq_ids)
                    generation.submit(sample_request, seq_id=seq_id, stream=bool(request.stream))
                generation.listen_for_disconnect(receive)
                yield generation
            finally:
                generation.cancel()

    def _prepare(
        self,
        request: InferenceRequest,
        target: SamplingTarget,
        limits: SampleLimits,
        recording: TurnRecording | None,
    ) -> tuple[list[sampler_pb2.SampleRequest], ResponseBuilder]:
        """Return one engine request per prompt and the response builder, in a thread. Raises
        `InvalidRequest` or a subclass, `SequenceTooLong`, `EmptyBatch` or `TokenOutOfVocabulary`.
        """
        tokenizer = self.tokenizer(target.model)
        params = sampling_params(request, tokenizer)
        if recording is None:
            prompts = prompts_of(request, tokenizer, max_length=limits.max_length)
        else:
            prompts = [recording.prompt(tokenizer, max_length=limits.max_length)]
        parse = message_parsing(request, tokenizer.parsers)
        requests = [
            make_sample_request(request, prompt=one, params=params, parse=parse) for one in prompts
        ]
        for each in requests:
            limits.check_request(each)
        builder = ResponseBuilder(
            request,
            tokenizer=tokenizer,
            prompts=prompts,
            params=params,
            weight_version=target.version.name,
            parsed=parse is not None,
        )
        return requests, builder


Event = tuple[int, sampler_pb2.SampleDelta | tinker_pb2.SampleResponse]
"""A prompt's index, and new tokens of one sample or all finished samples."""


class SamplesInProgress:
    """One request's samples in progress, which are submitted, awaited and cancelled together.

    A waiting request checks its timeouts every `poll_interval` seconds. `max_unread` bounds the
    events that wait for a slow reader; the engine holds the rest."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        session: SamplingSession,
        sampler: Sampler,
        owner: str,
        builder: ResponseBuilder,
        check: Check,
        recording: TurnRecording | None = None,
        poll_interval: float = 2.0,
        max_unread: int = 64,
    ) -> None:
        self._gateway = gateway
        self._session = session
        self._sampler = sampler
        self._owner = owner
        self._version = session.version  # a later request may change it
        self._builder = builder
        self._check = check
        self._recording = recording
        self._poll_interval = poll_interval
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._unread_slots = asyncio.Semaphore(max_unread)
        self._futures: list[Future] = []
        self._disconnect_listener: asyncio.Task[None] | None = None
        self._unfinished = 0
        self._started_at = time.monotonic()

    def submit(self, request: sampler_pb2.SampleRequest, *, seq_id: int, stream: bool) -> None:
        """Submit the next prompt's request, as an SDK's sample. Raises `Overloaded`."""
        prompt, sampler = len(self._futures), self._sampler
        request_id = request_id_of(owner=self._session.id, seq_id=seq_id)
        request.operation_id = request_id
        request.session_id = self._session.session_id
        request.seq_id = seq_id
        request.version.CopyFrom(self._version.to_proto())
        future = Future(
            request_id=request_id,
            source="sample",
            owner=self._owner,
            describe=lambda: sampler.describe_sample(request_id),
        )

        async def put_delta(delta: sampler_pb2.SampleDelta) -> None:
            await self._unread_slots.acquire()
            self._events.put_nowait((prompt, delta))

        def put_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, TandemError):
                self._events.put_nowait(outcome)
            else:
                response = tinker_pb2.SampleResponse.FromString(outcome.body)
                self._events.put_nowait((prompt, response))

        self._gateway.samplers.submit(
            sampler,
            future=future,
            request=request,
            check=self._check,
            tell=put_delta if stream else None,
        )
        self._futures.append(future)
        self._unfinished += 1
        future.on_end(put_outcome)

    def listen_for_disconnect(self, receive: Receive) -> None:
        """End the wait when the client disconnects. Its request must have been read."""

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._events.put_nowait(ClientDisconnect())

        self._disconnect_listener = asyncio.create_task(listen())

    async def response(self) -> Json:
        """Return the whole response. Raises as `events`."""
        found = {
            prompt: sampled
            async for prompt, sampled in self.events()
            if isinstance(sampled, tinker_pb2.SampleResponse)
        }
        response = self._builder.response([found[prompt] for prompt in sorted(found)])
        await self._record(found[0])
        return response

    @property
    def stop_string(self) -> str:
        """The stop string that ended the first choice, or ""."""
        return self._builder.stop_string

    async def _record(self, sample: tinker_pb2.SampleResponse) -> None:
        """Write the turn before its end is answered, so that a client knows no unrecorded one."""
        if self._recording is not None:
            await self._recording.record(sample, self._builder.messages(), self._version)

    async def parts(self) -> AsyncGenerator[list[Json], None]:
        """Yield a stream's parts, all ready ones together, from the first token on. Raises as
        `events`."""
        ready = self._builder.opening()
        async for prompt, sampled in self.events():
            if isinstance(sampled, tinker_pb2.SampleResponse):
                self._builder.count(sampled)
                await self._record(sampled)
            else:
                ready += self._builder.parts(sampled, prompt=prompt)
            if ready and self._events.empty():
                yield ready
                ready = []
        yield ready + self._builder.closing()

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events until all prompts are finished.

        Raises a sample's error, `EngineStarting` or `OperationTimedOut` after its time,
        `GatewayRestarted` or `ClientDisconnect`."""
        while self._unfinished:
            try:
                async with asyncio.timeout(self._poll_interval):
                    event = await self._events.get()
            except TimeoutError:
                self._gateway.sessions.touch(self._session.session_id)
                check_wait(self._gateway, self._sampler, self._futures[-1], since=self._started_at)
                continue
            if isinstance(event, Exception):
                raise event
            if isinstance(event[1], sampler_pb2.SampleDelta):
                self._unread_slots.release()
            else:
                self._unfinished -= 1
            yield event

    def cancel(self) -> None:
        if self._disconnect_listener is not None:
            self._disconnect_listener.cancel()
        for future in self._futures:
            if not future.ended:
                self._gateway.samplers.cancel(future.request_id)
        self._gateway.sessions.touch(self._session.session_id)


def check_wait(gateway: Gateway, sampler: Sampler, future: Future, *, since: float) -> None:
    """Raise if a request has waited too long for a sample. `since` is on the monotonic clock.

    Raises `EngineStarting`, `OperationTimedOut` or `GatewayRestarted`."""
    waited = time.monotonic() - since
    if gateway.futures.closing:
        raise GatewayRestarted("the gateway is shutting down; retry a little later")
    if not sampler.serves and waited > START_TIMEOUT:
        why = future.describe().reason
        raise EngineStarting(f"{why}; it goes on, so retry a little later")
    limit = gateway.settings.operation_timeout
    if waited > limit:
        raise OperationTimedOut(
            f"no response within {limit:g} s; ask for fewer tokens, or retry later"
        )
