"""Meters samples, and remembers the recent ones for traces.

Samples are not in the journal of any run, so traces need a memory of them: the last
`_REMEMBERED` of all sessions, since the gateway started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.usage.meter import Subject, UsageMeter
from tandem.v1 import common_pb2, sampler_pb2

_REMEMBERED = 50_000


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """One sample at its engine. `started_at` is in seconds since 1970; `error` is the type of
    the error, empty for a sample that succeeded."""

    request_id: str
    session_id: str
    started_at: float
    seconds: float
    weight_version: str
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    error: str


class RecentSamples:
    def __init__(self, *, usage: UsageMeter) -> None:
        self._usage = usage
        self._spans: deque[SampleSpan] = deque(maxlen=_REMEMBERED)

    def of_session(self, session_id: str) -> list[SampleSpan]:
        """Return those that are remembered, in the order in which they ended."""
        return [span for span in self._spans if span.session_id == session_id]

    def add(self, span: SampleSpan, *, base_model: str, accelerator_seconds: float) -> None:
        """Remember a sample, and count it if it succeeded."""
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


class EngineMeter:
    """Measures the samples of one engine."""

    def __init__(self, *, samples: RecentSamples, base_model: str) -> None:
        self._samples = samples
        self._base_model = base_model
        self._shares = TimeShares()

    async def measure(
        self, request: sampler_pb2.SampleRequest, answer: Awaitable[sampler_pb2.SampleReply]
    ) -> sampler_pb2.SampleReply:
        """Await the engine's answer to a request, and count what the sample used."""
        reply = sampler_pb2.SampleReply(failure=common_pb2.Failure(type="unanswered"))
        started_at, started = time.time(), time.monotonic()
        mark = self._shares.start()
        try:
            reply = await answer
            return reply
        finally:
            self._samples.add(
                SampleSpan(
                    request_id=request.operation_id,
                    session_id=request.session_id,
                    started_at=started_at,
                    seconds=time.monotonic() - started,
                    weight_version=reply.version.name or request.version.name,
                    prompt_tokens=reply.prompt_tokens,
                    cached_tokens=reply.cached_tokens,
                    sampled_tokens=reply.sampled_tokens,
                    error=reply.failure.type,
                ),
                base_model=self._base_model,
                accelerator_seconds=self._shares.stop(mark),
            )


class TimeShares:
    """Shares the time in which a worker is busy between the things that it works on at once.

    While n things are under way, each gets 1/n of the time that passes, so that all shares add
    up to the time in which there was any. The cost does not depend on n.

    Literal example: two samples that begin together and take 4 s each get 2 s each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        self._share = 0.0
        self._at = clock()

    def start(self) -> float:
        """Return the mark to pass to `stop`."""
        self._advance()
        self._under_way += 1
        return self._share

    def stop(self, mark: float) -> float:
        """Return the share, in seconds, of what was started with this mark."""
        self._advance()
        self._under_way -= 1
        return self._share - mark

    def _advance(self) -> None:
        now = self._clock()
        if self._under_way:
            self._share += (now - self._at) / self._under_way
        self._at = now
