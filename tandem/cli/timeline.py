"""`tandem timeline`: a picture of who had the devices of which group, and when.

A lane for each group, with as many rows as workers were awake at once; a colour for each session.
The beginning of a box is hatched while its worker woke, its end is darker while it fell asleep.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlencode
from xml.sax.saxutils import escape, quoteattr

import typer

from tandem.cli.context import DataDir, JsonFlag, call, print_json, say
from tandem.cli.keys import parse_duration
from tandem.errors import UserError

_COLOURS = (
    "#4477aa",
    "#ee7733",
    "#228833",
    "#cc3377",
    "#66bbdd",
    "#bb9922",
    "#7755aa",
    "#44aa88",
    "#aa5544",
    "#887766",
)
_ANOTHER = "#b4b8bd"
"""Of another owner's workers, whose sessions are not told."""
_INK, _PALE = "#222222", "#777777"
_MINUTE, _HOUR = 60, 3600
_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 4, 12, 24)),
)
"""Between the marks of the axis, in seconds."""

_WIDTH, _LEFT, _RIGHT, _TOP = 1200.0, 110.0, 120.0, 72.0
_ROW, _LANE_GAP, _LEGEND_ROW = 34.0, 16.0, 20.0
_MOST_LABELS = 10

Shade = Literal["plain", "waking", "falling asleep"]
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Span:
    """Times in seconds since 1970; `ended` is the end of the picture while it lasts."""

    group: str
    worker: str
    kind: str
    owner: str
    session_id: str
    began: float
    wake_seconds: float
    sleep_seconds: float
    ended: float


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    shade: Shade = "plain"
    hint: str = ""


@dataclass(frozen=True)
class Label:
    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = _INK
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(frozen=True)
class Rule:
    """A vertical line."""

    x: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Picture:
    """In pixels, from the upper left corner. Later shapes are above earlier ones."""

    height: float
    rules: Sequence[Rule]
    boxes: Sequence[Box]
    labels: Sequence[Label]


