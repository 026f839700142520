"""The samples of late: what usage counts of them, and what a trace shows of them.

Samples are not in the operation log, so that traces need a memory of them. It is short: the
last `_REMEMBERED` of all sessions, of this gateway's life.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.usage.meter import SharedClock, Subject, UsageMeter
from tandem.v1 import sampler_pb2

_REMEMBERED = 50_000


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """One sample at its engine. `started_at` in seconds since 1970; `error` is a type, empty
    for one that went well."""

    request_id: str
    session_id: str
    started_at: float
    seconds: float
    weight_version: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    error: str = ""


class SampleLog:
    def __init__(self, *, usage: UsageMeter) -> None:
        self._usage = usage
        self._spans: deque[SampleSpan] = deque(maxlen=_REMEMBERED)

    def of_session(self, session_id: str) -> list[SampleSpan]:
        """Those that are remembered, in the order of their ends."""
        return [span for span in self._spans if span.session_id == session_id]

    def note(self, span: SampleSpan, *, base_model: str, accelerator_seconds: float) -> None:
        self._spans.append(span)
        if span.error:
            return
        sampling_session_id = span.request_id.rpartition(":")[0]
        self._usage.record(
            "sample",
            Subject(id=sampling_session_id, session_id=span.session_id, base_model=base_model),
            input_tokens=span.prompt_tokens,
            cached_tokens=span.cached_tokens,
            output_tokens=span.sampled_tokens,
            accelerator_seconds=accelerator_seconds,
        )


@dataclass
class Measured:
    """Where the answer is put, if one comes."""

    reply: sampler_pb2.SampleReply | None = None


class SampleMeter:
    """Measures the samples of one engine."""

    def __init__(self, *, samples: SampleLog, base_model: str) -> None:
        self._samples = samples
        self._base_model = base_model
        self._clock = SharedClock()

    @contextmanager
    def measure(self, request: sampler_pb2.SampleRequest) -> Iterator[Measured]:
        """Around the call to the engine; what it put into `reply` is counted at the end."""
        measured = Measured()
        started_at, started = time.time(), time.monotonic()
        mark = self._clock.start()
        try:
            yield measured
        finally:
            self._samples.note(
                _span(request, measured.reply, started_at, time.monotonic() - started),
                base_model=self._base_model,
                accelerator_seconds=self._clock.stop(mark),
            )


def _span(
    request: sampler_pb2.SampleRequest,
    reply: sampler_pb2.SampleReply | None,
    started_at: float,
    seconds: float,
) -> SampleSpan:
    if reply is None or reply.HasField("failure"):
        return SampleSpan(
            request_id=request.operation_id,
            session_id=request.session_id,
            started_at=started_at,
            seconds=seconds,
            weight_version=request.version.name,
            error=reply.failure.type if reply is not None else "unanswered",
        )
    return SampleSpan(
        request_id=request.operation_id,
        session_id=request.session_id,
        started_at=started_at,
        seconds=seconds,
        weight_version=reply.version.name,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        sampled_tokens=reply.sampled_tokens,
    )
