"""One training run, as it is held in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from gateway.delivery import RunFacts
from gateway.dispatch import Dispatcher, Prepare
from gateway.fleet import Worker
from gateway.models import BaseModelEntry
from tandem.errors import TandemError
from tandem.worker import TrainingSpec

RunState = Literal["starting", "ready", "ended"]


class Run:
    """One training run while its session is active."""

    def __init__(
        self,
        *,
        facts: RunFacts,
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
