"""SAPO: a soft gate instead of the clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import DatumLayout, LossResult, LossSettings, Setting
from trainer_service.losses.policy import (
    POLICY_INPUTS,
    finish,
    policy_loss,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor


def sapo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ 4/τ·sigmoid(τ·(r - 1))·A with r = exp(p - old), per token. All [E].

    τ is `tau_positive` where A > 0, else `tau_negative`: 1 and 1.05 (Soft Adaptive Policy
    Optimization, arXiv 2511.20347). At r = 1 the gradient is that of PPO. It fades with the
    distance from 1."""
    tokens = ready(logprobs, inputs)
    tau = torch.where(
        tokens.advantages > 0,
        logprobs.new_tensor(settings.number("tau_positive")),
        logprobs.new_tensor(settings.number("tau_negative")),
    )
    gate = 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))
    return finish(tokens, -gate * tokens.advantages, inputs, settings, layout)


LOSS = policy_loss(
    "sapo",
    sapo,
    inputs=POLICY_INPUTS,
    settings=(
        Setting("tau_positive", 1.0, "τ where A > 0", low=0.0, above=True),
        Setting("tau_negative", 1.05, "τ where A < 0", low=0.0, above=True),
    ),
)
