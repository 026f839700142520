from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from tests.support.losses.cases import (
    CASES,
    POLICY_LOSSES,
    REQUESTS,
    Config,
    Data,
    compute,
    gradient,
    layout_for,
    random_data,
    request_id,
    settings_of,
    totals_of,
)
from trainer_service.losses import LOSSES, Loss, LossResult

every_request = pytest.mark.parametrize(("name", "config"), REQUESTS, ids=request_id)


def results(result: LossResult) -> torch.Tensor:
    return torch.stack([result.loss.detach(), *result.sums])


@contextmanager
def stopped_gradients(
    held: Iterator[torch.Tensor] | None, kept: list[torch.Tensor]
) -> Iterator[None]:
    """Records the results of `detach`, or replays recorded ones."""
    original = torch.Tensor.detach

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(original(tensor) if held is None else next(held))
        return kept[-1]

    torch.Tensor.detach = detach  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.detach = original  # type: ignore[method-assign]


def finite_differences(loss: Loss, data: Data, config: Config) -> torch.Tensor:
    """Central differences. Values without a gradient in the loss are fixed."""
    noted: list[torch.Tensor] = []
    with stopped_gradients(None, noted):
        compute(loss, data, config)

    def value(logprobs: torch.Tensor) -> float:
        with stopped_gradients(iter(noted), []):
            return float(compute(loss, Data(logprobs, data.inputs, data.sizes), config).loss)

    step = 1e-6
    found = torch.zeros_like(data.logprobs)
    for place in range(len(found)):
        change = torch.zeros_like(found)
        change[place] = step
        found[place] = (value(data.logprobs + change) - value(data.logprobs - change)) / (2 * step)
    return found


@every_request
def test_gradients_are_those_of_finite_differences(name, config):
    loss, data = LOSSES[name], random_data()
    found = gradient(loss, data, config)
    torch.testing.assert_close(found, finite_differences(loss, data, config), rtol=1e-6, atol=1e-7)
    assert found.abs().max() > 0


def groups(loss: Loss, data: Data) -> list[list[int]]:
    datums = range(len(data.sizes))
    return [list(datums[start : start + loss.group]) for start in datums[:: loss.group]]


def flat(lists: Sequence[Sequence[int]]) -> list[int]:
    return [each for part in lists for each in part]


@every_request
def test_the_order_of_the_datums_does_not_matter(name, config):
    loss, data = LOSSES[name], random_data()
    turned = data.pick(flat(groups(loss, data)[::-1]))
    once, again = compute(loss, data, config), compute(loss, turned, config)
    torch.testing.assert_close(results(once), results(again))
    for one, other in zip(once.maxima, again.maxima, strict=True):
        assert float(one) == float(other)


@every_request
def test_any_split_into_micro_batches_adds_up_to_the_whole(name, config):
    loss, data = LOSSES[name], random_data()
    totals = totals_of(loss, data)
    whole, moved = results(compute(loss, data, config)), gradient(loss, data, config)
    together = groups(loss, data)
    for cuts in itertools.product([False, True], repeat=len(together) - 1):
        parts: list[list[list[int]]] = [[together[0]]]
        for cut, group in zip(cuts, together[1:], strict=True):
            if cut:
                parts.append([])
            parts[-1].append(group)
        leaf = data.logprobs.clone().requires_grad_(True)
        cut_data = Data(leaf, data.inputs, data.sizes)
        each = [compute(loss, cut_data.pick(flat(part)), config, totals=totals) for part in parts]
        torch.testing.assert_close(sum(results(one) for one in each), whole)
        sum(one.loss for one in each).backward()
        torch.testing.assert_close(leaf.grad, moved)


@every_request
def test_what_is_masked_may_be_garbage(name, config):
    """Policy losses have `mask`. In others, targets of weight 0 do not count."""
    loss, data = LOSSES[name], random_data()
    mask = "mask" if CASES[name].policy else "weights"
    data.inputs["mask"][3] = 0.0
    data.inputs["weights"][[3, 7]] = 0.0
    out = data.inputs[mask] == 0
    if name == "gspo":  # its mask chooses the tokens of a sequence's ratio
        data.inputs["sequence_ratio_mask"][out] = 0.0
    kept = {mask, "desirable", "z0", "sequence_ratio_mask"}
    garbage = Data(
        torch.where(out, -9.0, data.logprobs),
        {
            key: values if key in kept else torch.where(out, -17.0, values)
            for key, values in data.inputs.items()
        },
        data.sizes,
    )
    once, again = compute(loss, data, config), compute(loss, garbage, config)
    torch.testing.assert_close(results(once), results(again))
    torch.testing.assert_close(gradient(loss, data, config), gradient(loss, garbage, config))
    assert gradient(loss, garbage, config)[out].abs().max() == 0


