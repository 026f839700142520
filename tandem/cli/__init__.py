"""The `tandem` command: one module for each subject, put together in `main`.

To add a command, write a function with typer's annotations in the module of its subject and
register it in `main`. Commands talk to the running gateway by `context.call`.
"""

from tandem.cli.main import main

__all__ = ["main"]
