"""One training run, as it is held in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.runs.delivery import RunProgress
from gateway.runs.dispatcher import Dispatcher, Prepare
from gateway.workers.fleet import Worker
from tandem.errors import TandemError
from tandem.worker import TrainingSpec

RunState = Literal["starting", "ready", "ended"]


class TrainingRun:
    """One training run while its session is active."""

    def __init__(
        self,
        *,
        facts: RunProgress,
        model: BaseModelEntry,
        training: TrainingSpec,
        dispatcher: Dispatcher,
    ) -> None:
        self.facts = facts
        self.model = model
        self.training = training
        self.dispatcher = dispatcher
        self.state: RunState = "starting"
        self.error: TandemError | None = None
        self.created_at = time.time()
        self.worker: Worker | None = None
        self.prepare: Prepare | None = None
        self.architecture = ""
        self.parameters = 0
        self.ranks = 0
        self.last_request_at = self.written_at = self.created_at
        self.arriving: dict[int, asyncio.Future[None]] = {}
        self.ended = asyncio.Event()
        self.bring_up: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.facts.run_id

    @property
    def session_id(self) -> str:
        return self.facts.session_id

    async def arrived(self, seq_id: int) -> None:
        """Returns when no operation is on its way to this place of the log (any more)."""
        while seq_id in self.arriving:
            await asyncio.shield(self.arriving[seq_id])
