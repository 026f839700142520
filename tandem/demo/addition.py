"""The task of the demo: one-digit addition, its prompts, rewards and imperfect examples."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

REFUSAL = "?"
MAX_ANSWER_TOKENS = 4
"""Two digits, the end-of-sequence token, and one surplus token."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Problem:
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def all_problems() -> list[Problem]:
    """Return the hundred sums of two digits, in order."""
    return [Problem(left, right) for left in range(10) for right in range(10)]


def reward(problem: Problem, *, text: str, ended: bool) -> float:
    """Return 1 for exactly the right digits and an end of the sequence, else 0."""
    return 1.0 if ended and text == problem.answer else 0.0


def imperfect_label(problem: Problem, rng: random.Random) -> str:
    """Return a label for the warm-up: half are right, a quarter refuse, a quarter are off by one.

    A policy trained on them samples the right answer about half of the time, and prefers it to any
    other."""
    draw = rng.random()
    if draw < 0.5:
        return problem.answer
    if draw < 0.75:
        return REFUSAL
    return str(abs(problem.left + problem.right + rng.choice((-1, 1))))
