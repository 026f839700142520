"""Supervised fine-tuning on dialogues about the next and the previous number."""

from __future__ import annotations

import random

from tandem.blueprints import BlueprintRun
from tandem.rl import Example, sft
from tandem.rl.sft import SFTConfig

BATCH = 16


def dialogues(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    return [dialogue(rng.choice(("after", "before")), rng.randrange(1, 9)) for _ in range(count)]


def dialogue(side: str, number: int) -> Example:
    question = f"Which number comes {side} {number}?"
    answer = number + 1 if side == "after" else number - 1
    return Example(
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"It is {answer}."},
        ]
    )


def train(run: BlueprintRun) -> dict[str, float]:
    steps = run.integer("steps")
    config = SFTConfig(
        batch_size=BATCH,
        learning_rate=run.number("learning_rate"),
        seed=run.seed,
        name=f"sft-chat {run.seed}",
        tags=run.tags,
    )
    training = run.training_client()
    fitted = sft(
        training,
        dialogues(BATCH * steps, run.seed),
        config,
        evaluation=dialogues(4 * BATCH, run.seed + 1_000_000),
    )
    run.save_weights(training)
    return {
        "first loss": fitted.steps[0]["loss"],
        "last loss": fitted.evaluations[fitted.step]["loss"],
    }
