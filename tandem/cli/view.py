"""`tandem view`: the runs of a data directory, without a gateway."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

_MODULE = "gateway.admin.view"


def view(
    data_dir: Annotated[Path, typer.Argument(help="A data directory, also a copy of one.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8501,
) -> None:
    """Show the runs of a data directory in a browser, without a gateway.

    It reads the folders runs/RUN/record and changes nothing. It serves this machine only, and asks
    for no key.

    Example: tandem view .tandem"""
    # Settings are a gateway's. With them, the module might open its database.
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")
    }
    command = [sys.executable, "-m", _MODULE, str(data_dir), "--port", str(port)]
    os.execve(sys.executable, command, environment)
