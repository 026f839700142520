"""Tool use over several turns: the policy learns to look a number up before it answers.

It needs a model with a chat template, such as that of
`python -m tandem.demo.tiny_model FOLDER --tokenizer qwen`. A short warm-up shows the form of a
call. `tandem/demo/box.py` has the tool, its environment, and the dialogues of the warm-up."""

from __future__ import annotations

import argparse
import random
from functools import partial

import tinker

from tandem.demo.box import MAX_ANSWER_TOKENS, Box, boxes, dialogues, reward
from tandem.rl import RLConfig, train
from tandem.rl.sft import SFTConfig, sft

BATCH = 16


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/chat")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    rng = random.Random(asked.seed)
    episodes = boxes(64, rng)
    config = RLConfig(
        steps=asked.steps,
        groups_per_step=16,
        group_size=8,
        max_tokens=MAX_ANSWER_TOKENS,
        learning_rate=4e-4,
        seed=asked.seed,
        name="examples: tool_use",
    )
    with tinker.ServiceClient(base_url=asked.base_url) as service:
        training = service.create_lora_training_client(f"{asked.model}:full").result()
        warm_up = SFTConfig(batch_size=BATCH, learning_rate=3e-3, seed=asked.seed)
        sft(training, dialogues(BATCH * 80, rng), warm_up)
        result = train(training, episodes, partial(Box, reward), config)
    for step in result.steps:
        print(f"step {step.step}: mean reward {step.reward:.3f}")
    found = {
        "first reward": result.steps[0].reward,
        "last reward": result.steps[-1].reward,
    }
    print(found)
    return found


if __name__ == "__main__":
    main()
