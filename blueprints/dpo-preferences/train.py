"""DPO on pairs of a number and an excuse."""

from __future__ import annotations

import random

from tandem.blueprints import BlueprintRun
from tandem.rl.preferences import DPOConfig, Preference, dpo

BATCH = 16
EXCUSES = ("?", "I do not know.", "Perhaps.")


def preferences(count: int, seed: int) -> list[Preference]:
    rng = random.Random(seed)
    sums = ((rng.randrange(10), rng.randrange(10)) for _ in range(count))
    return [better(f"{a}+{b}=", str(a + b), rng.choice(EXCUSES)) for a, b in sums]


def better(prompt: str, number: str, excuse: str) -> Preference:
    return Preference(prompt, chosen=number, rejected=excuse)


def train(run: BlueprintRun) -> dict[str, float]:
    steps = run.integer("steps")
    config = DPOConfig(
        batch_size=BATCH,
        learning_rate=run.number("learning_rate"),
        beta=run.number("beta"),
        seed=run.seed,
        name=f"dpo-preferences {run.seed}",
        tags=run.tags,
    )
    held_out = [Preference("7+8=", "15", excuse) for excuse in EXCUSES]
    training = run.training_client()
    pairs = preferences(BATCH * steps, run.seed)
    fitted = dpo(training, pairs, config, evaluation=held_out)
    run.save_weights(training)
    return {"first loss": fitted.steps[0]["loss"], **fitted.evaluations[fitted.step]}
