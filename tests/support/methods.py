"""SFT, DPO, KTO and GRPO of both backends, on one task that a tiny model learns in 30 steps.

A right answer to a number is the number, and a wrong one has letters in the place of its digits.
GRPO's bandit rewards the share of digits among the characters of an answer. The seed draws the
model, the numbers and their order. `fsdp2` trains through the SDK, on a real stack with one rank.
`trl` runs the program of its jobs under torchrun, with two processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tinker

from tandem.rl import (
    DPOConfig,
    Example,
    Judgement,
    KTOConfig,
    Preference,
    RLConfig,
    SFTConfig,
    dpo,
    kto,
    sft,
    train,
)
from tests.support import flipped, flipped_backend
from tests.support.stacks import TestStack, running, write_qwen
from tests.support.trl_jobs import TrlJob

Row = dict[str, Any]
BACKENDS = ("fsdp2", "trl")
METHODS = ("sft", "dpo", "kto", "grpo")
SEEDS = range(3)
STEPS, BATCH = 30, 32
LEARNING_RATES = {"sft": 1e-2, "dpo": 3e-3, "kto": 3e-3, "grpo": 1e-2}
BETA = 0.5
GROUPS, GROUP_SIZE, MAX_TOKENS = 16, 8, 4
NEEDED_FALL, NEEDED_REWARD = 0.2, 0.9
DIGITS, LETTERS = "0123456789", "abcdefghij"
TIMEOUT = 300.0


@dataclass(frozen=True)
class Outcome:
    """`first` and `last` are held-out losses before and after the training, or the mean rewards of
    GRPO's first and last step. `steps` are the losses, or the rewards, of the steps."""

    method: str
    first: float
    last: float
    steps: Sequence[float]

    @property
    def has_learned(self) -> bool:
        if self.method == "grpo":
            return self.last >= NEEDED_REWARD
        return self.last <= (1 - NEEDED_FALL) * self.first


def rows_of(method: str, seed: int) -> tuple[list[Row], list[Row]]:
    """Return rows to train on, in TRL's format, and held-out rows of other numbers."""
    numbers = random.Random(seed).sample(range(100, 1000), 4 * BATCH)
    rows = [_row(method, str(number), place) for place, number in enumerate(numbers)]
    return rows[:-BATCH], rows[-BATCH:]


def _row(method: str, right: str, place: int) -> Row:
    wrong = right.translate(str.maketrans(DIGITS, LETTERS))
    columns: Mapping[str, Row] = {
        "sft": {"completion": right},
        "dpo": {"chosen": right, "rejected": wrong},
        "kto": {"completion": wrong if place % 2 else right, "label": not place % 2},
        "grpo": {"answer": DIGITS},
    }
    return {"prompt": f"{right}=", **columns[method]}


class Trainings:
    """Trains one method at a time. `models` are the folders of models by seed."""

    def __init__(self, folder: Path, models: Sequence[Path], stack: TestStack) -> None:
        self._folder, self._models, self._stack = folder, models, stack

    def run(self, backend: str, method: str, seed: int, *, flipped: bool = False) -> Outcome:
        by_name = {"fsdp2": self._run_fsdp2, "trl": self._run_trl}
        outcome = by_name[backend](method, seed, flipped)
        assert len(outcome.steps) == STEPS
        return outcome

    def _run_fsdp2(self, method: str, seed: int, is_flipped: bool) -> Outcome:
        asked = {"tandem.backend": "flipped" if is_flipped else "fsdp2"}
        if method != "grpo":
            asked["tandem.sampler"] = "none"
        with self._stack.service() as service:
            training = service.create_lora_training_client(
                f"{_name(seed)}:full", user_metadata=asked
            ).result(TIMEOUT)
            if method == "grpo":
                return _reinforce(training, seed)
            return _fit(training, method, seed)

    def _run_trl(self, method: str, seed: int, is_flipped: bool) -> Outcome:
        kind = "flipped" if is_flipped else "right"
        job = TrlJob(self._folder / f"{method}-{seed}-{kind}", self._models[seed])
        of_method: Mapping[str, object] = {"beta": BETA} if method in ("dpo", "kto") else {}
        batch, (rows, held_out) = BATCH, rows_of(method, seed)
        if method == "grpo":
            batch, held_out = GROUPS * GROUP_SIZE, []
            of_method = {
                "group_size": GROUP_SIZE,
                "max_completion_length": MAX_TOKENS,
                "reward": "answer_characters",
            }
        job.write_data(rows, held_out)
        common = {
            "method": method,
            "learning_rate": LEARNING_RATES[method],
            "schedule": "constant",
            "steps": STEPS,
            "batch_size": batch // job.processes,
            "save_steps": 0,
            "seed": seed,
        }
        job.run({**common, **of_method}, wrapper=[flipped.__file__] if is_flipped else [])
        if method == "grpo":
            return _of_rewards(job.values("reward"))
        before, *_others, after = job.values("eval_loss")
        return Outcome(method, before, after, job.values("loss"))


