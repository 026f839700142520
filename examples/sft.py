"""Supervised fine-tuning: the model learns to add digits from right answers.

Run it against `tandem up --model my/model=FOLDER`. README.md in this folder says more."""

from __future__ import annotations

import argparse
import random

import tinker

from tandem.rl import Example
from tandem.rl.sft import SFTConfig, sft

DIGITS = range(5)
BATCH = 32


def sums(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    pairs = [(rng.choice(DIGITS), rng.choice(DIGITS)) for _ in range(count)]
    return [Example(f"{a}+{b}=", {"answer": str(a + b)}) for a, b in pairs]


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    config = SFTConfig(batch_size=BATCH, learning_rate=2e-3, seed=asked.seed, name="examples: sft")
    with tinker.ServiceClient(base_url=asked.base_url) as service:
        training = service.create_lora_training_client(f"{asked.model}:full").result()
        fitted = sft(
            training,
            sums(BATCH * asked.steps, asked.seed),
            config,
            evaluation=sums(BATCH, asked.seed + 1),
        )
        print(training.save_weights_for_sampler("sums").result().path)
    found = {
        "first loss": fitted.steps[0]["loss"],
        "last loss": fitted.evaluations[fitted.step]["loss"],
    }
    print(found)
    return found


if __name__ == "__main__":
    main()
