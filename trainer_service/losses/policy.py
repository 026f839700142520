"""Shared parts of the policy-gradient losses: ratios, corrections, KL terms and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tandem.errors import UnknownLossSetting
from trainer_service.losses.base import (
    AGGREGATION_SETTINGS,
    Compute,
    DatumLayout,
    Input,
    Loss,
    LossResult,
    LossSettings,
    Setting,
    aggregate,
    check_aggregation,
)
from trainer_service.losses.corrections import CORRECTIONS, Mismatch, bounded

if TYPE_CHECKING:
    from torch import Tensor


KL_TYPES = ("k1", "k2", "k3", "k3_plus", "unbiased")
KL_INPUTS = (
    Input(
        "ref_logprobs",
        "log probability of the target under the reference policy",
        needed_with="kl_coeff",
    ),
)
KL_SETTINGS = (
    Setting("kl_coeff", 0.0, "weight of the KL term. Above 0 it needs `ref_logprobs`", low=0.0),
    Setting("kl_type", "k3", "estimator of the KL term", choices=KL_TYPES),
)


def kl_term(logprobs: Tensor, reference: Tensor, *, ratio: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy, reference) for each token, with x = ref - p. All [E].

    - `k1`: -x. Unbiased. As a loss, its gradient is ∇p, which is 0 on average.
    - `k2`: x²/2. Its gradient is that of the KL, on policy.
    - `k3`: exp(x) - x - 1. Unbiased, never negative, of low variance.
    - `k3_plus`: the value of k3 with the gradient of k2 (verl).
    - `unbiased`: r·k3, with the ratio r = exp(p - old) (DeepSeek-V3.2, arXiv 2512.02556).

    k1, k2 and k3: Schulman, joschu.net/blog/kl-approx."""
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
    settings: LossSettings,
    *,
    ratio: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return `values` [E] plus kl_coeff·KL, and the KL without gradient (0 if unused)."""
    coefficient = settings.number("kl_coeff")
    if not coefficient:
        return values, values.detach().new_zeros(values.shape)
    kl = kl_term(logprobs, inputs["ref_logprobs"], ratio=ratio, kind=settings.text("kl_type"))
    return values + coefficient * kl, kl.detach()


LOGPROBS = Input(
    "logprobs",
    "log probability of the target under the sampler (mu). A token without a finite one is dropped",
    required=True,
    finite=False,
)
ADVANTAGES = Input("advantages", "advantage A of the token", required=True)
MASK = Input(
    "mask",
    "0 for tokens that do not count, such as the prompt. Without it, A = 0 marks these tokens",
)
OLD_LOGPROBS = Input(
    "old_logprobs",
    "log probability under the trainer when the batch began (old). Without it, mu is taken",
)
BOUND_INPUTS = (
    Input(
        "clip_low_threshold",
        "bound instead of the setting's, for a token or a datum",
        shape="either",
        default="clip_low_threshold",
    ),
    Input(
        "clip_high_threshold",
        "bound instead of the setting's, for a token or a datum",
        shape="either",
        default="clip_high_threshold",
    ),
)
SAMPLER_INPUTS = (LOGPROBS, ADVANTAGES, MASK, *KL_INPUTS)
"""For losses with the ratio p/mu."""
POLICY_INPUTS = (LOGPROBS, ADVANTAGES, MASK, OLD_LOGPROBS, *KL_INPUTS)
CORRECTION_SETTINGS = (
    Setting("correction", "none", "corrections of the mismatch, joined by `+`"),
    *(setting for correction in CORRECTIONS.values() for setting in correction.settings),
)
POLICY_SETTINGS = (*AGGREGATION_SETTINGS, *KL_SETTINGS, *CORRECTION_SETTINGS)
POLICY_SUMS = (
    *("active", "dropped", "ratio", "kl", "ref_kl", "weight", "rejected"),
    *("sampled", "k3", "entropy", "gap"),
)
CLIPPED_POLICY_SUMS = (*POLICY_SUMS, "clipped")
POLICY_MAXIMA = ("ratio_max", "gap_max")


def bound_settings(low: float, high: float) -> tuple[Setting, ...]:
    """Settings that bound the ratio itself, not its distance from 1."""
    return (
        Setting("clip_low_threshold", low, "lower bound of the ratio", low=0.0),
        Setting("clip_high_threshold", high, "upper bound of the ratio", low=0.0),
    )


def check_policy(settings: LossSettings) -> None:
    check_aggregation(settings)
    correction_names(settings)


def without_corrections(settings: LossSettings) -> bool:
    """Corrections weigh a token by its whole sequence. See `Loss.by_entry`."""
    return not correction_names(settings)


def correction_names(settings: LossSettings) -> tuple[str, ...]:
    text = settings.text("correction")
    if text in ("none", ""):
        return ()
    names = tuple(name.strip() for name in text.split("+"))
    for name in names:
        if name not in CORRECTIONS:
            raise UnknownLossSetting(
                f"unknown correction {name!r}; known: none, {', '.join(CORRECTIONS)}; several are "
                "joined by '+'"
            )
    return names


@dataclass(frozen=True)
class Tokens:
    """The prepared tokens of a policy loss. All [E] but `bypass`.

    `logprobs` p. `sampler` mu and `old`, both finite. `log_ratio` = p - old within ±20, and `ratio`
    is its exponential. `active` and `dropped` are 0 or 1. `bypass`: there are no `old_logprobs`, so
    old is mu."""

    logprobs: Tensor
    advantages: Tensor
    sampler: Tensor
    old: Tensor
    log_ratio: Tensor
    ratio: Tensor
    active: Tensor
    dropped: Tensor
    bypass: bool


def ready(
    logprobs: Tensor, inputs: Mapping[str, Tensor], *, acts_everywhere: bool = False
) -> Tokens:
    """Prepare the inputs that all policy losses share.

    A token is dropped if its sampler logprob is not finite: it is not active, and its ratio is 1.
    Without `mask`, tokens with a nonzero advantage are active, or all with `acts_everywhere`."""
    now = logprobs.detach()
    given, advantages = inputs["logprobs"], inputs["advantages"]
    finite = torch.isfinite(given)
    sampler = torch.where(finite, given, now)
    chosen = inputs["mask"] != 0 if "mask" in inputs else advantages != 0
    if acts_everywhere and "mask" not in inputs:
        chosen = torch.ones_like(finite)
    bypass = "old_logprobs" not in inputs
    old = sampler if bypass else inputs["old_logprobs"]
    log_ratio = bounded(logprobs - old)
    return Tokens(
        logprobs=logprobs,
        advantages=advantages,
        sampler=sampler,
        old=old,
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        active=(chosen & finite).to(logprobs.dtype),
        dropped=(chosen & ~finite).to(logprobs.dtype),
        bypass=bypass,
    )


def clip_bounds(
    inputs: Mapping[str, Tensor], settings: LossSettings, *, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The bounds of the ratio, [E] or [1]: the inputs, if given, or the settings."""
    low, high = (
        inputs[name] if name in inputs else like.new_full((1,), settings.number(name))
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return low, high


def correction_weight(
    tokens: Tokens, settings: LossSettings, layout: DatumLayout, *, ratio: Tensor
) -> Tensor:
    """The product of the named corrections' weights: [E], without gradient.

    In bypass mode the loss's `ratio` [E] is p/mu and contains the mismatch. Any weight that stands
    for the mismatch divides the ratio out once. Masks alone leave it in place."""
    names = correction_names(settings)
    now = tokens.logprobs.detach()
    weight = torch.ones_like(now)
    if not names:
        return weight
    trainer = now if tokens.bypass else tokens.old
    mismatch = Mismatch(
        log_rho=bounded(trainer - tokens.sampler) * tokens.active,
        drift=tokens.sampler - now,
        advantages=tokens.advantages,
        active=tokens.active,
    )
    for name in names:
        weight = weight * CORRECTIONS[name].weight(mismatch, settings, layout)
    if tokens.bypass and not all(CORRECTIONS[name].mask for name in names):
        weight = weight / ratio.detach()
    return weight


def finish(
    tokens: Tokens,
    values: Tensor,
    inputs: Mapping[str, Tensor],
    settings: LossSettings,
    layout: DatumLayout,
    *,
    ratio: Tensor | None = None,
    clipped: Tensor | None = None,
) -> LossResult:
    """Weigh the token losses `values` [E], add the unweighted KL term and aggregate.

    `ratio` is the loss's own ratio if it differs from the tokens'. `clipped` [E] marks clipped
    tokens."""
    ratio = tokens.ratio if ratio is None else ratio
    weight = torch.ones_like(tokens.active)
    if settings.has("correction"):
        weight = correction_weight(tokens, settings, layout, ratio=ratio)
    values, kl = add_kl(values * weight, tokens.logprobs, inputs, settings, ratio=tokens.ratio)
    loss = aggregate(values, tokens.active, settings, layout)
    return reported(tokens, loss, kl=kl, weight=weight, ratio=ratio, clipped=clipped)


def reported(
    tokens: Tokens,
    loss: Tensor,
    *,
    kl: Tensor,
    weight: Tensor,
    ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    sampled: bool = True,
) -> LossResult:
    """The loss with statistics of its active tokens, in the order of `POLICY_SUMS`. All [E] but
    `loss`.

    "kl" and "k3" estimate KL(old, p) by -log ratio and by ratio - log ratio - 1 (k1 and k3 of
    Schulman, joschu.net/blog/kl-approx). "entropy" estimates the sampler's by -mu, and "gap" is
    |p - mu|. "sampled" counts the tokens with a sampler's logprob: none unless `sampled`."""
    with torch.no_grad():
        active = tokens.active
        gap = (tokens.logprobs - tokens.sampler).abs() * active
        ratio = tokens.ratio if ratio is None else ratio
        sums: tuple[Tensor, ...] = (
            active.sum(),
            tokens.dropped.sum(),
            (ratio * active).sum(),
            -(tokens.log_ratio * active).sum(),
            (kl * active).sum(),
            (weight * active).sum(),
            ((weight == 0) * active).sum(),
            active.sum() * sampled,
            ((tokens.log_ratio.expm1() - tokens.log_ratio) * active).sum(),
            -(tokens.sampler * active).sum(),
            gap.sum(),
        )
        if clipped is not None:
            sums = (*sums, (clipped * active).sum())
        return LossResult(loss=loss, sums=sums, maxima=((ratio * active).amax(), gap.amax()))


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The reported numbers. Without an active token the ratio is 1 and the KL 0."""
    active = sums["active"]

    def mean(name: str, *, otherwise: float) -> float:
        return sums[name] / active if active else otherwise

    metrics = {
        "active_tokens:sum": active,
        "dropped_tokens:sum": sums["dropped"],
        "ratio:mean": mean("ratio", otherwise=1.0),
        "ratio:max": sums["ratio_max"] if active else 1.0,
        "kl:mean": mean("kl", otherwise=0.0),
        "ref_kl:mean": mean("ref_kl", otherwise=0.0),
        "correction_weight:mean": mean("weight", otherwise=1.0),
        "rejected_tokens:mean": mean("rejected", otherwise=0.0),
    }
    if "clipped" in sums:
        metrics["clipped:mean"] = mean("clipped", otherwise=0.0)
    return metrics


def policy_loss(
    name: str,
    compute: Compute,
    *,
    inputs: tuple[Input, ...],
    settings: tuple[Setting, ...] = (),
    clips: bool = False,
    by_entry: Callable[[LossSettings], bool] = without_corrections,
    check: Callable[[LossSettings], None] = check_policy,
) -> Loss:
    """Return a loss that acts on tokens with an advantage, and reports the statistics of `finish`.

    It has `POLICY_SETTINGS` after its own `settings`. With `clips`, it reports clipped tokens
    too."""
    return Loss(
        name=name,
        compute=compute,
        inputs=inputs,
        settings=(*settings, *POLICY_SETTINGS),
        check=check,
        by_entry=by_entry,
        active="advantages",
        sum_names=CLIPPED_POLICY_SUMS if clips else POLICY_SUMS,
        max_names=POLICY_MAXIMA,
        metrics=policy_metrics,
    )
