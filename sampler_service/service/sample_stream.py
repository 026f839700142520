"""The requests of one caller on their way to the engine, and the replies on their way back.

Both go in batches: whatever has arrived, and whatever the engine's last step has ended. Nothing of
it is done request by request by gRPC, whose price for a call is that of a short sample.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from sampler_service.work import Sampled
from tandem.v1 import sampler_pb2

_BATCH_BYTES = 4 * 2**20
"""Of replies, about so many go as one message; a single one may be larger."""

Encode = Callable[[Future[Sampled]], sampler_pb2.SampleReply]
"""Returns the reply to a request that has ended; not called for one that was cancelled."""


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class SampleStream:
    """Use: the reader of the requests calls `add`, `add_late` or `put` for each of them,
    and `cancel`; the writer `while batch := await stream.take(): ...`; at the end, `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, _Cancellable] = {}
        self._ended: deque[tuple[int, Future[Sampled], Encode]] = deque()
        self._ready: deque[sampler_pb2.SampleReply] = deque()
        self._changed = asyncio.Event()
        self._notified = False
        self._complete = False

    def add(self, number: int, answer: Future[Sampled], encode: Encode) -> None:
        """Expect the answer of the engine to a request."""
        self._under_way[number] = answer
        answer.add_done_callback(partial(self._note_end, number, encode))

    def add_late(self, number: int, answer: Coroutine[None, None, sampler_pb2.SampleReply]) -> None:
        """Expect the reply to a request that is not with the engine yet."""

        def replied(task: asyncio.Task[sampler_pb2.SampleReply]) -> None:
            if not task.cancelled():
                self.put(number, task.result())

        task = self._loop.create_task(answer)
        self._under_way[number] = task
        task.add_done_callback(replied)

    def put(self, number: int, reply: sampler_pb2.SampleReply) -> None:
        """Send a reply."""
        self._under_way.pop(number, None)
        reply.number = number
        self._ready.append(reply)
        self._changed.set()

    def cancel(self, number: int) -> None:
        """Drop a request, if it has not ended."""
        if (answer := self._under_way.pop(number, None)) is not None:
            answer.cancel()

    def complete(self) -> None:
        """Expect no more requests: `take` returns nothing once all have their replies."""
        self._complete = True
        self._changed.set()

    def close(self) -> None:
        """Drop all that has not ended."""
        for number in [*self._under_way]:
            self.cancel(number)

    async def take(self) -> sampler_pb2.SampleReplies | None:
        """Return the replies that are there, waiting for one if need be; None at the end."""
        while True:
            self._changed.clear()
            self._notified = False  # before the look, so that what ends meanwhile wakes us again
            if (batch := self._batch()).replies:
                return batch
            if self._complete and not self._under_way:
                return None
            await self._changed.wait()

    def _batch(self) -> sampler_pb2.SampleReplies:
        batch, size = sampler_pb2.SampleReplies(), 0
        while (self._ended or self._ready) and size < _BATCH_BYTES:
            if self._ended:
                number, answer, encode = self._ended.popleft()
                if self._under_way.pop(number, None) is None:
                    continue  # cancelled at the last moment
                reply = encode(answer)
                reply.number = number
            else:
                reply = self._ready.popleft()
            batch.replies.append(reply)
            size += len(reply.response)
        if self._ended or self._ready:
            self._changed.set()
        return batch

    def _note_end(self, number: int, encode: Encode, answer: Future[Sampled]) -> None:
        """Note that an answer is there, in the engine's thread; wake the writer once for all that
        it will find."""
        if answer.cancelled():
            return
        self._ended.append((number, answer, encode))
        if not self._notified and not self._loop.is_closed():
            self._notified = True
            self._loop.call_soon_threadsafe(self._changed.set)
