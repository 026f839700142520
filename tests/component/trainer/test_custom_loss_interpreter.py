"""The trainer's interpreter of custom losses agrees with the SDK."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, run_loss_handle
from torch.fx.node import _get_qualified_name

from tandem.custom_losses import operations
from tandem.custom_losses.implementations import FUNCTIONS, METHODS
from tandem.custom_losses.process import Limits, LossProcess
from tandem.errors import CustomLossFailed
from tests.support.custom_losses import CustomLossFn, layout_of, metrics_of, request_body, traced
from trainer_service.losses.custom import custom_loss

PROCESS = LossProcess()
Tensor = torch.Tensor
Pair = tuple[Tensor, Mapping[str, Tensor]]


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Pair:
    ratio = (logprobs - old).exp()
    bounded = torch.clamp(ratio, 0.8, 1.2)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    count = mask.sum().clamp(min=1)
    kl = ((old - logprobs) * mask).sum() / count
    return -(gain * mask).sum() / count + 0.1 * kl, {
        "custom/kl:mean": kl.detach(),
        "custom/clipped:sum": (ratio != bounded).float().sum(),
    }


def sequence_level(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Pair:
    n = logprobs.shape[0]
    chosen = (logprobs - old)[mask > 0]
    ratio = torch.exp(chosen.mean())
    loss = -(ratio * advantages.max(dim=0).values) / math.sqrt(n)
    return loss, {"custom/length:mean": mask.new_ones(n).sum()}


def odd_corners(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Pair:
    x = logprobs.to(torch.float64)
    a = F.softplus(x).sum() + F.logsigmoid(x).mean() + F.huber_loss(x, old.double())
    b = torch.logsumexp(torch.stack([logprobs, old]), dim=0).sum()
    c = torch.einsum("i,i->", logprobs, advantages) + logprobs @ old
    d = torch.where(mask > 0, logprobs, torch.full_like(logprobs, -1.0)).cumsum(0)[-1]
    e = logprobs[..., None, :2].sum() + logprobs[torch.arange(2, device=logprobs.device)].sum()
    f = logprobs.masked_fill(mask == 0, float("-inf")).amax() + torch.special.expit(old).sum()
    g = torch.ones(logprobs.size(0) + 1).sum() * logprobs.topk(2).values.sum()
    h = abs(logprobs[1:] - logprobs[:-1]).pow(2).sum() / (2 ** logprobs.shape[0])
    i = (~(mask > 0) & (old < 0)).to(logprobs.dtype).sum() * logprobs.mean()
    return a.float() + b + c + d + e + f + g + h + i, {"custom/a:sum": a, "custom/b:mean": b}


LENGTHS = (2, 7, 5)


def inputs_of_three_datums() -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    made = torch.Generator().manual_seed(3)
    logprobs = [-torch.rand(n, generator=made) for n in LENGTHS]
    return logprobs, {
        "old": [-torch.rand(n, generator=made) for n in LENGTHS],
        "advantages": [torch.randn(n, generator=made) for n in LENGTHS],
        "mask": [torch.tensor([1] + [i % 2 for i in range(n - 1)]) for n in LENGTHS],
    }


def by_the_client(
    fn: CustomLossFn, ranks: Mapping[str, int], logprobs: list[Tensor], arrays: dict
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Value, derivatives and metrics from the SDK's client."""
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1] * len(row)),
            loss_fn_inputs={
                name: types.TensorData.from_torch(values[i]) for name, values in arrays.items()
            },
        )
        for i, row in enumerate(logprobs)
    ]
    leaves = [row.clone().requires_grad_(True) for row in logprobs]
    loss, metrics = run_loss_handle(traced(fn, **ranks), data, leaves)
    loss.backward()
    return loss.item(), [leaf.grad for leaf in leaves], metrics


def by_the_trainer(
    fn: CustomLossFn,
    ranks: Mapping[str, int],
    logprobs: list[Tensor],
    arrays: dict,
    limits: Limits | None = None,
) -> tuple[float, Tensor, dict[str, float]]:
    loss = custom_loss(request_body(traced(fn, **ranks)), process=PROCESS, limits=limits)
    flat = torch.cat([row.reshape(-1) for row in logprobs]).requires_grad_(True)
    result = loss.compute(flat, {}, loss.defaults, layout_of(logprobs, arrays))
    result.loss.backward()
    return result.loss.item(), flat.grad, metrics_of(loss, result)


