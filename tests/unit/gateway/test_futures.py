from __future__ import annotations

import asyncio
import gc

import pytest

from gateway.metrics import Metrics
from gateway.storage.futures import table
from gateway.storage.futures.completion_feed import CompletionFeed, Target
from gateway.storage.futures.table import Future, FutureTable, Result
from tests.support.work import calls_in

DONE = Result(media="json", body=b"{}")
MANY = 3000


@pytest.fixture
async def futures(tmp_path):
    return FutureTable(
        folder=tmp_path,
        result_ttl=3600,
        bytes_in_memory=2**20,
        max_samples=100,
        metrics=Metrics(),
    )


def new(futures, name: object, *, source: str = "operation") -> Future:
    return futures.add(Future(request_id=f"r:{name}", source=source, describe=lambda: None))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_sweep_does_not_look_at_what_stays(futures):
    few = calls_in(futures.sweep)
    for number in range(MANY):
        new(futures, number)
    for number in range(MANY, MANY + 100):
        new(futures, number, source="sample").resolve(DONE)
    await settle()
    assert calls_in(futures.sweep) < few + 10
    assert len(futures) == MANY + 100


async def test_thousands_of_long_polls_share_no_future(futures):
    waiting = [
        asyncio.create_task(futures.wait(new(futures, number), timeout=60))
        for number in range(MANY)
    ]
    await settle()
    callbacks = [len(f._callbacks or ()) for f in gc.get_objects() if type(f) is asyncio.Future]
    assert max(callbacks) < 10
    futures.get("r:7").resolve(DONE)
    assert await waiting[7] == DONE
    futures.release_waiters()
    assert set(await asyncio.gather(*waiting)) == {DONE, None}
    assert await futures.wait(futures.get("r:8"), timeout=60) is None


async def test_a_result_leaves_a_while_after_it_was_fetched_or_was_not(futures, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(table.time, "monotonic", lambda: now[0])
    operation, sample, fetched = (
        new(futures, source, source=source.partition("-")[0])
        for source in ("operation", "sample", "sample-fetched")
    )
    unfinished = new(futures, "unfinished")
    for future in (operation, sample, fetched):
        future.resolve(DONE)
    futures.note_fetched(fetched)  # before the table knows its end
    await settle()
    now[0] += 20
    futures.note_fetched(fetched)  # again
    assert futures.sweep() == []
    now[0] += 11
    assert futures.sweep() == [operation]
    now[0] += 20
    assert futures.sweep() == [fetched]
    now[0] += 3600
    assert futures.sweep() == [sample]
    now[0] += 10 * 3600
    assert futures.sweep() == []
    assert futures.get("r:unfinished") is unfinished and len(futures) == 1


async def test_what_is_dropped_in_the_moment_of_its_end_leaves_nothing_behind(futures):
    sample = new(futures, "sample", source="sample")
    sample.resolve(Result(media="protobuf", body=b"x" * 5000))
    futures.forget(sample.request_id)
    await settle()
    assert (len(futures), futures.bytes_held, futures.sweep()) == (0, 0, [])


async def test_a_client_that_never_moves_its_cursor_is_told_of_the_newest_samples(futures):
    feed = CompletionFeed(futures=futures, idle_ttl=3600)
    target = Target("s-1:sample:0", client=0)
    assert await feed.poll(target, after=0, timeout=0, retrieved=()) is not None
    names = [f"s-1:sample:0:{number}" for number in range(MANY)]
    for name in names:
        future = futures.add(Future(request_id=name, source="sample", describe=lambda: None))
        feed.watch(future)
        future.resolve(DONE)
    await settle()
    completions, _cursor = await feed.poll(target, after=0, timeout=0, retrieved=())
    assert [done.request_id for done in completions] == names[-futures.max_samples :]
    assert all(futures.get(done.request_id) is not None for done in completions)
