"""Runs with each option on a GPU stay close to float32 on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.worker import TrainingSpec
from tests.support.devices import GPU, operations_on_gpu, settings_on
from tests.support.local_trainer import data_of, forward_backward, step
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import TrainerClient, logprobs_of, request, trainer_process

pytestmark = pytest.mark.slow

OPTIONS: dict[str, tuple[TrainingSpec, dict[str, Any]]] = {
    "by default": (TrainingSpec(), {}),
    "compiled": (TrainingSpec(), {"compile": "on"}),
    "states in bfloat16": (TrainingSpec(states="bfloat16"), {}),
    "moments on the host": (TrainingSpec(offload="moments"), {}),
    "weights on the host": (TrainingSpec(offload="weights"), {}),
}
CASES = [
    pytest.param(device, option, marks=GPU if device == "cuda" else ())
    for device in ("cpu", "cuda")
    for option in OPTIONS
    if (device, option) != ("cpu", "compiled")  # takes a minute, and has other tests
]


def course(client: TrainerClient) -> list[np.ndarray]:
    """Logprobs of one batch before each of four steps."""
    found = []
    for _ in range(4):
        output = client.output(request(mixed_data()))
        found.append(np.concatenate(logprobs_of(output)))
        assert not client.optim_step(lr=1e-3).HasField("failure")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "model"
    write_tiny_model(path, seed=1, shape=TinyShape(head_dim=64))
    return path


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> list[np.ndarray]:
    with trainer_process(model, tmp_path_factory.mktemp("cpu"), dtype="float32") as client:
        return course(client)


@pytest.mark.parametrize(("device", "option"), CASES)
def test_a_run_in_bfloat16_learns_as_one_in_float32_does(
    model, expected, tmp_path, device, option
) -> None:
    training, settings = OPTIONS[option]
    settings = {"dtype": "auto" if device == "cuda" else "bfloat16", **settings}
    with trainer_process(
        model, tmp_path, training=training, **settings_on(device), **settings
    ) as client:
        about = client.describe()
        assert (about.device, about.dtype, about.packs) == (device, "bfloat16", True)
        assert (about.peak_reserved_bytes >= about.peak_allocated_bytes > 0) == (device == "cuda")
        found = course(client)
    learned = np.abs(expected[-1] - expected[0]).mean()
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).mean() < learned / 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_batch_that_runs_out_of_memory_is_computed_in_smaller_parts(tmp_path) -> None:
    """The allocator's limit is below the memory of the whole batch."""
    data = data_of(1, count=2000)
    with operations_on_gpu(
        tmp_path, dtype="bfloat16", training=TrainingSpec(), micro_batch_tokens=32768
    ) as operations:
        forward_backward(operations, data)
        step(operations, lr=0.0)  # creates the moments
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        expected = forward_backward(operations, data)
        norm = step(operations, lr=0.0)["grad_norm"]
        most = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        limit = before + 0.7 * (most - before)
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        try:
            found = forward_backward(operations, data)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert operations.describe().micro_batch_tokens < 32768
        assert step(operations, lr=0.0)["grad_norm"] == pytest.approx(norm, rel=0.05)
    off = [np.abs(a - b) for a, b in zip(logprobs_of(found), logprobs_of(expected), strict=True)]
    assert np.concatenate(off).mean() < 0.03
