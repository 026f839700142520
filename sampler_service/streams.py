"""What lies between the engine's thread and the reader of a stream.

The engine never waits for a reader. What a slow one has not taken is merged: one delta for each
sample, with all tokens that are new to this reader. So a stream holds at most as many bytes as
the answer that ends it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sampler_service.engine import EngineDelta, SampledTokens
from sampler_service.response import stop_reason
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2


@dataclass
class _Untold:
    """New tokens of one sample, as little-endian bytes."""

    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    topk_ids: bytearray = field(default_factory=bytearray)
    topk_logprobs: bytearray = field(default_factory=bytearray)
    finished: bool = False
    stopped: bool = False

    def add(self, new: SampledTokens, *, finished: bool) -> None:
        self.tokens += _bytes(new.tokens, "<i4")
        self.logprobs += _bytes(new.logprobs, "<f4")
        if new.topk is not None:
            self.topk_ids += _bytes(new.topk.token_ids, "<i4")
            self.topk_logprobs += _bytes(new.topk.logprobs, "<f4")
        self.finished, self.stopped = finished, new.stopped

    def message(self, index: int, *, topk: int) -> sampler_pb2.SampleDelta:
        delta = sampler_pb2.SampleDelta(
            index=index,
            tokens=bytes(self.tokens),
            logprobs=bytes(self.logprobs),
            finished=self.finished,
        )
        if self.finished:
            delta.stop_reason = stop_reason(stopped=self.stopped)
        if topk:
            delta.topk.CopyFrom(
                tinker_pb2.TopkLogprobs(
                    token_ids=bytes(self.topk_ids),
                    logprobs=bytes(self.topk_logprobs),
                    k=topk,
                    length=len(self.tokens) // 4,
                )
            )
        return delta


class StreamBuffer:
    """Literal use: give `buffer.add` to the scheduler, `buffer.close` to whoever knows the end, and
    in the event loop `while deltas := await buffer.take(): ...`.

    `copies` is how many samples the engine's sample 0 stands for (greedy samples are all alike).
    """

    def __init__(
        self, *, topk: int, copies: int = 1, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._topk = topk
        self._copies = copies
        self._loop = loop or asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._untold: dict[int, _Untold] = {}
        self._waking = False
        self._closed = False
        self._news = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes of tokens and logprobs that the reader has not taken."""
        with self._lock:
            return sum(
                len(part)
                for u in self._untold.values()
                for part in (u.tokens, u.logprobs, u.topk_ids, u.topk_logprobs)
            )

    def add(self, deltas: Sequence[EngineDelta]) -> None:
        """From any thread. Wakes the reader once for all that it finds."""
        with self._lock:
            for delta in deltas:
                untold = self._untold.setdefault(delta.index, _Untold())
                untold.add(delta.new, finished=delta.finished)
            wake, self._waking = not self._waking, True
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """In the event loop: nothing more will come."""
        self._closed = True
        self._news.set()

    async def take(self) -> list[sampler_pb2.SampleDelta]:
        """What is new, by sample; waits for something. Empty at the end."""
        while True:
            self._news.clear()
            with self._lock:
                untold, self._untold = self._untold, {}
                self._waking = False
            if untold or self._closed:
                break
            await self._news.wait()
        return [
            new.message(copy, topk=self._topk)
            for index, new in sorted(untold.items())
            for copy in (range(self._copies) if self._copies > 1 else (index,))
        ]


def _bytes(values: npt.NDArray[np.int32] | npt.NDArray[np.float32], dtype: str) -> bytes:
    return values.astype(dtype, copy=False).tobytes()
