"""Messages of samples to an engine: a burst that begins in several turns of the loop forms one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.workers import sampler_client
from gateway.workers.sampler_client import SampleStream
from tandem.v1 import sampler_pb2

WORKER: Any = SimpleNamespace(lease=0, handle=SimpleNamespace(kind="sampler"), metadata=())


class Engine:
    """Notes the size of each message, and answers its requests."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def Sample(
        self, batches: AsyncIterator[sampler_pb2.SampleRequests], **_about: object
    ) -> AsyncIterator[sampler_pb2.SampleReplies]:
        async for batch in batches:
            self.sizes.append(len(batch.requests))
            replies = [sampler_pb2.SampleReply(number=each.number) for each in batch.requests]
            yield sampler_pb2.SampleReplies(replies=replies)


async def send(engine: Any, *, turns: int, each: int) -> None:
    """Send `each` requests in each of `turns` turns of the loop. Return after their answers."""
    stream, answers = SampleStream(WORKER, engine), []
    for _ in range(turns):
        answers += [stream.send(sampler_pb2.SampleRequest()) for _ in range(each)]
        await asyncio.sleep(0)
    await asyncio.gather(*answers)
    stream.end()


@pytest.mark.parametrize(("turns", "each", "sizes"), [(1, 1, [1]), (4, 8, [32]), (1, 100, [100])])
async def test_requests_of_successive_turns_form_one_message(turns, each, sizes):
    engine = Engine()
    await send(engine, turns=turns, each=each)
    assert engine.sizes == sizes


async def test_a_full_message_waits_for_no_more(monkeypatch):
    monkeypatch.setattr(sampler_client, "_FULL", 16)
    engine = Engine()
    await send(engine, turns=8, each=8)
    assert engine.sizes == [16, 16, 16, 16]
