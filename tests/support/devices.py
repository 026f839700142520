"""Parameters for tests on the CPU and, if there is one, on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.worker import TrainingSpec, WorkerSpec
from tandem.settings.workers import TrainerSettings
from trainer_service.compute.process_group import bring_up
from trainer_service.compute.topology import Topology
from trainer_service.service.operations import Operations

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def settings_on(device: str) -> dict[str, Any]:
    """Return arguments for `trainer_process`."""
    return {"device": "cuda", "devices": ["cuda:0"], "threads": 0} if device == "cuda" else {}


class Nobody:
    def meet(self) -> list[str]:
        raise AssertionError("there is one rank")

    def assign(self, rank: int, line: str) -> None:
        raise AssertionError("there is one rank")


@contextmanager
def operations_on_gpu(
    tmp_path: Path,
    *,
    dtype: str,
    training: TrainingSpec,
    max_length: int = 512,
    **settings: Any,
) -> Iterator[Operations]:
    """Yield the operations of a one-rank trainer in this process, with 1 GiB of state or more.

    `settings` are of `TrainerSettings`."""
    write_tiny_model(
        tmp_path, seed=1, shape=TinyShape(hidden=1024, ffn=8192, max_length=max_length)
    )
    spec = WorkerSpec(
        worker_id="trainer-gpu",
        kind="trainer",
        secret="none",
        model_name="tiny",
        model_path=str(tmp_path),
        session_id="s-gpu",
        training=training,
    )
    chosen = TrainerSettings(device="cuda", dtype=dtype, **settings)
    try:
        alone = Topology(nodes=1, node=0, ranks=1)
        yield Operations(bring_up(spec, settings=chosen, topology=alone, others=Nobody()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
