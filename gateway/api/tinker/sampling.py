"""Sampling sessions and samples."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.json_bounds import MOST_TOKENS
from gateway.api.tinker.sample_body import Sample, sample_request
from gateway.api.wire import (
    caller_of,
    gateway_of,
    json_response,
    note_for_audit,
    parse,
    promise,
    read_body,
)
from gateway.core import Gateway
from gateway.futures.table import Future
from gateway.identifiers import request_id_of
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession
from tandem.errors import InvalidRequest


class CreateSamplingSession(BaseModel):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=2**53)
    base_model: str | None = None
    model_path: str | None = None


class Join(BaseModel):
    sampling_session_id: str


async def create_sampling_session(request: Request) -> Response:
    """Begins to sample from a base model or a checkpoint."""
    gateway, caller = gateway_of(request), caller_of(request)
    body = parse(CreateSamplingSession, await read_body(request))
    await gateway.access.session(body.session_id, caller)
    session = await gateway.sampling.create(
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=body.base_model,
        model_path=body.model_path,
        readers=gateway.access.readers(caller),
    )
    await gateway.access.session(body.session_id, caller)  # it may have ended meanwhile
    _sampler_of(gateway, session)
    note_for_audit(request, target=session.id)
    return json_response({"type": "create_sampling_session", "sampling_session_id": session.id})


async def join_sampling_session(request: Request) -> Response:
    """A number for one more client of a sampling session, such as one that was unpickled
    elsewhere."""
    gateway = gateway_of(request)
    body = parse(Join, await read_body(request))
    await gateway.access.sampling_session(body.sampling_session_id, caller_of(request))
    number = await gateway.sampling.join(body.sampling_session_id)
    return json_response({"type": "join_sampling_session", "client_counter": number})


async def get_sampler(request: Request) -> Response:
    """What a sampling session samples from."""
    session = await gateway_of(request).access.sampling_session(
        request.path_params["sampler_id"], caller_of(request)
    )
    return json_response(
        {
            "sampler_id": session.id,
            "base_model": session.base_model,
            "model_path": session.model_path or None,
        }
    )


async def asample(request: Request) -> Response:
    """Asks for samples. A place asked for again gives the request of then. 429 when too many
    samples wait."""
    gateway = gateway_of(request)
    body = parse(Sample, await read_body(request), most_values=MOST_TOKENS)
    session, seq_id = await _place(request, body)
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
        gateway.samplers.submit(sampler, future=future, version=version, request=message)
        gateway.futures.add(future)
        gateway.completions.watch(future)
    return promise(
        session.id,
        seq_id,
        # The SDK wants one identity for each sample before there is one.
        sample_sequence_ids=[f"{request_id}:{i}" for i in range(body.num_samples)],
    )


async def _place(request: Request, body: Sample) -> tuple[SamplingSession, int]:
    """The sampling session, and the place in it."""
    gateway, caller = gateway_of(request), caller_of(request)
    if body.sampling_session_id is None:
        session = await gateway.implicit_sessions.create(
            owner=caller.owner,
            base_model=body.base_model,
            model_path=body.model_path,
            readers=gateway.access.readers(caller),
        )
        return session, gateway.implicit_sessions.next_seq_id(
            owner=caller.owner, sampling_session_id=session.id
        )
    if body.seq_id is None:
        raise InvalidRequest("a sample in a sampling session needs a seq_id")
    session = await gateway.access.sampling_session(body.sampling_session_id, caller)
    return session, body.seq_id


def _sampler_of(gateway: Gateway, session: SamplingSession) -> Sampler:
    """One that runs goes on when its model's name is no longer registered."""
    sampler = gateway.samplers.get(
        session_id=session.session_id, model_name=session.base_model, rank=session.rank
    )
    return sampler or gateway.samplers.ensure(
        session_id=session.session_id,
        model=gateway.models.get(session.base_model),
        rank=session.rank,
    )
