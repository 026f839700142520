"""Three real ranks gather what they hold rows of."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import end_together
from trainer_service.backends import owners_gathering
from trainer_service.backends.owners_gathering import OwnersGathering
from trainer_service.backends.sharding import DirectAllGather

RANKS = 3
PATIENCE = timedelta(seconds=60)
SHAPES = [[(7, 5), (7,)], [(2, 4)], [(6, 2, 3)], [(1,)], [(40, 33), (9, 2)]]
"""Of parts. Seven rows are three, three and one; of two rows, the last rank has none."""
OWNERS = [0, 1, 2, 1, 0]


def parts() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(shape, generator=generator) for shape in part] for part in SHAPES]


def run_rank(rank: int, folder: Path) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=PATIENCE)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        sharded = [
            (owner, [nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in part])
            for owner, part in zip(OWNERS, parts(), strict=True)
        ]
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            owners_gathering._MOST_COPIES = 1  # each waits for the one before
            gathering = OwnersGathering(sharded, dtype=dtype)
            whole = [[each.clone() for each in gathering.next(p)] for p in range(len(SHAPES))]
            gathering.end()
            found[dtype] = whole
        owned_by_the_second(sharded, rank, store)
        found["all"] = all_gathered(rank)
        torch.save(found, folder / f"{rank}.pt")
        end_together(store, rank=rank, size=RANKS)
    finally:
        dist.destroy_process_group()


def owned_by_the_second(
    sharded: list[tuple[int, list[nn.Parameter]]], rank: int, store: dist.Store
) -> None:
    """The first rank does not go on from its part before the second has got its own."""
    gathering = OwnersGathering(sharded, dtype=torch.float32)
    for place in range(len(SHAPES)):
        gathering.next(place)
        if (rank, place) == (1, 1):
            store.set("the second has its part", "")
        if (rank, place) == (0, 0):
            store.wait(["the second has its part"])
    gathering.end()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_is_whole_on_its_owner_alone_and_no_owner_waits_for_another_to_go_on(
    found, dtype
):
    for rank, of_rank in enumerate(found):
        for owner, whole, gathered in zip(OWNERS, parts(), of_rank[dtype], strict=True):
            assert len(gathered) == (len(whole) if owner == rank else 0)
            for expected, tensor in zip(whole, gathered, strict=False):
                assert torch.equal(tensor, expected.to(dtype))


def test_what_fsdp_gathers_has_each_ranks_part_in_its_place(found):
    expected = torch.tensor([0.5] * 4 + [1.5] * 4 + [2.5] * 4)
    assert all(torch.equal(of_rank["all"], expected) for of_rank in found)
