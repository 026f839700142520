"""A policy learns to look into a box with a tool before it says the box's number."""

from __future__ import annotations

import random
from functools import partial

from tandem.blueprints import BlueprintRun
from tandem.demo.box import MAX_ANSWER_TOKENS, Box, boxes, dialogues, reward
from tandem.rl import Evaluation, RLConfig, SFTConfig, sft
from tandem.rl import train as reinforce

BATCH = 16


def train(run: BlueprintRun) -> dict[str, float]:
    rng = random.Random(run.seed)
    training = run.training_client()
    if steps := run.integer("warm_up_steps"):
        # First it learns to repeat the tool's number, which guesses would disturb.
        examples = dialogues(BATCH * steps * 2 // 3, rng, guesses=0)
        examples += dialogues(BATCH * steps - len(examples), rng)
        warm_up = SFTConfig(
            batch_size=BATCH, learning_rate=3e-3, shuffle=False, seed=run.seed, tags=run.tags
        )
        sft(training, examples, warm_up)
        # The optimizer's averages of the warm-up would slow the first steps.
        training = run.copy_of(training)
    config = RLConfig(
        steps=run.integer("steps"),
        groups_per_step=16,
        group_size=8,
        max_tokens=MAX_ANSWER_TOKENS,
        objective="reinforce",
        learning_rate=run.number("learning_rate"),
        warmup_steps=1,
        betas=(0.9, 0.99),
        grad_clip_norm=0.01,
        substeps=4,
        epochs=2,
        evaluate_every=run.integer("steps"),
        seed=run.seed,
        name=f"tool-use {run.seed}",
        tags=run.tags,
    )
    result = reinforce(
        training,
        boxes(64, rng),
        partial(Box, reward),
        config,
        evaluation=Evaluation(dataset=boxes(32, rng)),
    )
    run.save_weights(training)
    return {
        "first reward": result.steps[0].reward,
        "last reward": result.steps[-1].reward,
        "gain": result.steps[-1].reward - result.steps[0].reward,
        "greedy": result.evaluations[-1].reward,
    }
