"""Long answers are read and sent some rows at a time."""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from urllib.parse import quote

import pytest
from sqlalchemy import delete, insert
from typer.testing import CliRunner

from gateway.storage.tables import checkpoints, operations, runs, sessions, worker_events
from tandem.cli.main import app
from tests.support.gateway.running import KEY

COUNT = 1_234
AT_ONCE = 500
"""Most rows in memory for one answer."""


@pytest.fixture
def rows_read(gate, monkeypatch):
    """Numbers of rows of later queries."""
    database, found = gate.gateway.database, []
    read = database.read

    async def counted(statement):
        rows = await read(statement)
        found.append(len(rows))
        return rows

    monkeypatch.setattr(database, "read", counted)
    return found


def write(gate, statement, rows) -> None:
    gate.run(gate.gateway.database.write(statement, *rows))


@pytest.fixture
def run_id(gate):
    """A run that nothing else reads: it has ended, but too recently to be removed."""
    session_id = f"s-{secrets.token_hex(6)}"
    ended = {"owner": "local", "created_at": 0.0, "ended_at": time.time()}
    write(gate, insert(sessions), [ended | {"id": session_id, "state": "finished"}])
    run = {"id": f"{session_id}:train:0", "session_id": session_id, "base_model": "tiny"}
    write(gate, insert(runs), [ended | run | {"state": "ended", "training": {}}])
    return run["id"]


@pytest.fixture
def saved(gate, run_id):
    """Many checkpoint paths. Each two were saved at the same moment."""
    paths = [f"tinker://{run_id}/weights/c{number:04}" for number in range(COUNT)]
    same = {"run_id": run_id, "kind": "weights", "base_model": "tiny", "folder": "", "version": ""}
    same |= {"step": 0, "bytes": 1, "optimizer": True, "owner": "local"}
    rows = [same | {"path": p, "created_at": number // 2} for number, p in enumerate(paths)]
    write(gate, insert(checkpoints), rows)
    yield paths
    write(gate, delete(checkpoints).where(checkpoints.c.run_id == run_id), ())


def get(url: str):
    request = urllib.request.Request(url, headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Length"] is None, "it is not made in memory"
        return json.load(answer)


def test_all_checkpoints_of_a_run_are_listed_some_at_a_time(gate, rest, run_id, saved, rows_read):
    found = rest.list_checkpoints(run_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in found] == saved
    listed_runs = rest.list_training_runs(limit=1000).result().training_runs
    (run,) = [run for run in listed_runs if run.training_run_id == run_id]
    assert run.last_checkpoint.tinker_path == saved[-1]
    assert max(rows_read) <= AT_ONCE
    listed = get(f"{gate.url}/api/v1/training_runs/{quote(run_id)}/checkpoints")
    assert [checkpoint["tinker_path"] for checkpoint in listed["checkpoints"]] == saved


def test_the_command_lists_as_many_as_it_is_told_from_several_pages(gate, saved, run_id):
    at = ("--data-dir", str(gate.settings.data_dir), "--json")
    for limit, chosen in ((COUNT - 10, ()), (10, ("--run", run_id))):
        command = ["checkpoints", "list", "--limit", str(limit), *chosen, *at]
        listed = json.loads(CliRunner().invoke(app, command).stdout)["checkpoints"]
        paths = [checkpoint["tinker_path"] for checkpoint in listed]
        assert len(paths) == len(set(paths)) == limit
        assert set(paths) == set(saved[-limit:])


def test_a_run_without_checkpoints_has_an_empty_list(gate, rest, run_id):
    assert rest.list_checkpoints(run_id).result().checkpoints == []


def test_a_trace_is_sent_some_events_at_a_time(gate, rest, run_id, rows_read):
    session_id = run_id.partition(":")[0]
    change = {"kind": "trainer", "owner": "local", "session_id": session_id, "state": "awake"}
    keys = [f"{session_id}:train:{number}" for number in range(COUNT)]
    write(gate, insert(worker_events), [change | {"key": key, "at": 1.0} for key in keys])
    done = {"run_id": run_id, "request": b"", "kind": "optim_step", "state": "done", "digest": b""}
    first = [done | {"seq_id": number, "accepted_at": 1.0} for number in range(COUNT)]
    write(gate, insert(operations), first)
    url = rest.export_session_trace(session_id).result()
    rows_read.clear()
    later = [done | {"seq_id": COUNT + n, "accepted_at": 1e10} for n in range(COUNT)]
    write(gate, insert(operations), later)
    events = get(url)["traceEvents"]
    assert max(rows_read) <= AT_ONCE
    assert sum(rows_read) < 3 * COUNT, "what was accepted later is not read"
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("optim_step") == COUNT
    assert sorted(name for name in names if name.endswith(" awake")) == sorted(
        f"{key} awake" for key in keys
    )
