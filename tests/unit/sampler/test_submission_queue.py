from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sampler_service import work
from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import QueuedLoad, SubmissionQueue
from tandem.errors import WorkerDied


def load(name: str) -> QueuedLoad:
    version = LoadableVersion(name=name, path=Path("/", name))
    return QueuedLoad(version=version, weights=version, arrived=0.0)


@pytest.mark.parametrize("notified", [False, True])
def test_an_idle_engine_takes_a_burst_as_a_whole_in_its_order(monkeypatch, notified):
    queue, burst = SubmissionQueue(), [load(name) for name in "abc"]
    later = iter(burst[1:])
    monkeypatch.setattr(
        work.time, "sleep", lambda _: [queue.put(each) for each in (next(later, None),) if each]
    )
    if notified:
        queue.notify()
    queue.put(burst[0])
    assert queue.take_submissions(wait=True) == burst


def test_a_busy_engine_waits_for_nothing():
    queue, only = SubmissionQueue(), load("a")
    assert queue.take_submissions(wait=False) == []
    queue.put(only)
    assert queue.take_submissions(wait=False) == [only]


def test_an_idle_engine_waits_for_a_notification_a_cancellation_or_its_time():
    queue, only = SubmissionQueue(), load("a")
    queue.put(only)
    assert queue.take_submissions(wait=True) == [only]
    assert queue.take_submissions(wait=True, seconds=0.01) == []
    for wake in (queue.notify, only.future.cancel):
        timer = threading.Timer(0.01, wake)
        timer.start()
        assert queue.take_submissions(wait=True) == []
        timer.join()


def test_a_closed_queue_fails_earlier_and_later_work():
    queue, earlier, later = SubmissionQueue(), load("a"), load("b")
    queue.put(earlier)
    queue.close(WorkerDied("the engine failed"))
    queue.put(later)
    for each in (earlier, later):
        with pytest.raises(WorkerDied, match="the engine failed"):
            each.future.result(timeout=0)
