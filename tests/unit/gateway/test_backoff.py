from __future__ import annotations

import pytest

from gateway.workers.demand import Backoff


def make(*, uniform: float = 0.0) -> Backoff:
    return Backoff(cap=5, uniform=lambda: uniform)


def test_the_first_failure_costs_no_wait_and_each_later_one_doubles_it_up_to_the_cap():
    backoff = make()
    assert [backoff.failed() for _ in range(7)] == [0, 0.5, 1, 2, 4, 5, 5]
    assert backoff.failures == 7


def test_jitter_only_shortens_a_wait():
    backoff = make(uniform=0.5)
    assert [backoff.failed() for _ in range(5)] == pytest.approx([0, 0.45, 0.9, 1.8, 3.6])


def test_work_earns_a_fresh_start():
    backoff = make()
    backoff.failed()
    backoff.failed()
    backoff.worked()
    assert backoff.failed() == 0
    assert backoff.failures == 1


def test_the_wait_stays_at_the_cap_for_ever():
    backoff = make()
    assert {backoff.failed() for _ in range(5000)} == {0, 0.5, 1, 2, 4, 5}