@contextmanager
def trainings(folder: Path) -> Iterator[Trainings]:
    """Start a stack in `folder`, with a model for each seed."""
    models = [write_qwen(folder / f"model-{seed}", seed=seed) for seed in SEEDS]
    flipped_backend.install(folder / "packages")
    path = f"{folder / 'packages'}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    names = {_name(seed): model for seed, model in enumerate(models)}
    with (
        patch.dict(os.environ, PYTHONPATH=path),
        running(folder / "data", models=names, settings={"trainer_ranks": "1"}) as stack,
    ):
        yield Trainings(folder, models, stack)


def _name(seed: int) -> str:
    return f"test/seed-{seed}"


def _fit(training: tinker.TrainingClient, method: str, seed: int) -> Outcome:
    """The first step has the rate 0, so the evaluation after it is that of the untrained model."""
    rows, held_out = ([_TYPES[method](row) for row in part] for part in rows_of(method, seed))
    learn, config = _LOOPS[method]
    settings = {"batch_size": BATCH, "final_learning_rate": 1.0, "seed": seed}
    settings |= {"grad_clip_norm": 1.0} | ({} if method == "sft" else {"beta": BETA})
    rate, epochs = LEARNING_RATES[method], STEPS * BATCH // len(rows)
    before, after = (
        learn(training, part, config(**settings, **more), evaluation=held_out, tracked=False)
        for part, more in (
            (rows[:BATCH], {"learning_rate": 0.0}),
            (rows, {"learning_rate": rate, "epochs": epochs}),
        )
    )
    first, last = (each.evaluations[each.step]["loss"] for each in (before, after))
    return Outcome(method, first, last, [each["loss"] for each in after.steps])


_LOOPS: Mapping[str, tuple[Callable[..., Any], Callable[..., SFTConfig]]] = {
    "sft": (sft, SFTConfig),
    "dpo": (dpo, DPOConfig),
    "kto": (kto, KTOConfig),
}
_TYPES: Mapping[str, Callable[[Row], Any]] = {
    "sft": lambda row: Example(row["prompt"], {"answer": row["completion"]}),
    "dpo": lambda row: Preference(**row),
    "kto": lambda row: Judgement(row["prompt"], row["completion"], row["label"]),
}


def _reinforce(training: tinker.TrainingClient, seed: int) -> Outcome:
    config = RLConfig(
        steps=STEPS,
        groups_per_step=GROUPS,
        group_size=GROUP_SIZE,
        max_tokens=MAX_TOKENS,
        learning_rate=LEARNING_RATES["grpo"],
        grad_clip_norm=1.0,
        seed=seed,
    )
    examples = [Example(row["prompt"]) for row in rows_of("grpo", seed)[0]]
    done = train(training, examples, digits, config, tracked=False)
    return _of_rewards([step.reward for step in done.steps])


async def digits(_example: Example, answer: str) -> float:
    """The reward `answer_characters` of TRL jobs, for the answer `DIGITS`."""
    return sum(each in DIGITS for each in answer) / max(1, len(answer))


def _of_rewards(rewards: Sequence[float]) -> Outcome:
    return Outcome("grpo", rewards[0], rewards[-1], rewards)
