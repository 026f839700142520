"""Finds a command's run by its id, its unique name, or the unique beginning of its id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from tandem.cli.context import Row, call, read_pages
from tandem.cli.tables import moment, printable
from tandem.errors import UnknownRun, UserError
from tandem.settings.chosen_names import is_run_id

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="An id such as s-0123456789ab:train:0, its beginning, or a name; `tandem runs list` "
        "shows them.",
    ),
]
_MOST_SHOWN = 10


def run_id(data_dir: Path | None, given: str) -> str:
    """Return the run's id. Raises `UnknownRun`, or `UserError` with the candidates."""
    if is_run_id(given):
        return given
    if "://" in given:
        raise UserError(
            f"{given!r} is not a run's name, nor an id such as s-0123456789ab:train:0; "
            "`tandem runs list` shows both"
        )
    found = [run for run in list_runs(data_dir, {"name": given})[0] if run["name"] == given]
    if not found and given.startswith("s-"):
        found = [run for run in list_runs(data_dir, {})[0] if run["id"].startswith(given)]
    if not found:
        raise UnknownRun(
            f"no run has the name {given!r}, or an id that begins with it; `tandem runs list` "
            "shows the runs"
        )
    if len(found) == 1:
        return str(found[0]["id"])
    some = "; ".join(map(_described, found[:_MOST_SHOWN]))
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    raise UserError(f"{given!r} means {len(found)} runs, give an id: {some}{more}")


def run_in_url(data_dir: Path | None, given: str) -> str:
    return quote(run_id(data_dir, given), safe=":")


def list_runs(
    data_dir: Path | None, filters: Mapping[str, str], *, most: int | None = None
) -> tuple[list[Row], int]:
    """Return the newest runs, `None` for all of them, and how many there are."""

    def ask(limit: int, offset: int) -> tuple[list[Row], int]:
        query = urlencode({**filters, "limit": limit, "offset": offset})
        answer = call(data_dir, "GET", f"runs?{query}")
        return answer["runs"], answer["total_count"]

    return read_pages(ask, most=most)


def _described(run: Row) -> str:
    name = printable(run["name"])
    return f"{run['id']} ({name + ', ' if name else ''}{run['state']}, {moment(run['created_at'])})"
