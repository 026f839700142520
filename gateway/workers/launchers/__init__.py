"""How the gateway starts workers, learns that they are ready or gone, and ends them.

`base` is the seam that the rest of the gateway codes against. `process` implements it with
processes on this machine; `backoff` says how long to wait before a worker is started again.
"""

from gateway.workers.launchers.backoff import Backoff, BackoffPolicy
from gateway.workers.launchers.base import Launcher, WorkerExit, WorkerHandle
from gateway.workers.launchers.process import ProcessLauncher

__all__ = [
    "Backoff",
    "BackoffPolicy",
    "Launcher",
    "ProcessLauncher",
    "WorkerExit",
    "WorkerHandle",
]
