"""The `tandem` command: one module per subject, registered in `main`.

To add a command, write a function with typer's annotations in its subject's module, and register it
in `main`. Its docstring is the help text. Commands call the running gateway with `context.call`."""

from tandem.cli.main import main

__all__ = ["main"]
