"""More published recipes of tinker-cookbook, without a hub, for `make nightly`.

Models come from a seed and data sets from files, as in `docs/cookbook.md`."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tests.support.cookbook import run_recipe, saved_last, write_lines
from tests.support.stacks import TestStack, running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

TIMEOUT = 900.0
SHAPE = TinyShape(hidden=128, layers=2, ffn=256, heads=2, max_length=4096)
DEFAULT = "Qwen/Qwen3.5-9B-Base"
"""The default model of `sl_loop` and `rl_loop`."""
GSM8K = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
"""Makes a folder a data set with the configuration `main`."""
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder, with the model `models/tiny`."""
    folder = tmp_path_factory.mktemp("recipes")
    write_tiny_model(folder / "models/tiny", seed=1, shape=SHAPE)
    return folder


@pytest.fixture(scope="module")
def recipes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    models = {"models/tiny": folder / "models/tiny"}
    settings = {"trainer_ranks": "1"}
    with running(tmp_path_factory.mktemp("data"), models=models, settings=settings) as stack:
        yield stack


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """A folder for one recipe, with `models/tiny`."""
    (tmp_path / "models").symlink_to(folder / "models")
    return tmp_path


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def listed(stack: TestStack, place: Path, module: str) -> set[str]:
    """Kinds of the recipe's newest checkpoints, which are listed and have bytes."""
    saved = saved_last(place, module)
    endpoint = stack.stack.endpoint
    rest = tinker.RestClient(base_url=endpoint.url, api_key=endpoint.api_key)
    run_id = saved["state_path"].removeprefix("tinker://").split("/")[0]
    found = rest.list_checkpoints(run_id).result().checkpoints
    sizes = {entry.tinker_path: entry.size_bytes for entry in found}
    kinds = {kind for kind in ("state_path", "sampler_path") if saved.get(kind) in sizes}
    assert all(sizes[saved[kind]] > 0 for kind in kinds)
    return kinds


def teach(
    stack: TestStack, place: Path, conversations: list[list[dict]], *, name: str, batch_size: int
) -> None:
    """Make a base model `name` with chat_sl: train all parameters, export, register."""
    write_lines(place / "taught.jsonl", [{"messages": each} for each in conversations])
    metrics = run_recipe(
        stack,
        "chat_sl.train",
        place,
        timeout=TIMEOUT,
        model_name="models/tiny:full",
        renderer_name="role_colon",
        dataset="taught.jsonl",
        train_on_what="last_assistant_message",
        batch_size=batch_size,
        learning_rate=5e-3,
        save_every=0,
        eval_every=0,
    )
    assert metrics[-1]["train_mean_nll"] < metrics[0]["train_mean_nll"]
    target = place / name
    target.parent.mkdir(parents=True, exist_ok=True)
    path = saved_last(place, "chat_sl.train")["sampler_path"]
    tandem(stack, "checkpoints", "export", path, str(target))
    tandem(stack, "models", "add", name, str(target))


def tandem(stack: TestStack, *arguments: str) -> None:
    executable = Path(sys.executable).with_name("tandem")
    command = [executable, *arguments, "--data-dir", stack.data_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def adapter(stack: TestStack, place: Path, module: str) -> dict[str, np.ndarray]:
    """Factors B of the newest adapter, which began as zeros."""
    target = place / "adapter"
    tandem(stack, "checkpoints", "export", saved_last(place, module)["sampler_path"], str(target))
    tensors = load_file(target / "adapter_model.safetensors")
    return {name: values for name, values in tensors.items() if "lora_B" in name}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- Supervised -------------------------------------------------------------------------------


def test_chat_sl_learns_a_file_of_conversations(recipes: TestStack, place: Path) -> None:
    rows = [
        {"messages": [turn("user", f"Say {number}."), turn("assistant", f"Here is {number}.")]}
        for number in range(256)
    ]
    write_lines(place / "conversations.jsonl", rows)

    metrics = run_recipe(
        recipes,
        "chat_sl.train",
        place,
        timeout=TIMEOUT,
        model_name="models/tiny",
        renderer_name="role_colon",
        dataset="conversations.jsonl",
        batch_size=16,
        learning_rate=3e-3,
        save_every=8,
    )

    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert len(losses) == 16
    # The model begins with a uniform guess, and learns which characters occur.
    assert losses[0] == pytest.approx(math.log(SHAPE.vocabulary), abs=0.3)
    assert mean(losses[-3:]) < losses[0] - 1
    assert listed(recipes, place, "chat_sl.train") == {"state_path", "sampler_path"}


def test_sl_loop_learns_a_local_data_set_under_its_default_name(
    recipes: TestStack, place: Path
) -> None:
    register(recipes, place, name=DEFAULT)
    rows = [
        {"messages": [turn("user", f"Say {number}."), turn("assistant", f"Here is {number}.")]}
        for number in range(260)
    ]
    for split in ("train", "test"):
        write_lines(place / f"HuggingFaceH4/no_robots/{split}.jsonl", rows)

    metrics = run_recipe(
        recipes, "sl_loop", place, timeout=TIMEOUT, batch_size=16, learning_rate=3e-3, save_every=8
    )

    losses = [row["train_mean_nll"] for row in metrics]
    assert len(losses) == 16
    assert losses[0] == pytest.approx(math.log(SHAPE.vocabulary), abs=0.3)
    assert mean(losses[-3:]) < losses[0] - 1
    assert listed(recipes, place, "sl_loop") == {"state_path", "sampler_path"}


def register(stack: TestStack, place: Path, *, name: str) -> None:
    """Register `models/tiny` under the recipe's name, here and at the gateway."""
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).symlink_to(place / "models/tiny")
    tandem(stack, "models", "add", name, str((place / name).resolve()))


