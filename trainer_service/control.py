"""How rank 0 tells the other ranks what to do, and hears what came of it.

A gloo group of its own, beside the one that computes. Every wait in it has the timeout of the
group. With one rank nothing is sent.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


class Op(enum.IntEnum):
    """What an operation is. `BEAT` does nothing: it keeps idle ranks from timing out."""

    BEAT = 0
    FORWARD_BACKWARD = 1
    OPTIM_STEP = 2
    PUBLISH = 3
    SAVE_CHECKPOINT = 4
    LOAD_CHECKPOINT = 5
    DROP_GRADIENTS = 6


_SIZE = struct.Struct("<q")


def _buffer(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


class Control:
    """`group` is None when there is one rank."""

    def __init__(self, *, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def broadcast(self, op: Op, payload: bytes = b"") -> None:
        """Rank 0: hands an operation to all others."""
        if self.group is None:
            return
        dist.broadcast(torch.tensor([op, len(payload)]), src=0, group=self.group)
        if payload:
            dist.broadcast(_buffer(payload), src=0, group=self.group)

    def beat(self) -> None:
        """Rank 0, while idle: the others' wait starts anew, and a dead one is noticed."""
        self.broadcast(Op.BEAT)

    def receive(self) -> tuple[Op, bytes]:
        """Other ranks: waits for the next operation."""
        header = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(header, src=0, group=self.group)
        op, size = header.tolist()
        if not size:
            return Op(op), b""
        payload = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self.group)
        return Op(op), payload.numpy().tobytes()

    def gather_known(self, payload: bytes, *, sizes: list[int]) -> list[bytes]:
        """Rank 0 gets the payloads of all ranks, whose sizes all know; others get nothing."""
        if self.group is None:
            return [payload]
        if self.rank:
            if payload:
                dist.send(_buffer(payload), dst=0, group=self.group)
            return []
        received = [payload]
        for rank in range(1, self.size):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                dist.recv(buffer, src=rank, group=self.group)
            received.append(buffer.numpy().tobytes())
        return received

    def gather(self, payload: bytes) -> list[bytes]:
        """Rank 0 gets the payloads of all ranks, of any size; others get nothing."""
        heads = self.gather_known(_SIZE.pack(len(payload)), sizes=[_SIZE.size] * self.size)
        sizes = [int(_SIZE.unpack(head)[0]) for head in heads]
        return self.gather_known(payload, sizes=sizes)
