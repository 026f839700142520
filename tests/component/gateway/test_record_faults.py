"""Records of many points and large rollouts, hostile names, and failing disks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.gateway.requests import finish, optim_step
from tests.support.gateway.running import Gate
from tests.support.waiting import wait_until

RUNS = "/api/tandem/v1/runs"
HOSTILE = [
    "<script>alert(1)</script>",
    "a\x00b",
    "\x1b[31mred\x07",
    "\u202egnp.exe",
    "👩‍👩‍👧‍👦 loss",
    "../../etc/passwd",
    "' OR 1=1; --",
    "line\nbreak\ttab",
    "{{ 7*7 }}",
    "",
    "x" * 200,
]

PADDING = {f"{number}" * 60: 1.0 for number in range(100, 200)}


@pytest.fixture(autouse=True)
def _no_session_goes_on(gate):
    """The memory of this machine bounds the number of workers."""
    yield
    with gate.http() as client:
        for session in gate.run(gate.gateway.sessions.all):
            finish(client, session.id)


def new_run(gate: Gate, **metadata: str) -> str:
    return gate.run_id(gate.session_id(), **metadata)


def folder_of(gate: Gate, run: str) -> Path:
    return gate.settings.data_dir / "runs" / run.replace(":", "_") / "record"


def post(client, run: str, *rows: tuple[int, dict], at: float | None = None):
    about = {} if at is None else {"at": at}
    body = {"rows": [{"step": step, "values": values, **about} for step, values in rows]}
    return client.post(f"{RUNS}/{run}/metrics", json=body)


def curves(client, run: str, **query) -> dict:
    answer = client.get(f"{RUNS}/{run}/metrics", params=query)
    assert answer.is_success, answer.text
    return answer.json()["metrics"]


@contextmanager
def mounted(folder: Path, *, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a filesystem")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_full_record_folder_refuses_rows_until_there_is_room_and_training_goes_on(gate):
    run = new_run(gate)
    gate.gateway.record.retry = 0.05
    with gate.http() as client, mounted(folder_of(gate, run), options="size=256k"):
        kept = 0
        while (answer := post(client, run, (kept, {"reward": kept, **PADDING}))).is_success:
            assert answer.json()["rows"] == 1
            kept += 1
        for _ in range(2):
            assert (answer.status_code, answer.json()["type"]) == (507, "storage_full")
            assert answer.headers["retry-after"]
            answer = post(client, run, (kept, {"reward": kept, **PADDING}))
        rollouts = {"batch": "one", "step": 1, "rollouts": [{"answer": "a" * 40_000}]}
        refused = client.post(f"{RUNS}/{run}/rollouts", json=rollouts)
        assert refused.status_code == 507
        assert optim_step(client, run, 1).is_success
        assert gate.retrieve(f"{run}:1").json()["type"] == "optim_step"
        assert curves(client, run, name="reward")["reward"]["step"][-1] == kept - 1
        remount(folder_of(gate, run), "size=4m")
        assert post(client, run, (kept, {"reward": kept})).json()["rows"] == 1
        assert client.post(f"{RUNS}/{run}/rollouts", json=rollouts).json()["rollouts"] == 1
        found = curves(client, run, points=10**6)
        assert found["reward"]["step"] == list(range(kept + 1)), "nothing acknowledged is lost"
        wait_until(lambda: "tandem/seconds/step" in curves(client, run))


def test_a_read_only_record_folder_refuses_rows_and_training_goes_on(gate):
    run = new_run(gate)
    gate.gateway.record.retry = 0.05
    with gate.http() as client, mounted(folder_of(gate, run), options="size=1m"):
        assert post(client, run, (0, {"reward": 0.0})).is_success
        remount(folder_of(gate, run), "ro")
        answer = post(client, run, (1, {"reward": 1.0}))
        assert (answer.status_code, answer.json()["category"]) == (503, "server"), answer.text
        assert answer.headers["retry-after"]
        assert optim_step(client, run, 1).is_success
        assert gate.retrieve(f"{run}:1").json()["type"] == "optim_step"
        assert client.get("/api/v1/readyz").status_code == 200
        remount(folder_of(gate, run), "rw")
        assert post(client, run, (1, {"reward": 1.0})).is_success
        assert curves(client, run)["reward"]["value"] == [0, 1]
        wait_until(lambda: "tandem/seconds/step" in curves(client, run))


def test_hostile_names_come_back_as_they_are_and_stay_in_their_place(gate):
    for name in HOSTILE:
        run = new_run(gate)
        with gate.http() as client:
            answer = post(client, run, (1, {name: 1.0, "ok": 2.0}))
            assert answer.is_success, (name, answer.text)
            found = curves(client, run)
            assert found["ok"]["value"] == [2]
            assert found[name]["value"] == [1], name
            changed = client.patch(f"{RUNS}/{run}", json={"name": name, "tags": [name]})
            if changed.is_success:
                told = client.get(f"{RUNS}/{run}").json()
                assert told["name"] == name.replace("\0", "\ufffd"), "as PostgreSQL needs it"
                listed = client.get(RUNS, params={"name": name}).json()
                assert run in [each["id"] for each in listed["runs"]]
            else:
                assert changed.status_code == 400, changed.text
            rollout = {"prompt": name, "answer": {"nested": [name]}, name or "empty": name}
            body = {"batch": f"b{name}"[:100], "step": 1, "rollouts": [rollout]}
            assert client.post(f"{RUNS}/{run}/rollouts", json=body).is_success
            page = client.get(f"{RUNS}/{run}/rollouts", params={"search": name}).json()
            assert page["rollouts"][0]["prompt"] == name
        assert {each.suffix for each in folder_of(gate, run).iterdir()} == {".json", ".jsonl"}


def test_jumping_clocks_change_no_order(gate):
    run = new_run(gate)
    with gate.http() as client:
        for step, at in ((1, time.time() + 10**6), (2, 0.0), (3, 2.0**40), (4, 5.0)):
            assert post(client, run, (step, {"reward": step}), at=at).is_success
        assert curves(client, run)["reward"]["step"] == [1, 2, 3, 4]
        for at in (-1.0, 2.0**41):
            assert post(client, run, (5, {"reward": 5}), at=at).status_code == 400
        told = client.get(f"{RUNS}/{run}").json()
        assert told["last"]["reward"] == 4


def test_dropped_rows_are_in_the_metrics_of_the_gateway(gate):
    def dropped() -> float:
        registry = gate.gateway.metrics.registry
        labels = {"kind": "metrics"}
        return registry.get_sample_value("tandem_gateway_record_dropped_total", labels) or 0.0

    run, before = new_run(gate), dropped()
    with gate.http() as client:
        too_many = {f"name {number}": 1.0 for number in range(201)}
        assert post(client, run, (1, too_many), (2, {"a": 1.0})).json()["dropped"] == 1
    assert dropped() == before + 1


@pytest.mark.slow
def test_a_million_points_are_drawn_with_their_extremes_in_little_memory(gate):
    run, names, steps = new_run(gate), 50, 20_000
    with gate.http() as client:
        for first in range(0, steps, 1000):
            rows = (
                (step, {f"m{name}": float((step * 7919 + name) % 1000) for name in range(names)})
                for step in range(first, first + 1000)
            )
            answer = post(client, run, *rows)
            assert answer.json()["rows"] == 1000, answer.text
        assert post(client, run, (12_345, {"m7": 1e9})).is_success
        before = psutil.Process().memory_info().rss
        found = curves(client, run)
        assert len(found) >= names
        assert all(len(curve["step"]) <= 1000 for curve in found.values())
        assert max(found["m7"]["value"]) == 1e9
        assert found["m7"]["step"][-1] == steps - 1
        whole = curves(client, run, name="m7", points=10**6)["m7"]
        assert len(whole["step"]) == steps
        assert psutil.Process().memory_info().rss - before < 400 * 2**20
        told = client.get(f"{RUNS}/{run}").json()
        assert told["last"]["m0"] == float((steps - 1) * 7919 % 1000)


@pytest.mark.slow
def test_100_mb_of_rollouts_are_kept_and_searched(gate):
    run = new_run(gate)
    text = "lorem ipsum " * 8000
    with gate.http() as client:
        for step in range(100):
            rollouts = [
                {"prompt": "p", "answer": f"{text}{step}-{number}", "reward": number / 10}
                for number in range(10)
            ]
            body = {"batch": str(step), "step": step, "rollouts": rollouts}
            answer = client.post(f"{RUNS}/{run}/rollouts", json=body)
            assert answer.json()["rollouts"] == 10, answer.text
        size = sum(each.stat().st_size for each in folder_of(gate, run).glob("rollouts-*"))
        assert size > 95 * 10**6
        query = {"step": 42, "order": "-reward", "limit": 2, "search": "42-"}
        found = client.get(f"{RUNS}/{run}/rollouts", params=query).json()
        assert [each["answer"][-4:] for each in found["rollouts"]] == ["42-9", "42-8"]
        assert found["total_count"] == 10
        assert len(found["steps"]) == 100
