"""`tandem logs`: list the logs of gateway, agent and workers, and print or follow one."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, resolve_data_dir
from tandem.cli.tables import Column, byte_size, moment, show_table
from tandem.errors import UserError
from tandem.stack import read_endpoint

_LONGEST_FIRST_LINE = 4096
_POLL_SECONDS = 0.3


def logs(
    worker: Annotated[
        str | None, typer.Argument(help="A worker id, `gateway` or `agent`. Default: list them.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing what is added.")
    ] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List logs, or print the end of one.

    The list shows each log's run, state, size and time. A worker's log is kept after the worker's
    end.

    Example: tandem logs gateway --follow"""
    data = resolve_data_dir(data_dir)
    if worker is None:
        _list(data, as_json=as_json)
        return
    path = data / "logs" / f"{worker}.log"
    if os.sep in worker or not path.is_file():
        raise UserError(f"there is no log of {worker!r}; `tandem logs` lists the logs")
    _print_tail(path, lines=lines, follow=follow)


def _list(data: Path, *, as_json: bool) -> None:
    states = _states(data)
    rows: list[dict[str, Any]] = []
    for path in (data / "logs").glob("*.log"):
        about, stat = _first_line(path), path.stat()
        rows.append(
            {
                "log": path.stem,
                "run": about.get("run_id") or "",
                "session": about.get("session_id") or "",
                "model": about.get("model") or "",
                "state": states.get(path.stem, "ended"),
                "bytes": sum(part.stat().st_size for part in _parts(path)),
                "written_at": stat.st_mtime,
                "path": str(path),
            }
        )
    rows.sort(key=lambda row: row["written_at"], reverse=True)
    end_if_json(as_json, {"logs": rows})
    show_table(
        [
            Column("log"),
            Column("state"),
            Column("size", right=True),
            Column("run"),
            Column("written", wrap=10),
        ],
        [
            (
                row["log"],
                row["state"],
                byte_size(row["bytes"]),
                row["run"],
                moment(row["written_at"]),
            )
            for row in rows
        ],
        empty=f"No logs in {data / 'logs'}.",
    )


def _states(data: Path) -> dict[str, str]:
    """Return the states of running processes. All other logs belong to ended ones."""
    if read_endpoint(data) is None:
        return {}
    workers = call(data, "GET", "status")["workers"]
    states = {worker["id"]: worker["state"] for worker in workers}
    return {"gateway": "ready", "agent": "ready", **states}


def _first_line(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        line = file.readline(_LONGEST_FIRST_LINE)
    try:
        about = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return about if isinstance(about, dict) else {}


def _parts(path: Path) -> Iterator[Path]:
    """Yield the files of a log, oldest first."""
    copies = [copy for copy in path.parent.glob(f"{path.name}.*") if copy.suffix[1:].isdigit()]
    yield from sorted(copies, key=lambda copy: -int(copy.suffix[1:]))
    yield path


def _print_tail(path: Path, *, lines: int, follow: bool) -> None:
    with path.open(errors="replace") as file:
        tail = deque(file, maxlen=lines)
        for copy in reversed(list(_parts(path))[:-1]):
            if len(tail) == lines:
                break
            with copy.open(errors="replace") as older:
                tail.extendleft(reversed(deque(older, maxlen=lines - len(tail))))
        sys.stdout.writelines(tail)
        sys.stdout.flush()
        while follow:
            try:
                if chunk := file.read():
                    sys.stdout.write(chunk)
                    sys.stdout.flush()
                    continue
                if path.stat().st_size < file.tell():  # it was rotated
                    file.seek(0)
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                return
