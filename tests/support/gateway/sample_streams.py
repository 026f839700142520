"""Answers of the fake samplers to a stream of samples, each request separately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from tandem.v1 import sampler_pb2

Answer = Callable[[sampler_pb2.SampleRequest], Awaitable[sampler_pb2.SampleReply]]


async def answered(
    batches: AsyncIterator[sampler_pb2.SampleRequests], answer: Answer
) -> AsyncIterator[sampler_pb2.SampleReplies]:
    """Yield each reply when it is ready. An error ends the stream."""
    tasks: dict[int, asyncio.Task[None]] = {}
    ready: asyncio.Queue[sampler_pb2.SampleReply | Exception | None] = asyncio.Queue()

    async def reply(request: sampler_pb2.SampleRequest) -> None:
        try:
            found = await answer(request)
            found.number = request.number
            ready.put_nowait(found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the stream
            ready.put_nowait(error)

    async def read() -> None:
        async for batch in batches:
            for request in batch.requests:
                tasks[request.number] = asyncio.create_task(reply(request))
            for number in batch.cancelled:
                tasks[number].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        ready.put_nowait(None)

    reading = asyncio.create_task(read())
    try:
        while (found := await ready.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield sampler_pb2.SampleReplies(replies=[found])
    finally:
        for task in (reading, *tasks.values()):
            task.cancel()
