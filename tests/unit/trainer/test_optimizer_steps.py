"""AdamW and dimuon against torch's own, on plain models."""

from __future__ import annotations

import math
import re
from typing import Literal

import pytest
import torch
from torch import nn

from tandem.errors import GradientsNotFinite, OptimizerSetting
from tandem.protocol.worker import TrainingSpec
from tandem.v1 import trainer_pb2
from trainer_service.optimizers import (
    AdamW,
    AdamWSettings,
    DiMuon,
    DiMuonSettings,
    Optimizer,
    StepSettings,
    make_optimizer,
    outer_parameters,
    step_settings,
)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.tanh(self.up(hidden)))))


def backward(model: nn.Module, step: int) -> None:
    tokens = torch.arange(10) * (step + 1) % 11
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 3) % 11, reduction="sum")
    loss.backward()


def alone(value: torch.Tensor) -> None:
    """The sum over one rank."""


HIDDEN = {"up.weight", "down.weight"}
SETTINGS: dict[str, StepSettings] = {
    "adamw": AdamWSettings(
        learning_rate=0.02, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0
    ),
    "dimuon": DiMuonSettings(learning_rate=0.02, beta1=0.9, grad_clip_norm=1.0),
}


def dimuon(model: nn.Module) -> DiMuon:
    return DiMuon(
        dict(model.named_parameters()), outer=outer_parameters(model), sum_over_ranks=alone
    )


def same(left: nn.Module, right: nn.Module, **tolerance: float) -> None:
    for (name, one), (_, other) in zip(
        left.named_parameters(), right.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            one, other, **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_torchs_over_several_steps(decay: float) -> None:
    ours, theirs = Tiny(), Tiny()
    optimizer = AdamW(dict(ours.named_parameters()), sum_over_ranks=alone)
    golden = torch.optim.AdamW(
        theirs.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=decay
    )
    settings = AdamWSettings(
        learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=decay, grad_clip_norm=0.0
    )
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        metrics = optimizer.step(settings)
        golden.step()
        golden.zero_grad()
        assert metrics["grad_norm"] == pytest.approx(norm.item())
        assert metrics["learning_rate"] == 0.01
    same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weight_decay_acts_without_a_gradient_of_the_loss() -> None:
    """Decoupled: w becomes w (1 - lr·decay) where the gradient is zero."""
    weight = nn.Parameter(torch.tensor([2.0, -4.0]))
    optimizer = AdamW({"weight": weight}, sum_over_ranks=alone)
    weight.grad = torch.zeros(2)
    optimizer.step(
        AdamWSettings(
            learning_rate=0.1,
            beta1=0.9,
            beta2=0.95,
            eps=1e-12,
            weight_decay=0.5,
            grad_clip_norm=0.0,
        )
    )
    torch.testing.assert_close(weight.detach(), torch.tensor([1.9, -3.8]))


def test_dimuon_is_torchs_muon_on_hidden_matrices_and_its_adamw_on_the_rest() -> None:
    ours, theirs = Tiny(), Tiny()
    optimizer = dimuon(ours)
    named = dict(theirs.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name in sorted(HIDDEN)],
        lr=0.02,
        momentum=0.8,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [p for name, p in named.items() if name not in HIDDEN],
        lr=0.02,
        betas=(0.8, 0.95),
        eps=1e-12,
        weight_decay=0.0,
    )
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        optimizer.step(DiMuonSettings(learning_rate=0.02, beta1=0.8, grad_clip_norm=0.0))
        for golden in (muon, adamw):
            golden.step()
            golden.zero_grad()
    same(ours, theirs, rtol=1e-5, atol=1e-6)
    for name in HIDDEN:
        torch.testing.assert_close(dict(ours.named_parameters())[name], named[name], rtol=0, atol=0)


