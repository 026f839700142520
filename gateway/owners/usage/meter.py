"""Sums usage by hour, subject and event, and measures samples.

Sums are written every few seconds, so a killed gateway loses only the last interval. A trainer's
accelerator seconds are its seconds times its ranks. A sampler's busy time is divided between
concurrent samples (`TimeShares`)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import add
from typing import Literal

from gateway.owners.budgets import OwnerBudgets
from gateway.owners.usage.sampled_versions import RememberedVersions
from gateway.owners.usage.time_shares import Timelines
from gateway.storage.database import Database
from gateway.storage.tables import usage
from tandem.v1 import common_pb2, sampler_pb2, trainer_pb2

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
    "job",
]
TrainerReply = (
    trainer_pb2.ForwardBackwardReply
    | trainer_pb2.OptimStepReply
    | trainer_pb2.PublishReply
    | trainer_pb2.SaveCheckpointReply
    | trainer_pb2.LoadCheckpointReply
)

HOUR = 3600

_MAX_UNWRITTEN = 4096
"""Sums in memory. Above this number they are written at once."""
_REMEMBERED_SAMPLES = 50_000
_COUNTERS = ("count", "input_tokens", "cached_tokens", "output_tokens", "accelerator_seconds")


@dataclass(frozen=True)
class Subject:
    """A training run or a sampling session. `run_id` is the run or the source of the sampled
    weights, "" for a base model."""

    id: str
    session_id: str
    owner: str
    base_model: str
    run_id: str = ""


class UsageMeter:
    """Every use also counts toward its owner's budget."""

    def __init__(
        self,
        *,
        database: Database,
        budgets: OwnerBudgets | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._budgets = budgets
        self._clock = clock
        self._insert_or_add = database.insert_or_add(usage, counters=_COUNTERS)
        self._sums: dict[tuple[int, UsageKind, Subject], tuple[float, ...]] = {}

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
        """Count one event. `cached_tokens` are input tokens that were not computed."""
        key = (int(self._clock()) // HOUR * HOUR, kind, subject)
        if key not in self._sums and len(self._sums) >= _MAX_UNWRITTEN:
            self.write()
        event = (1, input_tokens, cached_tokens, output_tokens, accelerator_seconds)
        self._sums[key] = tuple(map(add, self._sums.get(key, (0,) * len(event)), event))
        if self._budgets is not None and self._budgets.has_budget(subject.owner):
            if kind != "sample":  # before the operation's end, so that a crash forgets no use
                self.write()
            self._budgets.note_use(
                subject.owner,
                device_seconds=accelerator_seconds,
                tokens=input_tokens - cached_tokens + output_tokens,
            )

    def record_reply(
        self, kind: UsageKind, subject: Subject, reply: TrainerReply, *, ranks: int
    ) -> None:
        """Count a trainer's reply unless it failed. `ranks` devices worked at once."""
        if not reply.HasField("failure"):
            tokens = reply.tokens if isinstance(reply, trainer_pb2.ForwardBackwardReply) else 0
            seconds = reply.seconds * max(1, ranks)
            self.record(kind, subject, input_tokens=tokens, accelerator_seconds=seconds)

    def write(self) -> None:
        sums, self._sums = self._sums, {}
        rows = [
            {
                "hour": hour,
                "event": kind,
                "subject": subject.id,
                "run_id": subject.run_id,
                "session_id": subject.session_id,
                "owner": subject.owner,
                "base_model": subject.base_model,
                **dict(zip(_COUNTERS, amounts, strict=True)),
            }
            for (hour, kind, subject), amounts in sums.items()
        ]
        if rows:
            self._database.write_soon(self._insert_or_add, *rows)


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """One request at its engine. `started_at` is in seconds since 1970. `error` is the error's
    type, "" on success. `weight_version` is the sampled version, the last one for an `in_flight`
    request, and `weight_step` its optimizer step."""

    request_id: str
    session_id: str
    started_at: float
    seconds: float
    weight_version: str
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    error: str
    in_flight: bool = False
    weight_step: int = 0


class SampleMeter:
    """Meters samples and remembers the last `_REMEMBERED_SAMPLES`, because no journal has them."""

    def __init__(self, *, usage: UsageMeter, timelines: Timelines | None = None) -> None:
        self._usage = usage
        self.timelines = timelines or Timelines()
        self.versions = RememberedVersions()
        self._spans: OrderedDict[str, SampleSpan] = OrderedDict()

    def find(self, request_id: str) -> SampleSpan | None:
        return self._spans.get(request_id)

    def of_session(self, session_id: str) -> list[SampleSpan]:
        found = (span for span in self._spans.values() if span.session_id == session_id)
        return sorted(found, key=lambda span: span.started_at)

    async def measure(
        self,
        request: sampler_pb2.SampleRequest,
        answer: Awaitable[sampler_pb2.SampleReply],
        *,
        shares: TimeShares,
        ranks: int,
        owner: str,
        base_model: str,
    ) -> sampler_pb2.SampleReply:
        """Await the engine's answer, remember the request, and count it on success. `shares` and
        `ranks` are the engine's."""
        reply = sampler_pb2.SampleReply(failure=common_pb2.Failure(type="unanswered"))
        started_at, started = time.time(), time.monotonic()
        mark = shares.begin_task()
        try:
            reply = await answer
            return reply
        finally:
            accelerator_seconds = shares.end_task(mark) * ranks
            span = SampleSpan(
                request_id=request.operation_id,
                session_id=request.session_id,
                started_at=started_at,
                seconds=time.monotonic() - started,
                weight_version=reply.version.name or request.version.name,
                prompt_tokens=reply.prompt_tokens,
                cached_tokens=reply.cached_tokens,
                sampled_tokens=reply.sampled_tokens,
                error=reply.failure.type,
                in_flight=request.in_flight,
                weight_step=(reply if reply.version.name else request).version.step,
            )
            self._remember(span)
            if reply.samples:
                self.versions.remember(span.request_id, reply.samples)
            if not span.error:
                self._usage.record(
                    "sample",
                    Subject(
                        id=span.request_id.rpartition(":")[0],
                        session_id=span.session_id,
                        owner=owner,
                        base_model=base_model,
                        run_id=request.version.run_id,
                    ),
                    input_tokens=span.prompt_tokens,
                    cached_tokens=span.cached_tokens,
                    output_tokens=span.sampled_tokens,
                    accelerator_seconds=accelerator_seconds,
                )

    def _remember(self, span: SampleSpan) -> None:
        self._spans.pop(span.request_id, None)
        self._spans[span.request_id] = span
        if len(self._spans) > _REMEMBERED_SAMPLES:
            self._spans.popitem(last=False)


class TimeShares:
    """Divides a worker's busy time between its concurrent tasks.

    While n tasks run, each gets 1/n of the time. The cost does not depend on n. Example:
    two samples that start together and take 4 s get 2 s each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        self._share = 0.0
        self._at = clock()

    def begin_task(self) -> float:
        self._advance()
        self._under_way += 1
        return self._share

    def end_task(self, mark: float) -> float:
        """Return the share, in seconds, of the task with this mark."""
        self._advance()
        self._under_way -= 1
        return self._share - mark

    def _advance(self) -> None:
        now = self._clock()
        if self._under_way:
            self._share += (now - self._at) / self._under_way
        self._at = now
