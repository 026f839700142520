"""A sampler uses its given device or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.processes import cores_of
from tests.support.sampler_worker import PROMPT, sampler_process
from tests.support.worker_process import CALL_SECONDS


def test_all_threads_of_a_sampler_run_on_its_cores(model: Path):
    core = max(os.sched_getaffinity(0))
    with sampler_process(model, devices=(f"cpu:{core}",)) as client:
        client.sample(PROMPT)
        assert cores_of(client.process.pid) == {core}


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (("cpu:9999",), "cpu:9999 cannot be used"),
        (("cpu:0", "cpu:1"), "1 ranks were given 2 devices, not one each"),
    ],
)
def test_a_sampler_does_not_start_on_cores_that_there_are_not(model: Path, devices, reason):
    with sampler_process(model, devices=devices, wait=False) as client:
        assert client.report.error_type == "worker_start_failed"
        assert reason in client.report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_sampler_does_not_fall_back_on_the_cpu_for_a_gpu_that_there_is_not(model: Path):
    with sampler_process(model, devices=("cuda:0",), wait=False) as client:
        failure = client.next_report()
        assert failure.error_type == "worker_start_failed"
        assert "there is no CUDA device" in failure.error
