"""`tandem models`: the base models of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from tandem.cli.context import DataDir, JsonFlag, call, out, print_json

app = typer.Typer(help="Base models: add and list.", no_args_is_help=True)


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="The name that clients use, such as Qwen/Qwen3-8B.")],
    path: Annotated[Path, typer.Argument(help="A directory in the Hugging Face layout.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Register a base model with the running gateway."""
    body = {"name": name, "path": str(path.resolve())}
    answer = call(data_dir, "POST", "models", body=body)
    if as_json:
        print_json(answer)
    else:
        out.print(f"{name} is registered.")


@app.command("list")
def list_models(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List the registered base models."""
    answer = cast(dict[str, list[dict[str, object]]], call(data_dir, "GET", "models"))
    if as_json:
        print_json(answer)
        return
    table = Table("name", "max length", "path")
    for model in answer["models"]:
        table.add_row(str(model["name"]), str(model["max_length"] or ""), str(model["path"]))
    out.print(table)
