"""Checkpointed blocks, which recompute activations (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class _Switch(threading.local):
    on = False


class Checkpointing:
    """While `on`, each block keeps only its input for the backward pass.

    Each thread switches only its own micro-batches. Create it before sharding, so that a block's
    parameters are gathered for its recomputation."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._switch = _Switch()
        self.impossible = not blocks
        for block in blocks:
            block.forward = partial(self._compute, block.forward)

    @property
    def on(self) -> bool:
        return self._switch.on

    @on.setter
    def on(self, value: bool) -> None:
        self._switch.on = value

    def _compute(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if not self.on:
            return forward(*given, **named)
        # Blocks draw no random numbers, so no generator state is kept.
        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, **named)
