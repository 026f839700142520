"""stable_reinforce: Tandem's own formula for the loss of that name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import (
    AGGREGATION_SETTINGS,
    DatumLayout,
    Input,
    Loss,
    LossResult,
    LossSettings,
    Setting,
    aggregate,
    check_aggregation,
)
from trainer_service.losses.policy import (
    ADVANTAGES,
    CLIPPED_POLICY_SUMS,
    MASK,
    POLICY_MAXIMA,
    policy_metrics,
    ready,
    reported,
)

if TYPE_CHECKING:
    from torch import Tensor


def stable_reinforce(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ sg(k·min(r, C))·p·A + kl_coeff·Σ k·(p - q)²/2, per token. All [E].

    **This formula is ours. The SDK's original service does not publish its own.** It is REINFORCE
    with known remedies for a sampler that differs slightly from the trained policy:

    - r = exp(p - q) weights a token's gradient, truncated at C = `ratio_cap` (arXiv 1606.02647). sg
      stops the gradient.
    - k = 1[low ≤ exp(mean of p - q over the sequence) ≤ high] drops sequences of another policy
      (`sequence_low`, `sequence_high`; geometric rejection, verl, rollout_corr.md).
    - The last term pulls towards the sampler. On policy its gradient is that of KL(policy, sampler)
      ("k2", joschu.net/blog/kl-approx).

    With provenance spans, each sampled sequence is judged by itself and prompt tokens do not act.
    Without them, the datum is one sequence. Without `logprobs`, q = p and r = 1."""
    sampled = "logprobs" in inputs
    if not sampled:
        inputs = {**inputs, "logprobs": logprobs.detach()}
    tokens = ready(logprobs, inputs)
    tokens = dataclasses.replace(tokens, active=tokens.active * (layout.sequence >= 0))
    ratio = tokens.ratio.detach()
    mean = layout.sequence_means(tokens.log_ratio.detach(), tokens.active).exp()
    low, high = settings.number("sequence_low"), settings.number("sequence_high")
    kept = ((mean >= low) & (mean <= high)).to(ratio.dtype)
    capped = ratio.clamp(max=settings.number("ratio_cap"))
    pull = kept * (logprobs - tokens.sampler).square() / 2
    reinforce = -kept * capped * logprobs * tokens.advantages
    values = reinforce + settings.number("kl_coeff") * pull
    loss = aggregate(values, tokens.active, settings, layout)
    clipped = capped != ratio
    return reported(tokens, loss, kl=pull, weight=kept, clipped=clipped, sampled=sampled)


LOSS = Loss(
    name="stable_reinforce",
    compute=stable_reinforce,
    inputs=(
        ADVANTAGES,
        Input(
            "logprobs",
            "log probability under the sampler (mu). Without it, p is taken",
            finite=False,
        ),
        MASK,
    ),
    settings=(
        Setting("kl_coeff", 0.01, "weight of the pull towards the sampler", low=0.0),
        Setting("ratio_cap", 2.0, "C, the most that a token counts", low=0.0, above=True),
        Setting("sequence_low", 0.5, "lower bound of a sequence's mean ratio", low=0.0),
        Setting("sequence_high", 2.0, "upper bound of a sequence's mean ratio", low=0.0),
        *AGGREGATION_SETTINGS,
    ),
    check=check_aggregation,
    active="advantages",
    sampled_only=True,
    sum_names=CLIPPED_POLICY_SUMS,
    max_names=POLICY_MAXIMA,
    metrics=policy_metrics,
)
