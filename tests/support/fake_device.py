"""A fake device with separate memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer_service.compute.offload import Offload
from trainer_service.service.operations import Operations


class FakeDevice:
    """A device's memory in host memory. Copies have ended when they were awaited.

    `host_blocks` lists the sizes of host allocations. At most `most` succeed."""

    is_host = False

    def __init__(self, *, most: int = 10**6) -> None:
        self.most = most
        self.host_blocks: list[int] = []
        self.waits = 0
        self.given_back = 0

    def allocate_host(self, size: int) -> Tensor:
        if len(self.host_blocks) >= self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.host_blocks.append(size)
        return torch.full((size,), 0x7F, dtype=torch.uint8)

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield

    def mark(self) -> Callable[[], None]:
        def wait() -> None:
            self.waits += 1

        return wait

    def give_back(self) -> None:
        self.given_back += 1


def offload_of(operations: Operations, device: FakeDevice | None = None) -> Offload:
    """Let a rank's operations sleep as on a device with separate memory."""
    trainer = operations.trainer
    offload = Offload(lambda: [trainer.backend], memory=device or FakeDevice())
    operations.switching._offload = offload
    return offload
