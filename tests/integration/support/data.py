"""Datums for the tests, and what comes back for them as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinker import TrainingClient, types

from tests.integration.support.models import VOCABULARY

Floats = NDArray[np.float32]

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo")
LOSSES = ("cross_entropy", *POLICY_LOSSES)


def sequences(count: int, *, seed: int, shortest: int = 4, longest: int = 24) -> list[list[int]]:
    """Random token sequences of different lengths."""
    random = np.random.default_rng(seed)
    return [
        random.integers(3, VOCABULARY, random.integers(shortest, longest + 1)).tolist()
        for _ in range(count)
    ]


def datum(tokens: list[int], **inputs: Floats) -> types.Datum:
    """Predict each token from those before; `inputs` are arrays [len(tokens) - 1]."""
    targets = np.array(tokens[1:], dtype=np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            **{name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
        },
    )


def supervised(tokens: list[int], *, weight: float = 1.0) -> types.Datum:
    return datum(tokens, weights=np.full(len(tokens) - 1, weight, dtype=np.float32))


def batch(
    loss: str, tokens: list[list[int]], *, old: list[Floats], seed: int = 0
) -> list[types.Datum]:
    """Datums for any loss. `old` are the logprobs of the policy that is said to have sampled."""
    if loss == "cross_entropy":
        return [supervised(sequence, weight=0.5) for sequence in tokens]
    random = np.random.default_rng(seed)
    return [
        datum(
            sequence,
            # About a fifth off, so that the ratio is clipped here and there.
            logprobs=(logprobs + random.normal(0, 0.2, len(logprobs))).astype(np.float32),
            advantages=random.normal(0, 1, len(logprobs)).astype(np.float32),
        )
        for sequence, logprobs in zip(tokens, old, strict=True)
    ]


def logprobs(training: TrainingClient, tokens: list[list[int]]) -> list[Floats]:
    """The trainer's logprobs of tokens[1:], [length - 1] for each sequence; nothing is trained."""
    future = training.forward([supervised(sequence) for sequence in tokens], "cross_entropy")
    return outputs(future.result(timeout=120))


def outputs(result: types.ForwardBackwardOutput) -> list[Floats]:
    return [np.array(out["logprobs"].data, np.float32) for out in result.loss_fn_outputs]


def adam(rate: float = 1e-2) -> types.AdamParams:
    # With the usual eps, Adam's first step is the sign of the gradient: what two ways of adding
    # up leave of a gradient that is zero would become a whole step. A larger eps is smooth.
    return types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.99, eps=1e-3)


def train(training: TrainingClient, *, seed: int, steps: int = 3, rate: float = 1e-2) -> None:
    """Moves the weights far enough that no test can take the old ones for the new."""
    data = [supervised(tokens) for tokens in sequences(8, seed=seed)]
    pending = []
    for _ in range(steps):
        pending += [
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=rate)),
        ]
    for future in pending:
        future.result(timeout=120)


def largest_difference(left: list[Floats], right: list[Floats]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))
