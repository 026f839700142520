"""From a request to its response, for both endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive

from gateway.api.openai.errors import InvalidField
from gateway.api.openai.generation import Finished, Generation
from gateway.api.openai.models import ModelDirectory, SamplingTarget
from gateway.api.openai.prompts import (
    Prompt,
    make_sample_request,
    prompts_of,
    stop_conditions,
)
from gateway.api.openai.responses import ChatBuilder, CompletionBuilder, ResponseBuilder
from gateway.api.openai.schemas import CompletionRequest, Json, SamplingFields
from gateway.api.openai.tokenizer import ModelTokenizer, Tokenizers
from gateway.auth.identity import Caller
from gateway.core import Gateway
from gateway.fair_queue import FairSemaphore
from gateway.sampling.implicit_sessions import ImplicitSessions
from tandem.v1 import sampler_pb2


@dataclass(frozen=True)
class PreparedRequest:
    """The prompts of a request, with one engine request each, and the builder of its response."""

    prompts: Sequence[Prompt]
    sample_requests: Sequence[sampler_pb2.SampleRequest]
    builder: ResponseBuilder


@dataclass(frozen=True)
class RunningRequest:
    """A request whose samples are being computed, and how to read its response."""

    weight_version: str
    generation: Generation
    builder: ResponseBuilder

    async def response(self) -> Json:
        """Return the whole response. Raises as `Generation.next`."""
        return self.builder.response(await self.generation.all())

    async def parts(self) -> AsyncGenerator[list[Json], None]:
        """Yield the parts of a streamed response, those that are ready at once together; the first
        come with the first token. Raises as `Generation.next`."""
        ready = self.builder.opening()
        while (event := await self.generation.next()) is not None:
            if isinstance(event, Finished):
                ready += self.builder.remainder(event.response, prompt=event.prompt)
            else:
                ready += self.builder.delta(event.delta, prompt=event.prompt)
            if ready and not self.generation.has_unread:
                yield ready
                ready = []
        yield ready + self.builder.closing()


class InferenceService:
    """Answers completions and chats with the parts of a gateway. `models` are what can be asked
    for.

    `max_preparing` requests have their prompts rendered and encoded at once, and owners take
    turns: this runs in the threads that also write all owners' files.
    """

    def __init__(self, gateway: Gateway, *, max_preparing: int = 2) -> None:
        self._settings = gateway.settings
        self._samplers = gateway.samplers
        self._sessions = gateway.sessions
        self._futures = gateway.futures
        self._tokenizers = Tokenizers()
        self._preparation = FairSemaphore(slots=max_preparing)
        self._implicit_sessions = ImplicitSessions(
            sessions=gateway.sessions,
            sampling=gateway.sampling,
            display_name="OpenAI-compatible requests",
            user_metadata={"tandem_made_for": "/v1"},
            ttl=self._settings.openai.idle_ttl,
        )
        self.models = ModelDirectory(
            models=gateway.models,
            checkpoints=gateway.checkpoints,
            versions=gateway.versions,
            runs=gateway.runs,
            access=gateway.access,
        )

    @asynccontextmanager
    async def start(
        self, request: SamplingFields, *, caller: Caller, receive: Receive
    ) -> AsyncIterator[RunningRequest]:
        """Start sampling; what has not ended with the block is cancelled. An invalid request
        starts nothing. Raises a `TandemError`."""
        async with self.models.resolve(request.model, caller) as target:
            tokenizer = await self._tokenizers.get(target.model)
            async with self._preparation.turn(caller.owner):
                prepared = await prepare(request, target, tokenizer)
            self._check_choices(request, prepared)
            generation = await self._generation(target, owner=caller.owner)
            try:
                for sample_request in prepared.sample_requests:
                    seq_id = self._implicit_sessions.next_seq_id(
                        owner=caller.owner, sampling_session_id=generation.session_id
                    )
                    generation.submit(sample_request, seq_id=seq_id, stream=bool(request.stream))
                generation.listen_for_disconnect(receive)
                yield RunningRequest(
                    weight_version=target.version.name,
                    generation=generation,
                    builder=prepared.builder,
                )
            finally:
                generation.cancel()

    async def _generation(self, target: SamplingTarget, *, owner: str) -> Generation:
        """Find the owner's sampling session and engine for the target; the engine may have to
        start. All engines are made for adapters, so that a base model and its adapters share one.
        """
        session = await self._implicit_sessions.serve(
            owner=owner, model=target.name, version=target.version, rank=target.rank
        )
        sampler = self._samplers.ensure(
            session_id=session.session_id,
            model=target.model,
            rank=max(target.rank, self._settings.sampler.max_lora_rank),
        )
        return Generation(
            settings=self._settings.openai,
            sessions=self._sessions,
            samplers=self._samplers,
            session=session,
            sampler=sampler,
            owner=owner,
            version=target.version,
            closing=lambda: self._futures.closing,
        )

    def _check_choices(self, request: SamplingFields, prepared: PreparedRequest) -> None:
        n, prompts = request.n or 1, len(prepared.prompts)
        limit = self._settings.openai.max_choices
        if prompts * n > limit:
            raise InvalidField(
                f"{prompts} prompts with {n} choices each are {prompts * n}; {limit} at most "
                "(TANDEM_OPENAI_MAX_CHOICES)",
                param="n",
            )


async def prepare(
    request: SamplingFields, target: SamplingTarget, tokenizer: ModelTokenizer
) -> PreparedRequest:
    """Raise `InvalidRequest` or one of its kinds, `SequenceTooLong`, `EmptyBatch` or
    `TokenOutOfVocabulary`."""
    stops = stop_conditions(request, tokenizer)
    prompts = await prompts_of(request, tokenizer, max_length=target.model.max_length)
    builder = CompletionBuilder if isinstance(request, CompletionRequest) else ChatBuilder
    return PreparedRequest(
        prompts=prompts,
        sample_requests=[
            make_sample_request(request, prompt=prompt, stops=stops) for prompt in prompts
        ],
        builder=builder(
            request,
            tokenizer=tokenizer,
            prompts=prompts,
            stops=stops,
            weight_version=target.version.name,
        ),
    )
