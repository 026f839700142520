"""Stop conditions in a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.sampler_worker import (
    EOS,
    LENGTH,
    PROMPT,
    SamplerClient,
    sampler_process,
    text,
    tokens_of,
)
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def long_sample(sampler: SamplerClient) -> list[int]:
    """The sample of seed 5 without stops."""
    return sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[]).samples[0].tokens


def test_a_stop_token_ends_the_sample_and_is_part_of_it(
    sampler: SamplerClient, long_sample: list[int]
):
    stop = long_sample[7]
    (sample,) = sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[stop]).samples
    assert sample.stopped
    assert sample.tokens == long_sample[: long_sample.index(stop) + 1]
    assert len(sample.logprobs) == len(sample.tokens)


def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it(
    sampler: SamplerClient, long_sample: list[int]
):
    at = next(i for i in range(5, 58) if min(long_sample[i : i + 2]) > 2)
    stop = text(long_sample[at : at + 2])
    (sample,) = sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[stop, "never this"]).samples
    assert sample.stopped
    assert sample.tokens == long_sample[: len(sample.tokens)]
    assert text(sample.tokens[-2:]) == stop
    assert len(sample.logprobs) == len(sample.tokens)


def test_an_empty_stop_list_samples_on_behind_the_end_token(sampler: SamplerClient):
    requests = [
        sampler.request(PROMPT, n=32, seed=9, max_tokens=60, stop=stop) for stop in (None, [])
    ]
    stopping, running_on = sampler.sample_all(requests)
    ended = [tokens for tokens in tokens_of(running_on) if EOS in tokens[:-1]]
    assert ended, "no sample had an end token: the test proves nothing"
    assert all(len(sample.tokens) == 60 and not sample.stopped for sample in running_on.samples)
    for sample, whole in zip(stopping.samples, tokens_of(running_on), strict=True):
        cut = whole.index(EOS) + 1 if EOS in whole else 60
        assert sample.tokens == whole[:cut]
        assert sample.stopped == (EOS in whole)


def test_without_max_tokens_the_models_length_ends_the_sample(sampler: SamplerClient):
    (sample,) = sampler.sample(PROMPT, max_tokens=None, stop=[]).samples
    assert (len(PROMPT) + len(sample.tokens), sample.stopped) == (LENGTH, False)


def test_a_stop_string_is_refused_where_the_tokenizer_cannot_be_read_and_others_go_on(
    tmp_path: Path,
):
    model = write_tiny_model(tmp_path / "m", head_dim=32, max_length=LENGTH)
    (model / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unknown"}}))
    with sampler_process(model) as client:
        others = client.send(client.request(PROMPT, n=20, max_tokens=400, stop=[]))
        refused = client.send(client.request(PROMPT, max_tokens=5, stop=["a"])).result()
        assert refused.failure.type == "unsupported_input"
        assert "the model's tokenizer, which does not load" in refused.failure.message
        assert not others.result().HasField("failure")
