"""A training run in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import request_id_of
from gateway.owners.usage.time_shares import Timeline
from gateway.runs.dispatcher import Dispatcher
from gateway.runs.operations import Operation
from gateway.runs.recovery.replay_log import ReplayLog
from gateway.runs.trainer_host import HostedRun, TrainerHost
from gateway.storage.futures.table import Future, Waiting
from tandem.errors import TandemError

LAST_SEQ_ID = 2**53 + 1
"""The `seq_id` of the save before a planned end. Clients' numbers are smaller."""

RunState = Literal["starting", "ready", "ended"]


@dataclass(frozen=True)
class RunEnding:
    """The decision to end a run. `error` fails its queued and later operations. Without `discard`,
    the trainer saves a checkpoint first."""

    error: TandemError
    discard: bool = False


@dataclass(eq=False, kw_only=True)
class Run(HostedRun):
    """`life` is the task that starts the trainer and serves the run, `stopping` the one that stops
    it. `creation` is the operation that creates the run. `host` is its trainer's process, perhaps
    shared. `log` is None without recovery.

    `ending` is the decision to end the run, and `end_asked` is set with it. `finishing` is the task
    that carries it out. `last_save` is its save. `deadline` is in seconds since 1970.

    `restoring` describes a restoration of the trainer in progress, or is "". `restored` counts
    them. `snapshot_asked` is the folder of a snapshot that is being written, or "". `no_snapshot`
    explains a failure of the last one, or is "".

    `parent` is the newest weight version, which is pinned, `newest` the newest for sampling.
    `published` is the last version since the gateway started."""

    dispatcher: Dispatcher
    host: TrainerHost = field(init=False)
    timeline: Timeline = field(init=False)
    log: ReplayLog | None = None
    state: RunState = "starting"
    error: TandemError | None = None
    creation: Operation | None = None
    life: asyncio.Task[None] | None = None
    stopping: asyncio.Task[None] | None = None
    ending: RunEnding | None = None
    end_asked: asyncio.Event = field(default_factory=asyncio.Event)
    deadline: float | None = None
    finishing: asyncio.Task[None] | None = None
    last_save: Operation | None = None
    restoring: str = ""
    restored: int = 0
    snapshot_asked: str = ""
    no_snapshot: str = ""
    step: int = 0
    parent: str = ""
    newest: str = ""
    published: WeightVersion | None = None

    @property
    def snapshot_step(self) -> int:
        return self.log.newest.step if self.log is not None else 0

    @property
    def snapshot_problem(self) -> str:
        """Why there is no useful newer snapshot, or ""."""
        if self.log is not None and not self.log.complete:
            return self.log.why_incomplete
        return self.no_snapshot

    @property
    def makes_room(self) -> bool:
        """Whether a snapshot is being written that a nearly full log needs."""
        return self.log is not None and self.log.nearly_full and bool(self.snapshot_asked)

    @property
    def expected_version_bytes(self) -> int:
        """Bytes of the next weight version: those of the last, or 4 per parameter."""
        written = self.published.bytes if self.published is not None else 0
        return written or 4 * self.about.trainable_parameters

    @property
    def expected_state_bytes(self) -> int:
        """Bytes of a trainer's state: parameters and two moments, 4 bytes each."""
        return max(12 * self.about.trainable_parameters, 3 * self.expected_version_bytes)

    @property
    def why_over(self) -> TandemError | None:
        """The error of a new operation, if the run has ended or is ending."""
        return self.error or (self.ending.error if self.ending is not None else None)

    def new_future(self, seq_id: int) -> Future:
        return Future(
            request_id=request_id_of(owner=self.id, seq_id=seq_id),
            source="operation",
            owner=self.owner,
            describe=lambda: self.describe(seq_id),
        )

    @property
    def trouble(self) -> str:
        """Why the trainer makes no progress, or why the run ends. "" if all is well."""
        if self.ending is not None:
            return f"the run is ending: {self.ending.error.message}"
        waits = self.host.explain()
        if waits and not self.host.has_place:
            return waits
        return "; ".join(filter(None, (self.restoring, waits))) or self.host.silence

    def describe(self, seq_id: int) -> Waiting:
        waiting = self.dispatcher.describe(seq_id)
        if trouble := self.trouble:
            first = seq_id == 0  # it only waits for the trainer
            return Waiting(trouble if first else f"{trouble}; {waiting.reason}", paused=True)
        return waiting
