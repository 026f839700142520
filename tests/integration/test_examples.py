"""The examples run unmodified, and reach the bounds of examples/bounds.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.example_bounds import BOUNDS, broken_bounds, results_of
from tandem.demo.tiny_model import write_tiny_model
from tests.support.stacks import TestStack, running

ROOT = Path(__file__).resolve().parents[2]
KNOWN = json.loads(BOUNDS.read_text())
QUICKEST = "sft"
SEED = "7"
"""Not one of the seeds behind the bounds."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def examples_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "chars", seed=0)
    write_tiny_model(folder / "chat", seed=0, tokenizer="qwen")
    models = {"my/model": folder / "chars", "my/chat": folder / "chat"}
    settings = {"trainer_ranks": "1", "sampler_kv_cache_bytes": str(2**28)}
    with running(tmp_path_factory.mktemp("data"), models=models, settings=settings) as stack:
        yield stack


def run(stack: TestStack, *command: str) -> dict[str, float]:
    endpoint = stack.stack.endpoint
    done = subprocess.run(
        [sys.executable, "-W", "error:DEPRECATED:FutureWarning", *command, "--seed", SEED],
        cwd=ROOT,
        env={**os.environ, "TINKER_BASE_URL": endpoint.url, "TINKER_API_KEY": endpoint.api_key},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return results_of(done.stdout)


def marked(name: str) -> object:
    mark = pytest.mark.slow if name == QUICKEST else pytest.mark.nightly
    return pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", [marked(name) for name in KNOWN])
def test_an_example_reaches_its_bounds(name: str, examples_stack: TestStack) -> None:
    found = run(examples_stack, f"examples/{name}.py")
    assert broken_bounds(KNOWN[name]["bounds"], found) == [], found


@pytest.mark.nightly
def test_the_example_of_resuming_computes_the_same_after_its_break(
    examples_stack: TestStack,
) -> None:
    found = run(examples_stack, "examples/resume.py", "--steps", "2")
    assert found["difference"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in KNOWN if name != "resume"])
def test_a_broken_reward_violates_a_bound(name: str, examples_stack: TestStack) -> None:
    found = run(examples_stack, "-m", "tests.support.broken_example", name)
    assert broken_bounds(KNOWN[name]["bounds"], found), found
