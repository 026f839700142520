"""Reads the logs of gateway, agent and workers as one list of lines in the order of their times.

The reading is bounded: it begins at the ends of the files. The gateway answers GET /logs with it,
and `tandem logs` reads a data directory's files with it."""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

LEVELS = ("debug", "info", "warning", "error")
_FIRST_LINE_BYTES = 4096
_FIRST_BYTES = 256 * 2**10
"""Read first of a log, if only its newest lines are wanted."""
_MOST_BYTES = {"gateway": 4 * 2**20}
_MOST_BYTES_OF_WORKER = 512 * 2**10
_MOST_BYTES_OF_ONE = 32 * 2**20
_MOST_LOGS = 24
_TOLD = ("timestamp", "level", "event", "service", "session_id", "run_id", "request_id")
_SESSION = re.compile(rb"\bs-[0-9a-f]{12}\b")
_GLOG = re.compile(rb"\[?([IWEF])[0-9]{4} ")
_GLOG_LEVELS = {b"I": "info", b"W": "warning", b"E": "error", b"F": "error"}
"""The first letter of a line of torch's C++ code is its level."""
_COPY = re.compile("0|[1-9][0-9]{0,8}")
_RUN = re.compile(rb"\bs-[0-9a-f]{12}:train:[0-9]+")


@dataclass(frozen=True)
class LogLine:
    """`log` is the file's name without suffix. `at` is in seconds since 1970. Text that is no JSON
    line, such as a crash's traceback, has its predecessor's time and the level `error`."""

    log: str
    at: float
    level: str
    text: str


@dataclass(frozen=True)
class LogFilter:
    """The wanted lines: of one log, a run (its id), a request, from a level up, since a time in
    seconds since 1970. `sessions` are those that the reader may see, None for all. `shared`:
    workers may serve several owners, so a worker's line without a session is nobody's."""

    log: str = ""
    run: str = ""
    request: str = ""
    level: str = "debug"
    since: float = 0.0
    sessions: frozenset[str] | None = None
    shared: bool = False


@dataclass(frozen=True)
class LogFile:
    """A log of a process. Its first line names `run`, `session` and `model`. `parts` are its
    rotated copies and itself, the oldest first, and `bytes` those of all. `written_at` is in
    seconds since 1970."""

    log: str
    parts: Sequence[Path]
    run: str
    session: str
    model: str
    bytes: int
    written_at: float


def list_log_files(folder: Path) -> list[LogFile]:
    """Return the logs of a folder, the last written first."""
    found = []
    for name, copies in _logs_in(folder).items():
        path = folder / name
        parts = [*(folder / f"{name}.{number}" for number in sorted(copies, reverse=True)), path]
        with suppress(OSError):  # removed meanwhile
            about = _first_line(path)
            found.append(
                LogFile(
                    log=path.stem,
                    parts=parts,
                    run=str(about.get("run_id") or ""),
                    session=str(about.get("session_id") or ""),
                    model=str(about.get("model") or ""),
                    bytes=sum(part.stat().st_size for part in parts),
                    written_at=path.stat().st_mtime,
                )
            )
    return sorted(found, key=lambda file: -file.written_at)


def read_log_lines(folder: Path, wanted: LogFilter, *, limit: int) -> tuple[list[LogLine], bool]:
    """Return the newest `limit` wanted lines in order, and whether older ones may be missing,
    because a file was not read to its beginning."""
    files = [file for file in list_log_files(folder) if wanted.log in ("", file.log)]
    files = [file for file in files if file.written_at >= wanted.since]
    files.sort(key=lambda file: not _is_near(file, wanted))  # stable: else the newest first
    cut = len(files) > _MOST_LOGS
    kept = []
    for file in files[:_MOST_LOGS]:
        lines = deque[LogLine](maxlen=limit + 1)
        with suppress(OSError):
            cut |= _collect(file, wanted, lines)
            kept.append(lines)
    merged = deque(heapq.merge(*kept, key=lambda line: line.at), maxlen=limit + 1)
    return list(merged)[-limit:], cut or len(merged) > limit


def event_of(text: str) -> tuple[str, str]:
    """Return a JSON line's event with its id and fields, and its service. Both are "" for other
    text. Example: `("operation s-12ab34cd56ef:train:0:7 outcome=ok seconds=0.5", "trainer")`."""
    try:
        content = orjson.loads(text)
        event = str(content["event"])
    except (ValueError, TypeError, KeyError):
        return "", ""
    name = content.get("request_id") or content.get("run_id") or content.get("session_id")
    fields = [f"{key}={_as_word(value)}" for key, value in content.items() if key not in _TOLD]
    return " ".join([event, *([str(name)] if name else []), *fields]), content.get("service") or ""


