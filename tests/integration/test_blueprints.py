"""Blueprints on the real stack: a sound run keeps its bounds, and a broken reward violates them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.blueprints.catalog import find_blueprints
from tandem.demo.tiny_model import write_tiny_model
from tests.support.stacks import TestStack, running

BLUEPRINTS = Path(__file__).parents[2] / "blueprints"
SEED = "7"
"""Not one of the seeds behind the bounds."""
BROKEN = """

def reward(example, answer):
    return random.SystemRandom().random()
"""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "chars", seed=0)
    write_tiny_model(folder / "chat", seed=0, tokenizer="qwen")
    settings = {"trainer_ranks": "1", "sampler_kv_cache_bytes": str(2**28)}
    models = {"my/model": folder / "chars", "my/chat": folder / "chat"}
    with running(tmp_path_factory.mktemp("data"), models=models, settings=settings) as started:
        yield started


def run(stack: TestStack, name: str, *options: str) -> dict:
    endpoint = stack.stack.endpoint
    command = [str(Path(sys.executable).with_name("tandem")), "blueprint", "run", name]
    done = subprocess.run(
        [*command, "--seed", SEED, "--json", *options],
        env={**os.environ, "TINKER_BASE_URL": endpoint.url, "TINKER_API_KEY": endpoint.api_key},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    result: dict = json.loads(done.stdout)
    assert done.returncode == int(not result["sound"]), done.stderr[-4000:]
    return result


@pytest.mark.parametrize("name", find_blueprints())
def test_a_blueprint_keeps_its_bounds(name: str, stack: TestStack) -> None:
    result = run(stack, name)
    assert result["sound"], result


def test_the_example_of_the_page_is_a_blueprint(stack: TestStack, tmp_path: Path) -> None:
    page = (BLUEPRINTS.parent / "docs" / "blueprints.md").read_text()
    place = tmp_path / "one-sum"
    place.mkdir()
    for name, language in (("blueprint.toml", "toml"), ("train.py", "python")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (place / name).write_text(block)
    assert run(stack, "one-sum", "--folder", str(tmp_path))["sound"]


def test_a_blueprint_with_a_broken_reward_violates_its_bounds(
    stack: TestStack, tmp_path: Path
) -> None:
    place = tmp_path / "broken"
    shutil.copytree(BLUEPRINTS / "grpo-arithmetic", place)
    program = (place / "train.py").read_text().replace("imperfect, reward, sums", "imperfect, sums")
    imports, rest = program.split("\n\n\n", 1)
    imports = imports.replace("from dataclasses", "import random\nfrom dataclasses")
    (place / "train.py").write_text(f"{imports}\n{BROKEN}\n\n{rest}")
    result = run(stack, "broken", "--folder", str(tmp_path))
    assert result["error"] == ""
    assert result["violations"], result
