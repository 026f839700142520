"""Advantages per token from rewards per token: returns to go, whitening and GAE.

Arrays are [sequences, tokens]. `mask` has this shape and is 1 for tokens that count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def returns_to_go(rewards: Floats, mask: Floats, *, discount: float = 1.0) -> Floats:
    """Return G_t = r_t + discount · G_{t+1} for tokens that count, else 0.

    Example: rewards [[0, 0, 1]] with discount 0.5 give [[0.25, 0.5, 1]]."""
    found = np.zeros_like(rewards)
    after = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        # A token that does not count passes the later return on, undiscounted.
        after = np.where(mask[:, t] > 0, rewards[:, t] + discount * after, after)
        found[:, t] = after
    result: Floats = found * mask
    return result


def whitened(values: Floats, mask: Floats, *, ddof: int = 0, eps: float = 1e-8) -> Floats:
    """Return (x - mean) / sqrt(variance + eps) over all tokens that count, else 0.

    The variance is divided by the number of tokens minus `ddof`, which is 1 in verl."""
    count = mask.sum()
    if count <= ddof:
        return np.zeros_like(values)
    mean = (values * mask).sum() / count
    variance = ((values - mean) ** 2 * mask).sum() / (count - ddof)
    result: Floats = (values - mean) / np.sqrt(variance + eps) * mask
    return result


def reinforce_plus_plus(
    rewards: Floats,
    mask: Floats,
    *,
    group: int | None = None,
    discount: float = 1.0,
    ddof: int = 0,
    eps: float = 1e-8,
) -> Floats:
    """Return advantages [sequences, tokens] of rewards [sequences], given at the last token.

    They are returns to go, whitened over the batch's tokens (REINFORCE++, arXiv 2501.03262). With
    `group`, the number of adjacent answers to a prompt, each group's mean is subtracted first (the
    "-baseline" form). `ddof` as in `whitened`. Raises `ValueError` for incomplete groups."""
    if group is not None:
        if len(rewards) % group:
            raise ValueError(f"{len(rewards)} sequences do not divide into groups of {group}")
        by_group = rewards.reshape(-1, group)
        rewards = (by_group - by_group.mean(axis=1, keepdims=True)).reshape(-1)
    by_token = np.zeros(mask.shape)
    for row, weights in enumerate(mask):
        counting = np.flatnonzero(weights)
        if len(counting):
            by_token[row, counting[-1]] = rewards[row]
    return whitened(returns_to_go(by_token, mask, discount=discount), mask, ddof=ddof, eps=eps)


def gae(
    rewards: Floats, values: Floats, *, discount: float = 0.99, decay: float = 0.95
) -> tuple[Floats, Floats]:
    """Return advantages and returns [tokens] of a sequence (GAE, arXiv 1506.02438).

    A_t = δ_t + discount·decay·A_{t+1} with δ_t = r_t + discount·V_{t+1} - V_t, and V = 0 after the
    end. The return, the target of a value function, is A + V. Nothing is whitened."""
    advantages = np.zeros_like(rewards)
    after, value_after = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discount * value_after - values[t]
        after = delta + discount * decay * after
        advantages[t] = after
        value_after = float(values[t])
    return advantages, advantages + values
