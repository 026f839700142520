"""`tandem config`: the settings of the running gateway, or of this environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from tandem.cli.context import (
    ConfigFile,
    DataDir,
    JsonFlag,
    call,
    end_if_json,
    read_settings,
    remote_url,
    resolve_data_dir,
    run_offline,
    say,
    say_aside,
)
from tandem.cli.tables import Column, byte_size, show_table
from tandem.settings.config_file import apply_config_file
from tandem.settings.gateway import without_password
from tandem.settings.variables import settings_by_name
from tandem.stack import read_endpoint


@dataclass(frozen=True)
class _Setting:
    """A setting's variable with its value and default as JSON. Meaning and source are "" if
    unknown."""

    name: str
    value: Any
    default: Any
    meaning: str
    source: str


def config(
    changed: Annotated[
        bool, typer.Option("--changed", help="Only values that are not the default, with meanings.")
    ] = False,
    resources: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Instead: what pods of this model's folder request."),
    ] = None,
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the settings of the running gateway, without secrets.

    If no gateway runs here, they are those of this environment. Another owner's key may not read
    them: it takes an admin's. With --config, they are those with which `tandem up --config` would
    start here, each with its source.

    Example: tandem config --changed"""
    if resources is not None:
        _show_resources(resources, as_json=as_json)
        return
    if config_file is None:
        values, sources = _values(data_dir), {}
    else:
        resolve_data_dir(data_dir)  # refuses --url
        sources = dict.fromkeys(os.environ, "the environment")
        for name, each in apply_config_file(config_file, os.environ).items():
            sources[name] = f"{config_file}, line {each.line}"
        values = _of_environment()
    found = list(_settings(values, sources))
    if changed:
        found = [setting for setting in found if setting.value != setting.default]
    end_if_json(as_json, {"settings": [vars(each) for each in found]} if changed else values)
    if changed and not found:
        say("Every setting has its default.")
    for setting in found:
        source = f"  # {setting.source}" if setting.source else ""
        say(f"{setting.name}={_as_variable(setting.value)}{source}")
        if changed:
            default = _as_variable(setting.default) or "nothing"
            say(f"    {setting.meaning} Default: {default}.".replace("  ", " "))


def _values(data_dir: Path | None) -> dict[str, Any]:
    """Return the gateway's settings as JSON, else this environment's."""
    if remote_url(data_dir) or read_endpoint(resolve_data_dir(data_dir)) is not None:
        values: dict[str, Any] = call(data_dir, "GET", "config")
        return values
    say_aside("No gateway runs here. These are the settings of this environment.")
    return _of_environment()


def _of_environment() -> dict[str, Any]:
    settings = read_settings()
    settings.database_url = without_password(settings.database_url)
    return settings.model_dump(mode="json")


def _settings(values: dict[str, Any], sources: dict[str, str]) -> Iterator[_Setting]:
    known = dict(settings_by_name())
    for key, value in values.items():
        name = f"TANDEM_{key.upper()}"
        of_group = isinstance(value, dict) and name not in known
        inner = {f"{name}_{each.upper()}": its for each, its in value.items()} if of_group else {}
        for variable, its_value in (inner or {name: value}).items():
            field = known.get(variable, FieldInfo())  # a newer gateway may have others
            default = field.get_default(call_default_factory=True, validated_data={})
            yield _Setting(
                name=variable,
                value=its_value,
                default=None if default is PydanticUndefined else to_jsonable_python(default),
                meaning=field.description or "",
                source=sources.get(variable, ""),
            )


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
