"""From a body to an answer, whole or streamed: what both endpoints do alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Receive

from gateway.api.openai.answer import VERSION_HEADER, Heading, Json, Usage, choices_of, new_id
from gateway.api.openai.bodies import Body, ChatBody, CompletionBody
from gateway.api.openai.chat import ChatWriter, chat_prompt, chat_request, check_chat
from gateway.api.openai.choice import Choice, Chunk, Piece, piece_of_delta, piece_of_sequence
from gateway.api.openai.completion import (
    CompletionWriter,
    check_completion,
    completion_prompts,
    completion_request,
)
from gateway.api.openai.errors import FieldRefused
from gateway.api.openai.generation import Done, Generator, Running
from gateway.api.openai.models import Served, ServedModels
from gateway.api.openai.request import Stops, rules_of, stops_of
from gateway.api.openai.tokenizer import ModelTokenizer, Tokenizers
from gateway.auth.identity import Caller
from gateway.core import Gateway
from gateway.fair_queue import FairSemaphore
from gateway.sampling.implicit_sessions import ImplicitSessions
from gateway.sampling.router import SamplerRouter
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

_PREPARED = 2
"""Requests whose prompts are rendered and encoded at once; owners take turns. It is done in the
threads that the files of all owners are written in, so that some of them must stay free."""


class Writer(Protocol):
    """Writes the choices of one endpoint."""

    whole_kind: str
    streamed_kind: str
    id_prefix: str

    @property
    def echo_alone(self) -> bool: ...
    def answer(self, heading: Heading, choices: Sequence[Json]) -> Json: ...
    def whole(self, chunk: Chunk, response: tinker_pb2.SampleResponse) -> Json: ...
    def opening(self, index: int) -> Json | None: ...
    def part(self, chunk: Chunk) -> Json | None: ...


@dataclass(frozen=True)
class Plan:
    """What a body asks for."""

    prompts: Sequence[Sequence[int]]
    requests: Sequence[sampler_pb2.SampleRequest]
    writer: Writer
    stops: Stops


@dataclass
class Job:
    """A request whose samples are on their way."""

    body: Body
    served: Served
    plan: Plan
    running: Running
    choices: Sequence[Choice]
    id: str
    usage: Usage = field(default_factory=Usage)

    @property
    def headers(self) -> Mapping[str, str]:
        return {VERSION_HEADER: self.served.version.name}

    def heading(self, kind: str) -> Heading:
        return Heading(
            kind=kind,
            model=self.served.name,
            weight_version=self.served.version.name,
            id=self.id,
        )

    async def whole(self) -> Json:
        """The answer. Raises what a sample failed with."""
        writer, n = self.plan.writer, self.body.n or 1
        written: list[Json] = []
        for prompt, response in enumerate(await self.running.all()):
            self._count(response)
            choices = self.choices[prompt * n : (prompt + 1) * n]
            for choice, sequence in zip(choices, response.sequences, strict=True):
                written.append(
                    writer.whole(self._add(choice, piece_of_sequence(sequence)), response)
                )
        answer = writer.answer(self.heading(writer.whole_kind), written)
        return {**answer, "usage": self.usage.content()}

    async def parts(self) -> AsyncIterator[list[Json]]:
        """The answer as it comes: in each step what is there, the usage last. The first step
        comes with the first token. Raises what a sample failed with."""
        writer = self.plan.writer
        heading = self.heading(writer.streamed_kind)
        usage: Json = {"usage": None} if self.body.wants_usage else {}

        def part(choice: Json) -> Json:
            return {**heading.content([choice]), **usage}

        openings = [writer.opening(choice.index) for choice in self.choices]
        ready = [part(opening) for opening in openings if opening is not None]
        while (event := await self.running.next()) is not None:
            if isinstance(event, Done):
                chunks = self._rest(event)
            else:
                choice = self.choices[event.prompt * (self.body.n or 1) + event.delta.index]
                chunks = [self._add(choice, piece_of_delta(event.delta))]
            written = [writer.part(chunk) for chunk in chunks]
            ready += [part(choice) for choice in written if choice is not None]
            if ready and not self.running.unread:
                yield ready
                ready = []
        if self.body.wants_usage:
            ready.append({**heading.content([]), "usage": self.usage.content()})
        yield ready

    def _add(self, choice: Choice, piece: Piece) -> Chunk:
        if self.plan.writer.echo_alone:
            piece = Piece(tokens=[], logprobs=[], finish=piece.finish and "length")
        return choice.add(piece)

    def _rest(self, done: Done) -> list[Chunk]:
        """What the deltas of a prompt's samples did not tell, which is in the whole answer."""
        self._count(done.response)
        n, found = self.body.n or 1, []
        choices = self.choices[done.prompt * n : (done.prompt + 1) * n]
        for choice, sequence in zip(choices, done.response.sequences, strict=True):
            if not choice.finished:
                whole = piece_of_sequence(sequence)
                others = whole.alternatives
                rest = Piece(
                    tokens=whole.tokens[choice.tokens :],
                    logprobs=whole.logprobs[choice.tokens :],
                    alternatives=others[choice.tokens :] if others is not None else None,
                    finish=whole.finish,
                )
                found.append(self._add(choice, rest))
        return found

    def _count(self, response: tinker_pb2.SampleResponse) -> None:
        self.usage.cached += response.prompt_cache_hit_tokens
        if not self.plan.writer.echo_alone:
            self.usage.completion += sum(len(s.tokens) // 4 for s in response.sequences)


class InferenceService:
    """`models` are what can be asked for."""

    def __init__(
        self,
        *,
        models: ServedModels,
        sessions: ImplicitSessions,
        generator: Generator,
        samplers: SamplerRouter,
        rank: int,
        max_choices: int,
    ) -> None:
        self.models = models
        self._sessions = sessions
        self._generator = generator
        self._samplers = samplers
        self._rank = rank
        self._max_choices = max_choices
        self._tokenizers = Tokenizers()
        self._preparation = FairSemaphore(slots=_PREPARED)

    @staticmethod
    def of(gateway: Gateway) -> InferenceService:
        """The service of a gateway with these parts."""
        settings = gateway.settings
        return InferenceService(
            models=ServedModels(
                models=gateway.models,
                checkpoints=gateway.checkpoints,
                versions=gateway.versions,
                runs=gateway.runs,
                access=gateway.access,
            ),
            sessions=ImplicitSessions(
                sessions=gateway.sessions,
                sampling=gateway.sampling,
                display_name="OpenAI-compatible requests",
                user_metadata={"tandem_made_for": "/v1"},
                ttl=settings.openai.idle_ttl,
            ),
            generator=Generator(
                settings=settings.openai,
                sessions=gateway.sessions,
                samplers=gateway.samplers,
                closing=lambda: gateway.futures.closing,
            ),
            samplers=gateway.samplers,
            rank=settings.sampler.max_lora_rank,
            max_choices=settings.openai.max_choices,
        )

    @asynccontextmanager
    async def open(self, body: Body, *, caller: Caller, receive: Receive) -> AsyncIterator[Job]:
        """Begins what the body asks for; what has not ended with the block is given up. Nothing
        is started for a request that is wrong. Raises a `TandemError`."""
        _check(body)
        async with self.models.reading(body.model, caller) as served:
            tokenizer = await self._tokenizers.get(served.model)
            async with self._preparation.turn(caller.owner):
                plan = await _plan(body, served, tokenizer)
            self._check_choices(body, plan)
            session = await self._sessions.serve(
                owner=caller.owner, model=served.name, version=served.version, rank=served.rank
            )
            sampler = self._samplers.ensure(
                session_id=session.session_id,
                model=served.model,
                rank=max(served.rank, self._rank),  # one engine for a base model and its adapters
            )
            seq_ids = [
                self._sessions.next_seq_id(owner=caller.owner, sampling_session_id=session.id)
                for _request in plan.requests
            ]
            async with self._generator.running(
                owner=caller.owner,
                served=served,
                session=session,
                sampler=sampler,
                requests=plan.requests,
                seq_ids=seq_ids,
                stream=bool(body.stream),
                receive=receive,
            ) as running:
                yield Job(
                    body=body,
                    served=served,
                    plan=plan,
                    running=running,
                    choices=choices_of(
                        tokenizer=tokenizer,
                        prompts=plan.prompts,
                        n=body.n or 1,
                        rules=rules_of(body, plan.stops),
                    ),
                    id=new_id(plan.writer.id_prefix),
                    usage=Usage(prompt=sum(map(len, plan.prompts))),
                )

    def _check_choices(self, body: Body, plan: Plan) -> None:
        asked = len(plan.prompts) * (body.n or 1)
        if asked > self._max_choices:
            raise FieldRefused(
                f"{len(plan.prompts)} prompts with {body.n or 1} choices each are {asked}; "
                f"{self._max_choices} at most (TANDEM_OPENAI_MAX_CHOICES)",
                param="n",
            )


def _check(body: Body) -> None:
    if isinstance(body, CompletionBody):
        check_completion(body)
    if isinstance(body, ChatBody):
        check_chat(body)
    if body.stream_options is not None and not body.stream:
        raise FieldRefused("stream_options is about streams alone", param="stream_options")


async def _plan(body: Body, served: Served, tokenizer: ModelTokenizer) -> Plan:
    stops = stops_of(body, tokenizer)
    max_length = served.model.max_length
    if isinstance(body, ChatBody):
        prompt = await chat_prompt(body, tokenizer, max_length=max_length)
        return Plan(
            prompts=[prompt],
            requests=[chat_request(body, prompt=prompt, stops=stops)],
            writer=ChatWriter(body, tokenizer, prompt=prompt),
            stops=stops,
        )
    assert isinstance(body, CompletionBody)
    prompts = await completion_prompts(body, tokenizer, max_length=max_length)
    return Plan(
        prompts=prompts,
        requests=[completion_request(body, prompt=prompt, stops=stops) for prompt in prompts],
        writer=CompletionWriter(body, tokenizer, prompts=prompts),
        stops=stops,
    )
