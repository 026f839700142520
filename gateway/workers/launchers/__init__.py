"""Launchers start workers, learn that they are ready or gone, and stop them.

`base` is the seam that the rest of the gateway codes against; `agent` implements it with the agent
of this host (`tandem.agent`). To add a launcher, implement `base.Launcher` in a module of its own
and give it a name in `make_launcher`: `TANDEM_LAUNCHER` selects it by that name.
"""

from __future__ import annotations

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from gateway.workers.launchers.base import Launcher
from tandem.errors import InvalidRequest
from tandem.settings import GatewaySettings

__all__ = ["Launcher", "make_launcher"]

_CALL_SECONDS = 60.0
"""Of a call to the agent, beyond what a worker may take to start or to stop."""


def make_launcher(settings: GatewaySettings, epoch: Epoch) -> Launcher:
    """Return the launcher that `settings.launcher` names, for the gateway of that epoch.

    Raises `InvalidRequest`, naming the known ones, for an unknown name.
    """
    match settings.launcher:
        case "agent":
            bound = settings.worker_start_timeout + settings.worker_stop_timeout + _CALL_SECONDS
            return AgentLauncher(
                data_dir=settings.data_dir,
                timeout=bound,
                stop_timeout=settings.worker_stop_timeout,
                epoch=epoch,
            )
        case unknown:
            raise InvalidRequest(f"unknown TANDEM_LAUNCHER {unknown!r}; known: agent")
