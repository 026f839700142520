"""Two ranks, one of which runs out of memory in the middle of a backward pass."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.agent.worker_process import group_members
from tandem.worker import OUT_OF_MEMORY_METADATA_KEY
from tests.support import small_memory
from tests.support.trainer_worker import TrainerClient, datum, request, trainer_process
from tests.support.worker_process import CALL_SECONDS

EARLY = request([datum([7, 8, 9], weights=[1.0] * 3), datum([4, 5], weights=[1.0] * 2)])
LATE = request([datum(range(5 + n, 13 + n), weights=[1.0] * 8) for n in range(8)])
"""32 tokens for each of two ranks."""


def trained(client: TrainerClient, folder: Path) -> dict[str, np.ndarray]:
    """The weights after a step."""
    assert not client.optim_step(lr=1e-2).HasField("failure")
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory) -> dict[str, np.ndarray]:
    """What two ranks learn in micro-batches of 16 tokens."""
    folder = tmp_path_factory.mktemp("data")
    with trainer_process(models["qwen3"], folder, ranks=2, micro_batch_tokens=16) as client:
        client.output(EARLY)
        client.output(LATE)
        return trained(client, folder)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_trainer_ends_and_the_next_one_computes_smaller_micro_batches(
    models, tmp_path, monkeypatch, expected, rank
):
    small_memory.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    backend = {"ranks": 2, "backend": f"small_memory_{rank}"}
    with trainer_process(models["qwen3"], tmp_path, **backend) as client:
        early = client.forward_backward(EARLY)
        with pytest.raises(grpc.RpcError) as caught:
            client.forward_backward(LATE)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        said = f"rank {rank} failed: a micro-batch of 32 tokens ran out of memory: CUDA out of"
        assert caught.value.details().startswith(said)
        tokens = int(dict(caught.value.trailing_metadata())[OUT_OF_MEMORY_METADATA_KEY])
        report = client.next_report()
        assert (report.error_type, report.error[: len(said)]) == ("out_of_memory", said)
        assert client.process.wait(timeout=CALL_SECONDS) == 1
        assert group_members(client.process.pid) == []
    with trainer_process(models["qwen3"], tmp_path, **backend) as client:
        client.forward_backward(EARLY, micro_batch_tokens=early.micro_batch_tokens)
        late = client.forward_backward(LATE, out_of_memory_at=tokens)
        assert late.micro_batch_tokens == client.describe().micro_batch_tokens == 16
        found = trained(client, tmp_path)
        alone = client.forward_backward(request([datum(range(5, 35))]), out_of_memory_at=30)
        assert alone.failure.type == "out_of_memory"
        assert not client.forward_backward(LATE).HasField("failure")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
