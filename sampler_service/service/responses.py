"""Encodes results for clients, and buffers the deltas of streams.

Arrays are little-endian: tokens int32, logprobs float32, NaN for a missing logprob. The buffer
merges unread tokens into one delta per sample. So the engine never waits for a reader, and the
buffer never exceeds the final response."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from sampler_service.engine import (
    EngineDelta,
    EngineResult,
    Float32Array,
    Int32Array,
    SampledTokens,
    TopK,
)
from sampler_service.service.request_parser import ParsedRequest
from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import Sampled
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire

Runs = Sequence[wire.TandemVersionRun]
"""The versions of a sample's tokens, each with its number of tokens."""


def versions_of(sampled: Sampled) -> list[Runs]:
    return [_runs(sample, sampled.versions) for sample in sampled.result.samples]


def _runs(sample: SampledTokens, versions: Sequence[LoadableVersion]) -> Runs:
    ends = [*sample.carried_at, len(sample.tokens)]
    counts = [end - start for start, end in pairwise([0, *ends])]
    # A sample that ended early has no tokens of the last versions.
    return [
        wire.TandemVersionRun(version=version.name, step=version.step, tokens=count)
        for version, count in zip(versions, counts, strict=False)
        if count
    ]


def encode_response(
    result: EngineResult, *, version: str, parsed: ParsedRequest, versions: Sequence[Runs] = ()
) -> bytes:
    """Return a `tandem.wire.v1.SampleResponse` with the requested parts.

    `versions` lists the versions of each sample."""
    message = wire.SampleResponse(
        sequences=[
            _sequence(sample, runs) for sample, runs in zip_longest(result.samples, versions)
        ],
        prompt_cache_hit_tokens=result.cached_tokens,
        tandem_weight_version=version,
    )
    prompt = result.prompt
    if prompt is None:
        return message.SerializeToString()
    if parsed.prompt_logprobs and prompt.logprobs is not None:
        message.prompt_logprobs = _bytes(prompt.logprobs)
    if prompt.topk is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(prompt.topk))
    if parsed.targets is not None and prompt.targets is not None:
        message.target_prompt_logprobs.CopyFrom(parsed.targets.answer(prompt.targets))
    if prompt.draws is not None:
        message.prompt_alt_tokens.CopyFrom(_draws(prompt.draws))
    return message.SerializeToString()


def _sequence(sample: SampledTokens, runs: Runs | None) -> wire.SampledSequence:
    return wire.SampledSequence(
        stop_reason=_stop_reason(stopped=sample.stopped),
        tokens=_bytes(sample.tokens),
        logprobs=_bytes(sample.logprobs),
        topk_sampled_logprobs=_topk(sample.topk) if sample.topk is not None else None,
        tandem_versions=runs,
    )


def _stop_reason(*, stopped: bool) -> wire.StopReason.ValueType:
    return wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH


def _topk(topk: TopK) -> wire.TopkLogprobs:
    length, k = topk.token_ids.shape
    return wire.TopkLogprobs(
        token_ids=_bytes(topk.token_ids),
        logprobs=_bytes(topk.logprobs),
        k=k,
        length=length,
    )


def _draws(draws: TopK) -> wire.PromptAltTokens:
    """Encode two tensors [prompt - 1, k]. The SDK widens int32 tokens."""
    return wire.PromptAltTokens(
        tokens=wire.Tensor(
            dense=_bytes(draws.token_ids),
            dtype=wire.DTYPE_INT32,
            shape=draws.token_ids.shape,
        ),
        logprobs=wire.Tensor(
            dense=_bytes(draws.logprobs),
            dtype=wire.DTYPE_FLOAT32,
            shape=draws.logprobs.shape,
        ),
    )


def _bytes(values: Int32Array | Float32Array) -> bytes:
    return values.tobytes()  # all hosts of vLLM are little-endian


# --- Streams -----------------------------------------------------------------------------


@dataclass
class _Unsent:
    """Unread tokens of one sample and version, as little-endian bytes."""

    version: str
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    topk_ids: bytearray = field(default_factory=bytearray)
    topk_logprobs: bytearray = field(default_factory=bytearray)
    finished: bool = False
    stopped: bool = False

    def append_tokens(self, new: SampledTokens, *, finished: bool) -> None:
        self.tokens += _bytes(new.tokens)
        self.logprobs += _bytes(new.logprobs)
        if new.topk is not None:
            self.topk_ids += _bytes(new.topk.token_ids)
            self.topk_logprobs += _bytes(new.topk.logprobs)
        self.finished, self.stopped = finished, new.stopped

    def message(self, index: int, *, topk: int) -> sampler_pb2.SampleDelta:
        delta = sampler_pb2.SampleDelta(
            index=index,
            tokens=bytes(self.tokens),
            logprobs=bytes(self.logprobs),
            finished=self.finished,
            version=self.version,
        )
        if self.finished:
            delta.stop_reason = _stop_reason(stopped=self.stopped)
        if topk:
            delta.topk.CopyFrom(
                wire.TopkLogprobs(
                    token_ids=bytes(self.topk_ids),
                    logprobs=bytes(self.topk_logprobs),
                    k=topk,
                    length=len(self.tokens) // 4,
                )
            )
        return delta


class StreamBuffer:
    """Use: the scheduler calls `buffer.add_deltas`, the end of the request `buffer.close`, and the
    reader `while deltas := await buffer.next_deltas(): ...`."""

    def __init__(
        self, *, topk: int, copies: int = 1, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """`topk` alternatives per token. Sample 0 stands for `copies` equal, greedy samples."""
        self._topk = topk
        self._copies = copies
        self._loop = loop or asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._unsent: dict[int, list[_Unsent]] = {}
        self._notified = False
        self._closed = False
        self._changed = asyncio.Event()

    def add_deltas(self, deltas: Sequence[EngineDelta], version: LoadableVersion) -> None:
        """Add deltas from any thread. The reader is woken once per batch."""
        with self._lock:
            for delta in deltas:
                unsent = self._unsent.setdefault(delta.index, [])
                if not unsent or unsent[-1].version != version.name:
                    unsent.append(_Unsent(version.name))
                unsent[-1].append_tokens(delta.new, finished=delta.finished)
            notify, self._notified = not self._notified, True
        if notify and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """End the stream. Call it in the event loop."""
        self._closed = True
        self._changed.set()

    async def next_deltas(self) -> list[sampler_pb2.SampleDelta]:
        """Wait for new deltas, merged by sample and version. Empty at the end."""
        while True:
            self._changed.clear()
            with self._lock:
                unsent, self._unsent = self._unsent, {}
                self._notified = False
            if unsent or self._closed:
                break
            await self._changed.wait()
        return [
            new.message(copy, topk=self._topk)
            for index, parts in sorted(unsent.items())
            for new in parts
            for copy in (range(self._copies) if self._copies > 1 else (index,))
        ]
