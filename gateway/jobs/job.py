"""A job in memory, and its plan in the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gateway.checkpoints.base_models import BaseModelEntry
from tandem.errors import TandemError
from tandem.protocol.worker import LoraSpec, TrainingSpec


class JobPlan(BaseModel):
    """The request for a job.

    `configuration` has the settings of `backend`. `host_memory` is in bytes, 0 for an estimate.
    `deadline` is in seconds since 1970, None for no deadline. `ttl` are the seconds that its files
    stay after its end."""

    model_config = ConfigDict(frozen=True)

    backend: str
    configuration: dict[str, Any]
    processes: int
    group: str = ""
    host_memory: int = 0
    priority: int = 0
    max_restarts: int = 0
    deadline: float | None = None
    ttl: float


def training_of(configuration: Mapping[str, Any]) -> TrainingSpec:
    """Return the training that a configuration asks for. The import replaces it by the result's."""
    rank = configuration.get("lora_rank", 0)
    if not rank:
        return TrainingSpec()
    alpha = configuration.get("lora_alpha", 32.0)
    return TrainingSpec(lora=LoraSpec(rank=rank, alpha=alpha, unembedding=False))


@dataclass(eq=False, kw_only=True)
class Job:
    """Its files are in `folder`. `attempt` counts from 1, and `restarts` counts failed attempts.
    `reason` explains a wait outside the table of workers. That wait began `waits_since`, in seconds
    since 1970.

    `error` is the decision to end the job before its end. `life` is the task that follows the job,
    `ending` the one that ends it. `exits` has the reasons for the ends of its processes, by their
    ids, and `exited` is set with each. `begun` is the last attempt that this gateway started."""

    run_id: str
    session_id: str
    owner: str
    model: BaseModelEntry
    plan: JobPlan
    folder: Path
    attempt: int = 1
    restarts: int = 0
    reason: str = ""
    waits_since: float = 0.0
    error: TandemError | None = None
    life: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    exits: dict[str, str] = field(default_factory=dict)
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0

    def note_exit(self, process: str, reason: str) -> None:
        """Note that nothing is left of a process."""
        self.exits[process] = reason
        self.exited.set()

    def note_reason(self, reason: str) -> None:
        """Note why it waits, "" if it waits no more."""
        if reason and not self.reason:
            self.waits_since = time.time()
        self.reason = reason
