"""What a forward_backward and an optim_step do to the weights, seen from the client."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tinker import TrainingClient

from tests.support.sdk import (
    LOSSES,
    POLICY_LOSSES,
    adam,
    batch,
    datum,
    largest_difference,
    logprobs,
    outputs,
    refusal,
    rewind,
    sequences,
    supervised,
    train,
)
from tests.support.stacks import TestStack


def digests(version: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in version.glob("*.safetensors")
    }


def publish(run: TrainingClient) -> None:
    run.save_weights_and_get_sampling_client().result(timeout=120)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_half_batches_accumulate_to_one_whole(
    stack: TestStack, run: TrainingClient, loss: str
) -> None:
    tokens, probes = sequences(8, seed=51), sequences(4, seed=52)
    data = batch(loss, tokens, old=logprobs(run, tokens))
    whole = run.forward_backward(data, loss).result(timeout=60)
    run.optim_step(adam()).result(timeout=60)
    publish(run)
    tensors, seen = stack.published(run), logprobs(run, probes)

    rewind(run)
    before = logprobs(run, probes)
    halves = [run.forward_backward(half, loss) for half in (data[:4], data[4:])]
    run.optim_step(adam()).result(timeout=60)
    publish(run)

    losses = [half.result(timeout=60).metrics["loss:sum"] for half in halves]
    assert sum(losses) == pytest.approx(whole.metrics["loss:sum"], rel=1e-5, abs=1e-5)
    assert largest_difference(seen, logprobs(run, probes)) < 1e-4
    assert largest_difference(seen, before) > 1e-2, "the step hardly moved the policy"
    for name, tensor in stack.published(run).items():
        np.testing.assert_allclose(tensor, tensors[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_zero_advantages_leave_the_published_files_bit_identical(
    stack: TestStack, run: TrainingClient, loss: str
) -> None:
    tokens = sequences(6, seed=61)
    publish(run)
    before = digests(stack.newest_version(run))
    zeros = [
        datum(sequence, logprobs=old, advantages=np.zeros_like(old))
        for sequence, old in zip(tokens, logprobs(run, tokens), strict=True)
    ]
    run.forward_backward(zeros, loss).result(timeout=60)
    run.optim_step(adam()).result(timeout=60)
    publish(run)
    assert digests(stack.newest_version(run)) == before


def test_a_forward_changes_nothing(stack: TestStack, run: TrainingClient) -> None:
    data = [supervised(tokens) for tokens in sequences(4, seed=71)]
    run.forward(data, "cross_entropy").result(timeout=60)
    refused = refusal(lambda: run.optim_step(adam()).result(timeout=60))
    assert (refused.type, refused.category) == ("no_gradients", "user")


def test_outputs_come_in_the_order_of_the_datums_over_several_chunks(run: TrainingClient) -> None:
    """The SDK cuts a batch of more than 1024 datums, and sends the first part last."""
    train(run, seed=81)
    tokens = sequences(1100, seed=82, shortest=3, longest=5)
    few = [0, 1, 500, 1023, 1024, 1099]
    result = run.forward_backward([supervised(t) for t in tokens], "cross_entropy").result(
        timeout=120
    )
    run.optim_step(adam(rate=0.0)).result(timeout=60)
    found = outputs(result)
    assert [len(each) for each in found] == [len(each) - 1 for each in tokens]
    alone = logprobs(run, [tokens[index] for index in few])
    assert largest_difference([found[index] for index in few], alone) < 1e-5
    total = -sum(float(each.sum()) for each in found)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_a_custom_loss_of_the_client_trains_as_the_built_in_one(run: TrainingClient) -> None:
    """The SDK's custom losses send their gradient as weights of a cross_entropy."""
    data = [supervised(tokens) for tokens in sequences(4, seed=91)]
    probes = sequences(4, seed=92)
    run.forward_backward(data, "cross_entropy").result(timeout=60)
    run.optim_step(adam()).result(timeout=60)
    expected = logprobs(run, probes)

    rewind(run)
    run.forward_backward_custom(
        data, lambda _data, found: (-sum(each.sum() for each in found), {})
    ).result(timeout=60)
    run.optim_step(adam()).result(timeout=60)
    assert largest_difference(expected, logprobs(run, probes)) < 1e-4
