"""The progress of a run: its step, percent and time left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.runs.record.metrics import MetricsRow
from gateway.runs.record.progress import RecordIndex, StepProgress

TOTAL = {"total_steps": 10}


def after(index, *steps, now, by_user=True):
    rows = [MetricsRow(step, {}) for step in steps]
    return replace(index, updated_at=now).with_rows(rows, {}, by_user=by_user)


def run_of(*moments):
    """The index after steps that arrive at moments."""
    index = RecordIndex("s-1:train:0")
    for step, now in moments:
        index = after(index, step, now=now)
    return index


def test_a_run_without_a_step_has_no_progress():
    assert RecordIndex("s-1:train:0").progress(TOTAL) is None


def test_the_users_reward_replaces_the_mean_of_the_rollouts_in_either_order():
    rows = [MetricsRow(1, {}, 1.0)]
    for first, then in [("reward", "tandem/reward"), ("tandem/reward", "reward")]:
        index = RecordIndex("s-1:train:0").with_rows(rows, {first: 0.5}, by_user=True)
        assert index.last == {first: 0.5}
        assert set(index.with_rows(rows, {then: 0.5}, by_user=True).last) == {"reward"}


def test_percent_and_time_left_come_from_the_declared_number_of_steps():
    told = run_of((1, 100.0), (2, 104.0)).progress(TOTAL)
    assert told == StepProgress(2, 10, 20.0, 32.0, 104.0)


def test_a_run_that_counts_from_0_is_complete_with_its_last_step():
    told = run_of(*((step, step) for step in range(10))).progress(TOTAL)
    assert (told.step, told.percent, told.eta_seconds) == (9, 100.0, 0.0)


@pytest.mark.parametrize("config", [None, {}, {"total_steps": "ten"}, {"total_steps": True}])
def test_without_a_number_of_steps_only_the_step_is_known(config):
    assert run_of((1, 1.0), (2, 2.0)).progress(config) == StepProgress(2, None, None, None, 2.0)


@pytest.mark.parametrize("total", [0, -1, float("nan"), float("inf"), 2**60])
def test_an_absurd_number_of_steps_is_passed_over(total):
    assert run_of((1, 1.0)).progress({"total_steps": total}).percent is None


def test_the_step_never_falls_when_a_loop_logs_earlier_steps_again():
    index = run_of((5, 10.0), (3, 11.0), (4, 12.0))
    assert (index.step, index.progress(TOTAL).percent) == (5, 50.0)
    assert run_of((5, 10.0), (12, 20.0)).progress(TOTAL).percent == 100.0


def test_a_clock_that_jumps_back_gives_no_negative_time():
    told = run_of((1, 100.0), (2, 50.0), (3, 51.0)).progress(TOTAL)
    assert told.eta_seconds is not None and told.eta_seconds >= 0


def test_a_batch_of_steps_counts_the_time_since_the_last_one():
    index = after(run_of((1, 0.0)), 2, 3, 4, 5, now=8.0)
    assert (index.step, index.pace, index.first_step) == (5, 2.0, 1)


def test_the_optimizers_steps_count_until_the_user_logs():
    index = after(RecordIndex("s-1:train:0"), 7, now=1.0, by_user=False)
    assert index.progress(TOTAL).step == 7
    index = after(index, 0, now=2.0)
    assert (index.step, index.first_step, index.by_user) == (0, 0, True)
    assert after(index, 9, now=3.0, by_user=False).step == 0
