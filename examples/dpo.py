"""DPO: the model learns to prefer numbers to excuses, from pairs of answers."""

from __future__ import annotations

import argparse
import random

import tinker

from tandem.rl.preferences import DPOConfig, Preference, dpo

BATCH = 16
EXCUSES = ("?", "I do not know.", "Perhaps.")


def preferences(count: int, seed: int) -> list[Preference]:
    rng = random.Random(seed)

    def pair() -> Preference:
        left, right = rng.randrange(10), rng.randrange(10)
        return better(f"{left}+{right}=", str(left + right), rng.choice(EXCUSES))

    return [pair() for _ in range(count)]


def better(prompt: str, number: str, excuse: str) -> Preference:
    return Preference(prompt, chosen=number, rejected=excuse)


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    config = DPOConfig(
        batch_size=BATCH, learning_rate=5e-4, beta=0.1, seed=asked.seed, name="examples: dpo"
    )
    with tinker.ServiceClient(base_url=asked.base_url) as service:
        made = service.create_lora_training_client(asked.model, rank=8, seed=asked.seed)
        training = made.result()
        held_out = [Preference("7+8=", "15", excuse) for excuse in EXCUSES]
        fitted = dpo(
            training,
            preferences(BATCH * asked.steps, asked.seed),
            config,
            evaluation=held_out,
        )
    measured = fitted.evaluations[fitted.step]
    found = {
        "first loss": fitted.steps[0]["loss"],
        "margin": measured["margin"],
        "accuracy": measured["accuracy"],
    }
    print(found)
    return found


if __name__ == "__main__":
    main()
