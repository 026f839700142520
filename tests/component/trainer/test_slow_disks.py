"""Ranks wait for a slower rank's disk longer than for a collective."""

from __future__ import annotations

import errno
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tandem.weights import checksum_file
from tests.support.ranks import end_together
from trainer_service.checkpoints import storage
from trainer_service.checkpoints.storage import ByteCount, HashedFile, together
from trainer_service.checkpoints.training_state import write_shards

pytestmark = pytest.mark.slow

TIMEOUT = timedelta(seconds=8)
"""For a collective."""
PATIENCE = timedelta(seconds=120)
Play = Callable[[int, Path, dist.ProcessGroup], object]


def write_slowly(rank: int, folder: Path, group: dist.ProcessGroup) -> object:
    if rank == 1:
        write, storage._PIECE = HashedFile.write, 2**16

        def slow(file: HashedFile, content: bytes | memoryview) -> int:
            time.sleep(1.5 * TIMEOUT.total_seconds() * len(content) / 2**20)
            return write(file, content)

        HashedFile.write = slow  # type: ignore[method-assign]
    state = {f"of rank {rank}": torch.ones(2**18 if rank else 4)}
    return write_shards(state, folder / "partial", group=group)


def fail_to_write(rank: int, folder: Path, group: dist.ProcessGroup) -> object:
    if rank == 1:
        (folder / "partial").mkdir(exist_ok=True)
        (folder / "partial" / "rank-1-0.safetensors").write_bytes(b"there already")
    try:
        return write_shards({f"of rank {rank}": torch.ones(4)}, folder / "partial", group=group)
    except OSError as error:
        return type(error).__name__


def hang(rank: int, folder: Path, group: dist.ProcessGroup) -> object:
    wait = threading.Event().wait if rank == 1 else lambda: None
    try:
        together(group, wait, progress=ByteCount(), stalled_after=4.0)
    except OSError as error:
        return error.strerror
    return None


def run_rank(rank: int, play: Play, folder: Path) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        torch.save(play(rank, folder, group), folder / f"{rank}.pt")
        end_together(store, rank=rank, size=2)
    finally:
        dist.destroy_process_group()


def run(play: Play, folder: Path) -> list[object]:
    other = multiprocessing.get_context("spawn").Process(target=run_rank, args=(1, play, folder))
    other.start()
    try:
        run_rank(0, play, folder)
        other.join(PATIENCE.total_seconds())
        assert other.exitcode == 0
    finally:
        other.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_a_slow_disk_trips_no_collective_and_its_files_are_known_to_rank_0(tmp_path):
    files, of_the_other = run(write_slowly, tmp_path)
    assert of_the_other == []
    for entry in files:
        assert entry == checksum_file(tmp_path / "partial" / entry.name)
    assert {entry.name for entry in files} == {"rank-0-0.safetensors", "rank-1-0.safetensors"}


def test_a_rank_that_cannot_write_is_the_error_of_all(tmp_path):
    assert run(fail_to_write, tmp_path) == ["FileExistsError", "FileExistsError"]


def test_a_disk_that_hangs_is_given_up_by_all_ranks_alike(tmp_path):
    assert run(hang, tmp_path) == ["the disk of 1 ranks has stood still for 4 s"] * 2


def test_a_single_rank_just_writes():
    assert together(None, lambda: 17, progress=ByteCount()) == 17


def test_a_single_rank_gives_up_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(storage, "_BEAT", 0.001)
    never: Future[None] = Future()
    with pytest.raises(OSError, match="has stood still") as caught:
        storage.end_together(None, never, progress=ByteCount(), stalled_after=0.01)
    assert caught.value.errno == errno.ETIMEDOUT
