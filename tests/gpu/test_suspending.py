from __future__ import annotations

import asyncio
import json
import sys

import pytest
import torch

from tandem.agent.launcher import ProcessLauncher
from tandem.agent.suspender import CudaCheckpoint, uses_gpu
from tandem.agent.worker_process import group_members
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.worker import JobSpec, WorkerSpec
from tandem.protocol.worker_health import wait_until_serving
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import logprobs_of, request, trainer_process
from tests.support.waiting import until

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


TRAINS = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
weights, step = torch.ones(2**29, device="cuda"), 0
while not os.path.exists("enough"):
    dist.all_reduce(weights)
    assert bool((weights == 1).all())
    step += 1
    pathlib.Path("partial").write_text(str(step))
    os.replace("partial", "steps")
dist.destroy_process_group()
"""


async def test_a_suspended_job_of_one_rank_leaves_nothing_on_the_gpu_and_goes_on(tmp_path):
    folder, free = tmp_path / "job", torch.cuda.mem_get_info()[0]
    folder.mkdir()
    (folder / "train.py").write_text(TRAINS)
    steps = lambda: int((folder / "steps").read_text())  # noqa: E731
    spec = WorkerSpec(
        worker_id="job-s-1-0",
        kind="job",
        secret="the secret of a worker",
        model_name="tiny",
        model_path="tiny",
        session_id="s-1",
        devices=("cuda:0",),
        lease=1,
        job=JobSpec(
            framework="test",
            folder=str(folder),
            argv=(sys.executable, "-m", "torch.distributed.run", str(folder / "train.py")),
        ),
    )
    launcher = ProcessLauncher(data_dir=tmp_path)
    try:
        handle = await launcher.start(spec)
        await until((folder / "steps").exists)
        for lease in (2, 4):
            await launcher.suspend(spec.worker_id, lease=lease, timeout=120)
            done = steps()
            assert free - torch.cuda.mem_get_info()[0] < 64 * 2**20
            assert await wait_until_serving(handle, timeout=60) == "", "its worker answers"
            assert steps() <= done + 1, "a step may just have been written"
            await launcher.resume(spec.worker_id, lease=lease + 1, timeout=120)
            await until(lambda done=done: steps() > done + 1)
        (folder / "enough").touch()
        await until((folder / "attempt-1/end.json").exists)
    finally:
        await launcher.close()
    assert json.loads((folder / "attempt-1/end.json").read_text())["status"] == 0
