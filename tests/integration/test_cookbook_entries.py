"""tinker-cookbook's entry points run unmodified and offline, on a tiny model with Qwen's tokens.

The results go to tests/golden/cookbook.json, from which `python -m scripts.cookbook_table` makes
the table of docs/cookbook.md."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.demo.tiny_model import write_tiny_model
from tests.support.cookbook import ROOT, SCRIPT, output, run_module
from tests.support.cookbook_data import write_data
from tests.support.cookbook_entries import ENTRIES, MODELS, Entry
from tests.support.sandbox_fusion import sandbox_fusion
from tests.support.stacks import TestStack, running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

RESULTS = ROOT / "tests/golden/cookbook.json"
SETTINGS = {"trainer_ranks": "1", "sampler_kv_cache_bytes": str(2**28)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes' working folder: data sets, and one model under many names."""
    folder = tmp_path_factory.mktemp("cookbook")
    write_tiny_model(folder / "tiny", seed=1, tokenizer="qwen")
    for name in MODELS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "tiny")
    write_data(folder)
    subprocess.run([SCRIPT], check=True)  # installs it
    examples = folder / "tinker_cookbook/example_data"
    examples.mkdir(parents=True)
    published = ROOT / ".venv/cookbook/tinker_cookbook/example_data/multilingual.txt"
    first = published.read_text().splitlines(keepends=True)[:16]
    (examples / "multilingual.txt").write_text("".join(first))
    subprocess.run(
        [SCRIPT, "tests.support.cookbook_arrow", str(folder / "continual")], cwd=ROOT, check=True
    )
    return folder


@pytest.fixture(scope="module")
def cookbook_stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    models = {name: folder / "tiny" for name in MODELS}
    data = tmp_path_factory.mktemp("data")
    with running(data, models=models, settings=SETTINGS) as stack:
        yield stack


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, str]]:
    """`runs` or `fails` for each entry point. The rest is as in the run before."""
    found: dict[str, str] = {}
    yield found
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    merged = {entry.name: (before | found).get(entry.name, "") for entry in ENTRIES}
    RESULTS.write_text(json.dumps(merged, indent=1) + "\n")


@pytest.fixture(scope="module")
def sandbox_url() -> Iterator[str]:
    with sandbox_fusion() as (url, _statuses):
        yield url


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_point_of_the_cookbook_runs_to_its_end(
    entry: Entry,
    cookbook_stack: TestStack,
    folder: Path,
    results: dict[str, str],
    sandbox_url: str,
    tmp_path: Path,
) -> None:
    results[entry.name] = "fails"
    arguments = {**entry.arguments, **({entry.log: tmp_path / "log"} if entry.log else {})}
    done = run_module(
        cookbook_stack,
        *([entry.driver] if entry.driver else []),
        f"tinker_cookbook.recipes.{entry.module}",
        *(f"{name}={value}" for name, value in arguments.items()),
        folder=folder,
        given=entry.given,
        SANDBOX_URL=sandbox_url,
        TINKER_COOKBOOK_RUNS_DIR=str(tmp_path / "runs"),
    )
    assert done.returncode == 0, output(done)
    assert not entry.survives or entry.survives not in done.stdout + done.stderr, output(done)
    results[entry.name] = "runs"
