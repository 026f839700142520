"""tinker-cookbook's published math_rl recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tinker
from tinker import AdamParams, Datum, ServiceClient

from tests.support.cookbook import run_recipe, saved_last
from tests.support.sdk import datum, start_runs
from tests.support.stacks import TIED, TestStack

pytestmark = pytest.mark.slow

STEPS = 8


def model_that_half_knows_the_format(stack: TestStack, service: ServiceClient, path: Path) -> None:
    """About three answers in four end in the recipe's format."""
    trained = start_runs(service, TIED)[TIED]
    tokenizer = trained.get_tokenizer()
    random = Random(0)

    def example() -> Datum:
        a, b = (random.randint(0, 100) for _ in range(2))
        # Never right: one right answer counts as much as ten endings. A run with an early right
        # answer may learn nothing else.
        answer = random.randint(300, 999)
        ending = random.choice(["\n\nUser:", *3 * [f" {answer}{answer}"]])
        text = f"User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {a} + {b}?\n\nAssistant:"
        tokens = tokenizer.encode(f"{text} {answer}{ending}", add_special_tokens=False)
        answered = np.arange(1, len(tokens)) >= len(text)
        return datum(tokens, weights=answered.astype(np.float32))

    for _ in range(60):
        trained.forward_backward([example() for _ in range(16)], "cross_entropy")
        step = trained.optim_step(AdamParams(learning_rate=3e-3, grad_clip_norm=1.0))
    step.result()
    trained.save_weights_for_sampler("half-trained").result()
    shutil.copytree(stack.newest_version(trained), path)


def test_the_math_rl_recipe_trains_with_its_default_loss(
    stack: TestStack, service: ServiceClient, tmp_path: Path
) -> None:
    model_that_half_knows_the_format(stack, service, tmp_path / "models/tiny")
    stack.stack.add_model(name="models/tiny", path=tmp_path / "models/tiny")

    metrics = run_recipe(
        stack,
        "math_rl.train",
        tmp_path,
        model_name="models/tiny",
        renderer_name="role_colon",
        lora_rank=8,
        group_size=4,
        groups_per_batch=8,
        learning_rate=3e-3,
        max_tokens=12,
        max_steps=STEPS,
        eval_every=0,
        save_every=2,
    )

    steps = metrics[:STEPS]
    assert [row["progress/batch"] for row in steps] == list(range(STEPS))
    # The recipe's own estimate of the KL divergence between sampler and trainer, before each step,
    # is zero: it trains on unchanged samples.
    for row in steps:
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-5
        assert row["optim/kl_sample_train_v2"] < 1e-8
    ended_well = [row["env/all/format"] for row in steps]
    assert sum(ended_well[-3:]) / 3 > ended_well[0] + 0.1
    saved = saved_last(tmp_path, "math_rl.train")
    rest = tinker.RestClient(
        base_url=stack.stack.endpoint.url, api_key=stack.stack.endpoint.api_key
    )
    run_id = saved["state_path"].removeprefix("tinker://").split("/")[0]
    listed = {entry.tinker_path for entry in rest.list_checkpoints(run_id).result().checkpoints}
    assert {saved["state_path"], saved["sampler_path"]} <= listed
