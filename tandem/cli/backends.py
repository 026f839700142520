"""`tandem backends`: the trainer backends."""

from __future__ import annotations

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json
from tandem.cli.tables import Column, show_table

_COLUMNS = (
    Column("backend"),
    Column("trains"),
    Column("framework"),
    Column("version"),
    Column("capabilities", wrap=24),
    Column("settings", wrap=24),
)
_TRAINS = {"step": "runs", "job": "jobs"}


def list_backends(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List the trainer backends. --json adds the schema of each one's settings.

    Example: tandem backends --json"""
    answer = call(data_dir, "GET", "backends")
    end_if_json(as_json, answer)
    rows = [
        [
            each["name"],
            _TRAINS.get(each["kind"], ""),
            each["framework"],
            each["version"] or ("" if each["reason"] else "not installed"),
            ", ".join(each["capabilities"]),
            each["reason"] or ", ".join(each["configuration"]["properties"]),
        ]
        for each in answer["backends"]
    ]
    show_table(_COLUMNS, rows)
