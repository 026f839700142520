"""One of two ranks runs out of memory in a backward pass."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.agent.worker_process import group_members
from tandem.protocol.worker import OUT_OF_MEMORY_METADATA_KEY, Layout, LoraSpec, TrainingSpec
from tandem.wire.v1.tinker_pb2 import ForwardBackwardRequest
from tests.support import small_memory
from tests.support.architectures import write_model
from tests.support.trainer_worker import TrainerClient, datum, request, trainer_process
from tests.support.worker_process import CALL_SECONDS

EARLY = request([datum([7, 8, 9], weights=[1.0] * 3), datum([4, 5], weights=[1.0] * 2)])
LATE = [datum(range(5 + n, 13 + n), weights=[1.0] * 8) for n in range(8)]
"""32 tokens for each of two ranks."""
TOGETHER = TrainingSpec(lora=LoraSpec(rank=4, seed=5), layout=Layout(tensor_parallel=2))


def trained(client: TrainerClient, folder: Path) -> dict[str, np.ndarray]:
    assert not client.optim_step(lr=1e-2).HasField("failure")
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


def in_micro_batches_of_16(
    model: Path, folder: Path, training: TrainingSpec, late: ForwardBackwardRequest
) -> dict[str, np.ndarray]:
    """Weights of two ranks with enough memory for 16 tokens."""
    settings = {"training": training, "ranks": 2, "micro_batch_tokens": 16}
    with trainer_process(model, folder, **settings) as client:
        client.output(EARLY)
        client.output(late)
        return trained(client, folder)


@pytest.mark.parametrize(
    ("rank", "training"),
    [
        (0, TrainingSpec()),
        pytest.param(1, TrainingSpec(), marks=pytest.mark.nightly),
        pytest.param(1, TOGETHER, marks=pytest.mark.nightly),
    ],
    ids=["the first rank", "the second rank", "adapters of divided matrices"],
)
def test_the_trainer_ends_and_the_next_one_computes_smaller_micro_batches(
    model, tmp_path, monkeypatch, rank, training
):
    late = request(LATE[: len(LATE) // training.layout.tensor_parallel])
    expected = in_micro_batches_of_16(model, tmp_path / "expected", training, late)
    small_memory.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    backend = {"training": training, "ranks": 2, "backend": f"small_memory_{rank}"}
    with trainer_process(model, tmp_path, **backend) as client:
        early = client.forward_backward(EARLY)
        with pytest.raises(grpc.RpcError) as caught:
            client.forward_backward(late)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        said = f"rank {rank} failed: a micro-batch of 32 tokens ran out of memory: CUDA out of"
        assert caught.value.details().startswith(said)
        tokens = int(dict(caught.value.trailing_metadata())[OUT_OF_MEMORY_METADATA_KEY])
        report = client.next_report()
        assert (report.error_type, report.error[: len(said)]) == ("out_of_memory", said)
        assert client.process.wait(timeout=CALL_SECONDS) == 1
        assert group_members(client.process.pid) == []
    with trainer_process(model, tmp_path, **backend) as client:
        client.forward_backward(EARLY, micro_batch_tokens=early.micro_batch_tokens)
        again = client.forward_backward(late, out_of_memory_at=tokens)
        assert again.micro_batch_tokens == client.describe().micro_batch_tokens == 16
        found = trained(client, tmp_path)
        alone = client.forward_backward(request([datum(range(5, 35))]), out_of_memory_at=30)
        assert alone.failure.type == "out_of_memory"
        long = request([datum(range(5, 35))], forward_only=True)
        refused = client.forward_backward(long, out_of_memory_at=30)
        assert refused.failure.type == "out_of_memory"
        tried = client.forward_backward(long, out_of_memory_at=30, checkpoint=True)
        assert not tried.HasField("failure")
        assert not client.forward_backward(late).HasField("failure")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
