from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.losses.batches import REQUESTS, mixed_request
from tests.support.tiny_model import VOCABULARY, write_tiny_model
from tests.support.trainer_worker import TrainerClient, logprobs_of, trainer_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WAYS = {
    "as it is": {},
    "chunks": {"logits_bytes": 4 * VOCABULARY * 7},
    "checkpointed blocks": {"checkpointing": "on"},
}
TRAININGS = {"all parameters": TrainingSpec(), "adapters": TrainingSpec(lora=LoraSpec(rank=4))}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gpu"), architecture="qwen3")


def answers(client: TrainerClient) -> dict[str, tuple[wire.ForwardBackwardOutput, float]]:
    """Output and gradient norm of each loss. The weights do not change."""
    found = {}
    for name in REQUESTS:
        output = client.output(mixed_request(name))
        found[name] = (output, client.optim_step(lr=0.0).metrics["grad_norm"])
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", TRAININGS)
def test_a_gpu_computes_every_loss_as_a_cpu_does(model, tmp_path, training, way) -> None:
    """In float32, up to the order of sums."""
    common = {"training": TRAININGS[training], "dtype": "float32"}
    with trainer_process(model, tmp_path / "cpu", **common) as client:
        expected = answers(client)
    with trainer_process(
        model, tmp_path / "gpu", device="cuda", devices=["cuda:0"], threads=0, **common, **WAYS[way]
    ) as client:
        assert client.describe().device == "cuda"
        found = answers(client)
    assert_same(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("training", TRAININGS)
def test_two_ranks_over_nccl_compute_what_one_computes(model, tmp_path, training) -> None:
    common = {"training": TRAININGS[training], "dtype": "float32", "device": "cuda", "threads": 0}
    with trainer_process(model, tmp_path / "one", devices=["cuda:0"], **common) as client:
        expected = answers(client)
    devices = ["cuda:0", "cuda:1"]
    with trainer_process(
        model, tmp_path / "two", devices=devices, ranks=2, micro_batch_tokens=24, **common
    ) as client:
        found = answers(client)
    assert_same(found, expected)


def assert_same(found, expected) -> None:
    for name, (output, norm) in expected.items():
        other, other_norm = found[name]
        assert dict(other.metrics) == pytest.approx(dict(output.metrics), rel=1e-3, abs=1e-4), name
        assert other_norm == pytest.approx(norm, rel=1e-3), name
        for one, two in zip(logprobs_of(output), logprobs_of(other), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4, err_msg=name)
