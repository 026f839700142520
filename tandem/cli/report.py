"""`tandem report`: runs, queue and device seconds, and budgets left, in Markdown."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, say
from tandem.cli.keys import parse_duration


def report(
    since: Annotated[str, typer.Option(help="Count this time, such as 12h or 7d.")] = "7d",
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a report in Markdown: runs, queue seconds and device seconds by owner and blueprint,
    and the budgets left.

    Admins and maintainers see every owner.

    Examples: tandem report --since 7d > report.md
    tandem report --json"""
    start = max(0.0, time.time() - parse_duration(since))
    rows = call(data_dir, "GET", f"usage/blueprints?since={start:.0f}")["blueprints"]
    budgets = [
        _left(each["owner"], each["budget"])
        for each in call(data_dir, "GET", "owners")["owners"]
        if each["budget"] is not None
    ]
    moment = datetime.fromtimestamp(start, UTC)
    end_if_json(as_json, {"since": moment.isoformat(), "blueprints": rows, "budgets_left": budgets})
    say(f"# Use since {moment:%Y-%m-%d %H:%M} UTC\n")
    _write_table(
        ("owner", "blueprint", "runs", "queue seconds", "device seconds"),
        (
            (
                row["owner"],
                row["blueprint"] or "-",
                f"{row['runs']:,}",
                f"{row['queue_seconds']:,.0f}",
                f"{row['device_seconds']:,.0f}",
            )
            for row in rows
        ),
        texts=2,
    )
    say("\n## Budgets left\n")
    _write_table(
        ("owner", "device-hours", "tokens"),
        (
            (row["owner"], _amount(row["device_hours"], ".1f"), _amount(row["tokens"], "d"))
            for row in budgets
        ),
        texts=1,
    )


def _left(owner: str, budget: dict[str, Any]) -> dict[str, Any]:
    """Return the rest of a budget. None is without bounds."""
    return {"owner": owner} | {
        name: None if budget[name] is None else max(0, budget[name] - budget[f"used_{name}"])
        for name in ("device_hours", "tokens")
    }


def _amount(value: float | None, form: str) -> str:
    return "unlimited" if value is None else f"{value:,{form}}"


def _write_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int) -> None:
    """Print a table of Markdown. The first `texts` columns are on the left."""
    found = list(rows)
    if not found:
        say("None.")
        return
    rule = ["---" if index < texts else "---:" for index in range(len(heads))]
    for row in (heads, rule, *found):
        say(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
