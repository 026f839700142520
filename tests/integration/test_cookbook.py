"""tinker-cookbook's math_rl recipe, as it is published, as another program on this stack."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from support.models import write_qwen
from support.stacks import TestStack
from tinker import ServiceClient

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


def run_recipe(stack: TestStack, folder: Path, **options: object) -> list[dict]:
    """Runs it to its end in `folder`; returns the metrics that it logged, step by step."""
    endpoint = stack.stack.endpoint
    arguments = {
        "model_name": "models/tiny",
        "renderer_name": "role_colon",
        "lora_rank": 8,
        "group_size": 4,
        "groups_per_batch": 8,
        "learning_rate": 1e-3,
        "max_tokens": 5,
        "max_steps": STEPS,
        "eval_every": 0,
        "save_every": 2,
        "log_path": folder / "log",
        "behavior_if_log_dir_exists": "delete",
        **options,
    }
    command = [ROOT / "scripts/cookbook.sh", "tinker_cookbook.recipes.math_rl.train"]
    finished = subprocess.run(
        [*map(str, command), *(f"{name}={value}" for name, value in arguments.items())],
        cwd=folder,
        env={
            **os.environ,
            "TINKER_BASE_URL": endpoint.url,
            "TINKER_API_KEY": endpoint.api_key,
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    lines = (folder / "log/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_math_rl_recipe_trains_with_its_default_loss(
    stack: TestStack, service: ServiceClient, tmp_path: Path
) -> None:
    stack.stack.add_model(name="models/tiny", path=write_qwen(tmp_path / "models/tiny", seed=5))

    metrics = run_recipe(stack, tmp_path)

    assert [row["progress/batch"] for row in metrics] == list(range(STEPS))
    # What was sampled is what is trained: the recipe's own estimate of the KL divergence
    # between the sampler and the trainer, before each step.
    for row in metrics:
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-5
        assert row["optim/kl_sample_train_v2"] < 1e-8
    saved = [json.loads(line) for line in (tmp_path / "log/checkpoints.jsonl").open()]
    rest = service.create_rest_client()
    run_id = saved[-1]["state_path"].removeprefix("tinker://").split("/")[0]
    listed = {entry.tinker_path for entry in rest.list_checkpoints(run_id).result().checkpoints}
    assert {saved[-1]["state_path"], saved[-1]["sampler_path"]} <= listed
