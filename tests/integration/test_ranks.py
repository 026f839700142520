"""A run on two ranks computes what a run on one rank computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tinker import TrainingClient

from tests.support.sdk import (
    LOSSES,
    adam,
    batch,
    largest_difference,
    logprobs,
    rewind,
    sequences,
    start_runs,
)
from tests.support.stacks import TIED, TestStack, running


@pytest.fixture(scope="module")
def two_ranks(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestStack, TrainingClient]]:
    data_dir = tmp_path_factory.mktemp("two-ranks")
    with (
        running(data_dir, models=models, settings={"trainer_ranks": "2"}) as stack,
        stack.service() as service,
    ):
        yield stack, start_runs(service, TIED)[TIED]


def three_steps(
    stack: TestStack, run: TrainingClient, loss: str
) -> tuple[list[float], dict[str, np.ndarray], list[np.ndarray]]:
    """Losses of three steps, the weights published after them, and logprobs of other tokens.

    Seven datums do not divide by two ranks, and the last batch has fewer datums than ranks.
    """
    losses = []
    for step, count in enumerate((7, 5, 1)):
        tokens = sequences(count, seed=100 + step)
        data = batch(loss, tokens, old=logprobs(run, tokens), seed=step)
        future = run.forward_backward(data, loss)
        run.optim_step(adam()).result(timeout=60)
        losses.append(future.result(timeout=60).metrics["loss:sum"])
    run.save_weights_and_get_sampling_client().result(timeout=120)
    return losses, stack.published(run), logprobs(run, sequences(4, seed=110))


@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_compute_the_losses_and_weights_of_one(
    stack: TestStack,
    run: TrainingClient,
    two_ranks: tuple[TestStack, TrainingClient],
    loss: str,
) -> None:
    other_stack, other_run = two_ranks
    one = three_steps(stack, run, loss)
    two = three_steps(other_stack, rewind(other_run), loss)
    assert two[0] == pytest.approx(one[0], rel=1e-4, abs=1e-4)
    assert two[1].keys() == one[1].keys()
    for name, tensor in one[1].items():
        np.testing.assert_allclose(two[1][name], tensor, atol=2e-5, err_msg=name)
    assert largest_difference(one[2], two[2]) < 1e-4


def test_each_rank_writes_its_own_part_of_a_version(
    two_ranks: tuple[TestStack, TrainingClient],
) -> None:
    stack, run = two_ranks
    run.save_weights_and_get_sampling_client().result(timeout=120)
    sizes = [file.stat().st_size for file in stack.newest_version(run).glob("*.safetensors")]
    assert len(sizes) == 2
    assert min(sizes) > 0.2 * max(sizes), "the bytes are balanced over the ranks"
