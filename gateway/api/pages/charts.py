"""Charts as SVG, drawn by the server, so that a page is readable without JavaScript.

Colours come from the classes `c1` to `c8` in page.css. All texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from gateway.api.pages.texts import figure, visible
from gateway.runs.record.curves import Curve, Floats, Steps

_WIDTH, _HEIGHT = 400, 200
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 8, 10, 22
_COLUMNS = 90
"""Most bars of a chart. Each has the mean of its steps."""
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
        return _figure(Markup(), f"{title}: no finite value")
    axes = _Axes(steps.min(), steps.max(), finite.min(), finite.max())
    lines = [axes.marks(marks)]
    for colour, curve in curves:
        for part in _finite_parts(curve):
            x, y = axes.x(curve.step[part]), axes.y(curve.value[part])
            if len(x) == 1:
                dot = Markup('<circle class="c{} dot" cx="{:.1f}" cy="{:.1f}" r="2.5"/>')
                lines.append(dot.format(colour, x[0], y[0]))
            else:
                line = Markup('<polyline class="c{} line" points="{}"/>')
                lines.append(line.format(colour, _points(x, y)))
    last = figure(float(curves[0][1].value[-1]))
    told = f"{title}: {last} at step {int(steps.max())}" if len(curves) == 1 else title
    return _figure(axes.drawn() + Markup().join(lines), told)


def sparkline(values: Sequence[float]) -> Markup:
    """Draw a curve without axes, "" without two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup()
    y = np.array(finite)
    height = 24 - 4 - 20 * (y - y.min()) / (np.ptp(y) or 1.0) + 1
    points = _points(np.linspace(1, 99, len(y)), height)
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
    table = np.zeros((len(parts), len(steps)))
    for row, curve in enumerate(parts):
        table[row, np.searchsorted(steps, curve.step)] = np.nan_to_num(curve.value, posinf=0)
    bars = np.array_split(np.arange(len(steps)), min(len(steps), _COLUMNS))
    heights = np.array([table[:, bar].mean(axis=1) for bar in bars])
    axes = _Axes(steps[0], steps[-1], 0.0, float(heights.sum(axis=1).max()))
    width = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    drawn = []
    for index, column in enumerate(heights):
        tops = axes.y(np.cumsum(column))
        bottoms = np.concatenate([axes.y(np.zeros(1)), tops[:-1]])
        for colour, (top, bottom) in enumerate(zip(tops, bottoms, strict=True), 1):
            if bottom - top > 0.05:
                bar = Markup('<rect class="c{} bar" x="{:.1f}" y="{:.1f}" {}/>')
                size = Markup('width="{:.1f}" height="{:.1f}"')
                left = _LEFT + index * width
                shape = size.format(max(width - 1, 0.8), bottom - top)
                drawn.append(bar.format(colour, left, top, shape))
    return _figure(axes.drawn() + Markup().join(drawn), title)


class _Axes:
    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self._first, self._last = float(first), float(last) if last > first else float(first) + 1
        spread = high - low or abs(high) or 1.0
        self._low = low - (0.04 * spread if low else 0.0)
        self._high = high + 0.04 * spread

    def x(self, steps: Steps) -> Floats:
        share = (steps - self._first) / (self._last - self._first)
        return np.asarray(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), np.float64)

    def y(self, values: Floats) -> Floats:
        share = (values - self._low) / (self._high - self._low)
        return np.asarray(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), np.float64)

    def drawn(self) -> Markup:
        form = Markup(
            '<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>'
            '<text class="tick" x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
        )
        right = _WIDTH - _RIGHT
        rows = [
            form.format(_LEFT, right, y, _LEFT - 6, y + 4, figure(value))
            for value in _ticks(self._low, self._high, 4)
            for y in self.y(np.array([value]))
        ]
        label = Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
        rows += [
            label.format(x, _HEIGHT - 5, figure(step))
            for step in _ticks(self._first, self._last, 6)
            if step == int(step)
            for x in self.x(np.array([step]))
        ]
        return Markup().join(rows)

    def marks(self, marks: Sequence[Mark]) -> Markup:
        form = Markup(
            '<line class="event" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"><title>{3}</title>'
            "</line>"
        )
        seen = [mark for mark in marks if self._first <= mark.step <= self._last]
        xs = self.x(np.array([mark.step for mark in seen], dtype=np.int64))
        bottom = _HEIGHT - _BOTTOM
        told = [f"{visible(mark.text)} (step {mark.step})" for mark in seen]
        return Markup().join(
            form.format(x, _TOP, bottom, text) for x, text in zip(xs, told, strict=True)
        )


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers in the interval."""
    size = 10 ** math.floor(math.log10((high - low) / about))
    step = next(size * each for each in (1, 2, 5, 10) if size * each * about >= (high - low) * 0.99)
    first = math.ceil(low / step)
    return [each * step for each in range(first, math.floor(high / step) + 1)]


def _finite_parts(curve: Curve) -> list[Steps]:
    """Return the indexes of the curve's pieces between values that are not finite."""
    finite = np.flatnonzero(np.isfinite(curve.value))
    return [p for p in np.split(finite, np.flatnonzero(np.diff(finite) > 1) + 1) if len(p)]


def _points(x: Floats, y: Floats) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _figure(content: Markup, title: str) -> Markup:
    form = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return form.format(_WIDTH, _HEIGHT, visible(title), content)
