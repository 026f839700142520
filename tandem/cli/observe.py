"""`tandem status`, `logs`, `config` and `version`: commands that only show."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from tandem.cli.context import DataDir, JsonFlag, call, out, print_json, resolve_data_dir
from tandem.errors import UserError
from tandem.settings import GatewaySettings

Rows = list[dict[str, object]]

_TABLES: dict[str, tuple[str, ...]] = {
    "sessions": ("id", "display_name", "idle_seconds"),
    "runs": ("id", "state", "base_model", "step", "weight_version", "queued", "reason"),
    "samplers": ("worker", "state", "base_model", "weight_version", "waiting", "reason"),
    "workers": ("id", "kind", "state", "pid", "age_seconds"),
}


def status(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Show sessions, training runs, samplers, workers and their queues."""
    answer = cast(dict[str, Rows], call(data_dir, "GET", "status"))
    if as_json:
        print_json(answer)
        return
    for name, columns in _TABLES.items():
        rows = answer.get(name, [])
        if not rows:
            out.print(f"No {name}.")
            continue
        table = Table(*columns, title=name, title_justify="left")
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        out.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def logs(
    worker: Annotated[
        str | None, typer.Argument(help="A worker id, or `gateway`. Default: list them.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing what is added.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Print the end of a log. A worker's log outlives the worker."""
    directory = resolve_data_dir(data_dir) / "logs"
    if worker is None:
        for path in sorted(directory.glob("*.log")):
            out.print(path.stem)
        return
    path = directory / f"{worker}.log"
    if os.sep in worker or not path.is_file():
        raise UserError(f"there is no log of {worker!r}; `tandem logs` lists the logs")
    _print_tail(path, lines=lines, follow=follow)


def _print_tail(path: Path, *, lines: int, follow: bool) -> None:
    with path.open(errors="replace") as file:
        sys.stdout.writelines(deque(file, maxlen=lines))
        sys.stdout.flush()
        while follow:
            try:
                if chunk := file.read():
                    sys.stdout.write(chunk)
                    sys.stdout.flush()
                else:
                    time.sleep(0.3)
            except KeyboardInterrupt:
                return


def config(as_json: JsonFlag = False) -> None:
    """Print the resolved settings, without secrets."""
    values = GatewaySettings().model_dump(mode="json", exclude={"api_key"})
    if as_json:
        print_json(values)
        return
    for prefix, group in (("TANDEM_", values), *_groups(values)):
        for key, value in group.items():
            if not isinstance(value, dict):
                out.print(f"{prefix}{key.upper()}={value}")


def _groups(values: dict[str, object]) -> list[tuple[str, dict[str, object]]]:
    return [
        (f"TANDEM_{name.upper()}_", cast(dict[str, object], group))
        for name, group in values.items()
        if isinstance(group, dict)
    ]


def version(as_json: JsonFlag = False) -> None:
    """Print the versions of Tandem and of the libraries below it."""
    from tandem.demo.run import versions

    found = versions()
    if as_json:
        print_json(found)
        return
    for name, number in found.items():
        out.print(f"{name} {number}")
