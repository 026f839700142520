"""Three real ranks gather what they hold rows of."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import end_together
from trainer_service.backends.sharding import DirectAllGather

RANKS = 3
PATIENCE = timedelta(seconds=60)


def run_rank(rank: int, folder: Path) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=PATIENCE)
    try:
        torch.save(all_gathered(rank), folder / f"{rank}.pt")
        end_together(store, rank=rank, size=RANKS)
    finally:
        dist.destroy_process_group()


def all_gathered(rank: int) -> torch.Tensor:
    gather, group = DirectAllGather(), dist.group.WORLD
    assert group is not None
    room = gather.allocate((RANKS * 4,), dtype=torch.float32, device=torch.device("cpu"))
    mine = room.chunk(RANKS)[rank]
    mine.fill_(rank + 0.5)
    gather(room, mine, group)
    return room


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gathering")
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=run_rank, args=(rank, folder)) for rank in range(1, RANKS)]
    try:
        for other in others:
            other.start()
        run_rank(0, folder)
        for other in others:
            other.join(PATIENCE.total_seconds())
            assert other.exitcode == 0
    finally:
        for other in others:
            other.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_what_fsdp_gathers_has_each_ranks_part_in_its_place(found):
    expected = torch.tensor([0.5] * 4 + [1.5] * 4 + [2.5] * 4)
    assert all(torch.equal(of_rank, expected) for of_rank in found)
