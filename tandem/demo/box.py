"""The task of the tool-use example and blueprint: look into a box, and say its number."""

from __future__ import annotations

import random
from collections.abc import Callable

from tandem.rl import Example
from tandem.rl.environments.tools import ToolEnvironment

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
QUESTION = {"role": "user", "content": "Which number is in the box?"}
NUMBERS = ("1", "2", "3", "4")
MAX_ANSWER_TOKENS = 32


def sides(number: str) -> str:
    """Return the result of a look: the number on each side of the box. A tiny model learns soon to
    repeat a number that it reads six times."""
    return " ".join([number] * 6)


def reward(example: Example, answer: str, *, looked: bool) -> float:
    """Half for a look into the box, and half for the right number."""
    return 0.5 * looked + 0.5 * (answer.strip() == example.data["number"])


class Box(ToolEnvironment):
    """An episode: a box with a number, and a tool that looks into it."""

    def __init__(self, reward: Callable[..., float] = reward) -> None:
        super().__init__([self.look], max_turns=3)
        self.schemas = []  # the warm-up shows the tool, and a tiny model reads no schema
        self._reward_of = reward

    def look(self) -> str:
        """Look into the box."""
        return sides(str(self.example.data["number"]))

    async def score(self, example: Example, answer: str) -> float:
        return self._reward_of(example, answer, looked="look" in self.calls)


def boxes(count: int, rng: random.Random) -> list[Example]:
    return [Example([QUESTION], {"number": rng.choice(NUMBERS)}) for _ in range(count)]


def dialogues(count: int, rng: random.Random, *, guesses: float = 0.5) -> list[Example]:
    """Return dialogues for the warm-up. Half of them guess, so that the reward decides."""
    return [_dialogue(rng, guesses) for _ in range(count)]


def _dialogue(rng: random.Random, guesses: float) -> Example:
    number = rng.choice(NUMBERS)
    if rng.random() < guesses:
        return Example([QUESTION, {"role": "assistant", "content": number}])
    return Example(
        [
            QUESTION,
            {"role": "assistant", "content": CALL},
            {"role": "tool", "name": "look", "content": sides(number)},
            {"role": "assistant", "content": number},
        ]
    )
