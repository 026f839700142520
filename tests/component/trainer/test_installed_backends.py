"""An installed package's backend agrees with the built-in one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.support.losses.batches import mixed_data, mixed_request
from tests.support.other_packages import PLAIN_BACKEND, install
from tests.support.trainer_worker import TrainerClient, logprobs_of, trainer_process

LOSSES = ["cross_entropy", "gspo", "ppo, token mean"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    return install(PLAIN_BACKEND, tmp_path_factory.mktemp("package"))


@pytest.fixture
def plain(installed, monkeypatch) -> str:
    """The backend's name. Workers find its package."""
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{os.environ.get('PYTHONPATH', '')}")
    return "plain"


def trained(client: TrainerClient, folder: Path) -> tuple[list, dict[str, np.ndarray]]:
    """Outputs and weights of some steps. In the last one a rank has no data."""
    outputs = []
    for loss in LOSSES:
        outputs.append(client.output(mixed_request(loss)))
        assert not client.optim_step(lr=1e-2).HasField("failure")
    outputs.append(client.output(mixed_request("cross_entropy", mixed_data(1))))
    step = client.optim_step(lr=1e-2, eps=1e-4)
    assert not step.HasField("failure"), step.failure
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    files = path.glob("*.safetensors")
    return outputs, {name: each for file in files for name, each in load_file(file).items()}


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory) -> tuple[list, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    with trainer_process(models["qwen3"], folder) as client:
        return trained(client, folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_losses_and_weights_are_those_of_the_built_in_one(
    models, tmp_path, plain, expected, ranks
):
    with trainer_process(models["qwen3"], tmp_path, backend=plain, ranks=ranks) as client:
        found, weights = trained(client, tmp_path)
    outputs, expected_weights = expected
    for one, other in zip(found, outputs, strict=True):
        assert dict(one.metrics) == pytest.approx(dict(other.metrics), rel=1e-4, abs=1e-5)
        for mine, theirs in zip(logprobs_of(one), logprobs_of(other), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-4)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        np.testing.assert_allclose(weights[name], tensor, atol=2e-4, err_msg=name)


def test_adapters_that_it_cannot_train_are_refused_before_it_starts(models, tmp_path, plain):
    training = TrainingSpec(lora=LoraSpec(rank=4))
    with trainer_process(
        models["qwen3"], tmp_path, backend=plain, training=training, wait=False
    ) as client:
        report = client.next_report()
    assert report.error_type == "unsupported_by_backend"
    assert "PlainBackend cannot train adapters" in report.error
