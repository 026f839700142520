"""Asking a sampler through the SDK."""

from __future__ import annotations

import numpy as np
from tinker import SamplingClient, types

from tests.integration.support.data import Floats

TIMEOUT = 120.0


def params(*, tokens: int = 8, seed: int | None = None, temperature: float = 1.0):
    # An empty list of stops: the end-of-sequence token does not end a sample either.
    return types.SamplingParams(max_tokens=tokens, seed=seed, temperature=temperature, stop=[])


def sample(
    sampler: SamplingClient, prompt: list[int], *, count: int = 1, **settings
) -> list[types.SampledSequence]:
    return list(
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            num_samples=count,
            sampling_params=params(**settings),
        )
        .result(timeout=TIMEOUT)
        .sequences
    )


def prompt_logprobs(sampler: SamplingClient, tokens: list[list[int]]) -> list[Floats]:
    """The sampler's logprobs of tokens[1:], as `data.logprobs` has the trainer's."""
    futures = [sampler.compute_logprobs(types.ModelInput.from_ints(each)) for each in tokens]
    found = []
    for future in futures:
        answer = future.result(timeout=TIMEOUT)
        assert answer[0] is None, "the first token has no logprob"
        found.append(np.array(answer[1:], np.float32))
    return found
