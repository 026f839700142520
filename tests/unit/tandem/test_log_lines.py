"""The lines of several logs, in the order of their times."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from tandem.cli import context, logs
from tandem.cli.main import app
from tandem.errors import ServerError
from tandem.log_lines import LogFilter, LogLine, list_log_files, read_log_lines

NOON = datetime(2026, 7, 13, 12, tzinfo=UTC)
ANN, BEN = "s-aaaaaaaaaaaa", "s-bbbbbbbbbbbb"
RUN, OTHER_RUN = f"{ANN}:train:1", f"{ANN}:train:10"


def line(second: float, event: str, **fields: object) -> str:
    at = (NOON + timedelta(seconds=second)).isoformat()
    return orjson.dumps({"event": event, "level": "info", "timestamp": at, **fields}).decode()


def write(folder: Path, log: str, *lines: str) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{log}.log").open("a") as file:
        file.writelines(f"{each}\n" for each in lines)


def first(log: str, session: str, run: str = "") -> str:
    return line(0, "log_of_worker", worker_id=log, session_id=session, run_id=run)


def test_copies_of_a_log_are_found_by_one_look_at_the_folder(tmp_path, monkeypatch):
    looks = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scan(path))
    for name in ("w.log", "w.log.2", "w.log.10", "w.log.old", "w.log.1.tmp", "v.log", "x.log.1"):
        (tmp_path / name).write_text("x\n")
    found = {file.log: file for file in list_log_files(tmp_path)}
    assert [part.name for part in found["w"].parts] == ["w.log.10", "w.log.2", "w.log"]
    assert ({*found}, found["w"].bytes, looks) == ({"w", "v"}, 6, [tmp_path])
    assert list_log_files(tmp_path / "none") == []


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "logs"
    write(
        place,
        "gateway",
        line(0.5, "listening"),
        line(1, "worker_ready", run_id=RUN),
        line(4, "operation_failed", run_id=RUN, request_id=f"{RUN}:3", level="warning"),
        line(6, "run_ended", run_id=OTHER_RUN),
        line(7, "worker_ready", run_id=f"{BEN}:train:0"),
    )
    write(
        place,
        "trainer",
        first("trainer", ANN, RUN),
        line(2, "ready"),
        line(3, "operation", run_id=RUN, request_id=f"{RUN}:3"),
        "Traceback (most recent call last):",
        line(3.5, "operation", run_id=OTHER_RUN, request_id=f"{OTHER_RUN}:3"),
    )
    write(place, "sampler", first("sampler", ANN), line(5, "sampled", version=f"{RUN}/v000001"))
    return place


def events(lines: list[LogLine]) -> list[str]:
    return [f"{each.log} {event_of(each)}" for each in lines]


def event_of(each: LogLine) -> str:
    try:
        return str(orjson.loads(each.text)["event"])
    except orjson.JSONDecodeError:
        return each.text.split()[0]


def read(folder: Path, *, limit: int = 100, **wanted: object) -> list[LogLine]:
    return read_log_lines(folder, LogFilter(**wanted), limit=limit)[0]


def test_the_lines_of_a_run_come_from_all_logs_in_order_and_a_longer_id_is_another_run(folder):
    assert events(read(folder, run=RUN)) == [
        "trainer log_of_worker",
        "gateway worker_ready",
        "trainer ready",
        "trainer operation",
        "trainer Traceback",
        "gateway operation_failed",
        "sampler sampled",
    ]


def test_a_request_a_level_and_a_time_select_lines(folder):
    named = read(folder, request=f"{RUN}:3")
    assert events(named) == ["trainer operation", "gateway operation_failed"]
    assert events(read(folder, level="warning")) == [
        "trainer Traceback",
        "gateway operation_failed",
    ]
    since = (NOON + timedelta(seconds=5)).timestamp()
    assert events(read(folder, since=since)) == [
        "sampler sampled",
        "gateway run_ended",
        "gateway worker_ready",
    ]
    assert {each.log for each in read(folder, log="sampler")} == {"sampler"}


def test_the_newest_lines_are_kept_and_the_cut_is_told(folder):
    lines, cut = read_log_lines(folder, LogFilter(), limit=2)
    assert (events(lines), cut) == (["gateway run_ended", "gateway worker_ready"], True)
    assert read_log_lines(folder, LogFilter(), limit=100)[1] is False


def test_an_owner_sees_lines_that_name_only_own_sessions(folder):
    write(folder, "trainer", line(8, "both", other=f"{BEN}:train:0", run_id=RUN))
    mine = frozenset({ANN})
    seen = events(read(folder, sessions=mine))
    assert "trainer ready" in seen and "trainer Traceback" in seen
    assert "gateway listening" not in seen and "trainer both" not in seen
    assert "gateway worker_ready" in seen and not [
        e for e in read(folder, sessions=mine) if BEN in e.text
    ]
    shared = events(read(folder, sessions=mine, shared=True))
    assert "trainer ready" not in shared and "trainer operation" in shared
    assert read(folder, sessions=frozenset()) == []


def test_a_long_log_is_read_from_its_end_into_its_copies_and_from_a_time_in_steps(tmp_path):
    folder = tmp_path / "logs"
    many = [line(second, "step", number=second, filler="x" * 200) for second in range(6000)]
    write(folder, "gateway", *many[4000:])
    write(folder, "trainer", *many)
    (folder / "gateway.log.1").write_text("\n".join(many[:4000]))
    lines, cut = read_log_lines(folder, LogFilter(log="gateway"), limit=10_000)
    assert ([orjson.loads(each.text)["number"] for each in lines], cut) == (
        list(range(6000)),
        False,
    )
    lines, cut = read_log_lines(folder, LogFilter(), limit=10_000)
    assert cut, "a worker's log is read from its end only"
    since = (NOON + timedelta(seconds=3000)).timestamp()
    lines, cut = read_log_lines(folder, LogFilter(log="trainer", since=since), limit=10_000)
    assert (len(lines), cut) == (3000, False)


def test_a_line_of_torchs_code_has_the_level_of_its_first_letter(folder):
    write(folder, "trainer", "[W1127 08:45:37.874262014 utils.cpp:68] Warning: NUMA binding")
    levels = [each.level for each in read(folder, level="warning") if "NUMA" in each.text]
    assert levels == ["warning"]


def test_a_torn_line_and_a_file_of_garbage_do_no_harm(folder):
    (folder / "odd.log").write_bytes(b'\xff\xfe\x00 no json\n[1]\n{"timestamp": 3}\n{"event"')
    assert len([each for each in read(folder) if each.log == "odd"]) == 4


def test_the_command_prints_plain_text_and_json(folder):
    def tandem(*arguments: str) -> str:
        at = ("--data-dir", str(folder.parent))
        done = CliRunner().invoke(app, ["logs", *arguments, *at], env={"TINKER_BASE_URL": ""})
        assert done.exception is None, done.exception
        return done.stdout

    said = tandem("--run", RUN, "--level", "warning").splitlines()
    assert said[0] == "trainer: Traceback (most recent call last):"
    assert said[1].endswith(f" warning gateway: operation_failed {RUN}:3")
    told = orjson.loads(tandem("--request", f"{RUN}:3", "--json"))
    assert [each["log"] for each in told["lines"]] == ["trainer", "gateway"]


def test_following_prints_late_and_new_lines_once_and_waits_for_the_gateway(monkeypatch, folder):
    shown = [vars(each) for each in read(folder)]
    newest = shown[-1]["at"]
    early = vars(LogLine("trainer", newest - 2, "info", "early"))
    late = vars(LogLine("trainer", newest - 1, "info", "late"))
    new = vars(LogLine("gateway", newest + 1, "info", "new"))
    last, there = shown[-1:], [early, shown[-1]]
    answers = iter([ServerError("silent"), there, [*there, late], [*there, late, new], [new]])
    asked = []

    def answer(wanted, _limit):
        asked.append(wanted.since)
        found = next(answers, None)
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, ServerError):
            raise found
        return found, False

    monkeypatch.setattr(context.time, "sleep", lambda _seconds: None)
    wanted = LogFilter()
    added = []
    with pytest.raises(KeyboardInterrupt):
        for lines in logs._added(answer, wanted, last):
            added += [each["text"] for each in lines]
    assert added == ["late", "new"]
    assert (asked[0], asked[-1]) == (newest - 5.0, newest + 1 - 5.0)
