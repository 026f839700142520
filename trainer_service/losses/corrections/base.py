"""What a correction is given, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.kl import bounded
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Mismatch:
    """How far sampler and trainer are apart. All [E], without gradient.

    `log_rho` is log ρ = old - mu, 0 where a token is not `active`; `drift` is mu - p, with p the
    policy now; `advantages` are those of the tokens.

    `bypass` says that the client gave no `old_logprobs`: the loss then takes mu for old, so that
    its own ratio p/mu already carries the mismatch. ρ is then p/mu, and a correction answers
    with what it changes of it, f(ρ)/ρ instead of f(ρ).
    """

    log_rho: Tensor
    drift: Tensor
    advantages: Tensor
    active: Tensor
    bypass: bool

    def factor(self, weight: Tensor, log_rho: Tensor) -> Tensor:
        """`weight` = f(ρ), or f(ρ)/ρ in bypass mode."""
        return weight * (-log_rho).exp() if self.bypass else weight

    def sequence_log_rho(self, layout: Layout) -> Tensor:
        """log of the product of ρ over a datum's active tokens, for each of its entries: [E]."""
        return bounded(layout.datum_sums(self.log_rho))[layout.datum]


@dataclass(frozen=True)
class Correction:
    """`weight(mismatch, settings, layout)` is the factor [E] of each token's loss."""

    name: str
    weight: Callable[[Mismatch, Settings, Layout], Tensor]
    settings: tuple[Setting, ...]
