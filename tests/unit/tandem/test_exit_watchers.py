"""Watchers of a launcher hear of each exit once."""

from __future__ import annotations

from tandem.protocol.exit_watchers import ExitWatchers
from tandem.protocol.worker import WorkerExit

FIRST, SECOND = (WorkerExit(worker_id=name, reason="killed") for name in ("w-1", "w-2"))


async def test_a_watcher_hears_of_exits_before_and_after_it_came():
    watchers = ExitWatchers()
    exits = watchers.watch_exits([FIRST])
    watchers.tell(SECOND)
    watchers.close()
    assert [each async for each in exits] == [FIRST, SECOND]
    assert len(watchers) == 0


def test_a_watcher_that_never_began_to_read_leaves_with_its_iterator():
    watchers = ExitWatchers()
    exits = watchers.watch_exits()
    assert len(watchers) == 1
    del exits
    assert len(watchers) == 0
