"""Kernels of GPUs that add in whatever order their blocks end, and how they keep to one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_bits() -> Iterator[None]:
    """Let torch's kernels on a GPU give the same bits each time, while the block runs.

    It is for single calls: other operators cost more in this mode, or raise. It is for GPUs alone,
    where one thread computes, since the mode is that of the process. `warn_only` has no effect
    but a warning, and filling new memory would be for nothing. torch's public function would change
    what its compiler does, too.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled
