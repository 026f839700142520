"""Copies of a first load are repeated by later ones, if they are all that the load does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sampler_service.vllm.copies import CopiedModel, Named


def fused() -> nn.Module:
    """A model with q [4, 3] and k [2, 3] in one padded parameter, and a norm."""
    model = nn.Module()
    model.qk = nn.Parameter(torch.zeros(8, 3))
    model.norm = nn.Parameter(torch.zeros(3))
    return model


def loading(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def load(tensors: Named) -> None:
        for name, tensor in tensors:
            if name == "q":
                model.qk[:4].copy_(tensor[1:5])  # a worker's part
            elif name == "k":
                model.qk[4:6].copy_(change(tensor))
                model.qk[6:].fill_(0)
            elif name == "norm":
                model.norm.data.copy_(tensor)

    return load


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 3), "k": (2, 3), "norm": (3,), "left out": (2,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_a_later_load_repeats_the_copies_of_the_first_one():
    model, expected = fused(), fused()
    copied = CopiedModel(model)
    assert not copied.has_copies
    copied.note_copies(tensors(1).items(), loading(model, lambda each: each))
    assert copied.has_copies
    assert copied.repeat_copies(tensors(2).items()) == set()
    with torch.no_grad():
        loading(expected, lambda each: each)(tensors(2).items())
    assert torch.equal(model.qk, expected.qk) and torch.equal(model.norm, expected.norm)


def test_views_of_one_memory_are_told_apart():
    """As in a trainer's memory."""
    model, memory = fused(), torch.arange(60.0)
    copied = CopiedModel(model)
    views = {"norm": memory[40:43], "q": memory[3:21].view(6, 3), "k": memory[50:56].view(2, 3)}
    copied.note_copies(views.items(), loading(model, lambda each: each))
    assert copied.repeat_copies(tensors(2).items()) == set()
    assert torch.equal(model.qk[:4], tensors(2)["q"][1:5])
    assert torch.equal(model.qk[4:6], tensors(2)["k"])


def test_a_missing_tensor_is_named():
    copied = CopiedModel(model := fused())
    copied.note_copies(tensors(1).items(), loading(model, lambda each: each))
    some = {name: tensor for name, tensor in tensors(2).items() if name != "k"}
    assert copied.repeat_copies(some.items()) == {"k"}


def test_a_load_that_computes_is_not_repeated():
    copied = CopiedModel(model := fused())
    copied.note_copies(tensors(1).items(), loading(model, lambda each: each + 1))
    assert not copied.has_copies


def test_a_load_that_leaves_a_parameter_out_is_not_repeated():
    copied = CopiedModel(model := fused())
    some = {name: tensor for name, tensor in tensors(2).items() if name != "norm"}
    copied.note_copies(some.items(), loading(model, lambda each: each))
    assert not copied.has_copies


def test_copies_end_where_a_parameter_moves():
    copied = CopiedModel(model := fused())
    copied.note_copies(tensors(1).items(), loading(model, lambda each: each))
    model.norm.data = model.norm.data.clone()
    assert not copied.has_copies
