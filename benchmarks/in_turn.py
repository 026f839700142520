"""Processes that measure on request, so that several ways take turns and meet the same load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

Ask = Callable[[object], Any]


@contextmanager
def asked(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Ask, psutil.Process]]:
    """Start a module that prints "ready", then answers each line of JSON with one (`answers`).

    Yields a function that asks it, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    def answer() -> Any:
        for line in stdout:
            if line.startswith(_MARK):  # other lines are logs
                return json.loads(line.removeprefix(_MARK))
        raise RuntimeError(f"{module} ended with status {process.wait()}")

    def ask(question: object) -> object:
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return answer()

    try:
        assert answer() == "ready"
        yield ask, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(timeout=60)


def floor_environment(*, threads: int) -> dict[str, str]:
    """Return the environment of a floor with `threads` OpenMP threads, and libiomp5 preloaded."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return {"OMP_NUM_THREADS": str(threads), **preload}


_MARK = "answer: "


def answers(measure: Callable[..., object]) -> None:
    """Call `measure` with each received list of arguments, until the input ends."""
    print(_MARK + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(measure(*json.loads(line))), flush=True)
