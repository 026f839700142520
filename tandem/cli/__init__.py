"""The `tandem` command. One file a subject; each command says what it prints with --json."""

from tandem.cli.main import main

__all__ = ["main"]
