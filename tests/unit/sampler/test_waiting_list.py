from __future__ import annotations

from pathlib import Path

from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import QueuedLoad, WaitingList


def load(name: str, arrived: float) -> QueuedLoad:
    version = LoadableVersion(name=name, path=Path("/", name))
    return QueuedLoad(version=version, weights=version, arrived=arrived)


def listed(*works: QueuedLoad) -> WaitingList:
    waiting = WaitingList()
    for work in works:
        waiting.add(work)
    return waiting


def test_the_oldest_are_the_first_of_each_version_in_the_order_in_which_they_came():
    b, a, c, later = load("b", 1.0), load("a", 2.0), load("c", 3.0), load("b", 4.0)
    waiting = listed(b, a, c, later)
    assert waiting.oldest == [b, a, c]
    assert waiting.take(b.version, lambda work: work.arrived < 2) == [b]
    assert waiting.oldest == [a, c, later]
    assert len(waiting) == len(list(waiting)) == 3


def test_a_version_that_nothing_waits_for_is_gone():
    work = load("a", 1.0)
    waiting = listed(work)
    assert waiting.take(work.version) == [work]
    assert waiting.take(work.version) == waiting.oldest == []
    assert len(waiting) == 0


def test_what_was_cancelled_is_dropped_wherever_it_waits():
    first, second, third = load("a", 1.0), load("b", 2.0), load("a", 3.0)
    waiting = listed(first, second, third)
    first.future.cancel()
    second.future.cancel()
    waiting.drop_cancelled()
    assert list(waiting) == [third]
