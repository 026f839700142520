"""The order of the parts, their expected seconds on an H200, and the tests after them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.agent.worker_process import kill_group

_UNKNOWN_SECONDS = 120.0
_LONGER = 2.0
"""A part may take this many times its expected seconds."""
_ENDING_SECONDS = 30.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Planned:
    """`seconds` are expected, with the writing of the model if the part is its first."""

    size: str
    part: str
    seconds: float = _UNKNOWN_SECONDS

    @property
    def longest(self) -> float:
        return _LONGER * self.seconds

    def __str__(self) -> str:
        return f"{self.size} {self.part}"


PLAN = (
    Planned("1.5B", "serving", 115),
    Planned("1.5B", "training", 80),
    Planned("1.5B", "joint", 40),
    Planned("4B", "training", 75),
    Planned("1.5B", "recovery", 90),
    Planned("1.5B", "starts", 115),
    Planned("8B", "serving", 170),
    Planned("1.5B", "trainers", 50),
    Planned("1.5B", "wakes", 100),
    Planned("1.5B", "together", 100),
    Planned("0.5B", "engines", 75),
    Planned("1.5B", "engines", 75),
    Planned("1.5B", "plain", 70),
    Planned("1.5B", "sampling", 120),
    Planned("1.5B", "publishing", 30),
    Planned("1.5B", "memory", 150),
    Planned("1.5B", "adapters", 70),
)
"""The parts with goals come first, except `sampling`. The seconds are calculated, not measured."""


def planned(sizes: Sequence[str] | None, parts: Sequence[str]) -> list[Planned]:
    """Return the chosen parts, in the order of the plan. `sizes` None: those of the plan."""
    if sizes is None:
        return [each for each in PLAN if each.part in parts]
    chosen = [
        (size, part)
        for size in sizes
        for part in parts
        if part != "together" or size == sizes[0]  # it starts a whole stack
    ]
    known = [each for each in PLAN if (each.size, each.part) in chosen]
    told = {(each.size, each.part) for each in known}
    return known + [Planned(*each) for each in chosen if each not in told]


def run_gpu_tests(report: Path, *, seconds: float | None) -> dict[str, object]:
    """Run `tests.gpu` with a JUnit report. After the `seconds`, its current test is the last."""
    command = [sys.executable, "-m", "tests.gpu", "--junitxml", str(report.resolve())]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=_ROOT, start_new_session=True)
    ended = True
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        ended = False
        process.send_signal(signal.SIGINT)  # pytest writes its report
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_ENDING_SECONDS)
    finally:
        kill_group(process.pid)
        process.wait()
    return {
        "status": process.returncode,
        "all_ran": ended,
        "seconds": round(time.monotonic() - began, 1),
    }
