"""The body of asample, and the message for the engine that comes of it.

What needs no model to be seen is refused here, at once; the sampler knows the vocabulary and
the model's length, and says the rest in its answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from gateway.api.request_body import FirstFault
from tandem.errors import EmptyBatch, InvalidRequest, TokenOutOfVocabulary, UnsupportedInput
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

Ints = Annotated[list[int], FirstFault()]


class Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: Ints | None = None


class Prompt(BaseModel):
    chunks: Annotated[list[Chunk], FirstFault()]


class Params(BaseModel):
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], FirstFault()] | Ints | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)


class TokenTensor(BaseModel):
    """Token ids, dense or sparse (CSR: rows by `sparse_crow_indices`, then columns)."""

    data: Ints
    dtype: str
    shape: list[int] | None = Field(None, max_length=8)
    sparse_crow_indices: Ints | None = None
    sparse_col_indices: Ints | None = None


class Sample(BaseModel):
    """Either in a sampling session, with a place in it, or, as the protocol's oldest form has
    it, of a `base_model` or a `model_path`.

    `record_stability_info` asks a server to keep what it needs for the loss stable_reinforce;
    ours takes that from the logprobs that the client sends, so that nothing is kept.
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


def sample_request(body: Sample) -> sampler_pb2.SampleRequest:
    """All that a client says of a sample but whose it is. Raises a `UserError`."""
    params = body.sampling_params
    if body.prompt_logprobs_last_n is not None and not body.prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs_last_n is about prompt logprobs; ask for them, too "
            "(include_prompt_logprobs)"
        )
    message = sampler_pb2.SampleRequest(
        prompt_tokens=_prompt_tokens(body.prompt),
        num_samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        params=sampler_pb2.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop_given=params.stop is not None,
        ),
    )
    if body.target_prompt_logprobs is not None:
        message.target_prompt_tokens = _tensor(body.target_prompt_logprobs).SerializeToString()
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
    """As the trainer's tensors are: int64, little endian. Their numbers are the sampler's to
    check."""
    if tensor.dtype != "int64":
        raise InvalidRequest(
            f"target_prompt_logprobs is of {tensor.dtype[:40]!r}; token ids are int64"
        )
    shape = tensor.shape if tensor.shape is not None else [len(tensor.data)]
    if not all(0 <= size < 2**31 for size in shape):
        raise InvalidRequest(f"target_prompt_logprobs cannot have the shape {shape}")
    message = tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_INT64, shape=shape)
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        message.dense = _int64(tensor.data)
        return message
    message.sparse_csr.values = _int64(tensor.data)
    message.sparse_csr.crow_indices = _int64(tensor.sparse_crow_indices or ())
    message.sparse_csr.col_indices = _int64(tensor.sparse_col_indices or ())
    return message


def _int64(numbers: Sequence[int]) -> bytes:
    try:
        return array("q", numbers).tobytes()
    except OverflowError as error:
        raise TokenOutOfVocabulary(
            "target_prompt_logprobs holds a number that is no token id"
        ) from error


def _prompt_tokens(prompt: Prompt) -> bytes:
    """int32, little endian, as all machines that vLLM runs on have it."""
    tokens = array("i")
    assert tokens.itemsize == 4
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise UnsupportedInput(
                f"a prompt chunk of type {chunk.type[:40]!r} is not supported by this server, "
                "which samples from text alone; supported: encoded_text"
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
