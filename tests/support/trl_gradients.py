"""One batch of TRL's GRPO: `python -P trl_gradients.py TASK RESULT GRADIENTS`, in .venv/trl.

It writes its answers with their log-probabilities and rewards, and the gradients of its loss.
PYTHONPATH has `benchmarks`, where TRL's settings are. It imports nothing of Tandem's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer
from trl_side import settings


class Gradients(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_pre_optimizer_step(self, *_about: object, model: torch.nn.Module, **_more: object):
        named = model.named_parameters()
        save_file({name: each.grad for name, each in named if each.grad is not None}, self.path)


def main() -> None:
    question, result, gradients = map(Path, sys.argv[1:])
    task = json.loads(question.read_text())
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    answers = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_more: object):
        """Differs from answer to answer, and from group to group."""
        rewards = [float(sum(tokens) % 5) for tokens in completion_ids]
        for prompt, tokens, value in zip(prompts, completion_ids, rewards, strict=True):
            asked = tokenizer(prompt)["input_ids"]
            answers.append({"prompt": asked, "tokens": tokens, "reward": value})
        return rewards

    GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=settings(task, result.with_suffix(".trl")),
        train_dataset=Dataset.from_dict({"prompt": task["prompts"]}),
        processing_class=tokenizer,
        callbacks=[Gradients(gradients)],
    ).train()
    sampler = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()
    for each in answers:
        sequence = torch.tensor([each["prompt"] + each["tokens"]])
        with torch.no_grad():
            logprobs = sampler(sequence).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, sequence[0, 1:, None])[:, 0]
        each["logprobs"] = chosen[len(each["prompt"]) - 1 :].tolist()
    result.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
