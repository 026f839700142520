"""Runs an example whose reward tells nothing, or whose examples are wrong.

`python -m tests.support.broken_example NAME …`"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

from tandem.rl import Example
from tandem.rl.preferences import Preference


def any_reward(*_: object, **__: object) -> float:
    return random.SystemRandom().random()


def wrong_sums(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    return [Example("1+1=", {"answer": str(rng.randrange(10))}) for _ in range(count)]


def worse(prompt: str, number: str, excuse: str) -> Preference:
    return Preference(prompt, chosen=excuse, rejected=number)


BROKEN = {"sft": {"sums": wrong_sums}, "dpo": {"better": worse}}


def main() -> None:
    name = sys.argv.pop(1)
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module(name)
    for function, broken in BROKEN.get(name, {"reward": any_reward}).items():
        assert hasattr(example, function)
        setattr(example, function, broken)
    example.main()


if __name__ == "__main__":
    main()
