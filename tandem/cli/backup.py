"""`tandem backup` and `tandem restore`: the database of a data directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.context import (
    DataDir,
    JsonFlag,
    end_if_json,
    fail,
    resolve_data_dir,
    run_offline,
    say,
)

_MODULE = "gateway.admin.backup"
_TIMEOUT = 6 * 3600.0
"""In seconds. Both commands read the whole database."""


def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder, which the backup becomes.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Back up the database and the manifests.

    It works while the gateway runs. Weights are not included: copy the data directory afterwards.

    Example: tandem backup /backups/monday"""
    request = {"action": "backup", "folder": str(folder.absolute())}
    answer = run_offline(_MODULE, resolve_data_dir(data_dir), request, timeout=_TIMEOUT)
    end_if_json(as_json, answer)
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
    """Restore the database from a backup.

    Stop the gateway first. No file of the data directory is removed. The command lists folders that
    the restored database does not know.

    Example: tandem restore /backups/monday"""
    request = {"action": "restore", "folder": str(folder.absolute()) if folder else None}
    answer = run_offline(_MODULE, resolve_data_dir(data_dir), request, timeout=_TIMEOUT)
    end_if_json(as_json, answer)
    say("The database is restored.")
    if answer["replaced"]:
        say(f"The database that was replaced is in {answer['replaced']}.")
    for path in answer["missing"]:
        fail(f"{path}: its files are not in the data directory", "missing")
    for place in answer["unknown"]:
        fail(f"{place}: the restored database does not know it; Tandem keeps it", "unknown")
