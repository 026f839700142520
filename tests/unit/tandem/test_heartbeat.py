from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tandem.protocol.heartbeat import ProcessHeartbeat


@pytest.fixture
def heartbeats(clock) -> Iterator[ProcessHeartbeat]:
    heartbeats = ProcessHeartbeat(clock)
    yield heartbeats
    heartbeats.close()


def beat(heartbeats: ProcessHeartbeat) -> None:
    os.write(heartbeats.fd, b".")


def listen(heartbeats: ProcessHeartbeat, clock, *, seconds: float) -> float:
    """Listen twice a second. Return the silence at the end."""
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        silence = heartbeats.silence()
    return silence


def test_silence_is_the_time_since_the_last_heartbeat(heartbeats, clock):
    beat(heartbeats)
    assert heartbeats.silence() == 0
    assert listen(heartbeats, clock, seconds=7) == 7
    beat(heartbeats)
    assert heartbeats.silence() == 0


def test_who_starts_is_not_silent(heartbeats, clock):
    assert listen(heartbeats, clock, seconds=100) == 0


def test_while_nobody_listens_nobody_is_silent(heartbeats, clock):
    beat(heartbeats)
    heartbeats.silence()
    clock.now += 1000  # the machine stood still
    assert heartbeats.silence() <= 1
