"""What the sampler computes is what the trainer computes, after every publish."""

from __future__ import annotations

import numpy as np
from tinker import TrainingClient

from tests.support.sdk import (
    adam,
    largest_difference,
    logprobs,
    prompt_logprobs,
    sample,
    sequences,
    supervised,
    train,
)

TOLERANCE = 1e-4


def test_sampled_logprobs_equal_the_trainers(any_run: TrainingClient) -> None:
    train(any_run, seed=11)
    sampler = any_run.save_weights_and_get_sampling_client().result(timeout=120)
    prompts = sequences(4, seed=12)
    wholes, sampled = [], []
    for index, prompt in enumerate(prompts):
        for sequence in sample(sampler, prompt, count=3, tokens=12, seed=index):
            assert len(sequence.tokens) == 12
            wholes.append(prompt + list(sequence.tokens))
            sampled.append(np.array(sequence.logprobs, np.float32))
    trained = [each[-12:] for each in logprobs(any_run, wholes)]
    assert largest_difference(trained, sampled) < TOLERANCE


def test_prompt_logprobs_equal_the_trainers_forward(any_run: TrainingClient) -> None:
    train(any_run, seed=21)
    sampler = any_run.save_weights_and_get_sampling_client().result(timeout=120)
    tokens = sequences(6, seed=22)
    assert largest_difference(logprobs(any_run, tokens), prompt_logprobs(sampler, tokens)) < (
        TOLERANCE
    )


def test_after_every_publish_the_sampler_serves_exactly_the_new_weights(
    any_run: TrainingClient,
) -> None:
    """Also where input and output embeddings are one tensor, which an engine may hold twice."""
    tokens = sequences(4, seed=31)
    before = logprobs(any_run, tokens)
    for publish in range(3):
        train(any_run, seed=32 + publish, steps=2)
        sampler = any_run.save_weights_and_get_sampling_client().result(timeout=120)
        now = logprobs(any_run, tokens)
        assert largest_difference(before, now) > 100 * TOLERANCE, "the weights hardly moved"
        assert largest_difference(now, prompt_logprobs(sampler, tokens)) < TOLERANCE
        before = now


def test_greedy_samples_follow_the_new_weights(run: TrainingClient) -> None:
    """A policy that was taught one answer gives that answer, and before it did not."""
    prompt, answer = [20, 30, 40], [50, 60, 70, 80]
    before = run.save_weights_and_get_sampling_client().result(timeout=120)
    assert list(sample(before, prompt, tokens=4, temperature=0.0)[0].tokens) != answer
    for _ in range(40):
        run.forward_backward([supervised(prompt + answer)], "cross_entropy")
        stepped = run.optim_step(adam())
    stepped.result(timeout=120)
    after = run.save_weights_and_get_sampling_client().result(timeout=120)
    assert list(sample(after, prompt, tokens=4, temperature=0.0)[0].tokens) == answer


def test_the_same_seed_gives_the_same_samples_through_the_whole_stack(
    run: TrainingClient,
) -> None:
    train(run, seed=41)
    sampler = run.save_weights_and_get_sampling_client().result(timeout=120)
    prompt = [5, 6, 7, 8]
    first = [list(s.tokens) for s in sample(sampler, prompt, count=4, tokens=16, seed=9)]
    again = [list(s.tokens) for s in sample(sampler, prompt, count=4, tokens=16, seed=9)]
    other = [list(s.tokens) for s in sample(sampler, prompt, count=4, tokens=16, seed=10)]
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first}) == 4, "the samples of a request differ"
    published_again = run.save_weights_and_get_sampling_client().result(timeout=120)
    later = [list(s.tokens) for s in sample(published_again, prompt, count=4, tokens=16, seed=9)]
    assert first == later, "the same weights under another version give the same samples"
