"""Turns labels and samples into the tinker SDK's datums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tinker import types


@dataclass(frozen=True)
class Rollout:
    """A sampled answer: `tokens` [n], and their `logprobs` [n] under the sampling policy."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


def supervised_datum(prompt: list[int], label: list[int], *, weight: float) -> types.Datum:
    """Return a datum for cross_entropy. Label tokens have the weight `weight`, prompt tokens 0."""
    from tinker import types

    inputs, targets = _shift(prompt, label)
    weights = np.zeros(len(targets), dtype=np.float32)
    weights[len(prompt) - 1 :] = weight
    return types.Datum(
        model_input=types.ModelInput.from_ints(inputs),
        loss_fn_inputs={
            "target_tokens": _tensor(np.asarray(targets, dtype=np.int64)),
            "weights": _tensor(weights),
        },
    )


def policy_datum(rollout: Rollout, *, advantage: float) -> types.Datum:
    """Return a datum for a policy loss. Sampled tokens get the advantage, prompt tokens 0."""
    from tinker import types

    inputs, targets = _shift(rollout.prompt, rollout.tokens)
    start = len(rollout.prompt) - 1
    logprobs = np.zeros(len(targets), dtype=np.float32)
    logprobs[start:] = rollout.logprobs
    advantages = np.zeros(len(targets), dtype=np.float32)
    advantages[start:] = advantage
    return types.Datum(
        model_input=types.ModelInput.from_ints(inputs),
        loss_fn_inputs={
            "target_tokens": _tensor(np.asarray(targets, dtype=np.int64)),
            "logprobs": _tensor(logprobs),
            "advantages": _tensor(advantages),
        },
    )


def _shift(prompt: list[int], completion: list[int]) -> tuple[list[int], list[int]]:
    """Position i of the input predicts position i of the target."""
    sequence = prompt + completion
    return sequence[:-1], sequence[1:]


def _tensor(values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> types.TensorData:
    from tinker import types

    kind = "int64" if values.dtype == np.int64 else "float32"
    return types.TensorData(data=values, dtype=kind, shape=list(values.shape))