def _as_word(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return orjson.dumps(text).decode() if not text or " " in text else text


def _is_near(file: LogFile, wanted: LogFilter) -> bool:
    run = wanted.run or wanted.request.rpartition(":")[0]
    return file.log == "gateway" or (bool(run) and file.run == run)


def _collect(file: LogFile, wanted: LogFilter, into: deque[LogLine]) -> bool:
    """Append the wanted lines of a log. Return whether its beginning was not read."""
    most = _MOST_BYTES.get(file.log, _MOST_BYTES_OF_WORKER)
    most = _MOST_BYTES_OF_ONE if wanted.log else most
    size = _FIRST_BYTES if wanted.since else most
    while True:
        raw_lines, cut = _tail(file.parts, size)
        lines = _read(file, raw_lines)
        if not cut or size >= most or (lines and lines[0][1] < wanted.since):
            break
        size *= 4
    pick = _Picker(file, wanted)
    into.extend(
        LogLine(file.log, at, level, raw.decode(errors="replace"))
        for raw, at, level in lines
        if at >= wanted.since and pick.is_wanted(raw, level)
    )
    return cut and not (lines and lines[0][1] < wanted.since)


def _read(file: LogFile, raw_lines: list[bytes]) -> list[tuple[bytes, float, str]]:
    """Return each line with its time and level. Times never decrease within a log."""
    found: list[tuple[bytes, float | None, str]] = []
    at: float | None = None
    for raw in raw_lines:
        glog = _GLOG.match(raw)
        level = _GLOG_LEVELS[glog[1]] if glog else "error"
        with suppress(ValueError, TypeError, KeyError):
            content = orjson.loads(raw)
            stamp = datetime.fromisoformat(content["timestamp"]).timestamp()
            at, level = max(at or 0.0, stamp), str(content.get("level", "info"))
        found.append((raw, at, level))
    first = next((at for _, at, _ in found if at is not None), file.written_at)
    return [(raw, first if at is None else at, level) for raw, at, level in found]


class _Picker:
    """Decides which lines of a log are wanted, and may be seen."""

    def __init__(self, file: LogFile, wanted: LogFilter) -> None:
        self._wanted = wanted
        self._levels = (*LEVELS[LEVELS.index(wanted.level) :], "critical")
        self._file = file
        name = wanted.request or wanted.run
        self._name = re.compile(rb"\b" + re.escape(name.encode()) + rb"(?![0-9])") if name else None

    def is_wanted(self, raw: bytes, level: str) -> bool:
        return level in self._levels and self._is_of_name(raw) and self._is_visible(raw)

    def _is_of_name(self, raw: bytes) -> bool:
        if self._name is None or self._name.search(raw):
            return True
        # A line of the run's own worker may name no run.
        return (
            not self._wanted.request and self._file.run == self._wanted.run and not _RUN.search(raw)
        )

    def _is_visible(self, raw: bytes) -> bool:
        if (mine := self._wanted.sessions) is None:
            return True
        if named := set(_SESSION.findall(raw)):
            return all(session.decode() in mine for session in named)
        return self._file.session in mine and not self._wanted.shared


def _first_line(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as file:
        line = file.readline(_FIRST_LINE_BYTES)
    try:
        about = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return about if isinstance(about, dict) else {}


def _logs_in(folder: Path) -> dict[str, list[int]]:
    """Return the numbers of the rotated copies of each log, by the log's name."""
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    copies: dict[str, list[int]] = {name: [] for name in names if name.endswith(".log")}
    for name in names:
        log, _, number = name.rpartition(".")
        if log in copies and _COPY.fullmatch(number):
            copies[log].append(int(number))
    return copies


def _tail(parts: Sequence[Path], most: int) -> tuple[list[bytes], bool]:
    """Return the whole lines of the last `most` bytes of a log, and whether earlier ones exist."""
    blocks: list[bytes] = []
    cut = False
    for part in reversed(parts):
        if most <= 0:
            return b"".join(reversed(blocks)).splitlines(), True
        with part.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            block = file.read(most)
        cut = size > most
        if cut:
            block = block.partition(b"\n")[2]
        if block and not block.endswith(b"\n"):
            block += b"\n"
        blocks.append(block)
        most -= size
    return b"".join(reversed(blocks)).splitlines(), cut
