"""Rows of a run's metrics: their limits, and their lines in the files.

A line is `{"step": 3, "at": 1.5e9, "source": "user", "values": {"reward": 0.5}}`. The source of the
server's rows is `tandem`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import orjson

from gateway.runs.record.curves import as_json
from gateway.runs.record.files import Place, read_lines
from tandem.tracking.names import SERVER

Source = Literal["user", "tandem"]

MAX_NAMES, MAX_ROW = 200, 64 * 2**10
"""Names and bytes of a row."""
_MAX_NAME, _MAX_NAMES_IN_ALL = 200, 1000
_READ_ROWS, _READ_BYTES = 1000, 4 * 2**20
"""Rows and bytes of one reading."""


@dataclass(frozen=True)
class MetricsRow:
    """Values by name of a step. `at` is in seconds since 1970, None for the arrival."""

    step: int
    values: Mapping[str, float]
    at: float | None = None


class RowLines(NamedTuple):
    """Rows within the limits, their lines, and the newest value of each name. `why` is a sentence
    about the last dropped row."""

    rows: Sequence[MetricsRow] = ()
    lines: Sequence[bytes] = ()
    last: Mapping[str, float | str] = {}
    why: str = ""


def lines_of_rows(
    rows: Sequence[MetricsRow], source: Source, known: Collection[str], now: float
) -> RowLines:
    """`known` are the run's names so far. The server's rows have no limits."""
    kept: list[MetricsRow] = []
    lines: list[bytes] = []
    last: dict[str, float | str] = {}
    why = ""
    names = len(known)
    for row in rows:
        values = {name: as_json(value) for name, value in row.values.items()}
        at = row.at if row.at is not None else now
        told = {"step": row.step, "at": at, "source": source, "values": values}
        line = orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)
        after = names + sum(name not in known and name not in last for name in values)
        if source == "user" and (excess := _excess(values, len(line), names, after)):
            why = excess
            continue
        kept.append(row)
        lines.append(line)
        last.update(values)
        names = after
    return RowLines(kept, lines, last, why)


def _excess(values: Collection[str], size: int, names: int, after: int) -> str:
    """Return a sentence about the limit that a row exceeds, or "". The run has `names` names, and
    `after` with the row's."""
    if len(values) > MAX_NAMES:
        return f"a row has {len(values)} names, {MAX_NAMES} at most"
    if size > MAX_ROW:
        return f"a row has {size} bytes as JSON, {MAX_ROW} at most"
    if any(len(name) > _MAX_NAME or name.startswith(SERVER) for name in values):
        return f"a name has more than {_MAX_NAME} characters, or begins with {SERVER}"
    if after > _MAX_NAMES_IN_ALL:
        return f"the run has {names} names, {_MAX_NAMES_IN_ALL} at most"
    return ""


def read_rows(folder: Path, after: Place, *, only_server: bool) -> tuple[list[MetricsRow], Place]:
    """Return the rows behind a place, and the place behind them. A long record comes in several
    pieces. Values that are not finite are text. Raises `OSError`."""
    found: list[MetricsRow] = []
    end = after
    for lines, place in read_lines(folder, "metrics", after, most_bytes=_READ_BYTES):
        end = place
        for line in lines:
            if only_server and b'"source":"tandem"' not in line:
                continue
            with suppress(ValueError, TypeError, LookupError):  # a part of a line
                row = orjson.loads(line)
                if not only_server or row["source"] == "tandem":
                    found.append(MetricsRow(row["step"], row["values"], row["at"]))
        if len(found) >= _READ_ROWS:
            break
    return found, end
