"""Plays episodes of `adder_v1`, and prints what the loop sees: `adder_episode.py CASE`."""

from __future__ import annotations

import asyncio
import json
import sys

from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.utils.loaders import load_environment

from tandem.rl.environments import Renderer, rollout
from tandem.rl.environments.verifiers import VerifiersEnvironment, examples
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.scripted_policy import ScriptedPolicy, turn

CALL = '<tool_call>{"name": "add", "arguments": {"left": 2, "right": 1}}</tool_call>'


def make(**harness):
    return load_environment(
        SingleAgentEnvConfig.model_validate(
            {
                "taskset": {"id": "adder_v1"},
                "agent": {
                    "harness": {"id": "adder_v1", **harness},
                    "runtime": {"type": "subprocess"},
                },
            }
        )
    )


async def play(answers: list[str], max_turns: int = 8, **harness) -> dict[str, object]:
    tokenizer = chat_tokenizer("chatml")
    policy = ScriptedPolicy([turn(tokenizer.encode(f"{text}<|im_end|>")) for text in answers])
    found = examples(lambda: make(**harness), limit=3)
    try:
        played = await rollout(
            VerifiersEnvironment(lambda: make(**harness)),
            found[2],
            sample=policy.sample,
            renderer=Renderer(tokenizer),
            max_tokens=99,
            max_turns=max_turns,
        )
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in left if "VerifiersEnvironment" in repr(task)]
    sequence: list[int] = []
    for prompt, got in zip(policy.prompts, played.turns, strict=True):
        sequence += got.observation
        assert list(prompt) == sequence
        sequence += got.tokens
    return {
        "examples": len(found),
        "reward": played.reward,
        "fields": played.fields,
        "text": tokenizer.decode(sequence),
    }


async def main() -> None:
    cases = {
        "plain": play([f"I add. {CALL}", "3"]),
        "streamed": play([f"I add. {CALL}", "3"], stream=True),
        "wrong": play(["4"]),
        "rewrites": play([CALL, "3"], rewrites=True),
        "crashes": play([CALL, "3"], crashes=True),
        "cut": play([CALL, "3"], max_turns=1),
    }
    print(json.dumps({name: await case for name, case in cases.items()}))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
