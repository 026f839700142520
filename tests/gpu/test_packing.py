"""Packed rows in bfloat16, which the GPU's attention kernel requires, also on the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.support.devices import DEVICES, settings_on
from tests.support.losses.batches import mixed_data
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_worker import logprobs_of, request, trainer_process
from trainer_service.models.packing import bounds_of, packed_attention

LENGTHS = [130, 1, 64, 64, 7, 33]


def row(device: str, *, heads: tuple[int, int], size: int) -> list[torch.Tensor]:
    """Query, key and value [1, heads, T, size] in bfloat16, in a model's memory layout."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, sum(LENGTHS), count, size, generator=generator)
        .to(device, torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention [1, T, heads, size] of one sequence, in float32, with a mask for its window."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    age = torch.arange(q.shape[2], device=q.device)
    distance = age[:, None] - age
    seen = (distance >= 0) & (distance < (window or len(age)))
    mixed = scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=seen)
    return mixed.transpose(1, 2)


def rms(values: torch.Tensor) -> float:
    return float(values.detach().float().square().mean().sqrt())


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)], ids=["all", "grouped", "one"])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_of_a_packed_row_is_that_of_each_sequence_alone(device, heads, size, window):
    """Each sequence is compared by itself, so that errors of a short one show."""
    parts = row(device, heads=heads, size=size)
    bounds = bounds_of(LENGTHS)
    packed, _ = packed_attention(
        None,
        *parts,
        None,
        sliding_window=window,
        bounds=torch.from_numpy(bounds).to(device),
        longest=max(LENGTHS),
    )
    spans = [slice(*each) for each in pairwise(bounds.tolist())]
    plain = torch.cat([alone(*(part[:, :, at] for part in parts), window) for at in spans], dim=1)
    gradient = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).to(device)
    of_packed = torch.autograd.grad(packed, parts, gradient.bfloat16())
    of_plain = torch.autograd.grad(plain, parts, gradient.bfloat16().float())

    assert packed.dtype == torch.bfloat16
    pairs = {"output": (packed.transpose(1, 2), plain.transpose(1, 2))}
    for name, *both in zip(("query", "key", "value"), of_packed, of_plain, strict=True):
        pairs[name] = both
    for name, (found, wanted) in pairs.items():
        for at in spans:
            off = rms(found[:, :, at].float() - wanted[:, :, at].float())
            assert off <= 0.02 * rms(wanted[:, :, at]) + 2e-3, (name, at)


@pytest.mark.parametrize("device", DEVICES)
def test_a_trainer_in_bfloat16_packs_and_computes_what_a_padded_one_does(tmp_path, device):
    """Up to bfloat16's rounding, which happens in different places."""
    model = write_tiny_model(tmp_path / "model", head_dim=64)
    found = {}
    for packing in ("on", "off"):
        with trainer_process(
            model,
            tmp_path / packing,
            dtype="bfloat16",
            packing=packing,
            micro_batch_tokens=64,
            **settings_on(device),
        ) as trainer:
            assert trainer.describe().packs == (packing == "on")
            output = trainer.output(request(mixed_data()))
            norm = trainer.optim_step(lr=0.0).metrics["grad_norm"]
            found[packing] = (np.concatenate(logprobs_of(output)), norm)
    (packed, norm), (padded, other) = found["on"], found["off"]
    assert np.abs(packed - padded).max() < 0.25
    assert np.abs(packed - padded).mean() < 0.03
    assert norm == pytest.approx(other, rel=0.05)
