"""`tandem runs export`: the whole record of a run, as JSON lines or CSV."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, Literal
from urllib.parse import urlencode

import orjson
import typer

from tandem.cli.context import DataDir, Row, call, say_aside
from tandem.cli.run_names import RunArgument, run_in_url
from tandem.tracking.names import SERVER

_POINTS = 1_000_000
_PAGE = 1000
_TIMEOUT = 300.0


def export(
    run: RunArgument,
    format_: Annotated[
        Literal["jsonl", "csv"], typer.Option("--format", help="One JSON object a line, or CSV.")
    ] = "jsonl",
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Export rollouts in place of metrics.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file. Default: standard output.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Write a run's metrics, or its rollouts.

    Metrics have one row for each step and source. The source `tandem` counts optimizer steps.

    Example: tandem runs export my-run --format csv -o metrics.csv"""
    path = f"runs/{run_in_url(data_dir, run)}"
    rows = _rollouts(path, data_dir) if rollouts else _metrics(path, data_dir)
    write = _write_json_lines if format_ == "jsonl" else _write_csv
    with _opened(output) as file:
        count = write(rows, file)
    if output is not None:
        say_aside(f"{count} rows are in {output}")


def _metrics(path: str, data_dir: Path | None) -> Iterator[Row]:
    """Yield rows as in the record's files, in the order of steps."""
    # The names come first, because all curves of a long run do not fit into one answer.
    names = call(data_dir, "GET", f"{path}/metrics?points=2", timeout=_TIMEOUT)["metrics"]
    for source, mine in (
        ("user", [name for name in names if not name.startswith(SERVER)]),
        ("tandem", [name for name in names if name.startswith(SERVER)]),
    ):
        rows: defaultdict[int, Row] = defaultdict(lambda: {"at": 0.0, "values": {}})
        for name in mine:
            query = urlencode({"name": name, "points": _POINTS})
            answer = call(data_dir, "GET", f"{path}/metrics?{query}", timeout=_TIMEOUT)
            curve = answer["metrics"][name]
            for step, value, at in zip(curve["step"], curve["value"], curve["at"], strict=True):
                row = rows[step]
                row["at"] = max(row["at"], at)
                row["values"][name] = value
        for step in sorted(rows):
            yield {"step": step, "source": source, **rows[step]}


def _rollouts(path: str, data_dir: Path | None) -> Iterator[Row]:
    """Yield all rollouts in the order of steps, each step's in the given order."""
    for step in _rollout_steps(path, data_dir):
        offset, total = 0, 1
        while offset < total:
            query = urlencode({"step": step, "limit": _PAGE, "offset": offset})
            page = call(data_dir, "GET", f"{path}/rollouts?{query}", timeout=_TIMEOUT)
            yield from page["rollouts"]
            offset += len(page["rollouts"])
            total = page["total_count"] if page["rollouts"] else 0


def _rollout_steps(path: str, data_dir: Path | None) -> list[int]:
    """Return all steps with rollouts, in order. One answer has at most a thousand."""
    found: list[int] = []
    while True:
        query = urlencode({"limit": 1, **({"before": found[0]} if found else {})})
        page = call(data_dir, "GET", f"{path}/rollouts?{query}", timeout=_TIMEOUT)
        if not page["steps"]:
            return found
        found = [each["step"] for each in page["steps"]] + found


def _write_json_lines(rows: Iterable[Row], file: IO[str]) -> int:
    """Return the number of rows."""
    count = 0
    for row in rows:
        count += 1
        file.write(orjson.dumps(row).decode() + "\n")
    return count


def _write_csv(rows: Iterable[Row], file: IO[str]) -> int:
    """Write a column for each name of any row. Lists and objects are JSON."""
    columns: dict[str, None] = {}
    count = 0
    with TemporaryFile("w+") as kept:
        for row in rows:
            count += 1
            flat = {**row, **row.get("values", {})}
            flat.pop("values", None)
            columns |= dict.fromkeys(flat)
            kept.write(orjson.dumps(flat).decode() + "\n")
        kept.seek(0)
        writer = csv.DictWriter(file, fieldnames=list(columns), restval="")
        writer.writeheader()
        for line in kept:
            writer.writerow({name: _cell(value) for name, value in orjson.loads(line).items()})
    return count


def _cell(value: Any) -> Any:
    return orjson.dumps(value).decode() if isinstance(value, list | dict) else value


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    """Open the file under a temporary name, which it loses at the end."""
    if output is None:
        yield sys.stdout
        return
    partial = output.with_name(f"{output.name}.partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            yield file
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
