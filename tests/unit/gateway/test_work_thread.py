from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.storage.work_thread import WorkThread
from tests.support.waiting import PATIENCE


@pytest.fixture
def thread():
    thread = WorkThread("work")
    yield thread
    thread.shutdown()


async def test_work_is_done_in_order_in_one_thread_and_its_results_come_back(thread):
    done = []

    def work(number: int) -> tuple[int, str]:
        done.append(number)
        return number, threading.current_thread().name

    results = await asyncio.gather(*(thread.run(lambda n=n: work(n)) for n in range(50)))
    assert results == [(number, "work") for number in range(50)]
    assert done == list(range(50))


async def test_what_the_work_raises_is_raised_to_whoever_waits_and_the_thread_goes_on(thread):
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(lambda: 2) == 2


async def test_work_whose_caller_was_cancelled_is_done_all_the_same(thread):
    go, done = threading.Event(), []
    waiting = thread.run(lambda: done.append(go.wait(PATIENCE)))
    waiting.cancel()
    go.set()
    await thread.run(lambda: None)
    assert done == [True]


def test_a_loop_that_is_closed_meanwhile_does_not_end_the_thread(thread):
    go, done = threading.Event(), []

    async def leave() -> None:
        thread.run(lambda: go.wait(PATIENCE))

    asyncio.run(leave())
    go.set()

    async def come_again() -> None:
        done.append(await thread.run(lambda: "again"))

    asyncio.run(come_again())
    assert done == ["again"]


def test_a_thread_that_was_given_nothing_ends_at_once():
    WorkThread("idle").shutdown()
