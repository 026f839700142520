"""Runs published recipes of tinker-cookbook against a stack."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.stacks import TestStack

ROOT = Path(__file__).resolve().parents[2]


def run_recipe(
    stack: TestStack, module: str, folder: Path, *, timeout: float = 480, **options: object
) -> list[dict]:
    """Run a recipe to its end in `folder`. Returns its metrics, step by step."""
    endpoint = stack.stack.endpoint
    log = folder / "log" / module
    arguments = {"log_path": log, **options}
    command = [ROOT / "scripts/cookbook.sh", f"tinker_cookbook.recipes.{module}"]
    finished = subprocess.run(
        [*map(str, command), *(f"{name}={value}" for name, value in arguments.items())],
        cwd=folder,
        env={
            **os.environ,
            "TINKER_BASE_URL": endpoint.url,
            "TINKER_API_KEY": endpoint.api_key,
            # Otherwise a data set of this name from another folder would be used.
            "HF_DATASETS_CACHE": str(folder / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
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
