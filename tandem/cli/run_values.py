"""A run's record for people: its main metric, progress, times and configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from tandem.cli.context import Row, call
from tandem.cli.run_charts import number
from tandem.cli.tables import duration
from tandem.errors import UserError
from tandem.tracking.names import SERVER, main_metric


def read_curves(
    data_dir: Path | None, run: str, names: Sequence[str], **options: object
) -> dict[str, Any]:
    """Return the run's curves in the order of these names, as GET /runs/RUN/metrics has them."""
    if not names:
        return {}
    query = urlencode([*(("name", name) for name in names), *options.items()])
    metrics: dict[str, Any] = call(data_dir, "GET", f"runs/{run}/metrics?{query}")["metrics"]
    return {name: metrics[name] for name in names if name in metrics}


def full_name(given: str, last: Mapping[str, object], *, later: bool = False) -> str:
    """Return a metric's name, also for a server's without `tandem/`. Raises `UserError` for an
    unknown one, unless it may come `later`."""
    for name in (given, f"{SERVER}{given}"):
        if name in last:
            return name
    if later:
        return given
    known = ", ".join(sorted(last)) or "none yet"
    raise UserError(f"the run has no metric {given!r}; known: {known}")


def main_value(run: Row) -> str:
    """Example: `reward 0.53`."""
    name = main_metric(run["last"])
    return f"{name.removeprefix(SERVER)} {number(run['last'][name])}" if name else ""


def step_of(run: Row) -> int:
    if progress := run["progress"]:
        return int(progress["step"])
    return run["last_step"]["step"] if run["last_step"] else 0


def done(run: Row) -> str:
    """Examples: `42 %, 3 min` and ""."""
    progress = run["progress"]
    if not progress or progress["percent"] is None:
        return ""
    percent = f"{math.floor(progress['percent'])} %"
    left = progress["eta_seconds"]
    return f"{percent}, {duration(left)}" if left and run["state"] != "ended" else percent


def as_text(value: object) -> str:
    """Return a value of a configuration: text as it is, others as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
