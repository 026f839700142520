"""A mode for GPU kernels in which equal inputs give equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_bits() -> Iterator[None]:
    """Make torch's GPU kernels add in a fixed order within the block.

    Use it on a GPU, for single calls, in one computing thread: other operators get slower or raise,
    and the mode is global to the process. torch's public function would also change its compiler.
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
