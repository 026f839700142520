"""A policy that answers as it was told."""

from __future__ import annotations

from tandem.rl.rollouts import Turn


class ScriptedPolicy:
    """Answers with given tokens, and keeps the prompts."""

    def __init__(self, answers: list[Turn]) -> None:
        self.answers = answers
        self.prompts: list[tuple[int, ...]] = []
        self.seeds: list[int | None] = []

    async def sample(self, prompt, *, n, max_tokens, temperature, seed, stop):
        assert n == 1
        self.prompts.append(tuple(prompt))
        self.seeds.append(seed)
        return [self.answers[len(self.prompts) - 1]]


def turn(tokens, stop_reason="stop") -> Turn:
    tokens = tuple(tokens)
    return Turn(
        observation=(),
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        steps=(0,) * len(tokens),
        stop_reason=stop_reason,
    )
