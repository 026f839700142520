"""Sampling sessions and samples."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.dependencies import (
    AccessDep,
    AuditDep,
    GatewayDep,
    OwnSamplingSession,
    access_of,
    gateway_of,
)
from gateway.api.fields import Answer
from gateway.api.request_body import MOST_TOKENS, parse
from gateway.api.routing import Router, json_content, model_response
from gateway.api.tinker.sample_body import Sample, sample_request
from gateway.core import Gateway
from gateway.futures.table import Future
from gateway.identifiers import request_id_of
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession
from tandem.errors import (
    InvalidRequest,
    Overloaded,
    SessionFinished,
    StorageFull,
    UnknownModel,
    UnknownSampler,
    UnknownSession,
    UnknownWeights,
)

router = Router("/api/v1", tag="SDK")


class CreateSamplingSession(BaseModel):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=2**53)
    base_model: str | None = None
    model_path: str | None = None


class Join(BaseModel):
    sampling_session_id: str


class SampleAccepted(Answer):
    """`sample_sequence_ids`: one for each sample to come."""

    request_id: str
    sample_sequence_ids: list[str]


class CreatedSamplingSession(Answer):
    type: Literal["create_sampling_session"]
    sampling_session_id: str


class Joined(Answer):
    type: Literal["join_sampling_session"]
    client_counter: int


class SamplerInfo(Answer):
    sampler_id: str
    base_model: str
    model_path: str | None


# Raw: pydantic parses and validates a long prompt in one step. 120 us with 2000 tokens and 1.6 ms
# with 32,000; by FastAPI, which parses first, 191 us and 2.9 ms (median of 600 calls in process,
# both ways in turn).
@router.operation(
    "POST",
    "/asample",
    role="member",
    audit=None,
    errors=[
        UnknownSampler,
        SessionFinished,
        UnknownModel,
        UnknownWeights,
        Overloaded,
        StorageFull,
    ],
    rules=[
        "Either a `sampling_session_id` with a `seq_id`, or a `base_model`, or a `model_path`.",
        "The prompt is text alone, with at least one token; every token is a token id.",
    ],
    raw=json_content(Sample),
    responses={200: {"model": SampleAccepted}},
)
async def asample(request: Request) -> Response:
    """Ask for samples. Idempotent: a repeated seq_id returns the original request_id. 429 when
    too many samples wait."""
    gateway = gateway_of(request)
    body = parse(Sample, await request.body(), most_values=MOST_TOKENS)
    session, seq_id = await _session_and_seq_id(request, body)
    request_id = request_id_of(owner=session.id, seq_id=seq_id)
    if gateway.futures.get(request_id) is None:
        sampler = _sampler_of(gateway, session)
        version = session.version
        message = sample_request(body)
        message.operation_id = request_id
        message.session_id = session.session_id
        message.seq_id = seq_id
        message.version.CopyFrom(version.to_proto())
        future = Future(
            request_id=request_id,
            source="sample",
            kind="sample",
            owner=gateway.sessions.owner_of(session.session_id),
            describe=lambda: sampler.describe(request_id),
        )
        gateway.samplers.submit(sampler, future=future, request=message)
        gateway.futures.add(future)
        gateway.completions.watch(future)
    return model_response(
        SampleAccepted(
            request_id=request_id,
            # The SDK wants one identity for each sample before there is one.
            sample_sequence_ids=[f"{request_id}:{i}" for i in range(body.num_samples)],
        )
    )


@router.operation(
    "POST",
    "/create_sampling_session",
    role="member",
    audit="sampler_create",
    errors=[UnknownSession, SessionFinished, UnknownModel, UnknownWeights],
    rules=["Either `base_model` or `model_path` is needed, and the path must be one."],
)
async def create_sampling_session(
    body: CreateSamplingSession,
    gateway: GatewayDep,
    access: AccessDep,
    audit: AuditDep,
) -> CreatedSamplingSession:
    """Begin to sample from a base model or a checkpoint."""
    await access.session(body.session_id)
    session = await gateway.sampling.create(
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=body.base_model,
        model_path=body.model_path,
        readers=access.readers(),
    )
    await access.session(body.session_id)  # it may have ended meanwhile
    _sampler_of(gateway, session)
    audit.note(session.id)
    return CreatedSamplingSession(type="create_sampling_session", sampling_session_id=session.id)


@router.operation(
    "POST", "/join_sampling_session", role="member", audit=None, errors=[UnknownSampler]
)
async def join_sampling_session(body: Join, gateway: GatewayDep, access: AccessDep) -> Joined:
    """Return a number for one more client of a sampling session, such as one that was unpickled
    elsewhere."""
    await access.sampling_session(body.sampling_session_id)
    number = await gateway.sampling.join(body.sampling_session_id)
    return Joined(type="join_sampling_session", client_counter=number)


@router.operation("GET", "/samplers/{sampler_id}", role="reader")
async def get_sampler(session: OwnSamplingSession) -> SamplerInfo:
    """Return what a sampling session samples from."""
    return SamplerInfo(
        sampler_id=session.id,
        base_model=session.base_model,
        model_path=session.model_path or None,
    )


async def _session_and_seq_id(request: Request, body: Sample) -> tuple[SamplingSession, int]:
    access = access_of(request)
    gateway, owner = access.gateway, access.caller.owner
    if body.sampling_session_id is None:
        session = await gateway.implicit_sessions.create(
            owner=owner,
            base_model=body.base_model,
            model_path=body.model_path,
            readers=access.readers(),
        )
        seq_id = gateway.implicit_sessions.next_seq_id(owner=owner, sampling_session_id=session.id)
        return session, seq_id
    if body.seq_id is None:
        raise InvalidRequest("a sample in a sampling session needs a seq_id")
    session = await access.sampling_session(body.sampling_session_id)
    return session, body.seq_id


def _sampler_of(gateway: Gateway, session: SamplingSession) -> Sampler:
    """Return the session's sampler, started if needed. One that runs continues when its model's
    name is no longer registered."""
    sampler = gateway.samplers.get(
        session_id=session.session_id, model_name=session.base_model, rank=session.rank
    )
    return sampler or gateway.samplers.ensure(
        session_id=session.session_id,
        model=gateway.models.get(session.base_model),
        rank=session.rank,
    )
