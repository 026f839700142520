"""`tandem models`: the base models of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast
from urllib.parse import quote

import typer

from tandem.cli.context import DataDir, JsonFlag, call, print_json, say
from tandem.cli.tables import Column, show_table

app = typer.Typer(help="Base models: add, remove and list.", no_args_is_help=True)


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="The name that clients use, such as Qwen/Qwen3-8B.")],
    path: Annotated[Path, typer.Argument(help="A directory in the Hugging Face layout.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Register a base model with the running gateway."""
    body = {"name": name, "path": str(path.resolve())}
    answer = cast(dict[str, object], call(data_dir, "POST", "models", body=body))
    if as_json:
        print_json(answer)
    else:
        say(f"{name} is registered.")
        if answer["note"]:
            say(f"Note: {answer['note']}.")


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="The name that clients use.")],
    data_dir: DataDir = None,
) -> None:
    """Remove a base model's name; its files stay. Runs and engines that use it go on until their
    session ends or the gateway restarts."""
    call(data_dir, "DELETE", f"models/{quote(name)}")
    say(f"{name} is no longer registered.")


@app.command("list")
def list_models(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List the registered base models."""
    answer = cast(dict[str, list[dict[str, object]]], call(data_dir, "GET", "models"))
    if as_json:
        print_json(answer)
        return
    show_table(
        [Column("name"), Column("path", wrap=30), Column("max length", right=True)],
        [(model["name"], model["path"], model["max_length"]) for model in answer["models"]],
    )
