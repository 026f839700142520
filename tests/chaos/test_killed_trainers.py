"""Real trainers that are killed at random points. The seed decides the points."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tinker import TrainingClient

from tests.support.gateway.forking_launcher import ForkingLauncher
from tests.support.gateway.running import running_gateway
from tests.support.gateway.runs import OFTEN
from tests.support.sdk import TIMEOUT, adam, outputs, supervised
from tests.support.tiny_model import VOCABULARY, write_tiny_model

_LONGEST = 0.06
"""Seconds from a step's requests to the kill. A step takes about half of it."""
_AGAIN = 0.25
"""The share of the kills that strike the next trainer as well, at its start or in its replay."""
_WITHIN = 0.5


@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "kills",
    [pytest.param(8, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.nightly)],
)
def test_the_weights_after_any_number_of_kills_are_the_undisturbed_ones(
    tmp_path: Path, kills: int
) -> None:
    model = write_tiny_model(tmp_path / "model")
    launcher, chance = ForkingLauncher(), random.Random(36)
    with (
        running_gateway(tmp_path, launcher=launcher, recovery=OFTEN) as gate,
        gate.service() as service,
    ):
        gate.run(gate.gateway.models.add(name="real", path=str(model)))
        undisturbed, killed = (
            service.create_lora_training_client("real:full").result(TIMEOUT) for _ in range(2)
        )
        steps = struck = 0
        while struck < kills:
            pending = step(killed, steps)
            time.sleep(chance.uniform(0, _LONGEST))
            launcher.kill_trainer(killed.model_id)
            struck += 1
            if chance.random() < _AGAIN:
                time.sleep(chance.uniform(0, _WITHIN))
                launcher.kill_trainer(killed.model_id)
                struck += 1
            results = [future.result(TIMEOUT) for future in pending]
            expected = [future.result(TIMEOUT) for future in step(undisturbed, steps)]
            for ours, theirs in zip(outputs(results[0]), outputs(expected[0]), strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"step {steps}")
            steps += 1
        found, wanted = (weights_of(gate.settings.data_dir, run) for run in (killed, undisturbed))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def step(run: TrainingClient, number: int) -> list:
    tokens = np.random.default_rng(number).integers(3, VOCABULARY, (4, 16)).tolist()
    data = [supervised(each) for each in tokens]
    return [run.forward_backward(data, "cross_entropy"), run.optim_step(adam())]


def weights_of(data_dir: Path, run: TrainingClient) -> dict[str, np.ndarray]:
    run.save_weights_for_sampler("end").result(TIMEOUT)
    tensors: dict[str, np.ndarray] = {}
    for file in (data_dir / "weights" / run.model_id.replace(":", "_")).glob("v*/*.safetensors"):
        tensors |= load_file(file)
    return tensors
