"""Launchers start workers, learn that they are ready or gone, and stop them.

`base` is the seam that the rest of the gateway codes against; `process` implements it with
processes on this machine. To add a launcher, implement `base.Launcher` in a module of its own and
give it a name in `_LAUNCHERS`: `TANDEM_LAUNCHER` selects it by that name.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.workers.launchers.base import Launcher
from gateway.workers.launchers.process import ProcessLauncher
from tandem.errors import InvalidRequest
from tandem.settings import GatewaySettings

__all__ = ["Launcher", "make_launcher"]


def make_launcher(settings: GatewaySettings) -> Launcher:
    """Return the launcher that `settings.launcher` names.

    Raises `InvalidRequest`, naming the known ones, for an unknown name.
    """
    make = _LAUNCHERS.get(settings.launcher)
    if make is None:
        known = ", ".join(sorted(_LAUNCHERS))
        raise InvalidRequest(f"unknown TANDEM_LAUNCHER {settings.launcher!r}; known: {known}")
    return make(settings)


def _process_launcher(settings: GatewaySettings) -> Launcher:
    return ProcessLauncher(
        data_dir=settings.data_dir,
        start_timeout=settings.worker_start_timeout,
        stop_timeout=settings.worker_stop_timeout,
    )


_LAUNCHERS: dict[str, Callable[[GatewaySettings], Launcher]] = {"process": _process_launcher}
