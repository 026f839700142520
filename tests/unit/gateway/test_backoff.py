from __future__ import annotations

import pytest

from gateway.workers.fleet import Backoff


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(*, uniform: float = 0.0) -> tuple[Backoff, Clock]:
    clock = Clock()
    return Backoff(cap=5, clock=clock, uniform=lambda: uniform), clock


def test_each_failure_in_a_row_doubles_the_wait_up_to_the_cap():
    backoff, _ = make()
    assert [backoff.failed() for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]
    assert backoff.failures == 6


def test_jitter_only_shortens_a_wait():
    backoff, _ = make(uniform=0.5)
    assert [backoff.failed() for _ in range(5)] == pytest.approx([0.45, 0.9, 1.8, 3.6, 4.5])


def test_a_stable_period_earns_a_fresh_start():
    backoff, clock = make()
    backoff.failed()
    backoff.failed()
    backoff.ready()
    clock.now += 60
    assert backoff.failed() == 0.5
    assert backoff.failures == 1


def test_a_short_life_does_not():
    backoff, clock = make()
    backoff.failed()
    backoff.ready()
    clock.now += 59
    assert backoff.failed() == 1
    clock.now += 1000  # not ready in between: that it did not run is no stability
    assert backoff.failed() == 2


def test_the_wait_stays_at_the_cap_for_ever():
    backoff, _ = make()
    assert {backoff.failed() for _ in range(5000)} == {0.5, 1, 2, 4, 5}
