"""Asynchronous GRPO: sampling goes on while the trainer trains.

`off_by` allows tokens that are up to two optimizer steps old, and `in_flight` lets running answers
continue with new weights. The policy learns to answer with digits alone."""

from __future__ import annotations

import argparse

import tinker

from tandem.rl import Example, RLConfig, train

LENGTH = 8


def reward(example: Example, answer: str) -> float:
    """The share of digits in an answer of `LENGTH` characters."""
    return sum(letter.isdigit() for letter in answer) / LENGTH


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    config = RLConfig(
        steps=asked.steps,
        groups_per_step=4,
        group_size=8,
        max_tokens=LENGTH,
        learning_rate=3e-3,
        objective="dr_grpo",
        objective_options={"correction": "tis"},  # weighs tokens of older weights
        off_by=2,
        in_flight=True,
        seed=asked.seed,
        name="examples: async_grpo",
    )
    questions = [Example(f"{left}+{right}=") for left in range(10) for right in range(10)]
    with tinker.ServiceClient(base_url=asked.base_url) as service:
        made = service.create_lora_training_client(asked.model, rank=32, seed=asked.seed)
        training = made.result()
        result = train(training, questions, reward, config)
    for step in result.steps:
        print(f"step {step.step}: reward {step.reward:.2f}, age {step.staleness:.1f} steps")
    found = {
        "first reward": result.steps[0].reward,
        "last reward": result.steps[-1].reward,
        "oldest": float(max(step.oldest for step in result.steps)),
    }
    print(found)
    return found


if __name__ == "__main__":
    main()
