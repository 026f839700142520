"""Runs published recipes and tools of tinker-cookbook against a stack."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.stacks import TestStack

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts/cookbook.sh")


def environment(stack: TestStack, folder: Path) -> dict[str, str]:
    """Return the environment of a process that uses `stack`, and the data sets in `folder`."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        # Otherwise a data set of this name from another folder would be used.
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "TINKER_API_KEY": stack.stack.endpoint.api_key,
        "TINKER_BASE_URL": stack.stack.endpoint.url,
    }


def run_module(
    stack: TestStack,
    module: str,
    *arguments: object,
    folder: Path,
    given: str = "",
    timeout: float = 480,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a module to its end in `folder`, with `given` as its standard input."""
    return subprocess.run(
        [SCRIPT, module, *map(str, arguments)],
        cwd=folder,
        env={**environment(stack, folder), **variables},
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of its output, for a failing test."""
    return done.stdout[-2000:] + done.stderr[-4000:]


def run_recipe(
    stack: TestStack, module: str, folder: Path, *, timeout: float = 480, **options: object
) -> list[dict]:
    """Run a recipe to its end in `folder`. Returns its metrics, step by step."""
    log = folder / "log" / module
    arguments = (f"{name}={value}" for name, value in {"log_path": log, **options}.items())
    done = run_module(
        stack, f"tinker_cookbook.recipes.{module}", *arguments, folder=folder, timeout=timeout
    )
    assert done.returncode == 0, output(done)
    return read_lines(log / "metrics.jsonl")


def saved_last(folder: Path, module: str) -> dict:
    """Return the last checkpoint in a recipe's log: `state_path` and `sampler_path`."""
    return read_lines(folder / "log" / module / "checkpoints.jsonl")[-1]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
