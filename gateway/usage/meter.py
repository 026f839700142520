"""Adds up usage by hour, subject and kind of event.

Counting happens in memory and never waits. The sums are written to the database every few
seconds, so a gateway that is killed loses at most the last of these intervals. A subject is a
training run or a sampling session. Accelerator seconds are those of workers: a trainer's own
seconds times its ranks; the time in which a sampler works is shared between the samples that it
works on (`samples.TimeShares`), so that a sum never exceeds what the machines had.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gateway.sessions.registry import SessionRegistry
from gateway.storage.database import Database
from gateway.storage.tables import usage
from tandem.v1 import trainer_pb2

UsageKind = Literal[
    "forward",
    "forward_backward",
    "optim_step",
    "sample",
    "publish",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
]

HOUR = 3600

_MAX_UNWRITTEN = 4096
"""Sums that are kept in memory; when there are more, they are written at once."""
_COUNTERS = ("count", "input_tokens", "cached_tokens", "output_tokens", "accelerator_seconds")


@dataclass(frozen=True)
class Subject:
    """What used something: a training run or a sampling session."""

    id: str
    session_id: str
    base_model: str


@dataclass
class _Sum:
    """A row of the table `usage`."""

    hour: int
    event: UsageKind
    subject: str
    session_id: str
    owner: str
    base_model: str
    count: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accelerator_seconds: float = 0.0


class UsageMeter:
    def __init__(
        self,
        *,
        database: Database,
        sessions: SessionRegistry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._clock = clock
        self._insert_or_add = database.insert_or_add(usage, counters=_COUNTERS)
        self._sums: dict[tuple[int, str, str], _Sum] = {}

    def record(
        self,
        kind: UsageKind,
        subject: Subject,
        *,
        input_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        accelerator_seconds: float = 0.0,
    ) -> None:
        """Count one event. `cached_tokens` are the input tokens that were not computed."""
        hour = int(self._clock()) // HOUR * HOUR
        key = (hour, kind, subject.id)
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= _MAX_UNWRITTEN:
                self.write()
            found = self._sums[key] = _Sum(
                hour=hour,
                event=kind,
                subject=subject.id,
                session_id=subject.session_id,
                owner=self._sessions.owner_of(subject.session_id),
                base_model=subject.base_model,
            )
        found.count += 1
        found.input_tokens += input_tokens
        found.cached_tokens += cached_tokens
        found.output_tokens += output_tokens
        found.accelerator_seconds += accelerator_seconds

    def write(self) -> None:
        """Queue what was counted since the last call for writing, without waiting."""
        sums, self._sums = self._sums, {}
        if sums:
            self._database.write_soon(self._insert_or_add, *map(vars, sums.values()))


TrainerReply = (
    trainer_pb2.ForwardBackwardReply
    | trainer_pb2.OptimStepReply
    | trainer_pb2.PublishReply
    | trainer_pb2.SaveCheckpointReply
    | trainer_pb2.LoadCheckpointReply
)


class RunMeter:
    """Counts what a run's trainer did, from its replies. `ranks` devices work at once."""

    def __init__(self, *, usage: UsageMeter, subject: Subject, ranks: int) -> None:
        self._usage = usage
        self._subject = subject
        self._ranks = max(1, ranks)

    def note(self, kind: UsageKind, reply: TrainerReply) -> None:
        if reply.HasField("failure"):
            return
        tokens = reply.tokens if isinstance(reply, trainer_pb2.ForwardBackwardReply) else 0
        self._usage.record(
            kind,
            self._subject,
            input_tokens=tokens,
            accelerator_seconds=reply.seconds * self._ranks,
        )
