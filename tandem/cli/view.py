"""`tandem view`: the runs of a data directory, without a gateway."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.context import read_settings

_MODULE = "gateway.admin.view"


def view(
    data_dir: Annotated[Path, typer.Argument(help="A data directory, also a copy of one.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8501,
) -> None:
    """Show the runs of a data directory in a browser, without a gateway.

    It reads the folders runs/RUN/record and changes nothing. It serves this machine only, and asks
    for no key.

    Example: tandem view .tandem"""
    read_settings()  # the module reads them too, and could not explain an invalid one
    command = [sys.executable, "-m", _MODULE, str(data_dir), "--port", str(port)]
    with subprocess.Popen(command) as module:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the module, and then this
        status = module.wait()
    raise typer.Exit(max(0, status))
