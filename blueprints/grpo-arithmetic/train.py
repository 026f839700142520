"""GRPO on one-digit addition, from the demo's warm-up on imperfect answers."""

from __future__ import annotations

from dataclasses import replace

from tandem.blueprints import BlueprintRun
from tandem.demo.addition import REINFORCEMENT, WARM_UP, imperfect, reward, sums
from tandem.rl import Evaluation, sft
from tandem.rl import train as reinforce


def train(run: BlueprintRun) -> dict[str, float]:
    training = run.training_client()
    if steps := run.integer("warm_up_steps"):
        examples = imperfect(WARM_UP.batch_size * steps, seed=run.seed)
        sft(training, examples, replace(WARM_UP, seed=run.seed, tags=run.tags))
        # The optimizer's averages of the warm-up would slow the first steps.
        training = run.copy_of(training)
    config = replace(
        REINFORCEMENT,
        steps=run.integer("steps"),
        objective=run.text("objective"),
        learning_rate=run.number("learning_rate"),
        evaluate_every=run.integer("steps"),
        seed=run.seed,
        name=f"grpo-arithmetic {run.seed}",
        tags=run.tags,
    )
    result = reinforce(training, sums(), reward, config, evaluation=Evaluation(dataset=sums()))
    run.save_weights(training)
    return {
        "first reward": result.steps[0].reward,
        "last reward": result.steps[-1].reward,
        "gain": result.steps[-1].reward - result.steps[0].reward,
        "greedy": result.evaluations[-1].reward,
    }
