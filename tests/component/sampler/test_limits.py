"""An engine with little room (`tied_adapters`): requests take turns, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tandem.v1 import sampler_pb2
from tests.support.sampler_worker import SamplerClient, plain_logprobs, same
from tests.support.tiny_model import VOCABULARY


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, 40 + number).tolist() for number in range(count)]


def test_samples_are_the_same_when_requests_push_each_other_out_of_the_cache(
    tied_adapters: SamplerClient, sampler: SamplerClient, model: Path
):
    def requests(client: SamplerClient) -> list[sampler_pb2.SampleRequest]:
        return [
            client.request(
                prompt, seed=number, max_tokens=150, stop=[], prompt_logprobs=number % 2 == 0
            )
            for number, prompt in enumerate(prompts(24))
        ]

    tight, roomy = (client.sample_all(requests(client)) for client in (tied_adapters, sampler))
    for number, (one, other) in enumerate(zip(tight, roomy, strict=True)):
        assert [s.tokens for s in one.samples] == [s.tokens for s in other.samples]
        if number % 2 == 0:
            assert one.prompt_logprobs is not None
            expected = plain_logprobs(model, prompts(24)[number])
            assert np.abs(one.prompt_logprobs[1:] - expected).max() < 1e-4


def test_more_requests_than_sequences_are_all_answered(tied_adapters: SamplerClient):
    answers = tied_adapters.sample_all(
        [
            tied_adapters.request([5, 9], n=5, seed=number, max_tokens=5, stop=[])
            for number in range(20)
        ]
    )
    assert same(answers[3], tied_adapters.sample([5, 9], n=5, seed=3, max_tokens=5, stop=[]))
