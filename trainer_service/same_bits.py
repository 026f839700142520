"""One fixed order of additions for GPU kernels whose order otherwise varies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_bits() -> Iterator[None]:
    """Make torch's GPU kernels return equal bits each time, while the block runs.

    Use it for single calls, because other operators get slower or raise in this mode. Use it only
    on a GPU, with one computing thread, because the mode is global to the process. `warn_only`
    would only warn. Filling new memory is off because it costs time. torch's public function would
    also change its compiler.
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
