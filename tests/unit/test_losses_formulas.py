"""The losses against the golden numbers, by hand, and by finite differences in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer_service.losses import LOSSES

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo")


def golden_tensors(sampler: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The fixture's tokens as losses see them: flat, without padding, advantage R - mean."""
    inputs = GOLDEN["inputs"]
    mask = torch.tensor(inputs["mask"], dtype=torch.float64)
    reward = torch.tensor(inputs["reward"], dtype=torch.float64)
    advantages = (reward - reward.mean())[:, None].expand_as(mask)
    real = mask.bool()
    now = torch.tensor(inputs["lp"], dtype=torch.float64)[real]
    then = torch.tensor(inputs[sampler], dtype=torch.float64)[real]
    return now, {"logprobs": then, "advantages": advantages[real]}


def value(name: str, sampler: str, **settings: float) -> float:
    loss = LOSSES[name]
    logprobs, inputs = golden_tensors(sampler)
    return float(loss.compute(logprobs, inputs, {**loss.settings, **settings}).loss)


def expected(name: str) -> float:
    return GOLDEN["expected"][name]["token_sum(tinker)"]


def test_importance_sampling_is_the_golden_number():
    golden = expected("importance_sampling(rollout)")
    assert value("importance_sampling", "rollout") == pytest.approx(golden, abs=1e-7)


def test_ppo_with_its_default_bounds_is_the_golden_number():
    assert value("ppo", "old") == pytest.approx(expected("ppo_clip_0.2"), abs=1e-7)


def test_ppo_with_a_higher_upper_bound_is_the_golden_number():
    got = value("ppo", "old", clip_low_threshold=0.8, clip_high_threshold=1.28)
    assert got == pytest.approx(expected("ppo_clip_higher_0.2_0.28"), abs=1e-7)


def test_cispo_with_both_bounds_is_the_golden_number():
    got = value("cispo", "old", clip_low_threshold=0.8, clip_high_threshold=1.28)
    assert got == pytest.approx(expected("cispo_clip_0.8_1.28"), abs=1e-7)


def test_cispo_with_a_cap_of_three_is_the_golden_number():
    got = value("cispo", "old", clip_high_threshold=3.0)
    assert got == pytest.approx(expected("cispo_cap3_upper_only(trl_form)"), abs=1e-7)


def test_the_defaults_are_those_of_the_protocol():
    assert LOSSES["ppo"].settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert LOSSES["cispo"].settings == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert LOSSES["importance_sampling"].settings == {}
    assert LOSSES["cross_entropy"].settings == {}


def test_cross_entropy_is_the_weighted_sum_of_log_probabilities():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    result = LOSSES["cross_entropy"].compute(logprobs, {"weights": weights}, {})
    assert float(result.loss) == pytest.approx(1.0 + 1.0 - 1.0)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_gradients_are_those_of_finite_differences(name):
    loss = LOSSES[name]
    logprobs, inputs = golden_tensors("old")
    inputs = {**inputs, "weights": torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)}
    logprobs.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda p: loss.compute(p, inputs, loss.settings).loss, (logprobs,), eps=1e-7
    )


def test_the_gradient_of_cispo_is_that_of_its_weights_held_fixed():
    loss = LOSSES["cispo"]
    logprobs, inputs = golden_tensors("old")
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    held = (logprobs - inputs["logprobs"]).exp().clamp(0.8, 1.28)
    leaf = logprobs.clone().requires_grad_(True)
    loss.compute(leaf, inputs, settings).loss.backward()
    assert torch.allclose(leaf.grad, -held * inputs["advantages"])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_the_sampling_policy_every_gradient_is_minus_the_advantage(name):
    loss = LOSSES[name]
    _, inputs = golden_tensors("old")
    leaf = inputs["logprobs"].clone().requires_grad_(True)
    loss.compute(leaf, inputs, loss.settings).loss.backward()
    assert torch.allclose(leaf.grad, -inputs["advantages"])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_order_of_the_tokens_does_not_matter(name):
    loss = LOSSES[name]
    logprobs, inputs = golden_tensors("old")
    inputs = {**inputs, "weights": torch.rand(len(logprobs), dtype=torch.float64)}
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(3))
    shuffled = {key: tensor[order] for key, tensor in inputs.items()}
    once = loss.compute(logprobs, inputs, loss.settings)
    again = loss.compute(logprobs[order], shuffled, loss.settings)
    assert torch.allclose(once.loss, again.loss)
    assert torch.allclose(torch.stack(once.sums), torch.stack(again.sums))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_metric_names_have_one_colon_and_do_not_depend_on_the_batch(name):
    loss = LOSSES[name]
    nothing = loss.metrics(dict.fromkeys(loss.sum_names, 0.0))
    something = loss.metrics(dict.fromkeys(loss.sum_names, 2.0))
    assert nothing.keys() == something.keys()
    assert all(key.count(":") == 1 for key in nothing)


def test_policy_metrics_leave_out_tokens_without_advantage():
    loss = LOSSES["ppo"]
    logprobs = torch.tensor([-1.0, -9.0], dtype=torch.float64)
    inputs = {
        "logprobs": torch.tensor([-2.0, 0.0], dtype=torch.float64),
        "advantages": torch.tensor([1.0, 0.0], dtype=torch.float64),
    }
    sums = loss.compute(logprobs, inputs, loss.settings).sums
    named = dict(zip(loss.sum_names, map(float, sums), strict=True))
    metrics = loss.metrics(named)
    assert metrics["active_tokens:sum"] == 1
    assert metrics["ratio:mean"] == pytest.approx(2.718281828)
    assert metrics["kl:mean"] == pytest.approx(-1.0)
    assert metrics["clipped:mean"] == 1
