"""How much memory this process holds."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path


def resident_bytes() -> int:
    """After what is free was given back to the system."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