def timeline(
    since: Annotated[str, typer.Option(help="How far back, such as 90s, 10m or 2h.")] = "10m",
    group: Annotated[str, typer.Option(help="Only of this group.")] = "",
    out: Annotated[Path, typer.Option(help="The picture: .svg, or .png with matplotlib.")] = Path(
        "timeline.svg"
    ),
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw who had the devices of each group, and when."""
    query = {"since": f"{time.time() - parse_duration(since):.3f}", "limit": 10_000}
    query |= {"group": group} if group else {}
    answer = cast(dict[str, object], call(data_dir, "GET", f"leases/spans?{urlencode(query)}"))
    if as_json:
        print_json(answer)
        return
    until = cast(float, answer["until"])
    spans = [
        Span(**{**row, "ended": row["ended"] or until})
        for row in cast(list[dict[str, Any]], answer["spans"])
    ]
    if not spans:
        raise UserError(
            f"nobody had leased devices in the last {since}. Only groups with leases are drawn: "
            "`tandem top` shows the workers of the others, such as a machine's cores"
        )
    began = max(cast(float, answer["since"]), min(span.began for span in spans))
    picture = draw(spans, began=began, ended=until)
    if out.suffix == ".png":
        write_png(picture, out)
    else:
        out.write_text(to_svg(picture))
    cut = "; older ones were too many" if answer["truncated"] else ""
    say(f"{out}: {len(spans)} spans of {until - began:.0f} s{cut}")


# --- What is drawn ----------------------------------------------------------------------------


def draw(spans: Sequence[Span], *, began: float, ended: float) -> Picture:
    """Lay out the picture of a time."""
    scale = (_WIDTH - _LEFT - _RIGHT) / max(ended - began, 0.001)
    boxes: list[Box] = []
    labels = [
        Label(_LEFT, 28, "Who had the devices", size=18, bold=True),
        Label(_LEFT, 48, f"{_clock(began, day=True)} to {_clock(ended)} UTC", colour=_PALE),
        Label(_WIDTH - 8, _TOP - 10, "in use, of which switching", 11, _PALE, "end"),
    ]
    colours = _colours(spans)
    y = _TOP
    for group in sorted({span.group for span in spans}):
        mine = [span for span in spans if span.group == group]
        rows = _rows(mine)
        for number, row in enumerate(rows):
            top = y + number * _ROW
            boxes.append(Box(_LEFT, top, _WIDTH - _LEFT - _RIGHT, _ROW - 4, "#f2f3f5"))
            for span in row:
                left = _LEFT + max(0.0, span.began - began) * scale
                right = _LEFT + (min(span.ended, ended) - began) * scale
                colour = colours.get(span.session_id, _ANOTHER)
                boxes += _boxes(span, left, right, top, scale=scale, colour=colour)
                if right - left > 7 * len(span.kind) + 8:
                    middle = (left + right) / 2
                    labels.append(Label(middle, top + 20, span.kind, 11, "#ffffff", "middle"))
        height = len(rows) * _ROW
        labels.append(Label(_LEFT - 10, y + height / 2 + 2, group, 13, _INK, "end", bold=True))
        share, switching = _shares(mine, began, ended, len(rows))
        said = f"{share:.0%}, {switching:.1%}"
        labels.append(Label(_WIDTH - 8, y + height / 2 + 2, said, 12, _PALE, "end"))
        y += height + _LANE_GAP
    ticks = list(_ticks(began, ended))
    rules = [Rule(_LEFT + (at - began) * scale, _TOP - 4, y - _LANE_GAP + 4) for at in ticks]
    labels += [
        Label(rule.x, y + 6, _clock(at), 11, _PALE, "middle")
        for rule, at in zip(rules, ticks, strict=True)
    ]
    y += 34
    for colour, shade, text in _legend(spans, colours):
        boxes.append(Box(_LEFT, y - 10, 24, 12, colour))
        if shade != "plain":
            boxes.append(Box(_LEFT, y - 10, 24, 12, colour, shade))
        labels.append(Label(_LEFT + 34, y, text))
        y += _LEGEND_ROW
    return Picture(y, rules, boxes, labels)


def _boxes(
    span: Span, left: float, right: float, top: float, *, scale: float, colour: str
) -> Iterable[Box]:
    height = _ROW - 4
    about = (
        f"{span.worker or 'another owner'}, {_clock(span.began)} for "
        f"{span.ended - span.began:.2f} s, woke in {span.wake_seconds:.2f} s, fell asleep in "
        f"{span.sleep_seconds:.2f} s"
    )
    yield Box(left, top, max(right - left, 0.5), height, colour, hint=about)
    if (wide := min(span.wake_seconds * scale, right - left)) >= 0.5:
        yield Box(left, top, wide, height, colour, "waking")
    if (wide := min(span.sleep_seconds * scale, right - left)) >= 0.5:
        yield Box(right - wide, top, wide, height, colour, "falling asleep")


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans in rows in which none overlaps another."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.began):
        free = (row for row in rows if row[-1].ended <= span.began + 0.002)
        row = next(free, None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _colours(spans: Iterable[Span]) -> Mapping[str, str]:
    """Return those of the sessions, in the order in which they first had devices."""
    sessions = dict.fromkeys(span.session_id for span in spans if span.session_id)
    return {session: _COLOURS[n % len(_COLOURS)] for n, session in enumerate(sessions)}


def _shares(spans: Iterable[Span], began: float, ended: float, rows: int) -> tuple[float, float]:
    """Return which part of the time the devices were somebody's, and which part went into
    switches."""
    spans = list(spans)
    whole = max(ended - began, 0.001) * rows
    had = sum(min(span.ended, ended) - max(span.began, began) for span in spans)
    return had / whole, sum(span.wake_seconds + span.sleep_seconds for span in spans) / whole


def _ticks(began: float, ended: float) -> Iterable[float]:
    least = (ended - began) / _MOST_LABELS
    step = next((step for step in _STEPS if step >= least), least)
    at = (began // step + 1) * step
    while at < ended:
        yield at
        at += step


def _legend(spans: Sequence[Span], colours: Mapping[str, str]) -> Iterable[tuple[str, Shade, str]]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.session_id] += span.ended - span.began
    owners = {span.session_id: span.owner for span in spans}
    for session, colour in colours.items():
        yield colour, "plain", f"{owners[session]}  {session}  {seconds[session]:.1f} s"
    if "" in owners:
        yield _ANOTHER, "plain", f"other owners  {seconds['']:.1f} s"
    yield _PALE, "waking", "its worker wakes"
    yield _PALE, "falling asleep", "its worker falls asleep"


def _clock(at: float, *, day: bool = False) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")


# --- How it is written ------------------------------------------------------------------------

_FONT = "font-family='Helvetica, Arial, sans-serif'"
_HATCH = (
    "<defs><pattern id='waking' width='6' height='6' patternUnits='userSpaceOnUse' "
    "patternTransform='rotate(45)'><rect width='2.5' height='6' fill='#ffffff' "
    "fill-opacity='0.7'/></pattern></defs>"
)
_FILL: Mapping[Shade, str] = {
    "waking": "fill='url(#waking)'",
    "falling asleep": "fill='#000000' fill-opacity='0.4'",
}


def to_svg(picture: Picture) -> str:
    """Return the picture as SVG."""
    size = f"{_WIDTH:.0f} {picture.height:.0f}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size}' width='{_WIDTH:.0f}' "
        f"height='{picture.height:.0f}' {_FONT}>{_HATCH}",
        f"<rect width='{_WIDTH:.0f}' height='{picture.height:.0f}' fill='#ffffff'/>",
    ]
    for box in picture.boxes:
        fill = _FILL.get(box.shade, f"fill='{box.colour}'")
        place = f"x='{box.x:.2f}' y='{box.y:.2f}' width='{box.width:.2f}' height='{box.height}'"
        hint = f"<title>{escape(box.hint)}</title>" if box.hint else ""
        parts.append(f"<rect {place} {fill}>{hint}</rect>")
    for rule in picture.rules:
        parts.append(
            f"<line x1='{rule.x:.2f}' x2='{rule.x:.2f}' y1='{rule.top}' y2='{rule.bottom}' "
            "stroke='#000000' stroke-opacity='0.15'/>"
        )
    for label in picture.labels:
        weight = "bold" if label.bold else "normal"
        parts.append(
            f"<text x='{label.x:.2f}' y='{label.y:.2f}' font-size='{label.size}' "
            f"fill={quoteattr(label.colour)} text-anchor='{label.anchor}' "
            f"font-weight='{weight}'>{escape(label.text)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def write_png(picture: Picture, path: Path) -> None:
    """Write the picture with matplotlib. Raises `UserError` where that is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise UserError("a .png needs matplotlib; an .svg needs nothing") from error
    figure = Figure(figsize=(_WIDTH / 100, picture.height / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(picture.height, 0))
    axes.axis("off")
    shaded = {"waking": ("none", "//////"), "falling asleep": ("#00000066", None)}
    for box in picture.boxes:
        colour, hatch = shaded.get(box.shade, (box.colour, None))
        axes.add_patch(
            Rectangle(
                (box.x, box.y),
                box.width,
                box.height,
                linewidth=0,
                facecolor=colour,
                edgecolor="#ffffffb3",
                hatch=hatch,
            )
        )
    for rule in picture.rules:
        axes.plot([rule.x, rule.x], [rule.top, rule.bottom], color="#00000026", linewidth=1)
    for label in picture.labels:
        axes.text(
            label.x,
            label.y,
            label.text,
            fontsize=label.size * 0.72,  # points
            color=label.colour,
            ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
            va="baseline",
            fontweight="bold" if label.bold else "normal",
        )
    figure.savefig(path)
