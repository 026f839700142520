"""A custom loss computed by the trainer equals the same function computed by the client."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker import ServiceClient, TrainingClient, types

from tests.support.sdk import (
    adam,
    datum,
    largest_difference,
    logprobs,
    outputs,
    refusal,
    rewind,
    sequences,
    start_runs,
)
from tests.support.stacks import TIED, TestStack, running

Pair = tuple[torch.Tensor, Mapping[str, torch.Tensor]]

RANKS = {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1, "scale": 0}


def clipped(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    scale: torch.Tensor,
) -> Pair:
    """Not linear in the logprobs, not a sum over tokens, and with inputs of three shapes."""
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mean = (gain * mask).sum() / mask.sum().clamp(min=1)
    spread = logprobs[mask > 0].var(unbiased=False)
    loss = scale * (spread - mean)
    return loss, {"custom/gain:mean": mean.detach(), "custom/tokens:sum": mask.sum()}


def undefined(logprobs: torch.Tensor) -> Pair:
    return torch.log(logprobs).sum(), {}


def data_for(run: TrainingClient, *, count: int, seed: int) -> list[types.Datum]:
    random = np.random.default_rng(seed)
    tokens = sequences(count, seed=seed)
    made = []
    for sequence, old in zip(tokens, logprobs(run, tokens), strict=True):
        mask = (random.uniform(size=len(old)) < 0.7).astype(np.int64)
        mask[0] = 1
        one = datum(
            sequence,
            old=(old + random.normal(0, 0.2, len(old))).astype(np.float32),
            advantages=random.normal(0, 1, len(old)).astype(np.float32),
        )
        one.loss_fn_inputs["mask"] = types.TensorData.from_numpy(mask)
        scale = torch.tensor(float(random.uniform(1, 2)))
        one.loss_fn_inputs["scale"] = types.TensorData.from_torch(scale)
        made.append(one)
    return made


@dataclass(frozen=True)
class Place:
    stack: TestStack
    service: ServiceClient
    run: TrainingClient


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    data_dir = tmp_path_factory.mktemp("custom-losses")
    with (
        running(data_dir, models=models, settings={"trainer_ranks": "2"}) as stack,
        stack.service() as service,
    ):
        yield Place(stack=stack, service=service, run=start_runs(service, TIED)[TIED])


@pytest.fixture
def one_rank(stack: TestStack, service: ServiceClient, run: TrainingClient) -> Place:
    return Place(stack=stack, service=service, run=run)


@pytest.fixture(params=["one_rank", "two_ranks"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    rewind(found.run)
    return found


def weights_after(place: Place, name: str) -> dict[str, np.ndarray]:
    place.run.optim_step(adam()).result(timeout=60)
    place.run.save_weights_for_sampler(name).result(timeout=60)
    return place.stack.published(place.run)


def test_the_server_gives_the_value_metrics_and_step_of_the_client(place: Place) -> None:
    run = place.run
    handle = place.service.create_custom_loss(clipped, input_ranks=RANKS).result(timeout=60)
    assert handle.loss_id is not None
    data = data_for(run, count=7, seed=61)
    server = run.forward_backward_custom(data, handle).result(timeout=60)
    server_weights = weights_after(place, "server")

    rewind(run)
    local = dataclasses.replace(handle, loss_id=None)
    client = run.forward_backward_custom(data, local).result(timeout=60)
    client_weights = weights_after(place, "client")

    assert server.metrics["loss:sum"] == pytest.approx(client.metrics["loss:sum"], rel=1e-6)
    for name in ("custom/gain:mean", "custom/tokens:sum"):
        assert server.metrics[name] == pytest.approx(client.metrics[name], rel=1e-6)
    assert largest_difference(outputs(server), outputs(client)) < 1e-6
    for name, tensor in client_weights.items():
        np.testing.assert_allclose(server_weights[name], tensor, atol=1e-6, err_msg=name)


def test_a_plain_function_over_the_whole_batch_runs_on_the_client(one_rank: Place) -> None:
    """Two ranges of places in the log: all forwards, then all backwards, with negative weights.

    The step is that of the same loss in one piece: -Σ p over tokens with the weights of its
    derivative, which for (Σ p)² is 2 Σ p.
    """
    run = one_rank.run
    tokens = sequences(5, seed=62)
    data = [datum(sequence) for sequence in tokens]

    def squared(_data: list[types.Datum], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
        total = torch.stack([each.sum() for each in found]).sum()
        return total**2 / 100, {"mine": total.item()}

    future = run.forward_backward_custom(data, squared)
    step = run.optim_step(adam())
    result = future.result(timeout=60)
    step.result(timeout=60)
    total = result.metrics["mine"]
    assert result.metrics["loss:sum"] == pytest.approx(total**2 / 100, rel=1e-5)
    moved = logprobs(run, tokens)

    rewind(run)
    weight = np.float32(-2 * total / 100)
    same = [
        datum(sequence, weights=np.full(len(sequence) - 1, weight, np.float32))
        for sequence in tokens
    ]
    surrogate = run.forward_backward(same, "cross_entropy").result(timeout=60)
    run.optim_step(adam()).result(timeout=60)
    assert result.metrics["surrogate_loss:sum"] == pytest.approx(
        surrogate.metrics["loss:sum"], rel=1e-4
    )
    assert largest_difference(moved, logprobs(run, tokens)) < 1e-5


def test_a_loss_that_fails_is_a_typed_error_and_its_gradients_are_not_used(place: Place) -> None:
    run = place.run
    handle = place.service.create_custom_loss(undefined, input_ranks={"logprobs": 1}).result(60)
    tokens = sequences(4, seed=63)
    before = logprobs(run, tokens)
    data = [datum(sequence) for sequence in tokens]
    failed = refusal(lambda: run.forward_backward_custom(data, handle).result(timeout=60))
    assert failed.type == "custom_loss_failed"
    assert failed.category == "user"
    assert "'undefined'" in failed.message
    assert "torch.log" in failed.message
    step = refusal(lambda: run.optim_step(adam()).result(timeout=60))
    assert step.type == "gradients_incomplete"
    assert largest_difference(before, logprobs(run, tokens)) == 0


def test_a_loss_with_a_forbidden_operation_is_refused_when_it_is_created(
    service: ServiceClient,
) -> None:
    def drawn(logprobs: torch.Tensor) -> Pair:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    refused = refusal(
        lambda: service.create_custom_loss(drawn, input_ranks={"logprobs": 1}).result(timeout=60)
    )
    assert refused.type == "custom_loss_invalid"
    assert "torch.rand_like" in refused.message


def test_dimuon_trains_alike_on_one_rank_and_on_two(one_rank: Place, two_ranks: Place) -> None:
    tokens, probes = sequences(7, seed=64), sequences(4, seed=65)
    data = [datum(sequence) for sequence in tokens]
    found, losses = [], []
    for place in (one_rank, two_ranks):
        run = place.service.create_lora_training_client(
            f"{TIED}:full", optimizer=types.DimuonOptimizerConfig()
        ).result(timeout=240)
        for _ in range(3):
            future = run.forward_backward(data, "cross_entropy")
            run.optim_step(types.DimuonParams(learning_rate=3e-3, grad_clip_norm=5.0)).result(60)
        losses.append(future.result(timeout=60).metrics["loss:sum"])
        found.append(logprobs(run, probes))
        refused = refusal(lambda run=run: run.optim_step(adam()).result(timeout=60))
        assert refused.type == "optimizer_setting"
        assert "DimuonParams" in refused.message
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    # Newton-Schulz computes in bfloat16, which makes last bits of a gradient larger.
    assert largest_difference(found[0], found[1]) < 5e-2
