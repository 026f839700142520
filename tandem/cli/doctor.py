"""`tandem doctor`: what this machine can do, and what is missing."""

from __future__ import annotations

from typing import cast

import typer

from tandem.cli.context import DataDir, JsonFlag, print_json, resolve_data_dir, run_offline
from tandem.cli.tables import Column, show_table

_COLUMNS = (Column("level"), Column("name"), Column("value", wrap=24), Column("about", wrap=30))


def doctor(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Examine this machine: devices, memory, libraries, and the device groups there would be. Exits
    with status 1 if something that is needed does not work."""
    answer = run_offline("gateway.doctor", resolve_data_dir(data_dir), {})
    findings = cast(list[dict[str, str]], answer["findings"])
    if as_json:
        print_json(answer)
    else:
        show_table(_COLUMNS, [[row[column.heading] for column in _COLUMNS] for row in findings])
    if any(row["level"] == "problem" for row in findings):
        raise typer.Exit(1)
