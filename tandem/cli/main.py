"""Puts the commands together and turns our errors into one sentence and an exit status."""

from __future__ import annotations

import sys

import typer

from tandem.cli import checkpoints, demo, keys, models, observe, up
from tandem.cli.context import fail
from tandem.errors import TandemError

app = typer.Typer(
    name="tandem",
    help="Reinforcement learning of language models on your own machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("status")(observe.status)
app.command("logs")(observe.logs)
app.command("config")(observe.config)
app.command("version")(observe.version)
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(checkpoints.app, name="checkpoints")


def main() -> None:
    try:
        app()
    except (TandemError, ValueError) as error:
        fail(str(error))
        sys.exit(1)
