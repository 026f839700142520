"""Tasks of the package `reasoning-gym`: generated offline, with a verifier for each.

`examples` makes the dataset and `score` is the reward:

    train(training, examples("leg_counting", size=500), score, config)"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from tandem.rl.rollouts import Example

INSTRUCTION = (
    "Solve the problem step by step. Then write the final answer, and nothing else, "
    "between <answer> and </answer>."
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def examples(
    name: str,
    *,
    size: int,
    seed: int = 0,
    instruction: str | None = INSTRUCTION,
    **settings: object,
) -> list[Example]:
    """Return `size` examples of a dataset of `reasoning-gym`.

    `settings` are those of the dataset, for example `max_animals=3` of `leg_counting`. The prompt
    is a chat with the instruction and the question."""
    start = [] if instruction is None else [{"role": "system", "content": instruction}]
    dataset = _package().create_dataset(name, size=size, seed=seed, **settings)
    return [
        Example(
            [*start, {"role": "user", "content": entry["question"]}],
            {"dataset": name, "settings": settings, "entry": entry},
        )
        for entry in dataset
    ]


def score(example: Example, answer: str) -> float:
    """Return the verifier's score, 0 to 1, of the text in the last `<answer>` tags.

    Without tags it is the verifier's score of no answer, usually 0."""
    found = _ANSWER.findall(answer)
    settings = cast("Mapping[str, object]", example.data["settings"])
    verifier = _verifier(str(example.data["dataset"]), json.dumps(settings, sort_keys=True))
    entry = example.data["entry"]
    return float(verifier.score_answer(found[-1].strip() if found else None, entry))


@lru_cache(maxsize=32)
def _verifier(name: str, settings: str) -> Any:
    return _package().create_dataset(name, **json.loads(settings))


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError("these tasks need another package: pip install reasoning-gym") from error
