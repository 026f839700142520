"""Sampler and trainer agree after every publish."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
from tinker import ServiceClient, TrainingClient, types

from tests.support.sdk import (
    TIMEOUT,
    largest_difference,
    logprobs,
    prompt_logprobs,
    sample,
    sequences,
    train,
)
from tests.support.stacks import TIED, TestStack

TOLERANCE = 1e-4


def test_sampled_logprobs_equal_the_trainers(any_run: TrainingClient) -> None:
    train(any_run, seed=11)
    sampler = any_run.save_weights_and_get_sampling_client().result(timeout=240)
    prompts = sequences(4, seed=12)
    wholes, sampled = [], []
    for index, prompt in enumerate(prompts):
        for sequence in sample(sampler, prompt, count=3, tokens=12, seed=index):
            assert len(sequence.tokens) == 12
            wholes.append(prompt + list(sequence.tokens))
            sampled.append(np.array(sequence.logprobs, np.float32))
    trained = [each[-12:] for each in logprobs(any_run, wholes)]
    assert largest_difference(trained, sampled) < TOLERANCE


def test_after_every_publish_the_sampler_serves_exactly_the_new_weights(
    any_run: TrainingClient,
) -> None:
    """Also with tied embeddings, which an engine may hold twice."""
    tokens = sequences(4, seed=31)
    before = logprobs(any_run, tokens)
    for publish in range(3):
        train(any_run, seed=32 + publish, steps=2)
        sampler = any_run.save_weights_and_get_sampling_client().result(timeout=240)
        now = logprobs(any_run, tokens)
        assert largest_difference(before, now) > 100 * TOLERANCE, "the weights hardly moved"
        assert largest_difference(now, prompt_logprobs(sampler, tokens)) < TOLERANCE
        before = now


def test_a_snapshot_that_is_sampled_from_during_training_gives_one_version_alone(
    run: TrainingClient,
) -> None:
    train(run, seed=95)
    snapshot = run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
    tokens = sequences(5, seed=91)
    frozen = logprobs(run, tokens)
    futures = []
    for seed in (96, 97):
        futures += [snapshot.compute_logprobs(types.ModelInput.from_ints(t)) for t in tokens]
        train(run, seed=seed, steps=1)
        run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
    served = [np.array(future.result(timeout=TIMEOUT)[1:], np.float32) for future in futures]
    assert largest_difference(served, frozen * 2) < 1e-4


def test_the_tokenizer_is_found_by_the_models_path(
    service: ServiceClient, models: dict[str, Path]
) -> None:
    """The SDK takes the base model's name as the tokenizer's path."""
    sampler = service.create_sampling_client(base_model=str(models[TIED])).result(timeout=TIMEOUT)
    assert sampler.get_tokenizer().decode([13, 14]) == "*+"
    assert len(sample(sampler, [5, 6, 7], tokens=3)[0].tokens) == 3


def test_a_list_of_sequences_is_scored_as_the_sdk_scores_each(
    service: ServiceClient, stack: TestStack
) -> None:
    sampler = service.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT)
    tokens = [[5], *(each[: 2 + i % 9] for i, each in enumerate(sequences(80, seed=71)))]
    expected = [
        future.result(timeout=TIMEOUT)
        for future in [sampler.compute_logprobs(types.ModelInput.from_ints(t)) for t in tokens]
    ]
    endpoint = stack.stack.endpoint
    answer = httpx.post(
        f"{endpoint.url}/api/tandem/v1/logprobs",
        headers={"X-API-Key": endpoint.api_key},
        json={"model": TIED, "sequences": [*tokens[:40], [5, 10**6], *tokens[40:]]},
        timeout=TIMEOUT,
    ).json()
    assert answer["weight_version"] == f"base/{TIED}"
    wrong = answer["sequences"].pop(40)
    assert (wrong["index"], wrong["logprobs"]) == (40, None)
    assert wrong["failure"]["type"] == "token_out_of_vocabulary"
    assert [each["logprobs"][0] for each in answer["sequences"]] == [None] * len(tokens)
    for each, logprobs_ in zip(answer["sequences"], expected, strict=True):
        assert np.allclose(each["logprobs"][1:], logprobs_[1:], rtol=0, atol=TOLERANCE)
