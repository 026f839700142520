"""One gateway's open sample requests and the replies to them.

Both travel in batches, because a gRPC call costs as much as a short sample."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial

from sampler_service.work import Sampled
from tandem.v1 import sampler_pb2

_BATCH_BYTES = 4 * 2**20
"""The approximate size of a batch of replies."""

Encode = Callable[[Future[Sampled]], sampler_pb2.SampleReply]
"""Encodes the result of a request that was not cancelled."""


class SampleQueue:
    """Use: the reader calls `expect_result`, `expect_late` or `put` for each request, and `cancel`.
    The writer runs `while batch := await stream.next_replies(): ...`. At the end, call `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, Future[Sampled] | asyncio.Task[sampler_pb2.SampleReply]] = {}
        self._ended: deque[tuple[int, Future[Sampled], Encode]] = deque()
        self._ready: deque[sampler_pb2.SampleReply] = deque()
        self._changed = asyncio.Event()
        self._notified = False
        self._complete = False

    def expect_result(self, number: int, answer: Future[Sampled], encode: Encode) -> None:
        """Expect the engine's result for a request."""
        self._under_way[number] = answer
        answer.add_done_callback(partial(self._note_end, number, encode))

    def expect_late(
        self, number: int, answer: Coroutine[None, None, sampler_pb2.SampleReply]
    ) -> None:
        """Expect the reply to a request that the engine does not have yet."""

        def replied(task: asyncio.Task[sampler_pb2.SampleReply]) -> None:
            if not task.cancelled():
                self.put(number, task.result())

        task = self._loop.create_task(answer)
        self._under_way[number] = task
        task.add_done_callback(replied)

    def put(self, number: int, reply: sampler_pb2.SampleReply) -> None:
        self._under_way.pop(number, None)
        reply.number = number
        self._ready.append(reply)
        self._changed.set()

    def cancel(self, number: int) -> None:
        if (answer := self._under_way.pop(number, None)) is not None:
            answer.cancel()

    def complete(self) -> None:
        """Expect no more requests. `next_replies` returns None after the last reply."""
        self._complete = True
        self._changed.set()

    def close(self) -> None:
        for number in [*self._under_way]:
            self.cancel(number)

    async def next_replies(self) -> sampler_pb2.SampleReplies | None:
        """Wait for replies. None at the end."""
        while True:
            self._changed.clear()
            # Reset before the look, so that a later result wakes this again.
            self._notified = False
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
                    continue  # cancelled meanwhile
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
        """Note a result, in the engine's thread. The writer is woken once per batch."""
        if answer.cancelled():
            return
        self._ended.append((number, answer, encode))
        if not self._notified and not self._loop.is_closed():
            self._notified = True
            self._loop.call_soon_threadsafe(self._changed.set)
