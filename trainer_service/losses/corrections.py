"""Corrections for the mismatch between sampler and trainer: weights that multiply a policy loss.

The setting `correction` names them, joined by "+" ("tis+off_policy_mask"). Their weights are
multiplied. To add a correction, write its function and its `Correction`, and list it in
`CORRECTIONS` below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainer_service.losses.base import DatumLayout, LossSettings, Setting

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_LIMIT = 20.0
"""Bound of log ratios before exp, as in verl and SkyRL, so that one token cannot overflow a batch.
Beyond it a token has no gradient through its ratio."""


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class Mismatch:
    """The distance between sampler and trainer. All [E], without gradient.

    `log_rho` is log ρ = old - mu, and 0 for inactive tokens. `drift` is mu - p, with p the current
    policy. Without `old_logprobs`, old is p."""

    log_rho: Tensor
    drift: Tensor
    advantages: Tensor
    active: Tensor

    def sequence_log_rho(self, layout: DatumLayout) -> Tensor:
        """log of ∏ ρ over a datum's active tokens, for each of its entries: [E]."""
        return bounded(layout.datum_sums(self.log_rho))[layout.datum]


@dataclass(frozen=True)
class Correction:
    """`weight(mismatch, settings, layout)` is the factor [E] of each token's loss.

    It stands for the ratio of trainer and sampler. A `mask` only keeps or drops tokens."""

    name: str
    weight: Callable[[Mismatch, LossSettings, DatumLayout], Tensor]
    settings: tuple[Setting, ...]
    mask: bool = False


def tis(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = min(ρ, C), ρ = exp(old - mu) of the token.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site/off-policy-rl); truncation as in Retrace, arXiv 1606.02647."""
    return mismatch.log_rho.exp().clamp(max=settings.number("tis_cap"))


TIS = Correction(
    name="tis",
    weight=tis,
    settings=(Setting("tis_cap", 2.0, "C of `tis`", low=0.0, above=True),),
)


def seq_tis(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = min(∏ ρ, C), the product over the datum's active tokens.

    Li et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (yingru.notion.site)."""
    return mismatch.sequence_log_rho(layout).exp().clamp(max=settings.number("seq_tis_cap"))


SEQ_TIS = Correction(
    name="seq_tis",
    weight=seq_tis,
    settings=(Setting("seq_tis_cap", 2.0, "C of `seq_tis`", low=0.0, above=True),),
)


def masked(log_rho: Tensor, *, low: float, high: float) -> Tensor:
    """ρ·1[low ≤ ρ ≤ high], from log ρ."""
    rho = log_rho.exp()
    return rho * ((rho >= low) & (rho <= high))


def mis(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = ρ·1[low ≤ ρ ≤ high], ρ = exp(old - mu) of the token.

    Li et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (yingru.notion.site)."""
    low, high = settings.number("mis_low"), settings.number("mis_high")
    return masked(mismatch.log_rho, low=low, high=high)


MIS = Correction(
    name="mis",
    weight=mis,
    settings=(
        Setting("mis_low", 0.5, "lower bound of ρ in `mis`", low=0.0),
        Setting("mis_high", 2.0, "upper bound of ρ in `mis`", low=0.0, above=True),
    ),
)


def seq_mis(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = P·1[low ≤ P ≤ high], P = ∏ ρ over the datum's active tokens.

    Li et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (yingru.notion.site)."""
    low, high = settings.number("seq_mis_low"), settings.number("seq_mis_high")
    return masked(mismatch.sequence_log_rho(layout), low=low, high=high)


SEQ_MIS = Correction(
    name="seq_mis",
    weight=seq_mis,
    settings=(
        Setting("seq_mis_low", 0.5, "lower bound of ∏ρ in `seq_mis`", low=0.0),
        Setting("seq_mis_high", 2.0, "upper bound of ∏ρ in `seq_mis`", low=0.0, above=True),
    ),
)


def icepop(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = ρ·1[α ≤ ρ ≤ β], ρ = exp(old - mu) of the token.

    The function of `mis` with the bounds of its authors, 0.5 and 5 (Ling team, "Every step
    evolves", arXiv 2510.18855; ringtech.notion.site/icepop)."""
    low, high = settings.number("icepop_low"), settings.number("icepop_high")
    return masked(mismatch.log_rho, low=low, high=high)


ICEPOP = Correction(
    name="icepop",
    weight=icepop,
    settings=(
        Setting("icepop_low", 0.5, "α of `icepop`", low=0.0),
        Setting("icepop_high", 5.0, "β of `icepop`", low=0.0, above=True),
    ),
)


def geometric(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = 1[low ≤ g ≤ high], g = exp(mean of log ρ over the datum's active tokens).

    The geometric mean does not grow with the length (verl, rollout_corr.md). The default bounds are
    ours, wider than verl's."""
    mean = layout.datum_means(mismatch.log_rho, mismatch.active)[layout.datum].exp()
    low, high = settings.number("geometric_low"), settings.number("geometric_high")
    return ((mean >= low) & (mean <= high)).to(mean.dtype)


GEOMETRIC = Correction(
    name="geometric",
    weight=geometric,
    settings=(
        Setting("geometric_low", 0.99, "lower bound of g in `geometric`", low=0.0),
        Setting("geometric_high", 1.01, "upper bound of g in `geometric`", low=0.0, above=True),
    ),
    mask=True,
)


def off_policy_mask(mismatch: Mismatch, settings: LossSettings, layout: DatumLayout) -> Tensor:
    """w = 0 where A < 0 and mean(mu - p) over the datum's active tokens is above δ, else 1.

    DeepSeek-V3.2, arXiv 2512.02556, which names no δ."""
    mean = layout.datum_means(mismatch.drift, mismatch.active)[layout.datum]
    dropped = (mismatch.advantages < 0) & (mean > settings.number("off_policy_delta"))
    return (~dropped).to(mean.dtype)


OFF_POLICY_MASK = Correction(
    name="off_policy_mask",
    weight=off_policy_mask,
    settings=(Setting("off_policy_delta", 0.1, "δ of `off_policy_mask`", low=0.0),),
    mask=True,
)
CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {each.name: each for each in (TIS, SEQ_TIS, MIS, SEQ_MIS, ICEPOP, GEOMETRIC, OFF_POLICY_MASK)}
)