@every_request
def test_bfloat16_inputs_change_little(name, config):
    """The data avoids weights near their bounds, which may flip."""
    loss, data = LOSSES[name], random_data(seed=5)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16).float()

    coarse = Data(
        rounded(data.logprobs),
        {key: rounded(values) for key, values in data.inputs.items()},
        data.sizes,
    )
    exact = gradient(loss, data, config)
    got = gradient(loss, coarse, config).double()
    # bfloat16 has 8 bits: 0.4 % of a log probability of 3 is 0.012 of a log ratio. A sequence has a
    # multiple of it.
    assert float((got - exact).norm() / exact.norm()) < 0.1


@every_request
def test_metrics_have_the_same_keys_for_every_batch_and_one_reduction_each(name, config):
    loss, data = LOSSES[name], random_data()

    def metrics(of: Data) -> dict[str, float]:
        result = compute(loss, of, config)
        named = zip(loss.sum_names, result.sums, strict=True)
        extremes = zip(loss.max_names, result.maxima, strict=True)
        return loss.metrics({key: float(value) for key, value in (*named, *extremes)})

    nothing = data.pick(range(2))
    for key in ("advantages", "weights", "mask"):
        nothing.inputs[key] = torch.zeros_like(nothing.inputs[key])
    something, empty = metrics(data), metrics(nothing)
    assert something.keys() == empty.keys()
    assert all(key.split(":")[1] in ("sum", "mean", "min", "max") for key in something)
    assert all(map(math.isfinite, (*something.values(), *empty.values())))


@every_request
def test_a_loss_stays_on_the_device_of_its_logprobs_and_does_not_wait_for_it(name, config):
    """Tensors of the device "meta" have no values: mixing or reading them raises."""
    loss, data = LOSSES[name], random_data()
    declared = {each.name for each in loss.inputs}
    layout = layout_for(data.sizes, totals=totals_of(loss, data))
    layout = dataclasses.replace(
        layout, datum=layout.datum.to("meta"), sequence=layout.sequence.to("meta")
    )
    leaf = data.logprobs.to("meta").requires_grad_(True)
    inputs = {key: each.to("meta") for key, each in data.inputs.items() if key in declared}
    result = loss.compute(leaf, inputs, settings_of(loss, config), layout)
    assert torch.autograd.grad(result.loss, leaf)[0].device.type == "meta"


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tokens_whose_sampler_logprob_is_not_finite_are_dropped_and_counted(name, value):
    loss, data = LOSSES[name], random_data()
    config = {"aggregation": "token_mean"}
    data.inputs["mask"][:] = 1.0
    copies = {key: values.clone() for key, values in data.inputs.items()}
    masked = Data(data.logprobs, copies, data.sizes)
    masked.inputs["mask"][4] = masked.inputs["sequence_ratio_mask"][4] = 0.0
    data.inputs["logprobs"][4] = value
    torch.testing.assert_close(gradient(loss, data, config), gradient(loss, masked, config))
    result = compute(loss, data, config)
    named = dict(zip(loss.sum_names, map(float, result.sums), strict=True))
    named.update(zip(loss.max_names, map(float, result.maxima), strict=True))
    assert loss.metrics(named)["dropped_tokens:sum"] == 1
    assert loss.metrics(named)["active_tokens:sum"] == sum(data.sizes) - 1


def test_policy_metrics_leave_out_tokens_without_advantage():
    loss = LOSSES["ppo"]
    data = Data(
        torch.tensor([-1.0, -9.0], dtype=torch.float64),
        {
            "logprobs": torch.tensor([-2.0, 0.0], dtype=torch.float64),
            "advantages": torch.tensor([1.0, 0.0], dtype=torch.float64),
        },
        (2,),
    )
    result = compute(loss, data)
    named = dict(zip(loss.sum_names, map(float, result.sums), strict=True))
    named.update(zip(loss.max_names, map(float, result.maxima), strict=True))
    metrics = loss.metrics(named)
    assert metrics["active_tokens:sum"] == 1
    assert metrics["ratio:mean"] == metrics["ratio:max"] == pytest.approx(math.e)
    assert metrics["kl:mean"] == pytest.approx(-1.0)
    assert metrics["clipped:mean"] == 1
