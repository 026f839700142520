from __future__ import annotations

import asyncio

import pytest
import torch

from tandem.agent.suspender import CudaCheckpoint, uses_gpu
from tandem.agent.worker_process import group_members
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import logprobs_of, request, trainer_process

SUSPENDER = CudaCheckpoint()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(bool(SUSPENDER.why_not()), reason=f"cannot: {SUSPENDER.why_not()}"),
]


def test_a_suspended_trainer_leaves_nothing_on_the_gpu_and_goes_on_as_before(tmp_path):
    model = tmp_path / "model"
    write_tiny_model(model, seed=1, shape=TinyShape(hidden=2048, ffn=8192, layers=8))
    free = torch.cuda.mem_get_info()[0]
    with trainer_process(model, tmp_path, device="cuda", devices=["cuda:0"], threads=0) as trainer:
        trainer.output(request(mixed_data()))
        assert not trainer.optim_step().HasField("failure")
        before = logprobs_of(trainer.output(request(mixed_data(), forward_only=True)))
        pids = [pid for pid in group_members(trainer.process.pid) if uses_gpu(pid)]
        assert pids
        for _ in range(2):
            asyncio.run(SUSPENDER.suspend(pids, timeout=120))
            assert free - torch.cuda.mem_get_info()[0] < 64 * 2**20
            assert trainer.describe().ranks == 1, "it answers meanwhile"
            asyncio.run(SUSPENDER.resume(pids, timeout=120))
        after = logprobs_of(trainer.output(request(mixed_data(), forward_only=True)))
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        trainer.output(request(mixed_data()))
        assert not trainer.optim_step().HasField("failure")
