"""Commands print whole cells into a pipe, and at most 80 columns on a terminal."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli import observe
from tandem.cli.main import app

RUN = "s-0123456789ab:train:0"
VERSION = f"{RUN}/v000012-01234567"
PATH = f"tinker://{RUN}/sampler_weights/a-name-that-is-rather-long-[for]-a-checkpoint"
MODEL_PATH = "/srv/models/of/somebody/with/deep/folders/Qwen3-8B-and-its-snapshot/0123456789abcdef"
REASON = (
    "the trainer died: the trainer was killed by SIGKILL; create the run again, from a checkpoint"
)
KEY = {
    "id": "k-0123456789ab",
    "owner": "ann",
    "role": "member",
    "state": "active",
    "name": "laptop",
    "created_at": "2026-07-13T09:30:00Z",
    "expires_at": "2026-08-13T09:30:00Z",
    "last_used_at": "2026-07-14T10:00:00Z",
}
WORKERS = [
    {
        "id": f"{kind}-s-0123456789ab-0",
        "kind": kind,
        "state": "ready",
        "version": "0.1.0 (image 2026-11-23)",
        "pid": 1,
        "age_seconds": 5.0,
    }
    for kind in ("trainer", "sampler")
]
USED = {
    "owner": "ann",
    "training_tokens": 1_234_567_890,
    "prompt_tokens": 345_678,
    "cached_tokens": 1_000,
    "sampled_tokens": 987_654_321,
    "accelerator_seconds": 45_678.9,
    "checkpoints": 12,
    "checkpoint_bytes": 123_456_789,
}
ANSWERS = {
    "usage?since=0&limit=51": {
        "owners": [USED],
        "runs": [{**USED, "run_id": RUN, "name": "warm-up", "base_model": "Qwen/Qwen3-8B"}],
    },
    "status": {
        "warnings": [],
        "sessions": [
            {"id": "s-0123456789ab", "owner": "ann", "display_name": "x[1]", "idle_seconds": 1.2}
        ],
        "runs": [
            {
                "id": RUN,
                "name": "warm-up",
                "state": "ended",
                "base_model": "Qwen/Qwen3-8B",
                "step": 12,
                "weight_version": VERSION,
                "queued": 0,
                "reason": REASON,
            }
        ],
        "samplers": [],
        "workers": WORKERS,
    },
    "models": {"models": [{"name": "Qwen/Qwen3-8B", "path": MODEL_PATH, "max_length": 40960}]},
    "keys": {"keys": [KEY]},
    "checkpoints?limit=50&offset=0": {
        "cursor": {"total_count": 1},
        "checkpoints": [
            {
                "tinker_path": PATH,
                "size_bytes": 123456789,
                "time": "2026-07-13T09:30:00Z",
                "expires_at": None,
                "public": True,
            }
        ],
    },
}


@pytest.fixture
def gateway(monkeypatch):
    def call(_data_dir, _method, path, **_):
        return ANSWERS[path]

    for name in ("checkpoints", "keys", "logs", "models", "observe", "usage"):
        monkeypatch.setattr(f"tandem.cli.{name}.call", call)
    monkeypatch.setattr("tandem.cli.keys.read_endpoint", lambda _: object())
    monkeypatch.setattr("tandem.cli.logs.read_endpoint", lambda _: object())


@pytest.fixture
def terminal(monkeypatch):
    screen = StringIO()
    console = Console(
        file=screen, force_terminal=True, width=80, color_system=None, highlight=False, emoji=False
    )
    for module in ("context", "tables"):
        monkeypatch.setattr(f"tandem.cli.{module}.out", console)
    return screen


def tandem(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None, done.exception
    return done.stdout


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.fixture
def log_folder(tmp_path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for worker in (*(str(worker["id"]) for worker in WORKERS), "trainer-s-ffffffffffff-1"):
        first = {"event": "log_of_worker", "run_id": RUN, "session_id": "s-0123456789ab"}
        path = folder / f"{worker}.log"
        path.write_bytes(orjson.dumps(first) + b"\n" + b"x" * 2000)
        os.utime(path, (1_783_935_000, 1_783_935_000))
    (folder / "trainer-s-ffffffffffff-1.log.1").write_bytes(b"x" * 3000)
    return tmp_path


COMMANDS = {
    ("usage",): [RUN, "1.23 G", "988 M", "12.7 h", "117.7 MiB", "Qwen/Qwen3-8B"],
    ("status",): [RUN, VERSION, REASON, "trainer-s-0123456789ab-0", "x[1]"],
    ("checkpoints", "list"): [PATH, "123456789", "2026-07-13 09:30", "yes"],
    ("models", "list"): ["Qwen/Qwen3-8B", MODEL_PATH, "40960"],
    ("keys", "list"): [KEY["id"], "2026-08-13 09:30", "2026-07-14 10:00", "laptop"],
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_in_a_pipe_every_cell_is_whole_and_in_one_line(gateway, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    lines = tandem(*command).splitlines()
    for cell in COMMANDS[command]:
        assert any(cell in line for line in lines), cell


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_on_eighty_columns_columns_are_left_out_by_name_and_no_character_is_cut(
    gateway, terminal, command
):
    tandem(*command)
    shown = terminal.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    first = COMMANDS[command][0]
    assert squeezed(first) in squeezed(shown)
    if len(first) <= 40:
        assert first in shown, "an id is in one piece"
    if command == ("usage",):
        for cell in COMMANDS[command][1:5]:
            assert shown.count(cell) == 2, "of the owner and of the run"
    if command == ("status",):
        assert "Not shown, for lack of width: base_model, weight_version" in shown
        words = [line.split()[-1] for line in shown.splitlines() if line.strip()]
        assert "SIGKILL;" in words or "SIGKILL;" in shown


def test_a_path_wider_than_the_terminal_goes_on_in_the_next_line(gateway, terminal, monkeypatch):
    long = {
        **ANSWERS["checkpoints?limit=50&offset=0"]["checkpoints"][0],
        "tinker_path": PATH + "x" * 60,
    }
    answer = {"checkpoints": [long], "cursor": {"total_count": 1}}
    monkeypatch.setattr("tandem.cli.checkpoints.call", lambda _d, _m, path, **_: answer)
    tandem("checkpoints", "list")
    assert long["tinker_path"] in squeezed(terminal.getvalue())


def test_status_says_how_far_the_operation_of_a_run_is(gateway, monkeypatch):
    says = "forward_backward 12: the trainer is at work on it (4,096 of 65,536 tokens, 8 s)"
    run = {"id": RUN, "state": "ready", "step": 5, "queued": 1, "operation": {"says": says}}
    status = {"warnings": [], "sessions": [], "runs": [run], "samplers": [], "workers": []}
    monkeypatch.setattr(observe, "call", lambda *_: status)
    assert says in tandem("status")


def test_logs_are_listed_with_their_run_state_size_and_time(gateway, log_folder):
    lines = tandem("logs", "--data-dir", str(log_folder)).splitlines()
    assert lines[0].split() == ["log", "state", "size", "run", "written"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["trainer-s-0123456789ab-0"][1:] == [
        *("ready", "2.0", "KiB", RUN),
        *("2026-07-13", "09:30"),
    ]
    assert rows["trainer-s-ffffffffffff-1"][1:4] == ["ended", "5.0", "KiB"], "with its copies"
    listed = orjson.loads(tandem("logs", "--json", "--data-dir", str(log_folder)))["logs"]
    assert {row["run"] for row in listed} == {RUN}


def test_logs_fit_eighty_columns(gateway, log_folder, terminal):
    tandem("logs", "--data-dir", str(log_folder))
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["log", "state", "size", "run", "written"]


def test_a_cell_cannot_break_its_row_or_move_the_cursor(gateway, monkeypatch):
    session = {"id": "s-1", "owner": "ann", "display_name": "two\nlines\x1b[2J", "idle_seconds": 0}
    status = {"warnings": [], "sessions": [session], "runs": [], "samplers": [], "workers": []}
    monkeypatch.setattr(observe, "call", lambda *_: status)
    said = tandem("status")
    assert "\x1b" not in said
    assert "two lines" in said
