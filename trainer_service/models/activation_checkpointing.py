"""Checkpointed blocks: activations that are computed again instead of kept (Chen et al., arXiv
1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> None:
    """Let each block keep its input alone for the backward pass. Must come before sharding, so that
    a block's parameters are gathered when it is computed again."""
    for block in blocks:
        # Nothing here draws random numbers, so that there is no state of a generator to keep.
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
