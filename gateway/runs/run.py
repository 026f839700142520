"""A training run in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.identifiers import request_id_of
from gateway.runs.deltas import DeltaBase, Published
from gateway.runs.dispatcher import Dispatcher
from gateway.runs.operations import Operation
from gateway.runs.recovery.replay_log import Recovery
from gateway.storage.futures.table import Future, Waiting
from gateway.workers.asks import Asks
from gateway.workers.worker import Worker
from tandem.errors import TandemError
from tandem.protocol.worker import TrainingSpec
from tandem.v1 import trainer_pb2

if TYPE_CHECKING:
    from gateway.runs.trainer import RunTrainer

RunState = Literal["starting", "ready", "ended"]


@dataclass(eq=False)
class Run:
    """`life` is the task that starts the trainer and serves the run, `stopping` the one that stops
    it. `creation` is the operation that creates the run. `about` is the trainer's description of
    itself. `asks` are the requested resources.

    `parent` is the newest weight version, which is pinned, `newest` the newest for sampling.
    `published` is the last version since the gateway started. `deltas` chooses the next delta's
    base."""

    id: str
    session_id: str
    owner: str
    model: BaseModelEntry
    training: TrainingSpec
    dispatcher: Dispatcher
    asks: Asks = field(default_factory=Asks)
    recovery: Recovery = field(default_factory=Recovery)
    state: RunState = "starting"
    error: TandemError | None = None
    creation: Operation | None = None
    life: asyncio.Task[None] | None = None
    trainer: RunTrainer | None = None
    stopping: asyncio.Task[None] | None = None
    about: trainer_pb2.DescribeTrainerReply = field(
        default_factory=trainer_pb2.DescribeTrainerReply
    )
    step: int = 0
    parent: str = ""
    newest: str = ""
    published: Published | None = None
    deltas: DeltaBase = field(default_factory=DeltaBase)

    @property
    def worker(self) -> Worker | None:
        return self.trainer.host.worker if self.trainer is not None else None

    @property
    def sampler(self) -> str:
        return self.trainer.host.sampler if self.trainer is not None else ""

    @property
    def publishes_deltas(self) -> bool:
        """Whether versions for its own sampler may be deltas. `auto` means bfloat16, because a
        small step changes few bfloat16 values."""
        wanted = self.asks.delta
        return wanted == "on" or (wanted == "auto" and self.about.dtype == "bfloat16")

    @property
    def expected_version_bytes(self) -> int:
        """Bytes of the next weight version: those of the last, or 4 per parameter."""
        written = self.published.bytes if self.published is not None else 0
        return written or 4 * self.about.trainable_parameters

    @property
    def expected_state_bytes(self) -> int:
        """Bytes of a trainer's state: parameters and two moments, 4 bytes each."""
        return max(12 * self.about.trainable_parameters, 3 * self.expected_version_bytes)

    async def save(self) -> None:
        """Let the trainer finish its calls and save its state if that spares a replay. Return when
        that is done or the trainer is lost."""
        assert self.trainer is not None
        drained = asyncio.create_task(self.dispatcher.drain())
        try:
            await asyncio.wait({drained, self.trainer.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        await self.trainer.save()

    def new_future(self, seq_id: int) -> Future:
        return Future(
            request_id=request_id_of(owner=self.id, seq_id=seq_id),
            source="operation",
            owner=self.owner,
            describe=lambda: self.describe(seq_id),
        )

    @property
    def trouble(self) -> str:
        """Why the trainer makes no progress, "" if all is well."""
        if self.trainer is None:
            return ""
        host, restoration = self.trainer.host, self.trainer.restoration
        if queue := host.waits_for_place:
            return queue
        return "; ".join(filter(None, (restoration.doing, host.explain()))) or host.silence

    def describe(self, seq_id: int) -> Waiting:
        waiting = self.dispatcher.describe(seq_id)
        if trouble := self.trouble:
            return Waiting(f"{trouble}; {waiting.reason}", paused=True)
        return waiting
