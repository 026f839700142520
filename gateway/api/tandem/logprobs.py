"""Scores sequences of token ids: a list of samples of no token, a bounded number at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Annotated

import numpy as np
import orjson
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from gateway.api.bounds import version_check
from gateway.api.dependencies import Access
from gateway.api.fields import Answer, Refusal
from gateway.api.openai.models import ModelDirectory
from gateway.api.openai.service import check_wait
from gateway.api.request_body import JSON, TOKENS_BODY, BoundedRequest, FirstFault, Ints, parse
from gateway.api.routing import Router, json_content
from gateway.api.tinker.sampling import packed_integers, sampler_of
from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import relative_version_folder, request_id_of
from gateway.sampling.bounds import Bounds
from gateway.sampling.sessions import SamplingSession
from gateway.storage.futures.table import Future
from gateway.workers.model_sizes import read_ahead
from tandem.errors import (
    EmptyBatch,
    InvalidRequest,
    OperationTimedOut,
    Overloaded,
    SequenceTooLong,
    SessionFinished,
    StaleVersion,
    TandemError,
    TokenOutOfVocabulary,
    UnknownModel,
    UnknownRun,
    UnknownSampler,
    UnknownWeights,
    WorkerStartFailed,
)
from tandem.protocol.sample_limits import SampleLimits
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

router = Router("/api/tandem/v1", tag="Tandem")

MAX_SEQUENCES = 4096
_AT_ONCE = 32
"""Sequences of one request in the engine, so that it does not delay others."""
_POLL_SECONDS = 2.0
_OF_ONE_SEQUENCE = (EmptyBatch, InvalidRequest, SequenceTooLong, TokenOutOfVocabulary)


class Sequences(BaseModel):
    """The weights are a sampling session's, or a `model`'s as in /v1/completions."""

    sampling_session_id: str | None = None
    model: str | None = Field(None, min_length=1, max_length=400)
    sequences: Annotated[list[Ints], FirstFault()] = Field(min_length=1, max_length=MAX_SEQUENCES)


class ScoredSequence(Answer):
    """`logprobs` has a number for each token, but null for the first one. It is null if this
    sequence was refused, with the reason in `failure`."""

    index: int
    logprobs: list[float | None] | None
    failure: Refusal | None


class ScoredSequences(Answer):
    """`sequences` are in the order of the request."""

    weight_version: str
    sequences: list[ScoredSequence]


# Raw: pydantic parses and validates long lists in one step.
@router.operation(
    "POST",
    "/logprobs",
    role="ci",
    audit=None,
    errors=[
        OperationTimedOut,
        Overloaded,
        SessionFinished,
        StaleVersion,
        UnknownModel,
        UnknownRun,
        UnknownSampler,
        UnknownWeights,
        WorkerStartFailed,
    ],
    rules=["Either `sampling_session_id` or `model`. A `tinker://` path must be one."],
    bounds=TOKENS_BODY,
    raw=json_content(Sequences),
    responses={200: {"model": ScoredSequences}},
)
async def score_sequences(request: BoundedRequest) -> Response:
    """Return the log-probabilities of the tokens of many sequences, at temperature 1 without
    filters. One weight version scores all of them. A wrong sequence fails alone. The end of the
    connection cancels the rest."""
    access = Access(request)

    def read(raw: bytes) -> tuple[Sequences, list[bytes | TandemError]]:
        body = parse(Sequences, raw, most_values=request.most_values)
        packed = [_packed(tokens) for tokens in body.sequences]
        body.sequences = []  # free the tokens here, perhaps in a thread
        return body, packed

    body, sequences = await request.read(read)
    async with _weights(access, body) as (session, version):
        score = await _make_score(access, session, version)
        try:
            scored = await _score_all(score, sequences, request.receive)
        except ClientDisconnect:
            return Response(status_code=499)  # for the log, as the client is gone
    content = {"weight_version": version.name, "sequences": scored}
    # NaN, the first token's, becomes null.
    written = await asyncio.to_thread(orjson.dumps, content, None, orjson.OPT_SERIALIZE_NUMPY)
    return Response(written, media_type=JSON)


def _packed(tokens: list[int]) -> bytes | TandemError:
    try:
        return packed_integers("i", tokens, "the sequence")
    except TokenOutOfVocabulary as error:
        return error


@asynccontextmanager
async def _weights(
    access: Access, body: Sequences
) -> AsyncIterator[tuple[SamplingSession, WeightVersion]]:
    """Yield the sampling session and its version, and keep the files for the block."""
    gateway, owner = access.gateway, access.caller.owner
    if body.sampling_session_id is not None and body.model is None:
        session = await access.sampling_session(body.sampling_session_id)
        version = session.version  # an in-flight session may move on
        with gateway.checkpoints.pins.pinned(relative_version_folder(version.name)):
            yield session, version
    elif body.model is not None and body.sampling_session_id is None:
        access.check_blueprint(None)
        async with ModelDirectory(gateway).resolve(body.model, access.caller) as target:
            version = target.version
            async with gateway.implicit_sessions.place(owner, body.model) as (session_id, number):
                session = await gateway.sampling.serve(
                    session_id=session_id,
                    number=number,
                    model_path=body.model if version.run_id else "",
                    version=version,
                    rank=target.rank,
                )
            yield session, version
    else:
        raise InvalidRequest("sequences are scored by a sampling_session_id or by a model")


async def _make_score(
    access: Access, session: SamplingSession, version: WeightVersion
) -> Callable[[bytes | TandemError], Awaitable[np.ndarray]]:
    """Return a function that scores one sequence: logprobs [tokens], NaN for the first one."""
    gateway, started_at = access.gateway, time.monotonic()
    check = version_check(gateway, Bounds(), session)
    check(version.to_proto())
    owner = gateway.sessions.require(session.session_id).owner
    limits: SampleLimits | None = None
    with suppress(UnknownModel):  # its sampler may run all the same
        model = gateway.models.get(session.base_model)
        await read_ahead(model.path, gateway.settings)
        limits = await gateway.models.limits(model)
    client = await gateway.sampling.join(session.id)
    seq_ids = count(client * 10**9)
    sampler = sampler_of(gateway, session)

    async def score(sequence: bytes | TandemError) -> np.ndarray:
        if isinstance(sequence, TandemError):
            raise sequence
        seq_id = next(seq_ids)
        request_id = request_id_of(owner=session.id, seq_id=seq_id)
        message = sampler_pb2.SampleRequest(
            operation_id=request_id,
            session_id=session.session_id,
            seq_id=seq_id,
            version=version.to_proto(),
            prompt_tokens=sequence,
            num_samples=1,
            params=sampler_pb2.SamplingParams(max_tokens=0, top_k=-1, top_p=1.0),
            prompt_logprobs=True,
        )
        if limits is not None:
            limits.check_request(message)
        future = Future(
            request_id=request_id,
            source="sample",
            owner=owner,
            describe=lambda: sampler.describe_sample(request_id),
        )
        gateway.samplers.submit(sampler, future=future, request=message, check=check)
        try:
            while (outcome := await gateway.futures.wait(future, timeout=_POLL_SECONDS)) is None:
                check_wait(gateway, sampler, future, since=started_at)
                gateway.sessions.touch(session.session_id)
        finally:
            gateway.samplers.cancel(request_id)
        gateway.sessions.touch(session.session_id)
        if isinstance(outcome, TandemError):
            raise outcome
        answer = tinker_pb2.SampleResponse.FromString(outcome.body)
        return np.frombuffer(answer.prompt_logprobs, "<f4")

    return score


async def _score_all(
    score: Callable[[bytes | TandemError], Awaitable[np.ndarray]],
    sequences: list[bytes | TandemError],
    receive: Receive,
) -> list[dict[str, object]]:
    """Return each sequence's logprobs or failure, in order. Raises an error that concerns all of
    them, and `ClientDisconnect`."""
    scored: list[dict[str, object]] = [{} for _ in sequences]
    left = iter(enumerate(sequences))

    async def work() -> None:
        for index, sequence in left:
            failure = logprobs = None
            try:
                logprobs = await score(sequence)
            except _OF_ONE_SEQUENCE as error:
                failure = {"error": error.message, "type": error.type, "category": error.category}
            scored[index] = {"index": index, "logprobs": logprobs, "failure": failure}

    try:
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(_fail_at_disconnect(receive))
            await asyncio.wait([group.create_task(work()) for _ in range(_AT_ONCE)])
            listener.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return scored


async def _fail_at_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
