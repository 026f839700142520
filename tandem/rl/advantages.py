"""Advantages of sampled groups: one function per estimator.

Rewards and advantages are [groups, samples]. A row holds the answers to one prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def reward(rewards: Floats) -> Floats:
    """A = R. REINFORCE without a baseline (Williams, 1992).

    With rewards of 0 and 1, only right answers contribute, and no answer becomes less likely."""
    return rewards.copy()


def grpo(rewards: Floats, *, eps: float = 1e-4, ddof: int = 1) -> Floats:
    """A_i = (R_i - mean) / (std + eps), within a group (arXiv 2402.03300).

    A group of equal rewards has advantage 0. The defaults are TRL's: the sample's deviation (`ddof`
    1) and eps 1e-4. verl uses `ddof` 1 and 1e-6, torchtitan the population's deviation (`ddof` 0)
    and 1e-6."""
    enough = rewards.shape[1] > ddof
    std = rewards.std(axis=1, ddof=ddof, keepdims=True) if enough else 0.0
    centred: Floats = dr_grpo(rewards) / (std + eps)
    return centred


def dr_grpo(rewards: Floats) -> Floats:
    """A_i = R_i - mean, within a group (Dr. GRPO, arXiv 2503.20783).

    Without the division, easy and hard prompts have equal weight. Use it with a loss that divides
    by a constant (`aggregation` "constant")."""
    centred: Floats = rewards - rewards.mean(axis=1, keepdims=True)
    return centred


def rloo(rewards: Floats) -> Floats:
    """A_i = R_i - the mean of the others' R, within a group (leave one out, arXiv 2402.14740).

    Raises `ValueError` for groups of one."""
    count = rewards.shape[1]
    if count < 2:
        raise ValueError("rloo needs at least two answers in a group")
    scaled: Floats = dr_grpo(rewards) * count / (count - 1)
    return scaled


def maxrl(rewards: Floats) -> Floats:
    """A_i = (R_i - mean) / (mean + 1e-6), within a group (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1, a rarer right answer counts more."""
    means = rewards.mean(axis=1, keepdims=True)
    scaled: Floats = (rewards - means) / (means + 1e-6)
    return scaled


def batch_std(rewards: Floats) -> Floats:
    """A_i = (R_i - mean of the group) / (std of the whole batch + 1e-4) (arXiv 2508.08221).

    Unlike a group's own deviation, this does not amplify groups that nearly agree."""
    std = rewards.std(ddof=1) if rewards.size > 1 else 0.0
    scaled: Floats = dr_grpo(rewards) / (std + 1e-4)
    return scaled
