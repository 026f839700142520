"""DPPO: masks tokens by the change of their probability, not by its ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import DatumLayout, LossResult, LossSettings, Setting
from trainer_service.losses.policy import (
    SAMPLER_INPUTS,
    finish,
    policy_loss,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor


def dppo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ exp(p - q)·A·1[kept], per token, with q the sampler's log probability. All [E].

    A token is dropped if A has already moved its probability more than δ: A > 0 and exp(p) - exp(q)
    > δ, or A < 0 and exp(q) - exp(p) > δ (binary total variation, arXiv 2602.04879, with δ = 0.2 as
    in prime-rl's code)."""
    tokens = ready(logprobs, inputs)
    advantages, delta = tokens.advantages, settings.number("delta")
    moved = logprobs.detach().exp() - tokens.sampler.exp()
    dropped = ((advantages > 0) & (moved > delta)) | ((advantages < 0) & (-moved > delta))
    values = -tokens.ratio * advantages * ~dropped
    return finish(tokens, values, inputs, settings, layout, clipped=dropped)


LOSS = policy_loss(
    "dppo",
    dppo,
    inputs=SAMPLER_INPUTS,
    settings=(Setting("delta", 0.2, "δ, how far a probability may move", low=0.0),),
    clips=True,
)
