"""Allocations by torch's allocator on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocations(compute: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation and, negative, each release, in order."""
    # Collect earlier garbage first, so that its release is not counted. One collection may leave
    # objects.
    for _ in range(3):
        gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            compute()
    finally:
        gc.enable()
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    sizes: list[tuple[int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(sizes, key=lambda each: each[0])]
