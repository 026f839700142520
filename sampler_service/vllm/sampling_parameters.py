"""vLLM's parameters for each sample of a request.

- Each sample is its own request, with a seed hashed from (s, i). With vLLM's s + i, neighbouring
  seeds would share samples.
- `ignore_eos` is always on, and end tokens are stop tokens (`request_parser.py`)."""

from __future__ import annotations

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from sampler_service.engine import EngineRequest, PromptScoring
from sampler_service.vllm.grammars import PRECOMPILED, GrammarParameters
from sampler_service.vllm.prefix_cache import CACHE_LIMIT_ARGUMENT, LEADER_ARGUMENT
from sampler_service.vllm.prompt_scoring import SCORING_ARGUMENT

_LARGEST_CHECKED_TEMPERATURE = 2.0
"""The largest temperature that vLLM's constructor accepts. Its sampler computes larger ones too."""


def parameters_of(
    request: EngineRequest, *, index: int, scoring: PromptScoring | None, leader: str
) -> GrammarParameters:
    """Return the parameters of sample `index`.

    It scores the prompt by `scoring`, and shares the prefill of `leader`, vLLM's id of another
    sample."""
    seeded = request.seed is not None and request.temperature > 0
    extra: dict[str, object] | None = {LEADER_ARGUMENT: leader} if leader else None
    if scoring is not None and scoring.first_computed is not None:
        extra = {SCORING_ARGUMENT: request.id, CACHE_LIMIT_ARGUMENT: scoring.first_computed - 1}
    parameters = GrammarParameters(
        max_tokens=max(1, request.max_tokens),  # vLLM needs 1 or more: `pending.py` drops it
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=_child_seed(request.seed or 0, index) if seeded else None,
        stop=list(request.stop_strings) or None,
        include_stop_str_in_output=True,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,
        logprobs=request.topk,
        extra_args=extra,
        skip_clone=True,
        detokenize=bool(request.stop_strings),
        output_kind=(
            RequestOutputKind.CUMULATIVE if request.streamed else RequestOutputKind.FINAL_ONLY
        ),
        structured_outputs=(
            StructuredOutputsParams(regex=PRECOMPILED) if request.grammar is not None else None
        ),
        temperature=min(request.temperature, _LARGEST_CHECKED_TEMPERATURE),
    )
    parameters.temperature = request.temperature
    return parameters


def _child_seed(seed: int, index: int) -> int:
    """Return the 32-bit seed of sample `index`: SplitMix64 over both (Steele et al. 2014)."""
    mask = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 32
