"""An agent that speaks OpenAI's API, trained through the recorder.

The agent knows neither Tandem nor tokens: it gets an address and a key. The gateway records the
exact tokens of its turns, and returns them as data for training. Here the agent asks twice, and
its reward is the share of capital letters in the answers."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import tinker
from tinker import types

from tandem.rl import grpo

AGENTS = 32
TOKENS = 8


def agent(base_url: str, api_key: str) -> list[str]:
    """Hold a chat of two turns. Any program with OpenAI's client can stand here."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": "Say something."}]
    answers = []
    for _ in range(2):
        said = client.chat.completions.create(
            model="policy", messages=messages, max_tokens=TOKENS, temperature=1.0
        )
        answers.append(said.choices[0].message.content or "")
        messages += [
            {"role": "assistant", "content": answers[-1]},
            {"role": "user", "content": "Louder."},
        ]
    return answers


def reward(answers: list[str]) -> float:
    """The share of capital letters."""
    text = "".join(answers)
    return sum(letter.isupper() for letter in text) / max(len(text), 1)


def episode(gateway: httpx.Client, run_id: str) -> tuple[float, list[dict[str, Any]]]:
    """Return the agent's reward, and its recorded sequences."""
    trace = gateway.post("traces", json={"model": run_id}).raise_for_status().json()
    answers = agent(f"{trace['base_url']}/v1", trace["key"])
    recorded = gateway.get(f"traces/{trace['id']}").raise_for_status().json()["sequences"]
    gateway.delete(f"traces/{trace['id']}").raise_for_status()
    return reward(answers), recorded


def datum(sequence: dict[str, Any], advantage: float) -> types.Datum:
    inputs = sequence["datum"]["loss_fn_inputs"]
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence["datum"]["model_input"]),
        loss_fn_inputs={
            "target_tokens": [int(token) for token in inputs["target_tokens"]],
            "logprobs": inputs["logprobs"],
            "advantages": [advantage * sampled for sampled in inputs["mask"]],
        },
    )


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--model", default="my/chat")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    gateway = httpx.Client(
        base_url=f"{asked.base_url}/api/tandem/v1/",
        headers={"X-API-Key": os.environ["TINKER_API_KEY"]},
        timeout=120,
    )
    rewards: list[float] = []
    with (
        gateway,
        ThreadPoolExecutor(AGENTS) as threads,
        tinker.ServiceClient(base_url=asked.base_url) as service,
    ):
        made = service.create_lora_training_client(asked.model, rank=32, seed=asked.seed)
        training = made.result()
        for step in range(1, asked.steps + 1):
            training.save_weights_and_get_sampling_client().result()
            tasks = [threads.submit(episode, gateway, training.model_id) for _ in range(AGENTS)]
            episodes = [task.result() for task in tasks]
            rewards.append(sum(each for each, _ in episodes) / AGENTS)
            print(f"step {step}: mean reward {rewards[-1]:.3f}")
            advantages = grpo(np.array([[each for each, _ in episodes]]))[0]
            data = [
                datum(sequence, float(advantage))
                for (_, recorded), advantage in zip(episodes, advantages, strict=True)
                for sequence in recorded
            ]
            training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    found = {"first reward": rewards[0], "last reward": rewards[-1]}
    print(found)
    return found


if __name__ == "__main__":
    main()
