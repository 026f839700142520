"""Sampling sessions and samples.

The gateway refuses an impossible request at once, as far as it knows the model
(`tandem/protocol/sample_limits.py`). The sampler checks the rest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from gateway.api.bounds import BoundFields, check_may_bound, version_check
from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.request_body import TOKENS_BODY, BoundedRequest, FirstFault, Ints, Texts, parse
from gateway.api.routing import Router, json_content, model_response
from gateway.core import Gateway
from gateway.identifiers import request_id_of
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession
from gateway.storage.futures.table import Future, digest_of
from gateway.workers.model_sizes import read_ahead
from tandem.errors import (
    EmptyBatch,
    InvalidRequest,
    Overloaded,
    SequenceTaken,
    SequenceTooLong,
    SessionFinished,
    StaleVersion,
    StorageFull,
    TokenOutOfVocabulary,
    UnknownModel,
    UnknownSampler,
    UnknownSession,
    UnknownWeights,
    UnsupportedInput,
)
from tandem.protocol.sample_limits import SampleLimits, scores_prompt
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

router = Router("/api/v1", tag="SDK")


class Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: Ints | None = None


class Prompt(BaseModel):
    chunks: Annotated[list[Chunk], FirstFault()]


class Params(BaseModel):
    """The SDK sends neither `min_p` nor penalties."""

    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Texts | Ints | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)


class TokenTensor(BaseModel):
    """Token ids, dense or sparse (CSR: rows by `sparse_crow_indices`, then columns)."""

    data: Ints
    dtype: str
    shape: list[int] | None = Field(None, max_length=8)
    sparse_crow_indices: Ints | None = None
    sparse_col_indices: Ints | None = None


class Sample(BoundFields):
    """A request for samples in a sampling session, or, in the protocol's oldest form, from a
    `base_model` or a `model_path`.

    `record_stability_info` is ignored: our loss stable_reinforce needs only the client's logprobs.
    """

    sampling_session_id: str | None = None
    seq_id: int | None = Field(None, ge=0, le=2**62)
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = Field(1, ge=1, le=16384)
    prompt: Prompt
    sampling_params: Params
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1000)
    topk_sample_logprobs: int = Field(0, ge=0, le=1000)
    target_prompt_logprobs: TokenTensor | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0, le=1000)
    prompt_logprobs_last_n: int | None = Field(None, ge=1, le=2**31 - 1)
    record_stability_info: bool | None = None


_MESSAGE = sampler_pb2.SampleRequest.DESCRIPTOR
_SAME = {name for name in Sample.model_fields if name in _MESSAGE.fields_by_name}


class CreateSamplingSession(BaseModel):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=2**53)
    base_model: str | None = None
    model_path: str | None = None


class Join(BaseModel):
    sampling_session_id: str


class SampleAccepted(Answer):
    """`sample_sequence_ids` has one id per sample."""

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


# Raw: pydantic parses and validates a long prompt in one step, in a little more than half of
# FastAPI's time.
@router.operation(
    "POST",
    "/asample",
    role="ci",
    audit=None,
    errors=[
        UnknownSampler,
        SessionFinished,
        SequenceTaken,
        UnknownModel,
        UnknownWeights,
        StaleVersion,
        SequenceTooLong,
        TokenOutOfVocabulary,
        Overloaded,
        StorageFull,
    ],
    rules=[
        "Either a `sampling_session_id` with a `seq_id`, or a `base_model`, or a `model_path`.",
        "The prompt is text alone, with at least one token; every token is one of the vocabulary.",
        "The prompt and `max_tokens` fit into the model's context; 0 needs logprobs of the prompt.",
    ],
    bounds=TOKENS_BODY,
    raw=json_content(Sample),
    responses={200: {"model": SampleAccepted}},
)
async def asample(request: BoundedRequest) -> Response:
    """Ask for samples. Idempotent: a repeated seq_id with the same request returns the original
    request_id. 429 when too many samples wait."""
    access = Access(request)
    gateway = access.gateway

    def read(raw: bytes) -> tuple[Sample, sampler_pb2.SampleRequest, bytes]:
        body = parse(Sample, raw, most_values=request.most_values)
        message = _sample_request(body)
        body.prompt = Prompt(chunks=[])  # free the tokens here, perhaps in a thread
        return body, message, digest_of("asample", raw)

    body, message, digest = await request.read(read)
    session, seq_id = await _session_and_seq_id(access, body)
    request_id = request_id_of(owner=session.id, seq_id=seq_id)
    limits: SampleLimits | None = None
    with suppress(UnknownModel):  # its sampler may run all the same
        model = gateway.models.get(session.base_model)
        await read_ahead(model.path, gateway.settings)
        limits = await gateway.models.limits(model)
    if (accepted := gateway.futures.get(request_id)) is not None:
        if accepted.digest != digest:
            raise SequenceTaken(
                f"sample {seq_id} of {session.id} is already another request, which stays as it "
                "is: two clients number the samples of one sampling session. Let each client join "
                "it (join_sampling_session), which gives it numbers of its own"
            )
    else:
        if limits is not None:
            limits.check_request(message)
        owner = gateway.sessions.require(session.session_id).owner
        await check_may_bound(gateway, session.version, body.bounds, owner=owner)
        sampler = sampler_of(gateway, session)
        message.operation_id = request_id
        message.session_id = session.session_id
        message.seq_id = seq_id
        message.version.CopyFrom(session.version.to_proto())
        session.choose_updates(message)
        future = Future(
            request_id=request_id,
            source="sample",
            owner=owner,
            digest=digest,
            describe=lambda: sampler.describe_sample(request_id),
        )
        check = version_check(gateway, body.bounds, session)
        gateway.samplers.submit(sampler, future=future, request=message, check=check)
        gateway.futures.add(future)
        gateway.completions.watch(future)
    return model_response(
        SampleAccepted(
            request_id=request_id,
            # The SDK wants an id for each future sample.
            sample_sequence_ids=[f"{request_id}:{i}" for i in range(body.num_samples)],
        )
    )


@router.operation(
    "POST",
    "/create_sampling_session",
    role="ci",
    audit="sampler_create",
    errors=[UnknownSession, SessionFinished, SequenceTaken, UnknownModel, UnknownWeights],
    rules=["Either `base_model` or `model_path` is needed, and the path must be one."],
)
async def create_sampling_session(
    body: CreateSamplingSession, access: AccessDep
) -> CreatedSamplingSession:
    """Begin to sample from a base model or a checkpoint. The engine starts with the first
    sample."""
    await access.session(body.session_id)
    session = await access.gateway.sampling.create(
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=body.base_model,
        model_path=body.model_path,
        readers=access.readers(),
    )
    await access.session(body.session_id)  # it may have ended meanwhile
    access.audit.note(session.id)
    return CreatedSamplingSession(type="create_sampling_session", sampling_session_id=session.id)


@router.operation("POST", "/join_sampling_session", role="ci", audit=None, errors=[UnknownSampler])
async def join_sampling_session(body: Join, access: AccessDep) -> Joined:
    """Return a number for another client of a sampling session, such as an unpickled one."""
    await access.sampling_session(body.sampling_session_id)
    number = await access.gateway.sampling.join(body.sampling_session_id)
    return Joined(type="join_sampling_session", client_counter=number)


@router.operation("GET", "/samplers/{sampler_id}", role="reader", errors=[UnknownSampler])
async def get_sampler(sampler_id: PathText, access: AccessDep) -> SamplerInfo:
    """Return a sampling session's base model and checkpoint."""
    session = await access.sampling_session(sampler_id)
    return SamplerInfo.of(session, sampler_id=session.id, model_path=session.model_path or None)


