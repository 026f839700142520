"""What was measured, on which machine, written to `results/`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tandem.demo.run import versions

_RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Return date, processor, cores, memory, kernel and the versions of the software."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
        "versions": versions(),
    }


def save(results: Mapping[str, object]) -> Path:
    """Write results to a new file named by the date and a number; return its path."""
    _RESULTS.mkdir(exist_ok=True)
    path = _RESULTS / f"{time.strftime('%Y-%m-%d')}-{len(list(_RESULTS.iterdir())):03d}.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return path


def _processor() -> str:
    """Its name, and what tells generations of one name apart."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    about = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if "model name" not in about:
        return platform.machine()
    return f"{about['model name']} (family {about['cpu family']}, model {about['model']})"
