"""TRL's side of `benchmarks.trl_grpo`: `python -P trl_side.py TASK RESULT`, in .venv/trl.

It imports nothing of Tandem's. One process samples with transformers' `generate` and trains, which
is TRL's ordinary mode on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *_about: object, **_more: object) -> None:
        self.ended.append(time.monotonic())


def settings(task: dict[str, Any], folder: Path) -> GRPOConfig:
    """Everything that differs from TRL's defaults, and the defaults that the comparison needs."""
    beta1, beta2 = task["betas"]
    return GRPOConfig(
        output_dir=str(folder),
        # the batch: one generation, one pass, one optimizer step
        max_steps=task["steps"],
        per_device_train_batch_size=task["groups"] * task["group_size"],
        gradient_accumulation_steps=1,
        num_iterations=1,
        num_generations=task["group_size"],
        shuffle_dataset=False,
        # samples
        max_completion_length=task["max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # the objective
        loss_type="grpo",
        scale_rewards="group",
        importance_sampling_level="token",
        epsilon=0.2,
        beta=0.0,
        mask_truncated_completions=False,
        # the optimizer
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=task["eps"],
        weight_decay=0.0,
        max_grad_norm=task["clip_norm"],
        # float32 on a CPU
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        # nothing beside the training
        seed=task["seed"],
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    result = Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")

    def text(tokens: list[int]) -> str:
        """The answer without its end token, as Tandem gives it to a reward."""
        ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
        return str(tokenizer.decode(tokens[:-1] if ended else tokens))

    def reward(completion_ids: list[list[int]], answer: list[str], **_more: object) -> list[float]:
        return [
            float(text(tokens) == right)
            for tokens, right in zip(completion_ids, answer, strict=True)
        ]

    clock = Clock()
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=settings(task, result.with_suffix(".trl")),
        train_dataset=Dataset.from_dict({"prompt": task["prompts"], "answer": task["answers"]}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    ready = time.monotonic()
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    asked = task["evaluation"]
    inputs = tokenizer(asked["prompts"], return_tensors="pt", padding=True)
    width = inputs["input_ids"].shape[1]
    model = trainer.model.eval()
    with torch.no_grad():
        greedy = model.generate(**inputs, do_sample=False, max_new_tokens=task["max_tokens"])
    answers = [cut(row, tokenizer.eos_token_id) for row in greedy[:, width:].tolist()]
    result.write_text(
        json.dumps(
            {
                "ready": ready,
                "ended": clock.ended,
                "rewards": [row["reward"] for row in logged],
                "grad_norms": [row["grad_norm"] for row in logged],
                "greedy": sum(reward(answers, asked["answers"])) / len(answers),
            }
        )
    )


def cut(tokens: list[int], end: int) -> list[int]:
    """The tokens up to the end token. `generate` pads after it."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


if __name__ == "__main__":
    main()
