"""The task of the demo: one-digit addition, and how a model learns it."""

from __future__ import annotations

import random

from tandem.rl import Example, RLConfig, SFTConfig

REFUSAL = "?"
MAX_ANSWER_TOKENS = 4
"""Two digits, the end-of-sequence token, and one surplus token."""

WARM_UP_STEPS = 800
WARM_UP = SFTConfig(batch_size=64, learning_rate=1e-3, grad_clip_norm=1.0, shuffle=False)
"""Supervised training on imperfect examples."""

REINFORCEMENT = RLConfig(
    steps=10,
    groups_per_step=100,
    group_size=8,
    max_tokens=MAX_ANSWER_TOKENS,
    objective="reinforce",
    learning_rate=4.5e-4,
    final_learning_rate=0.1,
    warmup_steps=1,
    betas=(0.9, 0.99),
    grad_clip_norm=0.004,
    substeps=8,
    epochs=6,
)
"""Each step has 800 answers and 48 updates of 100 answers. So many updates of a batch need small
ones: the first 48 have half the rate, and gradients are clipped below their usual norm."""


def sums() -> list[Example]:
    """Return the hundred sums of two digits, in order."""
    return [
        Example(f"{left}+{right}=", {"answer": str(left + right)})
        for left in range(10)
        for right in range(10)
    ]


async def reward(example: Example, answer: str) -> float:
    """Return 1 for exactly the right digits, else 0.

    An answer without an end has `MAX_ANSWER_TOKENS` characters, so it is never right."""
    return float(answer == example.data["answer"])


def imperfect(count: int, *, seed: int) -> list[Example]:
    """Return random sums for the warm-up. Half of the answers are right, a quarter refuse, a
    quarter are off by one.

    A policy trained on them samples the right answer about half of the time, and prefers it to any
    other."""
    rng = random.Random(seed)
    chosen = rng.choices(sums(), k=count)
    return [Example(each.prompt, {"answer": _imperfect_answer(each, rng)}) for each in chosen]


def _imperfect_answer(example: Example, rng: random.Random) -> str:
    right = str(example.data["answer"])
    draw = rng.random()
    if draw < 0.5:
        return right
    if draw < 0.75:
        return REFUSAL
    return str(abs(int(right) + rng.choice((-1, 1))))
