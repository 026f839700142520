"""The numbers of an optimizer step, from sums over all its batches.

Sums and maxima combine exactly over micro-batches, ranks and requests. Means do not."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_service.losses.base import Loss, Totals

_SUMS = ("surprise", "weights", "negative", "sampled", "kl", "k3", "entropy", "gap", "clipped")
_MAXIMA = ("ratio_max", "gap_max")


def batch_sums(
    loss: Loss, named: Mapping[str, float], totals: Totals, *, wide: bool
) -> dict[str, float]:
    """Return a batch's part of `step_numbers`. Names end in `:sum` or `:max`, by which to combine
    them.

    `named` has the loss's sums and maxima. `wide`: the batch has [N, K] targets."""
    found = {f"{name}:sum": named[name] for name in _SUMS if name in named}
    found |= {f"{name}:max": named[name] for name in _MAXIMA if name in named}
    if "clipped" in named:
        found["clippable:sum"] = named["sampled"]
    chosen = loss.active or totals.active < totals.entries
    if chosen and not wide:  # otherwise prompts count too, or a token counts several times
        found |= {"trained:sum": totals.active, "answers:sum": totals.active_datums}
    return found


def step_numbers(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that the batches of a step define.

    - `loss`: Σ w·(-p) / Σ w of cross_entropy, per trained token. Absent with negative weights,
      which are derivatives of a client's loss.
    - Means over the trained tokens with a sampler's logprob: `kl_mean` and `kl_k3` (KL from old to
      p), `entropy` (-mu), `gap_mean` (|p - mu|), `clipped_share`. With `ratio_max`, `gap_max`.
    - `answer_tokens`: trained tokens of a datum that has any."""
    numbers: dict[str, float] = {}

    def divide(name: str, part: str, whole: str) -> None:
        if f"{part}:sum" in sums and sums.get(f"{whole}:sum", 0.0) > 0:
            numbers[name] = sums[f"{part}:sum"] / sums[f"{whole}:sum"]

    if not sums.get("negative:sum"):
        divide("loss", "surprise", "weights")
    divide("kl_mean", "kl", "sampled")
    divide("kl_k3", "k3", "sampled")
    divide("clipped_share", "clipped", "clippable")
    divide("entropy", "entropy", "sampled")
    divide("gap_mean", "gap", "sampled")
    divide("answer_tokens", "trained", "answers")
    if "gap_mean" in numbers:
        numbers |= {name: sums[f"{name}:max"] for name in _MAXIMA}
    return numbers
