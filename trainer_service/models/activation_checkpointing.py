"""Checkpointed blocks: activations that are computed again instead of kept (Chen et al., arXiv
1604.06174)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointing:
    """Lets each block keep its input alone for the backward pass, while it is `on`. Make it before
    sharding, so that a block's parameters are gathered when it is computed again."""

    def __init__(self, blocks: Iterable[nn.Module], *, on: bool) -> None:
        self.on = on
        for block in blocks:
            block.forward = partial(self._compute, block.forward)

    def _compute(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if not self.on:
            return forward(*given, **named)
        # Nothing here draws random numbers, so that there is no state of a generator to keep.
        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, **named)
