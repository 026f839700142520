"""A run that is continued from a checkpoint computes what the first one went on to compute."""

from __future__ import annotations

import numpy as np
import pytest
from support.data import largest_difference, logprobs, sequences, supervised, train
from support.stacks import TestStack
from tinker import ServiceClient, TrainingClient, types


def next_steps(run: TrainingClient) -> list[float]:
    """Losses of three further steps, whose size depends on the optimizer's moments."""
    found = []
    data = [supervised(tokens) for tokens in sequences(6, seed=171)]
    for _ in range(3):
        computed = run.forward_backward(data, "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=3e-3)).result(timeout=60)
        found.append(computed.result(timeout=60).metrics["loss:sum"])
    return found


def test_a_run_created_from_a_state_with_optimizer_continues_exactly(
    stack: TestStack, service: ServiceClient, run: TrainingClient
) -> None:
    probes = sequences(3, seed=172)
    train(run, seed=173)
    path = run.save_state("middle", overwrite=True).result(timeout=60).path
    saved = logprobs(run, probes)
    expected = next_steps(run)
    run.save_weights_and_get_sampling_client().result(timeout=120)

    future = service.create_training_client_from_state_with_optimizer(path)
    continued = future.result(timeout=120)
    assert continued.model_id != run.model_id
    assert largest_difference(saved, logprobs(continued, probes)) == 0
    assert next_steps(continued) == expected
    continued.save_weights_and_get_sampling_client().result(timeout=120)
    before, after = stack.published(run), stack.published(continued)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


def test_without_the_optimizer_the_weights_are_the_same_and_its_moments_start_afresh(
    service: ServiceClient, run: TrainingClient
) -> None:
    probes = sequences(3, seed=174)
    train(run, seed=175)
    path = run.save_state("middle-2", overwrite=True).result(timeout=60).path
    saved = logprobs(run, probes)
    expected = next_steps(run)

    fresh = service.create_training_client_from_state(path).result(timeout=120)
    assert largest_difference(saved, logprobs(fresh, probes)) == 0
    found = next_steps(fresh)
    assert found[0] == expected[0], "the same weights have the same next loss"
    assert found[1:] != pytest.approx(expected[1:], rel=1e-4), "the moments were not kept"
