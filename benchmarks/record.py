"""Writes measurements and a description of the machine to `results/`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tandem.demo.run import versions

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
        "versions": versions(),
    }


def new_file(folder: Path = RESULTS) -> Path:
    """Return a file with the next number, which no other result has."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.stem.rpartition("-")[2]) for path in folder.glob("*-[0-9]*.json")]
    return folder / f"{time.strftime('%Y-%m-%d')}-{max(numbers, default=-1) + 1:03d}.json"


def write(path: Path, results: Mapping[str, object]) -> None:
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def save(results: Mapping[str, object]) -> Path:
    path = new_file()
    write(path, results)
    return path


def _processor() -> str:
    """The processor's name, with the numbers that distinguish its generations."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    about = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if "model name" not in about:
        return platform.machine()
    return f"{about['model name']} (family {about['cpu family']}, model {about['model']})"
