"""GRPO on arithmetic: the policy learns to add digits from the reward alone.

A short warm-up on imperfect answers comes first, because a policy that is never right learns
nothing from its own answers. Model: the demo's tiny one, or any other. See README.md here."""

from __future__ import annotations

import argparse
import random

import tinker

from tandem.rl import Evaluation, Example, RLConfig, train
from tandem.rl.sft import SFTConfig, sft

DIGITS = range(5)


def sums() -> list[Example]:
    return [
        Example(f"{left}+{right}=", {"answer": str(left + right)})
        for left in DIGITS
        for right in DIGITS
    ]


def imperfect(count: int, seed: int) -> list[Example]:
    """Examples whose answer is right half of the time."""
    rng = random.Random(seed)
    chosen = [rng.choice(sums()) for _ in range(count)]
    return [
        Example(
            each.prompt, each.data if rng.random() < 0.5 else {"answer": str(rng.choice(DIGITS))}
        )
        for each in chosen
    ]


def reward(example: Example, answer: str) -> float:
    return float(answer == example.data["answer"])


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=None, help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/model")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tinker.ServiceClient(base_url=asked.base_url) as service:
        training = service.create_lora_training_client(f"{asked.model}:full").result()
        warm_up = SFTConfig(batch_size=32, learning_rate=2e-3, seed=asked.seed)
        sft(training, imperfect(32 * 200, asked.seed), warm_up)
        config = RLConfig(
            steps=asked.steps,
            groups_per_step=25,
            group_size=8,
            max_tokens=3,
            learning_rate=1e-3,
            evaluate_every=asked.steps,
            seed=asked.seed,
            name="examples: grpo_arithmetic",
        )
        result = train(training, sums(), reward, config, evaluation=Evaluation(dataset=sums()))
    for step in result.steps:
        print(f"step {step.step}: mean reward {step.reward:.3f}")
    found = {
        "first reward": result.steps[0].reward,
        "last reward": result.steps[-1].reward,
        "greedy": result.evaluations[-1].reward,
    }
    print(found)
    return found


if __name__ == "__main__":
    main()
