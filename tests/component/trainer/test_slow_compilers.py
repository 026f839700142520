"""Ranks wait for a slower rank's compiler longer than for a collective."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.component.trainer.test_slow_disks import PATIENCE, run
from trainer_service.compute.control_group import ControlGroup

TIMEOUT = timedelta(seconds=4)
"""For a collective."""


def timeouts(*groups: dist.ProcessGroup) -> set[object]:
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def compile_late(rank: int, folder: Path, group: dist.ProcessGroup) -> object:
    """Rank 1 is late for a collective, rank 0 at the end."""
    late, total = 1.2 * TIMEOUT.total_seconds(), torch.ones(1)
    assert dist.group.WORLD is not None
    groups = (dist.group.WORLD, group)
    for each in groups:
        each.set_timeout(TIMEOUT)
    with ControlGroup(rank=rank, size=2, group=group, timeout=TIMEOUT).patient(PATIENCE):
        during = timeouts(*groups)
        time.sleep(late if rank == 1 else 0.0)
        dist.all_reduce(total)
        time.sleep(late if rank == 0 else 0.0)
    dist.all_reduce(total, group=group)
    return [total.item(), during == {PATIENCE}, timeouts(*groups) == {TIMEOUT}]


def test_a_slow_compiler_trips_no_collective_and_then_they_are_timed_again(tmp_path):
    assert run(compile_late, tmp_path) == [[4.0, True, True]] * 2
