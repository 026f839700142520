from __future__ import annotations

import re
from io import StringIO

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.workers.table import OCCUPYING
from tandem.cli import groups
from tandem.cli.main import app

WORKER = {
    "state": "waiting",
    "position": 2,
    "worker": "s-0123456789ab:train:0",
    "name": "warm-up",
    "kind": "trainer",
    "owner": "ann",
    "session_id": "s-0123456789ab",
    "seconds": 12.3,
    "expected_seconds": 45.6,
    "reason": "the devices of group gpu are used by others",
    "device_seconds": 78.9,
    "device_bytes": 0,
    "host_bytes": 3 * 2**30,
    "disk_bytes": 5 * 2**30,
}
ANOTHERS = {key: type(value)() for key, value in WORKER.items()} | {"state": "awake"}
GROUP = {
    "name": "gpu",
    "host": "host",
    "devices": ["cuda:GPU-0123", "cuda:GPU-4567"],
    "roles": ["sampler", "trainer"],
    "awake": 1,
    "workers": [ANOTHERS, WORKER],
    "most_workers": 16,
    "placed": 2,
    "drained": False,
    "policy": "deferred",
    "switches": 57,
    "switch_seconds": 0.321,
    "resident_bytes": 0,
    "sleeping_bytes": 3 * 2**30,
    "spilled_bytes": 5 * 2**30,
}
QUEUED = {
    "position": 1,
    "worker": "s-9:train:0",
    "owner": "ben",
    "session_id": "s-9",
    "reason": "16 workers are there",
}


@pytest.fixture(autouse=True)
def answered(monkeypatch):
    memory = {"budget_bytes": 8 * 2**30, "used_bytes": 3 * 2**30}
    answer = {"groups": [GROUP], "memory": memory, "queue": [QUEUED]}
    monkeypatch.setattr(groups, "call", lambda *_: answer)


def tandem(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_groups_are_listed_with_what_is_on_them():
    head, row, memory = tandem("groups", "list").splitlines()
    assert head.split()[:5] == ["group", "state", "awake", "waiting", "placed"]
    assert row.split()[:7] == ["gpu", "open", "1/1", "1", "2/16", "57", "0.32"]
    assert "3.0 GiB" in row and "5.0 GiB" in row
    assert memory == "host memory: workers have 3.0 GiB of 8.0 GiB"
    assert orjson.loads(tandem("groups", "list", "--json"))["groups"] == [GROUP]


@pytest.mark.parametrize("state", sorted(OCCUPYING | {"giving_way"}))
def test_each_worker_that_may_have_the_devices_counts_as_awake(monkeypatch, state):
    monkeypatch.setitem(GROUP, "workers", [ANOTHERS | {"state": state}, WORKER])
    assert tandem("groups", "list").splitlines()[1].split()[2] == "1/1"


def test_top_shows_holders_waiters_with_their_turn_and_the_owners_seconds():
    said = tandem("top", "--once")
    lines = said.splitlines()
    waiting = next(line for line in lines if "s-0123456789ab:train:0" in line)
    assert waiting.split()[:7] == ["gpu", "waiting", "2", "12.3", "s", "45.6", "s"]
    assert any("awake" in line and "(another owner's)" in line for line in lines)
    assert "waiting for a place:" in lines
    assert any(re.fullmatch(r"ann +157\.8 *", line) for line in lines)


def interrupt_after(looks: int, monkeypatch) -> None:
    slept = []

    def sleep(_seconds: float) -> None:
        slept.append(_seconds)
        if len(slept) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr("tandem.cli.groups.time.sleep", sleep)


def test_top_prints_again_and_again_in_a_pipe_until_it_is_interrupted(monkeypatch):
    interrupt_after(3, monkeypatch)
    assert tandem("top", "--interval", "0.5").count("device seconds") == 3


def test_top_draws_over_itself_on_a_terminal(monkeypatch):
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=40)
    for module in ("groups", "tables", "context"):
        monkeypatch.setattr(f"tandem.cli.{module}.out", console)
    interrupt_after(2, monkeypatch)
    tandem("top")
    assert shown.getvalue().count("s-0123456789ab:train:0") == 2
    assert "\x1b[?1049l" in shown.getvalue(), "it gives the terminal back"
