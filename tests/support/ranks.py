"""Ranks of a process group that tests run themselves."""

from __future__ import annotations

import torch.distributed as dist


def end_together(store: dist.Store, *, rank: int, size: int) -> None:
    """Return when every rank is here. None of them reads from another then, as after a barrier one
    still may: gloo aborts a process whose peer closes the connection under a read."""
    store.set(f"done/{rank}", "")
    store.wait([f"done/{each}" for each in range(size)])
