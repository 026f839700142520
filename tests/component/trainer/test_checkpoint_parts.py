"""Ranks write and read their own parts of tensors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.support.ranks import end_together
from trainer_service.checkpoints.shards import ShardReader, read_layout
from trainer_service.checkpoints.training_state import write_shards

RANKS = 4
PATIENCE = timedelta(seconds=240)
TENSORS: dict[str, tuple[torch.Size | tuple[int, ...], torch.dtype]] = {
    "rows": ((8, 4), torch.float32),
    "uneven": ((7, 4), torch.bfloat16),
    "fewer rows than ranks": ((2, 4), torch.float32),
    "one row": ((1, 4), torch.float16),
    "nothing": ((0, 4), torch.float32),
    "three dimensions": ((4, 6, 3), torch.float32),
    "flags": ((9,), torch.bool),
    "counts": ((5, 5), torch.int64),
}
PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "sharded by rows": (Shard(0), Replicate()),
    "sharded by all ranks": (Shard(0), Shard(0)),
    "divided both ways": (Shard(0), Shard(1)),
    "divided by columns": (Replicate(), Shard(1)),
    "replicated": (Replicate(), Replicate()),
}


def whole() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    state = {
        name: torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=made).to(dtype)
        for name, (shape, dtype) in TENSORS.items()
    }
    return {**state, "step": torch.tensor(17.0)}


def placed(state: Mapping[str, torch.Tensor], placements: tuple[Placement, Placement]):
    mesh = init_device_mesh("cpu", (2, 2))
    found: dict[str, torch.Tensor] = {"step": state["step"].clone()}
    for name, tensor in state.items():
        if name != "step":
            fitting = [
                p if not p.is_shard(1) or tensor.ndim > 1 else Replicate() for p in placements
            ]
            found[name] = distribute_tensor(tensor.clone(), mesh, fitting)
    return found


def run_rank(rank: int, folder: Path) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=PATIENCE)
    try:
        for name, placements in PLACEMENTS.items():
            write_shards(placed(whole(), placements), folder / name, group=dist.group.WORLD)
        write_shards(whole(), folder / "of no mesh", group=dist.group.WORLD)
        dist.barrier()
        for source in (*PLACEMENTS, "of no mesh"):
            files = [file.name for file in (folder / source).iterdir()]
            for placements in PLACEMENTS.values():
                empty = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
                target = placed(empty, placements)
                reader = ShardReader(folder / source, files=files, group=dist.group.WORLD)
                dcp.load(target, storage_reader=reader)
                for name, tensor in whole().items():
                    found = target[name]
                    full = found.full_tensor() if name != "step" else found
                    assert torch.equal(full, tensor), (source, name)
        end_together(store, rank=rank, size=RANKS)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tensors that four ranks wrote, read again in every other way."""
    folder: Path = tmp_path_factory.mktemp("parts")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    try:
        for each in ranks:
            each.join(PATIENCE.total_seconds())
        assert [each.exitcode for each in ranks] == [0] * RANKS
    finally:
        for each in ranks:
            each.kill()
    return folder


@pytest.mark.parametrize("source", [*PLACEMENTS, "of no mesh"])
def test_one_rank_reads_what_four_have_written(folder, source):
    files = [file.name for file in (folder / source).iterdir()]
    assert {name.split("-")[1] for name in files} <= {"0", "1", "2", "3"}
    state = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    dcp.load(state, storage_reader=ShardReader(folder / source, files=files), no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in whole().items())


@pytest.mark.parametrize("source", [*PLACEMENTS, "of no mesh"])
def test_every_part_is_written_once(folder, source):
    files = [file.name for file in (folder / source).iterdir()]
    layout = read_layout(folder / source, files=files)
    assert {name: saved.shape for name, saved in layout.items()} == {
        name: tuple(tensor.shape) for name, tensor in whole().items()
    }
    names = [name for file in files for name in load_file(folder / source / file)]
    assert len(names) == len(set(names))
    if source == "divided both ways":
        assert len(layout["rows"].shards) == 4