RANKS = {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1}


@pytest.mark.parametrize("fn", [clipped, sequence_level, odd_corners])
def test_value_derivative_and_metrics_equal_those_of_the_client(fn: CustomLossFn) -> None:
    logprobs, arrays = inputs_of_three_datums()
    value, gradients, metrics = by_the_client(fn, RANKS, logprobs, arrays)
    ours, gradient, our_metrics = by_the_trainer(fn, RANKS, logprobs, arrays)
    assert ours == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(gradient, torch.cat(gradients), rtol=1e-6, atol=1e-6)
    assert our_metrics == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("fn", [clipped, sequence_level, odd_corners])
def test_value_and_derivative_are_those_of_torch_in_one_thread_to_the_last_bit(
    fn: CustomLossFn,
) -> None:
    logprobs, arrays = inputs_of_three_datums()
    ours, gradient, _ = by_the_trainer(fn, RANKS, logprobs, arrays)
    losses, gradients = [], []
    for number, row in enumerate(logprobs):
        leaf = row.clone().requires_grad_(True)
        loss, _ = fn(leaf, *(values[number] for values in arrays.values()))
        loss.double().backward()
        losses.append(loss.detach().double())
        gradients.append(leaf.grad)
    assert ours == torch.stack(losses).sum().item()
    assert torch.equal(gradient, torch.cat(gradients))


def test_wide_targets_scalars_and_integers_reach_the_function_in_their_shapes() -> None:
    def distil(logprobs: Tensor, teacher: Tensor, target_tokens: Tensor, scale: Tensor) -> Pair:
        kept = (target_tokens > 2).float()
        loss = -(teacher * logprobs * kept).sum(dim=-1).mean() * scale
        return loss, {"custom/kept:sum": kept.sum()}

    ranks = {"logprobs": 2, "teacher": 2, "target_tokens": 2, "scale": 0}
    logprobs = [-torch.rand(3, 4), -torch.rand(2, 2)]
    arrays = {
        "teacher": [torch.rand(3, 4), torch.rand(2, 2)],
        "target_tokens": [torch.randint(0, 5, (3, 4)), torch.randint(0, 5, (2, 2))],
        "scale": [torch.tensor(0.5), torch.tensor(2.0)],
    }
    value, gradients, metrics = by_the_client(distil, ranks, logprobs, arrays)
    ours, gradient, our_metrics = by_the_trainer(distil, ranks, logprobs, arrays)
    assert ours == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(gradient, torch.cat([g.reshape(-1) for g in gradients]))
    assert our_metrics == pytest.approx(metrics)


def test_a_batch_gives_the_same_however_it_is_split() -> None:
    logprobs, arrays = inputs_of_three_datums()
    loss = custom_loss(request_body(traced(clipped, **RANKS)), process=PROCESS)
    sums, gradients = torch.zeros(len(loss.sum_names), dtype=torch.float64), []
    value = 0.0
    for part in ([0, 1], [2]):
        rows = [logprobs[i] for i in part]
        flat = torch.cat(rows).requires_grad_(True)
        layout = layout_of(rows, {name: [v[i] for i in part] for name, v in arrays.items()})
        result = loss.compute(flat, {}, loss.defaults, layout)
        result.loss.backward()
        value += result.loss.item()
        gradients.append(flat.grad)
        sums += torch.stack(result.sums)
    whole, gradient, metrics = by_the_trainer(clipped, RANKS, logprobs, arrays)
    assert value == pytest.approx(whole, rel=1e-12)
    assert torch.equal(torch.cat(gradients), gradient)
    named = dict(zip(loss.sum_names, sums.tolist(), strict=True))
    assert loss.metrics(named) == pytest.approx(metrics)


def test_a_forward_alone_gives_the_value_and_no_gradient() -> None:
    logprobs, arrays = inputs_of_three_datums()
    loss = custom_loss(request_body(traced(clipped, **RANKS)), process=PROCESS)
    layout = layout_of(logprobs, arrays)
    result = loss.compute(torch.cat(logprobs), {}, loss.defaults, layout)
    assert not result.loss.requires_grad
    value, _, _ = by_the_client(clipped, RANKS, logprobs, arrays)
    assert result.loss.item() == pytest.approx(value, rel=1e-6)


def test_every_allowed_name_has_an_implementation_and_none_more() -> None:
    assert set(FUNCTIONS) == operations.FUNCTIONS
    assert set(METHODS) == operations.METHODS