async def _session_and_seq_id(access: Access, body: Sample) -> tuple[SamplingSession, int]:
    gateway, owner = access.gateway, access.caller.owner
    if body.sampling_session_id is None:
        model = (body.base_model, body.model_path)
        if model.count(None) != 1:
            raise InvalidRequest(
                "a sample needs a sampling_session_id with a seq_id, or else one of base_model "
                "and model_path"
            )
        access.check_blueprint(None)
        # The first request fixes the weights.
        async with gateway.implicit_sessions.place(owner, model) as (session_id, number):
            session = await gateway.sampling.create(
                session_id=session_id,
                number=number,
                base_model=body.base_model,
                model_path=body.model_path,
                readers=access.readers(),
            )
        return session, next(session.seq_ids)
    if body.seq_id is None:
        raise InvalidRequest("a sample in a sampling session needs a seq_id")
    session = await access.sampling_session(body.sampling_session_id)
    return session, body.seq_id


def sampler_of(gateway: Gateway, session: SamplingSession) -> Sampler:
    """Return the session's sampler, created if needed. A running one continues without its model's
    name."""
    run = gateway.runs.get(session.version.run_id)
    kept = run.host.sampler if run is not None and run.session_id == session.session_id else None
    sampler = gateway.samplers.get(
        session_id=session.session_id,
        model_name=session.base_model,
        rank=session.rank,
        all_weights=session.all_weights,
        kept=kept,
    )
    return sampler or gateway.samplers.ensure(
        session_id=session.session_id,
        model=gateway.models.get(session.base_model),
        rank=session.rank,
        all_weights=session.all_weights,
        kept=kept,
    )


