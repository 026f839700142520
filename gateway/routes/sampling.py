"""Sampling sessions and samples."""

from __future__ import annotations

from array import array

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.core import Gateway
from gateway.fleet import FENCING_TOKEN
from gateway.futures import Future
from gateway.names import request_id_of
from gateway.routes.wire import gateway_of, json_response, parse, promise, read_body
from gateway.samplers import Sampler
from gateway.sampling import SamplingSession
from tandem.errors import EmptyBatch, InvalidRequest, TokenOutOfVocabulary, UnsupportedInput
from tandem.v1 import sampler_pb2


class CreateSamplingSession(BaseModel):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(BaseModel):
    chunks: list[Chunk]


class Params(BaseModel):
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(BaseModel):
    sampling_session_id: str
    seq_id: int = Field(ge=0, le=2**62)
    num_samples: int = Field(1, ge=1, le=65536)
    prompt: Prompt
    sampling_params: Params
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1000)
    topk_sample_logprobs: int = Field(0, ge=0, le=1000)
    target_prompt_logprobs: object = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


async def create_sampling_session(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse(CreateSamplingSession, await read_body(request))
    await gateway.sessions.require(body.session_id)
    session = await gateway.sampling.create(
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=body.base_model,
        model_path=body.model_path,
    )
    await gateway.sessions.require(body.session_id)  # it may have ended meanwhile
    _sampler_of(gateway, session)
    return json_response({"type": "create_sampling_session", "sampling_session_id": session.id})


async def get_sampler(request: Request) -> Response:
    session = await gateway_of(request).sampling.require(request.path_params["sampler_id"])
    return json_response(
        {
            "sampler_id": session.id,
            "base_model": session.base_model,
            "model_path": session.model_path or None,
        }
    )


async def asample(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse(Sample, await read_body(request))
    session = await gateway.sampling.require(body.sampling_session_id)
    await gateway.sessions.require(session.session_id)
    request_id = request_id_of(owner=session.id, seq_id=body.seq_id)
    if gateway.futures.get(request_id) is None:
        sampler = _sampler_of(gateway, session)
        version = session.version
        message = _sample_request(body)
        message.operation_id = request_id
        message.fencing_token = FENCING_TOKEN
        message.session_id = session.session_id
        message.version.CopyFrom(version.to_proto())
        future = Future(
            request_id=request_id, source="sample", kind="sample", describe=sampler.describe
        )
        sampler.submit(future=future, version=version, request=message)
        gateway.futures.add(future)
    return promise(
        session.id,
        body.seq_id,
        # The SDK wants one identity for each sample before there is one.
        sample_sequence_ids=[f"{request_id}:{i}" for i in range(body.num_samples)],
    )


def _sampler_of(gateway: Gateway, session: SamplingSession) -> Sampler:
    """One that runs goes on when its model's name is no longer registered."""
    sampler = gateway.samplers.get(session_id=session.session_id, model_name=session.base_model)
    return sampler or gateway.samplers.ensure(
        session_id=session.session_id, model=gateway.models.get(session.base_model)
    )


def _sample_request(body: Sample) -> sampler_pb2.SampleRequest:
    """Raises a `UserError` for what this server does not take."""
    _check_supported(body)
    params = body.sampling_params
    message = sampler_pb2.SampleRequest(
        prompt_tokens=_prompt_tokens(body.prompt),
        num_samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        seq_id=body.seq_id,
        params=sampler_pb2.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop_given=params.stop is not None,
        ),
    )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    for stop in stops:
        if isinstance(stop, str):
            message.params.stop_strings.append(stop)
        elif 0 <= stop < 2**31:
            message.params.stop_token_ids.append(stop)
        else:
            raise TokenOutOfVocabulary(f"the stop token {stop} is no token id")
    return message


def _check_supported(body: Sample) -> None:
    asked = {
        "target_prompt_logprobs": body.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k != 0,
        "prompt_logprobs_last_n": body.prompt_logprobs_last_n is not None,
        "record_stability_info": bool(body.record_stability_info),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedInput(f"{name} is not supported by this server")


def _prompt_tokens(prompt: Prompt) -> bytes:
    """int32, little endian, as all machines that vLLM runs on have it."""
    tokens = array("i")
    assert tokens.itemsize == 4
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise UnsupportedInput(
                f"a prompt chunk of type {chunk.type!r} is not supported by this server; "
                "supported: encoded_text"
            )
        if chunk.tokens is None:
            raise InvalidRequest("prompt: a chunk of encoded_text has no tokens")
        try:
            tokens.extend(chunk.tokens)
        except OverflowError as error:
            raise TokenOutOfVocabulary("the prompt holds a number that is no token id") from error
    if not tokens:
        raise EmptyBatch("the prompt is empty")
    return tokens.tobytes()
