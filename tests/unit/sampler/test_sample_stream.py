from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from sampler_service.service.sample_stream import SampleQueue
from tandem.v1 import sampler_pb2


def encoded(answer: Future[bytes]) -> sampler_pb2.SampleReply:
    return sampler_pb2.SampleReply(response=answer.result())


def asked(stream: SampleQueue, *numbers: int) -> dict[int, Future[bytes]]:
    answers: dict[int, Future[bytes]] = {number: Future() for number in numbers}
    for number, answer in answers.items():
        stream.expect_result(number, answer, encoded)
    return answers


def numbers_of(batch: sampler_pb2.SampleReplies | None) -> list[int]:
    assert batch is not None
    return [reply.number for reply in batch.replies]


async def test_what_a_step_of_the_engine_ends_is_one_message():
    stream = SampleQueue()
    answers = asked(stream, 1, 2, 3)
    waiting = asyncio.create_task(stream.next_replies())
    await asyncio.sleep(0)

    def step() -> None:
        for number in (3, 1):
            answers[number].set_result(b"%d" % number)

    with ThreadPoolExecutor() as engine:
        engine.submit(step).result()
    batch = await waiting
    assert numbers_of(batch) == [3, 1]
    assert [reply.response for reply in batch.replies] == [b"3", b"1"]


async def test_a_cancelled_request_is_dropped_and_the_others_are_answered():
    stream = SampleQueue()
    answers = asked(stream, 1, 2)
    stream.cancel(1)
    stream.cancel(7)  # has ended long ago
    answers[2].set_result(b"two")
    stream.complete()
    assert answers[1].cancelled()
    assert numbers_of(await stream.next_replies()) == [2]
    assert await stream.next_replies() is None


async def test_a_stream_that_expects_no_more_ends_with_its_last_reply():
    async def late() -> sampler_pb2.SampleReply:
        return sampler_pb2.SampleReply(response=b"late")

    stream = SampleQueue()
    stream.expect_late(5, late())
    stream.complete()
    assert numbers_of(await stream.next_replies()) == [5]
    assert await stream.next_replies() is None


async def test_large_replies_are_messages_of_their_own():
    stream = SampleQueue()
    for number, answer in asked(stream, 1, 2, 3).items():
        answer.set_result(bytes(3 * 2**20) if number < 3 else b"")
    assert [numbers_of(await stream.next_replies()) for _ in range(2)] == [[1, 2], [3]]


async def test_what_has_not_ended_when_a_stream_breaks_is_cancelled():
    stream = SampleQueue()
    answers = asked(stream, 1, 2)
    late = asyncio.Event()
    stream.expect_late(3, late.wait())  # type: ignore[arg-type]
    stream.close()
    stream.complete()
    assert all(answer.cancelled() for answer in answers.values())
    assert await stream.next_replies() is None