def test_an_update_of_a_hidden_matrix_is_orthogonal_and_as_large_as_adamws() -> None:
    model = Tiny()
    before = model.up.weight.detach().clone()
    backward(model, 0)
    dimuon(model).step(DiMuonSettings(learning_rate=0.5, beta1=0.0, grad_clip_norm=0.0))
    update = (model.up.weight.detach() - before) / (0.5 * 0.2 * math.sqrt(12))
    values = torch.linalg.svdvals(update)
    # Newton-Schulz brings singular values only near 1, and a small one only part of the way.
    assert values.max() < 1.3
    assert (values > 0.5).sum() >= 6


def test_dimuon_clips_by_the_norm_of_all_gradients() -> None:
    """Muon forgets the size of a gradient, so AdamW's second moment shows the clipping."""
    model = Tiny()
    backward(model, 1)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    biased = model.up.bias.grad.clone()
    optimizer = dimuon(model)
    metrics = optimizer.step(DiMuonSettings(learning_rate=0.0, beta1=0.5, grad_clip_norm=norm / 4))
    assert metrics["grad_norm"] == pytest.approx(norm)
    average = optimizer.state(create=False)["up.bias.exp_avg"]
    torch.testing.assert_close(average, biased / 4 * 0.5, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_of_nothing_does_not_clip(limit: float) -> None:
    model = Tiny()
    backward(model, 1)
    biased = model.up.bias.grad.clone()
    optimizer = dimuon(model)
    optimizer.step(DiMuonSettings(learning_rate=0.0, beta1=0.5, grad_clip_norm=limit))
    torch.testing.assert_close(optimizer.state(create=False)["up.bias.exp_avg"], biased * 0.5)


def test_state_that_is_put_back_goes_on_as_if_nothing_had_been() -> None:
    ours, theirs = Tiny(), Tiny()
    first, second = dimuon(ours), dimuon(theirs)
    settings = DiMuonSettings(learning_rate=0.02, beta1=0.9, grad_clip_norm=1.0)
    for step in range(2):
        backward(ours, step)
        first.step(settings)
    assert second.state(create=False) == {}
    theirs.load_state_dict(ours.state_dict())
    saved = {name: tensor.clone() for name, tensor in first.state(create=False).items()}
    made = second.state(create=True)
    assert saved.keys() == made.keys()
    assert {f"{name}.momentum_buffer" for name in HIDDEN} <= saved.keys()
    for name, tensor in made.items():
        tensor.copy_(saved[name])
    for model, optimizer in ((ours, first), (theirs, second)):
        for step in range(2, 4):
            backward(model, step)
            optimizer.step(settings)
    same(ours, theirs)
    second.reset()
    assert second.state(create=False) == {}


def made(kind: Literal["adamw", "dimuon"], model: Tiny) -> Optimizer:
    return make_optimizer(
        TrainingSpec(optimizer=kind),
        dict(model.named_parameters()),
        outer=outer_parameters(model),
        device="cpu",
        sum_over_ranks=alone,
    )


def first_step_without_two(model: Tiny, optimizer: Optimizer, settings: StepSettings) -> None:
    """As with experts that got no token yet."""
    backward(model, 0)
    model.up.weight.grad = model.norm.weight.grad = None
    optimizer.step(settings)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_parameter_that_is_used_late_goes_on_from_what_was_saved(kind) -> None:
    ours, theirs = Tiny(), Tiny()
    first, second = made(kind, ours), made(kind, theirs)
    first_step_without_two(ours, first, SETTINGS[kind])
    theirs.load_state_dict(ours.state_dict())
    saved, empty = first.state(create=False), second.state(create=True)
    assert saved.keys() == empty.keys()
    for name, tensor in empty.items():
        tensor.copy_(saved[name])
    for model, optimizer in ((ours, first), (theirs, second)):
        for step in range(1, 3):
            backward(model, step)
            optimizer.step(SETTINGS[kind])
    same(ours, theirs)


@pytest.mark.parametrize("kind", SETTINGS)
def test_saving_changes_no_later_step(kind) -> None:
    saved, plain = Tiny(), Tiny()
    for model in (saved, plain):
        optimizer = made(kind, model)
        first_step_without_two(model, optimizer, SETTINGS[kind])
        if model is saved:
            optimizer.state(create=False)
        for step in range(1, 3):
            backward(model, step)
            optimizer.step(SETTINGS[kind])
    same(saved, plain)


def test_gradients_that_are_not_finite_change_nothing() -> None:
    model = Tiny()
    optimizer = dimuon(model)
    backward(model, 0)
    model.up.weight.grad[0, 0] = math.inf
    before = model.up.weight.detach().clone()
    with pytest.raises(GradientsNotFinite):
        optimizer.step(DiMuonSettings(learning_rate=0.1, beta1=0.9, grad_clip_norm=0.0))
    assert torch.equal(model.up.weight.detach(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.state(create=False) == {}


def test_embeddings_and_the_head_are_not_for_muon_even_when_tied() -> None:
    model = Tiny()
    assert outer_parameters(model) == {"embed.weight", "head.weight"}
    model.head.weight = model.embed.weight
    assert outer_parameters(model) == {"embed.weight", "head.weight"}


# --- Settings ------------------------------------------------------------------------------

ADAMW = trainer_pb2.AdamWParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-12)
DIMUON = trainer_pb2.DiMuonParams(learning_rate=0.1, beta1=0.9)


def test_a_steps_settings_must_be_those_of_the_runs_optimizer() -> None:
    both = {
        "adamw": trainer_pb2.OptimStepRequest(adamw=ADAMW),
        "dimuon": trainer_pb2.OptimStepRequest(dimuon=DIMUON),
    }
    assert isinstance(step_settings(both["adamw"], optimizer="adamw"), AdamWSettings)
    assert isinstance(step_settings(both["dimuon"], optimizer="dimuon"), DiMuonSettings)
    with pytest.raises(OptimizerSetting, match="'adamw', so its steps take AdamParams"):
        step_settings(both["dimuon"], optimizer="adamw")
    with pytest.raises(OptimizerSetting, match="'dimuon', so its steps take DimuonParams"):
        step_settings(both["adamw"], optimizer="dimuon")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", 1e38),
        ("beta1", 1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_settings_of_dimuon_out_of_range_are_named(name: str, value: float) -> None:
    params = trainer_pb2.DiMuonParams(learning_rate=0.1, beta1=0.9)
    setattr(params, name, value)
    with pytest.raises(OptimizerSetting, match=name):
        step_settings(trainer_pb2.OptimStepRequest(dimuon=params), optimizer="dimuon")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("learning_rate", "weight_decay") for value in (-0.1, 1e39)],
        *[("eps", value) for value in (0.0, 1e-46, 1e39, math.nan)],
        ("beta2", 1.0),
        ("grad_clip_norm", math.inf),
    ],
)
def test_settings_of_adamw_out_of_range_are_named(name: str, value: float) -> None:
    params = trainer_pb2.AdamWParams()
    params.CopyFrom(ADAMW)
    setattr(params, name, value)
    with pytest.raises(OptimizerSetting, match=re.escape(f"not {value}")) as caught:
        step_settings(trainer_pb2.OptimStepRequest(adamw=params), optimizer="adamw")
    assert caught.value.message.startswith(f"{name} must be ")


EXTREME = {
    "a vast rate and decay": trainer_pb2.OptimStepRequest(
        adamw=trainer_pb2.AdamWParams(learning_rate=1e18, weight_decay=1e18, eps=1e-12)
    ),
    "hardly any eps": trainer_pb2.OptimStepRequest(
        adamw=trainer_pb2.AdamWParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1.2e-38)
    ),
    "a vast rate of dimuon": trainer_pb2.OptimStepRequest(
        dimuon=trainer_pb2.DiMuonParams(learning_rate=1e18, beta1=0.9)
    ),
}


@pytest.mark.parametrize("name", EXTREME)
def test_every_setting_in_its_range_leaves_finite_weights(name: str) -> None:
    kind = EXTREME[name].WhichOneof("optimizer")
    model = Tiny()
    backward(model, 0)  # not every row of the embedding has a gradient
    made(kind, model).step(step_settings(EXTREME[name], optimizer=kind))
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
