from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.storage.log_files import tidy_logs

FIRST = "the log of worker w\n"


def tidy(folder: Path, *, max_bytes: int = 100, copies: int = 2, in_use: tuple[str, ...] = ()):
    tidy_logs(folder, max_bytes=max_bytes, copies=copies, ttl=3600, in_use=in_use)


def aged(path: Path, text: str = "x\n") -> Path:
    path.write_text(text)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


@pytest.fixture
def writer(tmp_path):
    """The standard error of a worker and its children."""
    fd = os.open(tmp_path / "w.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, FIRST.encode())
    yield lambda text: os.write(fd, text.encode())
    os.close(fd)


def test_a_large_log_is_rotated_under_its_writer_and_no_line_is_lost(tmp_path, writer):
    written = []
    for number in range(3):
        for line in range(10):
            written.append(f"line {line} of part {number}\n")
            writer(written[-1])
        if number < 2:
            tidy(tmp_path)
    files = [tmp_path / name for name in ("w.log.2", "w.log.1", "w.log")]
    assert sorted(tmp_path.iterdir()) == sorted(files), "and nothing else is left"
    assert {file.read_text().splitlines(keepends=True)[0] for file in files} == {FIRST}
    kept = "".join(file.read_text() for file in files).replace(FIRST, "")
    assert kept == "".join(written)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_no_more_copies_are_kept_than_asked_for_and_a_small_log_is_left_alone(tmp_path, writer):
    for _ in range(5):
        writer("x" * 200 + "\n")
        tidy(tmp_path)
        tidy(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"w.log", "w.log.1", "w.log.2"}
    assert (tmp_path / "w.log").read_text() == FIRST
    writer("x" * 200 + "\n")
    tidy(tmp_path, max_bytes=1000)
    assert (tmp_path / "w.log").stat().st_size > 200


def test_old_logs_go_but_for_those_of_live_workers(tmp_path):
    aged(tmp_path / "gone.log")
    aged(tmp_path / "live.log")
    aged(tmp_path / "live.log.1")
    (tmp_path / "fresh.log").write_text("x\n")
    tidy(tmp_path, in_use=("live",))
    assert {file.name for file in tmp_path.iterdir()} == {"live.log", "fresh.log"}
