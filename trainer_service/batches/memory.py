"""Micro-batches that do not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer_service.batches.micro_batches import MicroBatchPlan, RankPlan

_SENTENCES = ("DefaultCPUAllocator: can't allocate", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""RuntimeErrors for lack of memory: torch's on a CPU, and those of GPU libraries."""


class MicroBatchTooLarge(Exception):
    """A micro-batch of `tokens`, padding included, ran out of memory while the device had `free`
    bytes.

    If `RankTrainer.forward_backward` raises it, the process group is unusable: gradients are lost
    or other ranks hang in a collective."""

    def __init__(self, tokens: int, reason: str, *, free: int = 0) -> None:
        super().__init__(f"a micro-batch of {tokens} tokens ran out of memory: {reason}")
        self.tokens = tokens
        self.reason = reason
        self.free = free


def ran_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _SENTENCES)


def free_on(device: str) -> int:
    """The free bytes of a rank's GPU. 0 on a CPU, where the system ends a process rather than
    refuse it memory."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


def tokens_of(part: MicroBatchPlan, lengths: Sequence[int], *, packed: bool) -> int:
    """The tokens of a micro-batch, padding included."""
    own = [lengths[datum] for datum in part]
    return sum(own) if packed else len(own) * max(own, default=0)


def largest(plan: Sequence[RankPlan], lengths: Sequence[int], *, packed: bool) -> int:
    return max(tokens_of(part, lengths, packed=packed) for share in plan for part in share)
