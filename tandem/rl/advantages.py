"""From rewards of sampled groups to advantages: one function for each estimator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def reward(rewards: Floats) -> Floats:
    """A = R. Plain REINFORCE without a baseline (Williams, 1992).

    With rewards of 0 and 1 only right answers are learned from; nothing is pushed down.
    """
    return rewards.copy()


def grpo(rewards: Floats, *, eps: float = 1e-4) -> Floats:
    """A_i = (R_i - mean) / (std + eps), within a group, sample std (arXiv 2402.03300).

    A group whose rewards are all alike has advantage 0.
    """
    std = rewards.std(axis=1, ddof=1, keepdims=True) if rewards.shape[1] > 1 else 0.0
    centred: Floats = (rewards - rewards.mean(axis=1, keepdims=True)) / (std + eps)
    return centred


ALGORITHMS: dict[str, Callable[[Floats], Floats]] = {"reward": reward, "grpo": grpo}


def advantages(algorithm: str, rewards: Floats) -> Floats:
    """Advantages [groups, samples] of rewards [groups, samples].

    Literal example: `advantages("reward", [[1, 0]])` is `[[1, 0]]`. Raises `ValueError` for an
    unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm](rewards)
