"""Curves of a run's metrics, read from its files as they grow.

A table holds the values of one run as arrays. The tables of all runs share a bounded memory. A run
beyond its part keeps the extremes of neighbouring points only."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from gateway.runs.record.files import Place, read_lines, record_folder

_CACHE_BYTES = 256 * 2**20
_TABLE_BYTES = 128 * 2**20
_POINT_BYTES = 24
_NAME_BYTES = 1024
_NEVER_THINNED = 2**14
"""Points of a curve that stay exact."""
MOST_POINTS = 2_000_000
"""Points of all curves of an answer."""

Steps = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """Points in the order of their steps, one a step: three arrays of one length. `at` is in
    seconds since 1970."""

    step: Steps
    value: Floats
    at: Floats

    def take(self, points: npt.NDArray[Any]) -> Curve:
        return Curve(self.step[points], self.value[points], self.at[points])

    def before(self, step: int) -> Curve:
        return self.take(self.step < step)

    def then(self, later: Curve) -> Curve:
        return Curve(*(np.concatenate(pair) for pair in zip(self, later, strict=True)))

    def as_json(self) -> dict[str, object]:
        """Return lists or arrays for orjson. Values that are not finite are text."""
        value: object = self.value
        if not np.isfinite(self.value).all():
            value = list(map(as_json, self.value.tolist()))
        return {"step": self.step, "value": value, "at": self.at}


def as_json(value: float) -> float | str:
    """Return a finite number, or the text NaN, Infinity or -Infinity."""
    if -np.inf < value < np.inf:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def downsampled(curve: Curve, points: int) -> Curve:
    """Return at most `points` points: the first, the last, and of each bucket the least, the
    greatest, and a NaN if there is one."""
    count = len(curve.step)
    if count <= points:
        return curve
    missing = np.isnan(curve.value)
    each = 3 if missing.any() else 2
    buckets = max((points - 2) // each, 1)
    width = -(-count // buckets)
    padded = np.minimum(np.arange(-(-count // width) * width), count - 1).reshape(-1, width)
    value, rows = curve.value[padded], np.arange(len(padded))
    chosen = [
        padded[rows, np.where(missing[padded], np.inf, value).argmin(axis=1)],
        padded[rows, np.where(missing[padded], -np.inf, value).argmax(axis=1)],
    ]
    if each == 3:
        chosen.append(padded[rows, missing[padded].argmax(axis=1)])
    return curve.take(np.unique(np.concatenate([*chosen, [0, count - 1]])))


@dataclass(eq=False)
class _Column:
    step: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("d"))
    at: array[float] = field(default_factory=lambda: array("d"))

    def curve(self) -> Curve:
        """Return the last point of each step."""
        step = np.array(self.step, dtype=np.int64)
        curve = Curve(step, np.array(self.value), np.array(self.at))
        if (np.diff(step) > 0).all():
            return curve
        order = np.argsort(step, kind="stable")
        last = np.append(np.diff(step[order]) > 0, True)
        return curve.take(order[last])

    def thin(self) -> None:
        curve = downsampled(self.curve(), len(self.step) // 2)
        self.step = array("q", curve.step.tobytes())
        self.value = array("d", curve.value.tobytes())
        self.at = array("d", curve.at.tobytes())


class CurveTable:
    """The values of one run. Threads may share it."""

    def __init__(self, folder: Path, *, most_bytes: int = _TABLE_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._columns: dict[str, _Column] = {}
        self._end = Place()
        self._lock = threading.Lock()
        self.bytes = 0

    def read_new(self) -> None:
        """Read the lines since the last call. Raises `OSError`."""
        with self._lock:
            for lines, end in read_lines(self._folder, "metrics", self._end, most_bytes=2**62):
                for line in lines:
                    self._add(line)
                self._end = end
                self._measure()
                if self.bytes > self._most_bytes:
                    self._thin()

    def curves(self, names: Collection[str] | None) -> dict[str, Curve]:
        """Return the curves of these names that exist, or all, by name."""
        with self._lock:
            wanted = self._columns if names is None else dict.fromkeys(names)
            return {n: self._columns[n].curve() for n in sorted(wanted) if n in self._columns}

    def _add(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
            step, at = int(row["step"]), float(row["at"])
            values = {name: float(value) for name, value in row["values"].items()}
        except (ValueError, TypeError, LookupError, AttributeError):
            return  # not a line of ours
        for name, value in values.items():
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = _Column()
            column.step.append(step)
            column.value.append(value)
            column.at.append(at)

    def _measure(self) -> None:
        sizes = (len(column.step) for column in self._columns.values())
        self.bytes = sum(_NAME_BYTES + _POINT_BYTES * size for size in sizes)

    def _thin(self) -> None:
        for column in self._columns.values():
            if len(column.step) > _NEVER_THINNED:
                column.thin()
        self._measure()


class CurveCache:
    """The tables of the runs read last, up to `most_bytes` in all."""

    def __init__(self, data_dir: Path, *, most_bytes: int = _CACHE_BYTES) -> None:
        self._data_dir = data_dir
        self._most_bytes = most_bytes
        self._tables: OrderedDict[str, CurveTable] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(table.bytes for table in self._tables.values())

    def curves(self, run_id: str, names: Collection[str] | None) -> dict[str, Curve]:
        """Return a run's whole curves. Takes seconds for a long run. Raises `OSError`."""
        with self._lock:
            table = self._tables.get(run_id) or CurveTable(record_folder(self._data_dir, run_id))
            self._tables[run_id] = table
            self._tables.move_to_end(run_id)
        table.read_new()
        with self._lock:
            held = sum(one.bytes for one in self._tables.values())
            while held > self._most_bytes and len(self._tables) > 1:
                held -= self._tables.popitem(last=False)[1].bytes
        return table.curves(names)


def thinned(
    curves: Mapping[str, Curve], points: int, *, in_all: int = MOST_POINTS
) -> dict[str, Curve]:
    """Return curves of at most `points` points each, and at most about `in_all` together."""
    most = max(min(points, in_all // max(len(curves), 1)), 2)
    return {name: downsampled(curve, most) for name, curve in curves.items()}


def joined(parts: Iterable[tuple[Mapping[str, Curve], int | None]]) -> dict[str, Curve]:
    """Join the curves of a run's ancestors, the oldest first, and its own. Each part has the step
    of the checkpoint from which the next run went on. An earlier run's points end before the first
    of the later run, or after that step."""
    found: dict[str, Curve] = {}
    resumed: int | None = None
    for curves, next_resumed in parts:
        for name, curve in found.items():
            later = curves.get(name)
            if later is not None:
                found[name] = curve.before(int(later.step[0])).then(later)
            elif resumed is not None:
                found[name] = curve.before(resumed + 1)
        found |= {name: curve for name, curve in curves.items() if name not in found}
        resumed = next_resumed
    return found
