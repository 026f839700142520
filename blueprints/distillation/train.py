"""A student of one-digit addition learns from a teacher's log-probabilities of its own answers."""

from __future__ import annotations

from dataclasses import replace

from tandem.blueprints import BlueprintRun
from tandem.demo.addition import REINFORCEMENT, WARM_UP, imperfect, reward, sums
from tandem.rl import Evaluation, Reference, sft
from tandem.rl import train as reinforce


def train(run: BlueprintRun) -> dict[str, float]:
    teacher = run.training_client()
    examples = imperfect(WARM_UP.batch_size * run.integer("warm_up_steps"), seed=run.seed)
    sft(teacher, examples, replace(WARM_UP, seed=run.seed, tags=run.tags))
    student = run.copy_of(teacher)
    lessons = replace(
        WARM_UP, batch_size=50, learning_rate=5e-4, epochs=run.integer("teacher_epochs")
    )
    sft(teacher, sums(), lessons)
    print("The teacher has learned.")
    taught = teacher.save_weights_and_get_sampling_client().result()

    config = replace(
        REINFORCEMENT,
        objective="distillation",
        steps=run.integer("steps"),
        learning_rate=run.number("learning_rate"),
        evaluate_every=run.integer("steps"),
        seed=run.seed,
        name=f"distillation {run.seed}",
        tags=run.tags,
    )
    result = reinforce(
        student,
        sums(),
        reward,
        config,
        evaluation=Evaluation(dataset=sums()),
        reference=Reference(taught),
    )
    run.save_weights(student)
    return {
        "first reward": result.steps[0].reward,
        "last reward": result.steps[-1].reward,
        "gain": result.steps[-1].reward - result.steps[0].reward,
        "greedy": result.evaluations[-1].reward,
    }
