"""`tandem backup` and `tandem restore`: the database of a data directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from tandem.cli.context import (
    DataDir,
    JsonFlag,
    fail,
    print_json,
    resolve_data_dir,
    run_offline,
    say,
)

_MODULE = "gateway.admin.backup"
_TIMEOUT = 6 * 3600.0
"""Seconds: both read the whole database."""


def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder, which the backup becomes.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy the database and the manifests, also while the gateway serves; not the weights."""
    request = {"action": "backup", "folder": str(folder.absolute())}
    answer = run_offline(_MODULE, resolve_data_dir(data_dir), request, timeout=_TIMEOUT)
    if as_json:
        print_json(answer)
        return
    say(f"{folder}: the lists of files of {answer['folders']} checkpoints and versions.")
    if answer["revision"]:
        say("The database is in it. Copy the data directory after it, for the weights.")
    else:
        say("PostgreSQL is not in it: run pg_dump. Copy the data directory after both.")


def restore(
    folder: Annotated[
        Path | None, typer.Argument(help="A backup. With PostgreSQL: none, after pg_restore.")
    ] = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Put a backup's database in place while no gateway runs. Nothing in the data directory is
    removed; folders that this database does not know are listed."""
    request = {"action": "restore", "folder": str(folder.absolute()) if folder else None}
    answer = run_offline(_MODULE, resolve_data_dir(data_dir), request, timeout=_TIMEOUT)
    if as_json:
        print_json(answer)
        return
    say("The database is restored.")
    if answer["replaced"]:
        say(f"The database that was replaced is in {answer['replaced']}.")
    for path in cast(list[str], answer["missing"]):
        fail(f"{path}: its files are not in the data directory", "missing")
    for place in cast(list[str], answer["unknown"]):
        fail(f"{place}: the restored database does not know it; Tandem keeps it", "unknown")