def test_functions_are_known_under_the_names_that_tracing_gives_them() -> None:
    for place, owner in (("torch", torch), ("torch.nn.functional", F)):
        for name in operations.MODULES[place]:
            recorded = _get_qualified_name(getattr(owner, name))
            public = operations.PUBLIC_NAMES.get(recorded, recorded)
            assert FUNCTIONS[public] in (getattr(owner, name), FUNCTIONS[f"{place}.{name}"])


# --- Error messages ------------------------------------------------------------------------


def fails(fn: CustomLossFn, limits: Limits | None = None, **ranks: int) -> str:
    ranks = ranks or {"logprobs": 1}
    logprobs = [torch.tensor([-0.5, -1.0, 0.0])]
    arrays = {name: [torch.tensor([1.0, 2.0, 3.0])] for name in ranks if name != "logprobs"}
    with pytest.raises(CustomLossFailed) as caught:
        by_the_trainer(fn, ranks, logprobs, arrays, limits)
    return caught.value.message


def test_a_shape_that_does_not_fit_names_the_node_and_the_operation() -> None:
    def fn(logprobs: Tensor) -> Pair:
        return (logprobs[:2] + logprobs).sum(), {}

    message = fails(fn)
    assert "node 'add' (operator.add)" in message
    assert "'fn'" in message


def test_nan_is_refused_and_traced_to_where_it_comes_from() -> None:
    def fn(logprobs: Tensor) -> Pair:
        return torch.log(logprobs).sum(), {}

    message = fails(fn)
    assert "its loss is nan" in message
    assert "node 'log' (torch.log)" in message


def test_a_derivative_that_is_not_finite_is_refused() -> None:
    def fn(logprobs: Tensor) -> Pair:
        return torch.sqrt(-logprobs).sum(), {}

    assert "derivative" in fails(fn)


def test_a_loss_must_be_a_scalar_that_depends_on_the_logprobs() -> None:
    def vector(logprobs: Tensor) -> Pair:
        return logprobs * 2, {}

    def cut_off(logprobs: Tensor) -> Pair:
        return logprobs.detach().sum(), {}

    def counted(logprobs: Tensor) -> Pair:
        return (logprobs > 0).sum(), {}

    assert "scalar" in fails(vector)
    assert "does not depend" in fails(cut_off)
    assert "tensor of floats" in fails(counted)


def test_python_numbers_are_bounded() -> None:
    def tower(logprobs: Tensor) -> Pair:
        n = logprobs.shape[0]
        return logprobs.sum() * (n ** (10 * n) ** n), {}

    def doubled(logprobs: Tensor) -> Pair:
        n = logprobs.shape[0]
        for _ in range(8):
            n = n * n
        return logprobs.sum() * n, {}

    assert "64 bits" in fails(tower)
    assert "64 bits" in fails(doubled)


def test_math_does_not_take_tensors_out_of_the_gradient_unnoticed() -> None:
    def fn(logprobs: Tensor) -> Pair:
        return logprobs.sum() * math.exp(logprobs.sum()), {}

    assert "there is torch.exp" in fails(fn)


def test_an_index_outside_is_the_clients_mistake() -> None:
    def fn(logprobs: Tensor, index: Tensor) -> Pair:
        return logprobs[index.long()].sum(), {}

    assert "operator.getitem" in fails(fn, logprobs=1, index=1)


def test_a_mask_of_another_length_is_refused() -> None:
    def fn(logprobs: Tensor) -> Pair:
        return logprobs[(logprobs < 0)[:2]].sum(), {}

    assert "mask" in fails(fn)


def test_a_graph_that_fails_leaves_no_gradient() -> None:
    def fn(logprobs: Tensor) -> Pair:
        return torch.log(logprobs).sum(), {}

    loss = custom_loss(request_body(traced(fn, logprobs=1)), process=PROCESS)
    flat = torch.tensor([-1.0, -2.0]).requires_grad_(True)
    result = loss.compute(flat, {}, loss.defaults, layout_of([flat], {}))
    result.loss.backward()
    assert flat.grad is not None
    assert not flat.grad.any()


def test_tracing_gives_no_name_that_would_surprise_us() -> None:
    nodes = encode_graph(traced(odd_corners, **RANKS)).nodes
    assert {node.op for node in nodes} == {"placeholder", "call_function", "call_method", "output"}