def _sample_request(body: Sample) -> sampler_pb2.SampleRequest:
    params, targets = body.sampling_params, body.target_prompt_logprobs
    if body.prompt_logprobs_last_n is not None and not body.prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs_last_n is about prompt logprobs; ask for them, too "
            "(include_prompt_logprobs)"
        )
    message = sampler_pb2.SampleRequest(
        **body.model_dump(include=_SAME),
        prompt_tokens=prompt_tokens(body.prompt),
        target_prompt_tokens=b"" if targets is None else _tensor(targets).SerializeToString(),
        params=sampler_pb2.SamplingParams(
            **params.model_dump(exclude={"stop"}), stop_given=params.stop is not None
        ),
    )
    if params.max_tokens == 0 and not scores_prompt(message):
        raise InvalidRequest(
            "max_tokens is 0; at least 1 is needed, unless logprobs of the prompt are asked for"
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


def _tensor(tensor: TokenTensor) -> tinker_pb2.Tensor:
    """Encode as little-endian int64, like the trainer's tensors. The sampler checks the values."""
    if tensor.dtype != "int64":
        raise InvalidRequest(
            f"target_prompt_logprobs is of {tensor.dtype[:40]!r}; token ids are int64"
        )
    shape = tensor.shape if tensor.shape is not None else [len(tensor.data)]
    if not all(0 <= size < 2**31 for size in shape):
        raise InvalidRequest(f"target_prompt_logprobs cannot have the shape {shape}")
    values, rows, columns = (
        packed_integers("q", numbers or (), "target_prompt_logprobs")
        for numbers in (tensor.data, tensor.sparse_crow_indices, tensor.sparse_col_indices)
    )
    message = tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_INT64, shape=shape)
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        message.dense = values
    else:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = rows
        message.sparse_csr.col_indices = columns
    return message


def prompt_tokens(prompt: Prompt) -> bytes:
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise UnsupportedInput(
                f"a prompt chunk of type {chunk.type[:40]!r} is not supported by this server, "
                "which samples from text alone; supported: encoded_text"
            )
        if chunk.tokens is None:
            raise InvalidRequest("prompt: a chunk of encoded_text has no tokens")
    tokens = chain.from_iterable(chunk.tokens or () for chunk in prompt.chunks)
    packed = packed_integers("i", tokens, "the prompt")
    if not packed:
        raise EmptyBatch("the prompt is empty")
    return packed


def packed_integers(typecode: Literal["i", "q"], numbers: Iterable[int], what: str) -> bytes:
    """Return little-endian int32 or int64, the byte order of all machines for vLLM."""
    try:
        return array(typecode, numbers).tobytes()
    except OverflowError as error:
        raise TokenOutOfVocabulary(f"{what} holds a number that is no token id") from error
