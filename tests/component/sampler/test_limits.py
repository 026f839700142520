"""A real engine with hardly any room: requests take turns, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem.v1 import sampler_pb2
from tests.support.sampler_worker import SamplerClient, plain_logprobs, same, sampler_process
from tests.support.tiny_model import VOCABULARY

LENGTH = 512


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[SamplerClient]:
    """1 MiB of keys and values: some 1,300 tokens of this model."""
    with sampler_process(model, kv_cache_bytes=2**20, max_num_seqs=16) as client:
        yield client


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, 40 + number).tolist() for number in range(count)]


def test_samples_are_the_same_when_requests_push_each_other_out_of_the_cache(
    narrow: SamplerClient, sampler: SamplerClient, model: Path
):
    def requests(client: SamplerClient) -> list[sampler_pb2.SampleRequest]:
        return [
            client.request(
                prompt,
                seed=number,
                max_tokens=150,
                stop=[],
                prompt_logprobs=number % 2 == 0,
            )
            for number, prompt in enumerate(prompts(24))
        ]

    tight, roomy = (client.sample_all(requests(client)) for client in (narrow, sampler))
    for number, (one, other) in enumerate(zip(tight, roomy, strict=True)):
        assert [s.tokens for s in one.samples] == [s.tokens for s in other.samples]
        if number % 2 == 0:
            assert one.prompt_logprobs is not None
            expected = plain_logprobs(model, prompts(24)[number])
            assert np.abs(one.prompt_logprobs[1:] - expected).max() < 1e-4


def test_more_requests_than_sequences_are_all_answered(narrow: SamplerClient):
    answers = narrow.sample_all(
        [narrow.request([5, 9], n=5, seed=number, max_tokens=5, stop=[]) for number in range(20)]
    )
    assert same(answers[3], narrow.sample([5, 9], n=5, seed=3, max_tokens=5, stop=[]))


def test_a_prompt_longer_than_the_model_is_a_typed_mistake(narrow: SamplerClient):
    failure = narrow.refusal(narrow.request([5] * LENGTH))
    assert failure.type == "sequence_too_long"
    assert str(LENGTH) in failure.message
