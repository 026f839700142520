"""Launchers start workers, learn that they are ready or gone, and stop them.

`base` is the seam that the rest of the gateway codes against; `process` implements it with
processes on this machine. To add a launcher, implement `base.Launcher` in a module of its own and
give it a name in `make_launcher`: `TANDEM_LAUNCHER` selects it by that name.
"""

from __future__ import annotations

from gateway.workers.launchers.base import Launcher
from gateway.workers.launchers.process import ProcessLauncher
from tandem.errors import InvalidRequest
from tandem.settings import GatewaySettings

__all__ = ["Launcher", "make_launcher"]


def make_launcher(settings: GatewaySettings) -> Launcher:
    """Return the launcher that `settings.launcher` names.

    Raises `InvalidRequest`, naming the known ones, for an unknown name.
    """
    match settings.launcher:
        case "process":
            return ProcessLauncher(
                data_dir=settings.data_dir,
                start_timeout=settings.worker_start_timeout,
                stop_timeout=settings.worker_stop_timeout,
            )
        case unknown:
            raise InvalidRequest(f"unknown TANDEM_LAUNCHER {unknown!r}; known: process")
