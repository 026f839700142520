"""Examples of a dataset, and the rollouts that a policy samples for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

Message: TypeAlias = Mapping[str, object]
"""A message of a chat: `{"role": "user", "content": "2 + 3?"}`."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a chat."""


Stop: TypeAlias = Sequence[str] | Sequence[int] | None
"""Texts or token ids that end an answer. None means the model's own."""


class SampleSettings(TypedDict):
    """`n` answers of at most `max_tokens` tokens. The same seed gives the same answers."""

    n: int
    max_tokens: int
    temperature: float
    seed: int | None
    stop: Stop


@dataclass(frozen=True)
class Example:
    """A row of a dataset. `data` is for the reward: `Example("2+3=", {"answer": "5"})`."""

    prompt: Prompt
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer of the policy. `observation` are the token ids before it that the policy did not
    sample: the prompt, or an environment's reply. `tokens`, `logprobs` and `steps` have one entry
    for each sampled token. `steps` are the optimizer steps of the weights behind each token.
    `stop_reason` is "stop" or "length". `sequence_id` is the server's name of the sample."""

    observation: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    steps: Sequence[int]
    stop_reason: str = "stop"
    sequence_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """An answer, or an episode of several turns. `text` is the last answer's. `fields` are shown
    beside it in the record, and replace none of the record's own."""

    turns: Sequence[Turn]
    reward: float
    text: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def oldest_step(self) -> int:
        """The optimizer step of the oldest weights behind its tokens. Without a token it is never
        old."""
        return min((step for turn in self.turns for step in turn.steps), default=sys.maxsize)

    @property
    def truncated(self) -> bool:
        """Whether the last answer ended at the bound on its length."""
        return bool(self.turns) and self.turns[-1].stop_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one example. `number` is the example's place in the order of the run: 0, 1,
    2 and so on, beyond the dataset's length in later epochs."""

    number: int
    example: Example
    rollouts: Sequence[Rollout]

    @property
    def oldest_step(self) -> int:
        return min((rollout.oldest_step for rollout in self.rollouts), default=sys.maxsize)

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]
