"""Weights that a trainer on the same device hands over in memory, in place of their files.

A handoff is opened once, while the engine loads it, and closed with its last tensor. The engine's
sums are compared with the trainer's sums of its files. See "Handed over on one device" in
docs/design/models.md."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tandem.errors import LoadFailed, describe
from tandem.v1 import common_pb2
from tandem.weights.tensors import STORED_TYPES

if TYPE_CHECKING:
    import torch

_TYPES = {stored: name.removeprefix("torch.") for name, stored in STORED_TYPES.items()}


def open_handoff(handoff: common_pb2.Handoff) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of all tensors in the trainer's memory.

    Raises `LoadFailed` if the memory is gone, and `RuntimeError` from torch and CUDA."""
    memory = _on_gpu(handoff) if handoff.HasField("cuda") else _on_host(handoff)
    return _tensors(handoff, memory)


def _tensors(
    handoff: common_pb2.Handoff, memory: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for each in handoff.tensors:
        dtype: torch.dtype = getattr(torch, _TYPES[each.dtype])
        size = math.prod(each.shape) * dtype.itemsize
        yield (
            each.name,
            memory[each.offset : each.offset + size].view(dtype).view(tuple(each.shape)),
        )


def _on_host(handoff: common_pb2.Handoff) -> torch.Tensor:
    """Open the memory as bytes. It outlives the trainer."""
    import torch

    where = handoff.host
    try:
        # By now the descriptor may be another process's pipe, which would wait for a writer.
        file = os.open(f"/proc/{where.pid}/fd/{where.file}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise LoadFailed(
            f"{handoff.name} is not in the trainer's memory: {describe(error)}"
        ) from error
    try:
        found = os.fstat(file)
        if (found.st_ino, found.st_size) != (where.inode, handoff.bytes):
            raise LoadFailed(f"{handoff.name} is not in the trainer's memory any more")
        mapped = mmap.mmap(file, handoff.bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _on_gpu(handoff: common_pb2.Handoff) -> torch.Tensor:
    """Open the memory of a GPU.

    After the trainer closes its copy, at the latest at its deadline, reading gives wrong sums."""
    import torch

    where, device = handoff.cuda, torch.cuda.current_device()
    if str(torch.cuda.get_device_properties(device).uuid) != where.device_uuid:
        raise LoadFailed(f"{handoff.name} is in the memory of another GPU, {where.device_uuid}")
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        where.handle,
        handoff.bytes,
        where.storage_offset,
        where.counter_handle,
        where.counter_offset,
        where.event_handle,
        where.event_sync_required,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
