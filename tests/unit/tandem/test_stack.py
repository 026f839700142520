"""When a gateway or an agent that ended is started again. No process is started here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.stack import _Supervised


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def supervised(clock: Clock) -> _Supervised:
    return _Supervised(
        name="gateway", command=[], environment={}, log_path=Path("none"), patience=10, clock=clock
    )


def test_the_waits_double_with_each_end_of_the_last_minute(supervised, clock):
    waits = []
    for _ in range(4):
        supervised.note_end()
        waits.append(supervised.due - clock.now)
    assert waits == [0.25, 0.5, 1, 2]
    clock.now += 61
    assert supervised.note_end() == 1
    assert supervised.due - clock.now == 0.25


def test_only_the_ends_of_the_last_minute_are_counted(supervised, clock):
    counted = []
    for _ in range(8):
        counted.append(supervised.note_end())
        clock.now += 20
    assert counted == [1, 2, 3, 4, 4, 4, 4, 4], "one every 20 s is never five within a minute"


def test_nothing_is_started_before_its_time(supervised, clock):
    supervised.start = lambda: started.append(clock.now)
    started: list[float] = []
    supervised.note_end()
    supervised.start_when_due()
    assert started == []
    clock.now = supervised.due
    supervised.start_when_due()
    assert started == [clock.now]
