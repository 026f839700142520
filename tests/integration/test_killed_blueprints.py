"""Killed runs of a blueprint on the real stack leave nothing behind."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from tandem.demo.tiny_model import write_tiny_model
from tests.support.files import entries, tree
from tests.support.processes import marked
from tests.support.stacks import TestStack, running
from tests.support.waiting import wait_until

KILLS = 10
VALUES = {"warm_up_steps": 20, "teacher_epochs": 2, "steps": 2}
"""Of a run that takes seconds."""
SHORTEST_TTL = 3600
"""Seconds for which a saved state stays at least, because the SDK allows no shorter time."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    model = tmp_path_factory.mktemp("models") / "chars"
    write_tiny_model(model, seed=0)
    settings = {
        "trainer_ranks": "1",
        "sampler_kv_cache_bytes": str(2**28),
        "session_ttl": "30",  # three heartbeats of the SDK
    }
    data = tmp_path_factory.mktemp("data")
    with running(data, models={"my/model": model}, settings=settings) as started:
        yield started


def started(stack: TestStack, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    """Start a run with its temporary files in `folder`, and in a process group of its own."""
    endpoint = stack.stack.endpoint
    command = [str(Path(sys.executable).with_name("tandem")), "blueprint", "run", "distillation"]
    for name, value in VALUES.items():
        command += ["--set", f"{name}={value}"]
    return subprocess.Popen(
        command,
        env={
            **os.environ,
            "TINKER_BASE_URL": endpoint.url,
            "TINKER_API_KEY": endpoint.api_key,
            "TMPDIR": str(folder),
            "KILLED_BLUEPRINTS": mark,
        },
        start_new_session=True,
    )


def left(stack: TestStack) -> dict[str, list[dict]]:
    """Return all rows of the gateway's status, and the workers that hold devices."""
    status = stack.status()
    kinds = ("sessions", "runs", "samplers", "sampling_sessions", "workers")
    found = {kind: status[kind] for kind in kinds}
    with stack.stack.client() as client:
        groups = client.get("groups").json()["groups"]
    found["places"] = [worker for group in groups for worker in group["workers"]]
    return {kind: rows for kind, rows in found.items() if rows}


def folders(stack: TestStack) -> set[str]:
    """Return the folders of weight versions, snapshots and saved states."""
    kinds = ("weights", "snapshots", "checkpoints")
    return {
        str(version.relative_to(stack.data_dir))
        for kind in kinds
        for run in entries(stack.data_dir / kind)
        for version in entries(run)
    }


def saved_states(stack: TestStack) -> list[dict]:
    with stack.stack.client() as client:
        answer = client.get(f"{stack.stack.endpoint.url}/api/v1/checkpoints", params={"limit": 100})
        found: list[dict] = answer.json()["checkpoints"]
        return found


def test_nothing_is_left_of_a_run_that_is_killed_at_ten_random_points(
    stack: TestStack, tmp_path: Path
) -> None:
    """The odd ones lose their whole process group, the others the command alone."""
    mark = f"killed-{uuid.uuid4().hex}"
    before = {process.pid for process in stack.processes()}
    began = time.monotonic()
    assert started(stack, tmp_path, mark).wait(600) in (0, 1), "so short a training is not sound"
    usual = time.monotonic() - began
    assert saved_states(stack)
    caches = tree(tmp_path)  # of imported libraries
    chosen = random.Random(0)
    killed = 0
    while killed < KILLS:
        with started(stack, tmp_path, mark) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(chosen.uniform(0, usual))
            if process.poll() is None:
                (os.killpg if killed % 2 else os.kill)(process.pid, signal.SIGKILL)
                killed += 1

    wait_until(lambda: not marked(mark), what="all processes of the runs have ended")
    wait_until(lambda: not left(stack), what="the sessions and their workers have ended")
    wait_until(
        lambda: {process.pid for process in stack.processes()} <= before,
        what="the processes of the workers have ended",
    )
    states = saved_states(stack)
    assert all(ends_soon(each) for each in states), states
    wait_until(
        lambda: len(folders(stack)) <= len(states), what=f"only {len(states)} saved states stay"
    )
    assert tree(tmp_path) == caches


def ends_soon(state: dict) -> bool:
    expires = state["expires_at"]
    left = datetime.fromisoformat(expires).timestamp() - time.time() if expires else math.inf
    return left <= SHORTEST_TTL
