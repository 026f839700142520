from __future__ import annotations

import pytest
import torch

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.v1 import common_pb2
from tests.support.devices import operations_on_gpu
from tests.support.local_trainer import data_of, forward_backward, step
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import request, trainer_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("spilled", [False, True], ids=["host", "file"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "training",
    [TrainingSpec(), TrainingSpec(lora=LoraSpec(rank=8), optimizer="adamw")],
    ids=["full", "lora"],
)
def test_all_state_leaves_the_gpu_and_comes_back_bit_by_bit(tmp_path, spilled, dtype, training):
    with operations_on_gpu(tmp_path / "model", dtype=dtype, training=training) as operations:
        forward_backward(operations, data_of(1))
        step(operations)
        forward_backward(operations, data_of(2))
        forward_backward(operations, data_of(3), forward_only=True)
        offload = operations.switching._offload
        tensors = offload._tensors()
        before = [tensor.detach().cpu() for tensor in tensors]
        request = common_pb2.SleepRequest(spill_folder=str(tmp_path) if spilled else "")
        for _ in range(2):
            slept = operations.switching.sleep(request)
            assert not slept.HasField("failure"), slept.failure
            assert slept.device_bytes == 0
            # Workspaces of cuBLAS remain.
            assert torch.cuda.memory_allocated() < 100 * 2**20 < slept.bytes_moved
            woken = operations.switching.wake()
            assert not woken.HasField("failure"), woken.failure
            assert woken.device_bytes == slept.bytes_moved
            assert all(
                torch.equal(tensor.detach().cpu().view(torch.uint8), kept.view(torch.uint8))
                for tensor, kept in zip(tensors, before, strict=True)
                if tensor.dim()
            )
        step(operations)


def test_a_trainer_that_does_not_fit_on_the_gpu_any_more_stays_asleep(tmp_path):
    training = TrainingSpec()
    with operations_on_gpu(tmp_path, dtype="float32", training=training) as operations:
        forward_backward(operations, data_of(1))
        assert operations.switching.sleep(common_pb2.SleepRequest()).bytes_moved > 0
        room = torch.cuda.mem_get_info()[0] - 64 * 2**20
        others = torch.empty(room, dtype=torch.uint8, device="cuda")
        assert operations.switching.wake().failure.type == "out_of_memory"
        assert operations.switching.asleep
        del others
        torch.cuda.empty_cache()
        assert not operations.switching.wake().HasField("failure")
        step(operations)


def test_a_sleeping_trainer_leaves_less_than_a_gibibyte_on_the_gpu(tmp_path):
    model = tmp_path / "model"
    write_tiny_model(model, seed=1, shape=TinyShape(hidden=2048, ffn=8192, layers=8))
    free = torch.cuda.mem_get_info()[0]
    with trainer_process(
        model, tmp_path, lease=1, device="cuda", devices=["cuda:0"], threads=0
    ) as client:
        client.output(request(mixed_data()))
        assert not client.optim_step().HasField("failure")
        assert free - torch.cuda.mem_get_info()[0] > 4 * 2**30
        client.hold(2)
        client.sleep()
        assert free - torch.cuda.mem_get_info()[0] < 2**30
        client.hold(3)
        client.wake()
        client.output(request(mixed_data()))
        assert not client.optim_step().HasField("failure")
