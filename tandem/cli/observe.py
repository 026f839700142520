"""`tandem status`, `config` and `version`: commands that only show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic_settings import BaseSettings

from tandem.cli.context import (
    DataDir,
    JsonFlag,
    call,
    end_if_json,
    fail,
    read_settings,
    resolve_data_dir,
    run_offline,
    say,
)
from tandem.cli.tables import Column, byte_size, show_table
from tandem.settings.gateway import without_password

_TABLES: dict[str, tuple[Column, ...]] = {
    "sessions": (
        Column("id"),
        Column("owner"),
        Column("idle_seconds", right=True),
        Column("display_name", wrap=20),
    ),
    "runs": (
        Column("id"),
        Column("state"),
        Column("step", right=True),
        Column("queued", right=True),
        Column("operation", wrap=28),
        Column("reason", wrap=24),
        Column("base_model"),
        Column("weight_version"),
    ),
    "samplers": (
        Column("worker"),
        Column("replica", right=True),
        Column("state"),
        Column("waiting", right=True),
        Column("under_way", right=True),
        Column("reason", wrap=24),
        Column("base_model"),
        Column("weight_version"),
    ),
    "workers": (
        Column("id"),
        Column("kind"),
        Column("state"),
        Column("version"),
        Column("pid", right=True),
        Column("age_seconds", right=True),
    ),
}
"""Columns by field of the status."""


def status(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Show sessions, training runs, samplers and workers, with their queues."""
    answer = call(data_dir, "GET", "status")
    end_if_json(as_json, answer)
    for sentence in answer["warnings"]:
        fail(sentence, "warning")
    for number, (name, columns) in enumerate(_TABLES.items()):
        if number:
            say("")
        rows = answer.get(name, [])
        for row in rows:
            if isinstance(operation := row.get("operation"), dict):
                row["operation"] = operation["says"]
        cells = [[row.get(column.heading) for column in columns] for row in rows]
        show_table(columns, cells, title=f"{name}:", empty=f"No {name}.")


def config(
    resources: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Instead: what pods of this model's folder request."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the resolved settings, without secrets."""
    if resources is not None:
        _show_resources(resources, as_json=as_json)
        return
    settings = read_settings()
    settings.database_url = without_password(settings.database_url)
    end_if_json(as_json, settings.model_dump(mode="json"))
    groups = [(name, value) for name, value in settings if isinstance(value, BaseSettings)]
    own = settings.model_dump(mode="json", exclude={name for name, _ in groups})
    for prefix, values in (
        ("TANDEM_", own),
        *((f"TANDEM_{name.upper()}_", group.model_dump(mode="json")) for name, group in groups),
    ):
        for key, value in values.items():
            say(f"{prefix}{key.upper()}={_as_variable(value)}")


def _as_variable(value: object) -> str:
    """Write a setting's value as its environment variable takes it."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _show_resources(model: Path, *, as_json: bool) -> None:
    module = "gateway.admin.pod_resources"
    answer = run_offline(module, resolve_data_dir(None), {"model": str(model.resolve())})
    end_if_json(as_json, answer)
    rows = answer["rows"]
    columns = [Column(name, right=name not in ("pool", "worker")) for name in rows[0]]
    sizes = ("memory", "shared_memory", "ephemeral")
    cells = [[byte_size(row[k]) if k in sizes else row[k] for k in row] for row in rows]
    show_table(columns, cells)


def version(as_json: JsonFlag = False) -> None:
    """Print the versions of Tandem and its libraries."""
    from tandem.demo.run import versions

    found = versions()
    end_if_json(as_json, found)
    for name, number in found.items():
        say(f"{name} {number}")
