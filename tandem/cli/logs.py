"""`tandem logs`: the logs of gateway, agent and workers, in the order of their times.

On the gateway's machine the files are read, also after the gateway's end. From elsewhere, or with a
key, the gateway reads them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlencode

import orjson
import typer

from tandem.cli.context import (
    KEY_VARIABLE,
    DataDir,
    JsonFlag,
    Row,
    call,
    end_if_json,
    print_json,
    remote_url,
    resolve_data_dir,
    say_aside,
    watch,
)
from tandem.cli.keys import parse_duration
from tandem.cli.run_names import run_id
from tandem.cli.tables import Column, byte_size, moment, printable, show_table
from tandem.errors import UserError
from tandem.log_lines import LogFilter, event_of, list_log_files, read_log_lines
from tandem.stack import read_endpoint

_POLL_SECONDS = 0.5
_LATE_SECONDS = 5.0
"""A line may be written this long after its time, for example by another host's worker."""
_FOLLOWED_LINES = 10_000

Read = Callable[[LogFilter, int], tuple[list[Row], bool]]


def logs(
    worker: Annotated[
        str | None, typer.Argument(help="A worker id, `gateway` or `agent`. Default: list them.")
    ] = None,
    run: Annotated[str, typer.Option("--run", help="Only lines about this run.")] = "",
    request: Annotated[
        str, typer.Option("--request", help="Only lines about this request, as errors name it.")
    ] = "",
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option("--level", help="Only lines of this level and above."),
    ] = "debug",
    since: Annotated[str, typer.Option(help="Only lines of this time, such as 10m or 2h.")] = "",
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=10_000, help="How many of the newest lines.")
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing what is added, until Ctrl-C.")
    ] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List logs, or print lines of all logs in the order of their times.

    The list shows each log's run, state, size and time. A worker's log is kept after the worker's
    end.

    Example: tandem logs --run my-run --level warning --follow"""
    start = time.time() - parse_duration(since) if since else 0.0
    by_files = _reads_files(data_dir)
    name = run_id(data_dir, run) if run else ""
    wanted = LogFilter(log=worker or "", run=name, request=request, level=level, since=start)
    if wanted == LogFilter() and not follow:
        _list(_rows(data_dir, by_files), as_json=as_json)
        return
    read = partial(_read, data_dir, by_files)
    found, cut = read(wanted, lines)
    if worker and not found and worker not in [row["log"] for row in _rows(data_dir, by_files)]:
        raise UserError(f"there is no log of {worker!r}; `tandem logs` lists the logs")
    if as_json and not follow:
        print_json({"lines": found, "cut": cut})
        return
    _print(found, as_json=as_json, one_log=bool(worker))
    if cut and len(found) < lines:
        say_aside("Older lines may exist: each log is read from its end only.")
    elif not found:
        say_aside("No such lines.")
    if follow:
        with suppress(KeyboardInterrupt):
            for added in _added(read, wanted, found):
                _print(added, as_json=as_json, one_log=bool(worker))


def _reads_files(data_dir: Path | None) -> bool:
    if remote_url(data_dir):
        return False
    directory = resolve_data_dir(data_dir)
    return not os.environ.get(KEY_VARIABLE) or read_endpoint(directory) is None


def _read(
    data_dir: Path | None, by_files: bool, wanted: LogFilter, limit: int
) -> tuple[list[Row], bool]:
    """Return the newest lines, and whether older ones may exist."""
    if by_files:
        folder = resolve_data_dir(data_dir) / "logs"
        found, cut = read_log_lines(folder, wanted, limit=limit)
        return [vars(line) for line in found], cut
    asked = {name: value for name, value in vars(wanted).items() if value}
    answer = call(data_dir, "GET", f"logs?{urlencode({**asked, 'limit': limit})}")
    return answer["lines"], answer["cut"]


def _added(read: Read, wanted: LogFilter, shown: list[Row]) -> Iterator[list[Row]]:
    """Yield further lines for ever."""
    newest = max((line["at"] for line in shown), default=time.time())
    seen = {_identity(line): line["at"] for line in shown}
    first = True

    def look() -> list[Row]:
        since = max(wanted.since, newest - _LATE_SECONDS)
        return read(replace(wanted, since=since), _FOLLOWED_LINES)[0]

    for found in watch(look, pause=_POLL_SECONDS):
        # The first look also finds earlier lines than the shown ones.
        added = [
            line
            for line in found
            if _identity(line) not in seen and (not first or line["at"] > newest)
        ]
        first = False
        seen |= {_identity(line): line["at"] for line in found}
        if added:
            newest = max(newest, added[-1]["at"])
            yield added
        seen = {each: at for each, at in seen.items() if at >= newest - _LATE_SECONDS}


def _identity(line: Row) -> tuple[str, str]:
    return line["log"], line["text"]


def _print(found: Sequence[Row], *, as_json: bool, one_log: bool) -> None:
    for line in found:
        if as_json:
            print(orjson.dumps(line).decode(), flush=True)
        else:
            print(_as_text(line, one_log=one_log), flush=True)


def _as_text(line: Row, *, one_log: bool) -> str:
    """Example: `09:30:00.123 error trainer: operation_failed type=out_of_memory`."""
    event, service = event_of(line["text"])
    if not event:
        about = "" if one_log else f"{line['log']}: "
        return f"{about}{printable(line['text'])}"
    at = datetime.fromtimestamp(line["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return printable(f"{at} {line['level']} {service or line['log']}: {event}")


def _list(rows: Sequence[Row], *, as_json: bool) -> None:
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
        empty="No logs. The logs of pods are with `kubectl logs`.",
    )


def _rows(data_dir: Path | None, by_files: bool) -> list[Row]:
    rows: list[Row] = []
    if not by_files:
        rows = call(data_dir, "GET", "logs/files")["logs"]
        return rows
    data = resolve_data_dir(data_dir)
    states: dict[str, str] = {}
    if read_endpoint(data) is not None:
        workers = call(data_dir, "GET", "status")["workers"]
        states = {worker["id"]: worker["state"] for worker in workers}
        states = {"gateway": "ready", "agent": "ready", **states}
    for file in list_log_files(data / "logs"):
        about = {name: value for name, value in vars(file).items() if name != "parts"}
        state, path = states.get(file.log, "ended"), str(file.parts[-1])
        rows.append({**about, "state": state, "path": path})
    return rows
