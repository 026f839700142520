"""Resume: a loop that ends early continues, and computes what an uninterrupted one computes.

The state is in the folder `out`, and the weights are in a checkpoint of the gateway. A killed
process continues in the same way: run the same `train` again."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import tinker

from tandem.rl import Example, RLConfig, resumable, train

LENGTH = 8


def reward(example: Example, answer: str) -> float:
    """The share of digits in an answer of `LENGTH` characters."""
    return sum(letter.isdigit() for letter in answer) / LENGTH


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    questions = [Example(f"{left}+{right}=") for left in range(10) for right in range(10)]
    with (
        tinker.ServiceClient(base_url=asked.base_url) as service,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = RLConfig(
            steps=asked.steps,
            groups_per_step=4,
            group_size=8,
            max_tokens=LENGTH,
            learning_rate=3e-3,
            objective="dr_grpo",
            save_every=2,
            out=Path(folder, "whole"),
            seed=asked.seed,
            name="examples: resume",
        )
        # A fixed seed for the adapter, so that both runs begin with the same one.
        model = resumable(service, asked.model, rank=32, seed=asked.seed)
        whole = train(model, questions, reward, config)

        parts = replace(config, out=Path(folder, "parts"))
        first = train(model, questions, reward, replace(parts, steps=asked.steps // 2))
        rest = train(model, questions, reward, parts)
    resumed = [step.reward for step in (*first.steps, *rest.steps)]
    undisturbed = [step.reward for step in whole.steps]
    for number, pair in enumerate(zip(undisturbed, resumed, strict=True), start=1):
        print(f"step {number}: reward {pair[0]:.4f} alone, {pair[1]:.4f} resumed")
    found = {
        "first reward": resumed[0],
        "last reward": resumed[-1],
        "difference": max(abs(a - b) for a, b in zip(undisturbed, resumed, strict=True)),
    }
    print(found)
    return found


if __name__ == "__main__":
    main()
