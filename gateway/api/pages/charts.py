"""Charts as SVG, drawn by the server, so that a page is readable without JavaScript.

Colours come from the classes `c1` to `c8` in page.css. All texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from gateway.api.pages.texts import figure, visible
from gateway.runs.record.curves import Curve, Floats

_WIDTH, _HEIGHT = 400, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 390, 8, 178
"""The edges of the plotted area."""
_COLUMNS = 90
"""Most bars of a chart. Each has the mean of its steps."""
_LEAST, _MOST = 1e-300, 1e300
"""Within these, the axes compute without an overflow. Greater values are drawn at the edge."""
COLOURS = 8


@dataclass(frozen=True)
class Mark:
    """An event on the curves, at a step."""

    step: int
    text: str


def line_chart(
    curves: Sequence[tuple[int, Curve]], *, title: str, marks: Sequence[Mark] = ()
) -> Markup:
    """Draw curves over steps. Each has the number of its colour."""
    steps = np.concatenate([curve.step for _, curve in curves])
    values = np.concatenate([curve.value for _, curve in curves])
    finite = values[np.isfinite(values)]
    if not len(finite):
        return _figure([], f"{title}: no finite value")
    axes = _Axes(steps.min(), steps.max(), finite.min(), finite.max())
    drawn = [*axes.ticks(), *axes.marks(marks)]
    for colour, curve in curves:
        x, y = axes.x(curve.step), axes.y(curve.value)
        known = np.flatnonzero(np.isfinite(curve.value))
        parts = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
        drawn += [_line(colour, x[part], y[part]) for part in parts if len(part)]
    last = figure(float(curves[0][1].value[-1]))
    told = f"{title}: {last} at step {int(steps.max())}" if len(curves) == 1 else title
    return _figure(drawn, told)


def sparkline(values: Sequence[float]) -> Markup:
    """Draw a curve without axes, "" without two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup()
    y = np.array(finite)
    points = _points(np.linspace(1, 99, len(y)), 21 - 20 * (y - y.min()) / (np.ptp(y) or 1.0))
    told = f"from {figure(finite[0])} to {figure(finite[-1])}"
    form = Markup(
        '<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" '
        'aria-label="{}"><polyline class="c1 line" points="{}"/></svg>'
    )
    return form.format(told, points)


def stacked_bars(parts: Sequence[Curve], *, title: str) -> Markup:
    """Draw the sum of each step as a bar of parts, with the colours in their order. "" without
    steps."""
    steps = np.unique(np.concatenate([curve.step for curve in parts]))
    if not len(steps):
        return Markup()
    table = np.zeros((len(steps), len(parts)))
    for column, curve in enumerate(parts):
        table[np.searchsorted(steps, curve.step), column] = np.nan_to_num(curve.value, posinf=0)
    bars = [rows.mean(axis=0) for rows in np.array_split(table, min(len(steps), _COLUMNS))]
    axes = _Axes(steps[0], steps[-1], 0.0, max(bar.sum() for bar in bars))
    form = Markup('<rect class="c{} bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')
    width = (_RIGHT - _LEFT) / len(bars)
    drawn = axes.ticks()
    for place, bar in enumerate(bars):
        edges = axes.y(np.cumsum([0.0, *bar]))
        for colour, (bottom, top) in enumerate(pairwise(edges), 1):
            if bottom - top > 0.05:
                left, size = _LEFT + place * width, max(width - 1, 0.8)
                drawn.append(form.format(colour, left, top, size, bottom - top))
    return _figure(drawn, title)


class _Axes:
    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        first, (low, high) = float(first), np.clip((low, high), -_MOST, _MOST).tolist()
        spread = next(size for size in (high - low, abs(high), 1.0) if size > _LEAST)
        self._steps = (first, max(float(last), first + 1, math.nextafter(first, math.inf)))
        self._values = (low - (0.04 * spread if low else 0), high + 0.04 * spread)

    def x(self, steps: Any) -> Any:
        return np.interp(steps, self._steps, (_LEFT, _RIGHT))

    def y(self, values: Any) -> Any:
        return np.interp(values, self._values, (_BOTTOM, _TOP))

    def ticks(self) -> list[Markup]:
        row = Markup(
            '<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>'
            '<text class="tick" x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
        )
        label = Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
        values = [(value, self.y(value)) for value in _round_numbers(*self._values, about=4)]
        steps = [step for step in _round_numbers(*self._steps, about=6) if step == int(step)]
        return [
            *(row.format(_LEFT, _RIGHT, y, _LEFT - 6, y + 4, figure(value)) for value, y in values),
            *(label.format(self.x(step), _HEIGHT - 5, figure(step)) for step in steps),
        ]

    def marks(self, marks: Sequence[Mark]) -> list[Markup]:
        form = Markup(
            '<line class="event" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"><title>{3} (step {4})'
            "</title></line>"
        )
        first, last = self._steps
        return [
            form.format(self.x(mark.step), _TOP, _BOTTOM, mark.text, mark.step)
            for mark in marks
            if first <= mark.step <= last
        ]


def _round_numbers(low: float, high: float, *, about: int) -> list[float]:
    """Return round numbers in the interval."""
    size = 10 ** math.floor(math.log10((high - low) / about))
    step = next(size * each for each in (1, 2, 5, 10) if size * each * about >= (high - low) * 0.99)
    first = math.ceil(low / step)
    return [each * step for each in range(first, math.floor(high / step) + 1)]


def _line(colour: int, x: Floats, y: Floats) -> Markup:
    if len(x) == 1:
        dot = Markup('<circle class="c{} dot" cx="{:.1f}" cy="{:.1f}" r="2.5"/>')
        return dot.format(colour, x[0], y[0])
    return Markup('<polyline class="c{} line" points="{}"/>').format(colour, _points(x, y))


def _points(x: Floats, y: Floats) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _figure(drawn: Sequence[Markup], title: str) -> Markup:
    form = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return form.format(_WIDTH, _HEIGHT, visible(title), Markup().join(drawn))
