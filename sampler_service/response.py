"""From an engine's result to the bytes of `tandem.wire.v1.SampleResponse`, which the client gets.

Arrays are little-endian: tokens int32, logprobs float32, NaN where there is none.
"""

from __future__ import annotations

from sampler_service.engine import EngineResult, SampledTokens, TopK
from tandem.wire.v1 import tinker_pb2


def encode_response(result: EngineResult, *, version: str, prompt_logprobs: bool) -> bytes:
    """`prompt_logprobs` says whether the client asked for them (top-k alone computes them, too)."""
    message = tinker_pb2.SampleResponse(
        sequences=[_sequence(sample) for sample in result.samples],
        prompt_cache_hit_tokens=result.cached_tokens,
        tandem_weight_version=version,
    )
    if prompt_logprobs and result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.prompt_topk is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.prompt_topk))
    return message.SerializeToString()


def _sequence(sample: SampledTokens) -> tinker_pb2.SampledSequence:
    return tinker_pb2.SampledSequence(
        stop_reason=(
            tinker_pb2.STOP_REASON_STOP if sample.stopped else tinker_pb2.STOP_REASON_LENGTH
        ),
        tokens=sample.tokens.astype("<i4", copy=False).tobytes(),
        logprobs=sample.logprobs.astype("<f4", copy=False).tobytes(),
        topk_sampled_logprobs=_topk(sample.topk) if sample.topk is not None else None,
    )


def _topk(topk: TopK) -> tinker_pb2.TopkLogprobs:
    length, k = topk.token_ids.shape
    return tinker_pb2.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4", copy=False).tobytes(),
        logprobs=topk.logprobs.astype("<f4", copy=False).tobytes(),
        k=k,
        length=length,
    )
