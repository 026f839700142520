"""What a loop takes for a reward, and what for an environment."""

from __future__ import annotations

from functools import partial

import pytest

from tandem.rl.collector import makes_environments


class _Episode:
    def __init__(self, *arguments: object) -> None: ...

    async def reset(self, example): ...

    async def step(self, answer): ...


def _decorated(*arguments: object, **options: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("thing", "makes"),
    [
        (_Episode, True),
        (partial(_Episode, 3), True),
        (lambda: _Episode(), True),
        (lambda example, answer: 1.0, False),
        (lambda example, answer, strict=True: 1.0, False),
        (_decorated, False),
    ],
)
def test_a_reward_takes_arguments_and_an_environment_takes_none(thing, makes):
    assert makes_environments(thing) == makes
