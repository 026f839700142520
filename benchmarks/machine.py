"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from tandem.demo.run import versions


def describe() -> dict[str, object]:
    """Processor, cores, memory, versions and date."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30),
        "kernel": platform.release(),
        "versions": versions(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
