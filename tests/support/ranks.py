"""Ranks of a process group that tests run themselves."""

from __future__ import annotations

import torch.distributed as dist


def end_together(store: dist.Store, *, rank: int, size: int) -> None:
    """Wait until every rank is here.

    After a barrier a rank may still read from another, and gloo aborts a process if its peer then
    closes the connection."""
    store.set(f"done/{rank}", "")
    store.wait([f"done/{each}" for each in range(size)])
