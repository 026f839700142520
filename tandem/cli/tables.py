"""Tables without cut cells.

In a pipe each row is one line. On a terminal, cells are wrapped if their column allows it. If that
is not enough, the last columns are left out and named below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cli.context import new_console, out, say

_GAP = 2


@dataclass(frozen=True)
class Column:
    """`wrap`: the smallest line length, in characters, at which a terminal may break the cell.

    0 forbids breaks, as for an id that people copy."""

    heading: str
    wrap: int = 0
    right: bool = False


def id_column(heading: str, ids: Sequence[str]) -> Column:
    """Return a column for cells such as `ID NAME`. A terminal may put the name below the id."""
    return Column(heading, wrap=max(map(len, ids), default=1))


def show_table(
    columns: Sequence[Column], rows: Sequence[Sequence[object]], *, title: str = "", empty: str = ""
) -> None:
    """Print the rows below the title. Without rows, print only `empty`, if it is given."""
    if empty and not rows:
        say(empty)
        return
    cells = [[_one_line(cell) for cell in row] for row in rows]
    widths = [
        max(cell_len(text) for text in (column.heading, *(row[index] for row in cells)))
        for index, column in enumerate(columns)
    ]
    least = [
        min(width, max(column.wrap, cell_len(column.heading))) if column.wrap else width
        for column, width in zip(columns, widths, strict=True)
    ]
    shown = len(columns)
    console: Console = out
    if out.is_terminal:
        while shown > 1 and sum(least[:shown]) + _GAP * (shown - 1) > out.width:
            shown -= 1
    else:
        console = new_console(width=sum(widths) + _GAP * len(widths))
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column, width in zip(columns[:shown], least, strict=False):
        table.add_column(
            column.heading,
            no_wrap=not column.wrap and shown > 1,
            overflow="fold",
            min_width=width if shown > 1 else None,
            justify="right" if column.right else "left",
        )
    for row in cells:
        table.add_row(*map(Text, row[:shown]))
    if title:
        say(title)
    console.print(table)
    if left_out := [column.heading for column in columns[shown:]]:
        names = ", ".join(left_out)
        out.print(f"Not shown, for lack of width: {names} (--json shows all)", markup=False)


def say_rest(shown: int, total: int | None, what: str) -> None:
    """Say that a list goes on, if it does. `total` is None if only that is known.

    Example: `20 of 134 runs (--limit, --all show more)`."""
    if total is None or total > shown:
        of = f"{shown} of {total} {what}" if total is not None else f"The newest {shown} {what}"
        say(f"{of} (--limit, --all show more)")


def moment(value: Any) -> str:
    """Return a time to the minute, in UTC, such as `2026-07-13 09:30`."""
    if not value:
        return ""
    at = (
        datetime.fromtimestamp(value, UTC)
        if isinstance(value, int | float)
        else datetime.fromisoformat(str(value))
    )
    return at.strftime("%Y-%m-%d %H:%M")


def byte_size(size: float) -> str:
    """Example: `1.5 MiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def count(value: int) -> str:
    """Examples: `98,765`, `1.23 G`."""
    if value < 100_000:
        return f"{value:,}"
    size, unit = value / 1000, "k"
    for larger in ("M", "G", "T"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def duration(seconds: float) -> str:
    """Examples: "", `0.32 s`, `12.0 s`, `3 min` and `12.7 h`."""
    if not seconds:
        return ""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 180:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:,.1f} h"


def _one_line(value: object) -> str:
    return printable(
        "" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)
    )


def printable(text: str) -> str:
    """Replace characters that break a row or move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)
