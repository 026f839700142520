"""Tool use over several turns: the policy learns to look a number up before it answers.

It needs a model with a chat template, such as that of
`python -m tandem.demo.tiny_model FOLDER --tokenizer qwen`. A short warm-up shows the form of a
call. Half of its dialogues guess instead, so that the reward decides."""

from __future__ import annotations

import argparse
import random

import tinker

from tandem.rl import Example, RLConfig, train
from tandem.rl.environments.tools import ToolEnvironment
from tandem.rl.sft import SFTConfig, sft

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
QUESTION = {"role": "user", "content": "Which number is in the box?"}
NUMBERS = ("1", "2", "3", "4")
BATCH = 16


class Box(ToolEnvironment):
    """An episode: a box with a number, and a tool that looks into it."""

    def __init__(self) -> None:
        super().__init__([self.look], max_turns=3)
        self.schemas = []  # the warm-up shows the tool, and a tiny model reads no schema

    def look(self) -> str:
        """Look into the box."""
        return str(self.example.data["number"])

    async def score(self, example: Example, answer: str) -> float:
        return reward(example, answer, looked="look" in self.calls)


def reward(example: Example, answer: str, *, looked: bool) -> float:
    """Half for a look into the box, and half for the right number."""
    return 0.5 * looked + 0.5 * (answer.strip() == example.data["number"])


def dialogue(rng: random.Random) -> Example:
    number = rng.choice(NUMBERS)
    if rng.random() < 0.5:
        return Example([QUESTION, {"role": "assistant", "content": number}])
    return Example(
        [
            QUESTION,
            {"role": "assistant", "content": CALL},
            {"role": "tool", "name": "look", "content": number},
            {"role": "assistant", "content": number},
        ]
    )


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="by default TINKER_BASE_URL")
    parser.add_argument("--model", default="my/chat")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    rng = random.Random(asked.seed)
    boxes = [Example([QUESTION], {"number": rng.choice(NUMBERS)}) for _ in range(64)]
    config = RLConfig(
        steps=asked.steps,
        groups_per_step=16,
        group_size=8,
        max_tokens=32,
        learning_rate=4e-4,
        seed=asked.seed,
        name="examples: tool_use",
    )
    with tinker.ServiceClient(base_url=asked.base_url) as service:
        training = service.create_lora_training_client(f"{asked.model}:full").result()
        warm_up = SFTConfig(batch_size=BATCH, learning_rate=3e-3, seed=asked.seed)
        sft(training, [dialogue(rng) for _ in range(BATCH * 80)], warm_up)
        result = train(training, boxes, Box, config)
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
