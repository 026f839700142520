"""KL terms: what keeps a policy near a reference policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import Input, Setting, Settings

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to ±20 before they are exponentiated, as verl and SkyRL do: a single
token must not overflow a batch. Beyond the limit a token has no gradient through its ratio."""

KL_TYPES = ("k1", "k2", "k3", "k3_plus", "unbiased")
KL_INPUTS = (
    Input(
        "ref_logprobs",
        "log probability of the target under the reference policy",
        needed_with="kl_coeff",
    ),
)
KL_SETTINGS = (
    Setting("kl_coeff", 0.0, "weight of the KL term; above 0 it needs `ref_logprobs`", low=0.0),
    Setting("kl_type", "k3", "estimator of the KL term", choices=KL_TYPES),
)


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within ±`LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_term(logprobs: Tensor, reference: Tensor, *, ratio: Tensor, kind: str) -> Tensor:
    """Estimates of KL(policy, reference) for each token, with x = ref - p. All [E].

    - `k1`: -x. Unbiased; as a loss its gradient is ∇p, which is 0 on average.
    - `k2`: x²/2. Its gradient is that of the KL, on policy.
    - `k3`: exp(x) - x - 1. Unbiased, never negative, of low variance.
    - `k3_plus`: the value of k3 with the gradient of k2 (verl).
    - `unbiased`: r·k3, with the ratio r = exp(p - old) (DeepSeek-V3.2, arXiv 2512.02556).

    k1, k2 and k3: Schulman, joschu.net/blog/kl-approx.
    """
    x = bounded(reference - logprobs)
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    k3 = x.exp() - x - 1
    if kind == "k3":
        return k3
    if kind == "k3_plus":
        k2 = x.square() / 2
        return k2 + (k3 - k2).detach()
    return ratio * k3


def add_kl(
    values: Tensor,
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
    settings: Settings,
    *,
    ratio: Tensor,
) -> tuple[Tensor, Tensor]:
    """`values` [E] with kl_coeff·KL added, and the KL alone without gradient (0 if unused)."""
    coefficient = settings.number("kl_coeff")
    if not coefficient:
        return values, values.detach().new_zeros(values.shape)
    kl = kl_term(logprobs, inputs["ref_logprobs"], ratio=ratio, kind=settings.text("kl_type"))
    return values + coefficient * kl, kl.detach()
