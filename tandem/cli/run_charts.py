"""Curves of metrics as text: bars of one curve, or letters of several curves in one chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from string import ascii_uppercase

WIDTH = 60
_BAR_ROWS, _OVERLAY_ROWS = 6, 12
_BARS = " ▁▂▃▄▅▆▇█"
_SEVERAL = "*"
"""Marks a place of several curves."""

Points = Sequence[tuple[int, float]]
"""Finite values by step, in the order of steps."""


def points_of(curve: Mapping[str, Sequence[object]]) -> list[tuple[int, float]]:
    """Return the finite points of a curve of GET /runs/RUN/metrics."""
    pairs = zip(curve["step"], curve["value"], strict=True)
    return [
        (int(str(step)), float(value))
        for step, value in pairs
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def bar_chart(values: Sequence[float]) -> str:
    """Return a bar chart between labels of the largest and smallest value. A bar may be a mean of
    neighbours."""
    count = min(WIDTH, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)]
    means = [_mean(values[start:end]) for start, end in pairwise(bounds)]
    low, high = min(means), max(means)
    top, eighths = len(_BARS) - 1, _BAR_ROWS * (len(_BARS) - 1)
    levels = [
        max(1, round(_share(mean, low, high) * eighths)) if high > low else eighths // 2
        for mean in means
    ]
    rows = [
        "".join(_BARS[min(top, max(0, level - top * (_BAR_ROWS - 1 - row)))] for level in levels)
        for row in range(_BAR_ROWS)
    ]
    return _labelled(rows, low=low, high=high)


def overlay_chart(curves: Sequence[Points]) -> str:
    """Return one chart of several curves, each with its letter, over the steps of all. A letter
    stands for the mean of its column's steps."""
    steps = [step for curve in curves for step, _ in curve]
    first, last = min(steps), max(steps)
    columns = [_means_by_column(curve, first=first, last=last) for curve in curves]
    means = [mean for column in columns for mean in column.values()]
    low, high = min(means), max(means)
    grid = [[" "] * WIDTH for _ in range(_OVERLAY_ROWS)]
    for letter, column in zip(ascii_uppercase, columns, strict=False):
        for x, mean in column.items():
            share = _share(mean, low, high) if high > low else 0.5
            row = grid[_OVERLAY_ROWS - 1 - round(share * (_OVERLAY_ROWS - 1))]
            row[x] = letter if row[x] == " " else _SEVERAL
    chart = _labelled(["".join(row).rstrip() for row in grid], low=low, high=high)
    margin = " " * chart.index("│")
    begin = f"step {first}"
    return "\n".join(
        (
            chart,
            f"{margin}└{'─' * WIDTH}",
            f"{margin} {begin}{f'step {last}'.rjust(WIDTH - len(begin))}",
        )
    )


def _means_by_column(curve: Points, *, first: int, last: int) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for step, value in curve:
        x = (step - first) * (WIDTH - 1) // (last - first) if last > first else 0
        found.setdefault(x, []).append(value)
    return {x: _mean(values) for x, values in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)  # the sum might overflow


def _share(value: float, low: float, high: float) -> float:
    return (value / 2 - low / 2) / (high / 2 - low / 2)  # so might the difference


def _labelled(rows: Sequence[str], *, low: float, high: float) -> str:
    labels = [number(high), *[""] * (len(rows) - 2), number(low)]
    width = max(9, *map(len, labels))
    return "\n".join(f"{label:>{width}} │{row}" for label, row in zip(labels, rows, strict=True))


def number(value: object) -> str:
    """Return a metric's value with four digits. Text, such as NaN, stays."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
