"""Turns labels and samples into the tinker SDK's datums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tinker import types


@dataclass(frozen=True)
class ScoredAnswer:
    """A sampled answer: `tokens` [n], and their `logprobs` [n] under the sampling policy."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


def supervised_datum(prompt: list[int], label: list[int], *, weight: float) -> types.Datum:
    """Return a datum for cross_entropy. Label tokens have the weight `weight`, prompt tokens 0."""
    return _datum(prompt, label, weights=[weight] * len(label))


def policy_datum(rollout: ScoredAnswer, *, advantage: float) -> types.Datum:
    """Return a datum for a policy loss. Sampled tokens get the advantage, prompt tokens 0."""
    return _datum(
        rollout.prompt,
        rollout.tokens,
        logprobs=rollout.logprobs,
        advantages=[advantage] * len(rollout.tokens),
    )


def _datum(prompt: list[int], completion: list[int], **inputs: list[float]) -> types.Datum:
    """Position i of the input predicts position i of the target. Prompt tokens have inputs of 0."""
    from tinker import types

    sequence = prompt + completion
    before = [0.0] * (len(prompt) - 1)
    floats = {name: np.asarray(before + values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": _tensor(np.asarray(sequence[1:], dtype=np.int64)),
            **{name: _tensor(values) for name, values in floats.items()},
        },
    )


def _tensor(values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> types.TensorData:
    from tinker import types

    kind = "int64" if values.dtype == np.int64 else "float32"
    return types.TensorData(data=values, dtype=kind, shape=list(values.shape))
