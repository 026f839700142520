"""GRPO of `tandem.rl` and the trainer, against TRL's on answers that TRL sampled."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tinker import types

from tandem.demo.addition import sums
from tandem.demo.tiny_model import write_tiny_model
from tandem.rl.objectives import objective
from tandem.rl.rollouts import Example, Group, Rollout, Turn
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import gradients, make_rank, output_of
from tests.support.trainer_worker import datum, request

ROOT = Path(__file__).parents[3]
TRL = ROOT / ".venv" / "trl" / "bin" / "python"
GROUPS, GROUP_SIZE, MAX_TOKENS = 6, 8, 12
BOUND = 1e-5
"""Of the relative norm of a tensor's difference. Measured: 2e-6 at most."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not TRL.exists(), reason="scripts/trl.sh has not run"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory, model: Path) -> tuple[list[Group], Mapping[str, torch.Tensor]]:
    """TRL's answers, and the gradients of its loss."""
    folder = tmp_path_factory.mktemp("trl")
    task = {
        "model": str(model),
        "prompts": [each.prompt for each in sums()[:GROUPS]],
        "steps": 1,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "learning_rate": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-12,
        "clip_norm": 0.0,
        "seed": 0,
    }
    (folder / "task.json").write_text(json.dumps(task))
    files = [folder / name for name in ("task.json", "answers.json", "gradients.safetensors")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "HF_HUB_OFFLINE": "1",
    }
    script = ROOT / "tests" / "support" / "trl_gradients.py"
    subprocess.run([TRL, "-P", script, *files], env=environment, check=True, timeout=300)
    answers = json.loads(files[1].read_text())
    assert len(answers) == GROUPS * GROUP_SIZE
    parts = [answers[start : start + GROUP_SIZE] for start in range(0, len(answers), GROUP_SIZE)]
    groups = [
        Group(number=number, example=Example(part[0]["prompt"]), rollouts=[*map(rollout, part)])
        for number, part in enumerate(parts)
    ]
    return groups, load_file(files[2])


def rollout(answer: Mapping[str, Any]) -> Rollout:
    turn = Turn(
        observation=answer["prompt"],
        tokens=answer["tokens"],
        logprobs=answer["logprobs"],
        steps=[0] * len(answer["tokens"]),
    )
    return Rollout(turns=[turn], reward=answer["reward"])


async def differences(
    model: Path, groups: Sequence[Group], wanted: Mapping[str, torch.Tensor], *, name: str
) -> dict[str, float]:
    """Return the relative norm of the difference of each gradient, for an objective."""
    chosen = objective(name, max_tokens=MAX_TOKENS)
    data = [to_wire(each) for each in await chosen.data(groups)]
    trainer = make_rank(model)
    output_of(trainer, request(data, chosen.loss, settings=chosen.settings))
    found = gradients(trainer)
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - each).norm() / each.norm()) for name, each in wanted.items()}


def to_wire(made: types.Datum) -> wire.Datum:
    inputs = {name: tensor.data for name, tensor in made.loss_fn_inputs.items()}
    targets = inputs.pop("target_tokens")
    return datum(made.model_input.to_ints(), targets=targets, **inputs)


async def test_the_gradients_of_grpo_are_those_of_trl(model, of_trl):
    found = await differences(model, *of_trl, name="grpo")
    assert max(found.values()) < BOUND, found


async def test_the_gradients_of_another_objective_are_not_those_of_trl(model, of_trl):
    found = await differences(model, *of_trl, name="dr_grpo")
    assert min(found.values()) > 1000 * BOUND, found