# --- Preferences ------------------------------------------------------------------------------


def test_dpo_learns_to_prefer_what_was_chosen(recipes: TestStack, place: Path) -> None:
    random = Random(0)

    def pair() -> dict[str, str]:
        asked = f"\n\nHuman: Is {random.randint(0, 99)} even?\n\nAssistant:"
        return {"chosen": f"{asked} Perhaps it is.", "rejected": f"{asked} No idea."}

    write_lines(place / "Anthropic/hh-rlhf/train.jsonl", [pair() for _ in range(96)])
    write_lines(place / "Anthropic/hh-rlhf/test.jsonl", [pair() for _ in range(8)])

    metrics = run_recipe(
        recipes,
        "preference.dpo.train",
        place,
        timeout=TIMEOUT,
        model_name="models/tiny",
        renderer_name="role_colon",
        dataset="hhh",
        batch_size=8,
        learning_rate=1e-3,
    )

    assert len(metrics) == 12
    # The sampler serves the reference, so that it and the trainer agree before the first step.
    assert metrics[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(metrics[0]["margin"]) < 1e-5
    assert metrics[-1]["dpo_loss"] < metrics[0]["dpo_loss"] - 0.1
    assert metrics[-1]["accuracy"] == 1.0
    assert metrics[-1]["margin"] > 0.1
    assert listed(recipes, place, "preference.dpo.train") == {"state_path", "sampler_path"}


# --- Reinforcement ----------------------------------------------------------------------------


def test_rl_loop_earns_more_reward_with_its_default_loss(recipes: TestStack, place: Path) -> None:
    random = Random(0)
    strawberry = [
        turn("user", "How many r's are in strawberry?" + BOXED),
        turn(
            "assistant",
            "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b "
            "7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
        ),
    ]

    def task() -> tuple[str, int]:
        number = random.randint(10, 99)
        return f"Is {number} even? Say 1 if it is, else 0.", 1 - number % 2

    def conversation() -> list[dict]:
        """Half of the answers have the requested form."""
        question, answer = task()
        said = random.choice([f"\\boxed{{{answer}}}", f"It is {answer}."])
        return [*strawberry, turn("user", question + BOXED), turn("assistant", said)]

    name = "Qwen/Qwen3-8B-Base"
    teach(recipes, place, [conversation() for _ in range(8 * 120)], name=name, batch_size=8)
    tasks = [task() for _ in range(96)]
    rows = [{"question": asked, "answer": f"So it is.\n#### {answer}"} for asked, answer in tasks]
    for split in ("train", "test"):
        write_lines(place / f"openai/gsm8k/main/{split}.jsonl", rows)
    (place / "openai/gsm8k/README.md").write_text(GSM8K)

    metrics = run_recipe(
        recipes,
        "rl_loop",
        place,
        timeout=TIMEOUT,
        model_name=name,
        batch_size=8,
        group_size=8,
        learning_rate=3e-3,
        max_tokens=24,
        lora_rank=8,
        save_every=4,
    )

    rewards = [row["reward/total"] for row in metrics]
    assert len(rewards) == 12
    assert 0 < rewards[0] < 1
    assert mean(rewards[-3:]) > rewards[0] + 0.1
    assert listed(recipes, place, "rl_loop") == {"state_path", "sampler_path"}


def test_guess_number_trains_what_was_sampled_over_ten_turns(
    recipes: TestStack, place: Path
) -> None:
    random = Random(0)
    rules = (
        "Your job is to guess a integer between 0 and 1024. You can output your guess with the "
        "format Guess: <guess> (without the angle brackets), and say nothing else. Then we will "
        "tell you whether you guess is too high, too low, or correct."
    )
    refusal = (
        "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), "
        "and say nothing else."
    )

    def guess() -> str:
        """Half of the guesses have the requested form."""
        number = random.choice([256, 512, 768])
        return random.choice([f"Guess: {number}", f"Is it {number}?"])

    def answer(said: str) -> str:
        return random.choice(["Too low", "Too high"]) if said.startswith("Guess") else refusal

    def conversation() -> list[dict]:
        turns = []
        for _ in range(random.randint(0, 9)):
            said = guess()
            turns += [turn("player", said), turn("user", answer(said))]
        return [turn("system", rules), *turns, turn("assistant", guess())]

    name = "models/guesser"
    teach(recipes, place, [conversation() for _ in range(8 * 150)], name=name, batch_size=8)

    metrics = run_recipe(
        recipes,
        "multiplayer_rl.guess_number.train",
        place,
        timeout=TIMEOUT,
        model_name=name,
        renderer_name="role_colon",
        batch_size=2,
        group_size=8,
        learning_rate=1e-3,
        max_tokens=24,
        max_steps=4,
        eval_every=0,
        save_every=2,
    )

    steps = [row for row in metrics if "optim/kl_sample_train_v1" in row]
    assert len(steps) == 4
    for row in steps:
        # Each group has guesses in the right form and others, so that the run can learn.
        assert -10 < row["env/all/reward/total"] < 0
        assert row["env/all/by_group/frac_mixed"] == 1
        assert row["grad_norm"] > 0
        # Samples are trained unchanged, though each of ten turns begins a new prompt.
        assert row["env/all/turns_per_episode"] > 9
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-5
        assert row["optim/kl_sample_train_v2"] < 1e-8
    changed = adapter(recipes, place, "multiplayer_rl.guess_number.train")
    assert changed
    assert all(np.abs(values).max() > 0 for values in changed.values())
    assert listed(recipes, place, "multiplayer_rl.guess_number.train") == {
        "state_path",
        "sampler_path",
    }
