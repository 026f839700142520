"""Messages and what is inside: weight versions, and the `tandem.wire.v1.SampleResponse` that the
client gets.

Arrays are little-endian: tokens int32, logprobs float32, NaN where there is none.
"""

from __future__ import annotations

from pathlib import Path

from sampler_service.engine import EngineResult, SampledTokens, TopK
from sampler_service.reload import Version
from sampler_service.sampling import Question
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2
from tandem.wire.v1 import tinker_pb2


def encode_response(result: EngineResult, *, version: str, question: Question) -> bytes:
    """The answer to a question, with what it asked for and nothing else."""
    message = tinker_pb2.SampleResponse(
        sequences=[_sequence(sample) for sample in result.samples],
        prompt_cache_hit_tokens=result.cached_tokens,
        tandem_weight_version=version,
    )
    prompt = result.prompt
    if prompt is None:
        return message.SerializeToString()
    if question.prompt_logprobs and prompt.logprobs is not None:
        message.prompt_logprobs = prompt.logprobs.astype("<f4", copy=False).tobytes()
    if prompt.topk is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(prompt.topk))
    if question.targets is not None and prompt.targets is not None:
        message.target_prompt_logprobs.CopyFrom(question.targets.answer(prompt.targets))
    if prompt.draws is not None:
        message.prompt_alt_tokens.CopyFrom(_draws(prompt.draws))
    return message.SerializeToString()


def _sequence(sample: SampledTokens) -> tinker_pb2.SampledSequence:
    return tinker_pb2.SampledSequence(
        stop_reason=stop_reason(stopped=sample.stopped),
        tokens=sample.tokens.astype("<i4", copy=False).tobytes(),
        logprobs=sample.logprobs.astype("<f4", copy=False).tobytes(),
        topk_sampled_logprobs=_topk(sample.topk) if sample.topk is not None else None,
    )


def stop_reason(*, stopped: bool) -> tinker_pb2.StopReason.ValueType:
    return tinker_pb2.STOP_REASON_STOP if stopped else tinker_pb2.STOP_REASON_LENGTH


def _topk(topk: TopK) -> tinker_pb2.TopkLogprobs:
    length, k = topk.token_ids.shape
    return tinker_pb2.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4", copy=False).tobytes(),
        logprobs=topk.logprobs.astype("<f4", copy=False).tobytes(),
        k=k,
        length=length,
    )


def _draws(draws: TopK) -> tinker_pb2.PromptAltTokens:
    """Both [prompt - 1, k]. The SDK takes int32 tokens here, and makes int64 of them."""
    return tinker_pb2.PromptAltTokens(
        tokens=tinker_pb2.Tensor(
            dense=draws.token_ids.astype("<i4", copy=False).tobytes(),
            dtype=tinker_pb2.DTYPE_INT32,
            shape=draws.token_ids.shape,
        ),
        logprobs=tinker_pb2.Tensor(
            dense=draws.logprobs.astype("<f4", copy=False).tobytes(),
            dtype=tinker_pb2.DTYPE_FLOAT32,
            shape=draws.logprobs.shape,
        ),
    )


def version_of(message: common_pb2.WeightVersion) -> Version:
    if not message.name or not message.path:
        raise InvalidRequest("the request names no weight version, or not where it lies")
    return Version(
        name=message.name,
        path=Path(message.path),
        run_id=message.run_id,
        step=message.step,
        adapter=message.adapter,
    )


def version_message(version: Version) -> common_pb2.WeightVersion:
    return common_pb2.WeightVersion(
        name=version.name,
        path=str(version.path),
        run_id=version.run_id,
        step=version.step,
        adapter=version.adapter,
    )
