"""Where the time of a step went: `time_shares` and the timelines that feed it."""

from __future__ import annotations

import random

import pytest

from gateway.owners.usage.time_shares import SHARES, Span, Timelines, time_shares


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shares_of(*spans: tuple[str, float, float], until: float = 10.0) -> dict[str, float]:
    """Return the shares above zero of the time from 0."""
    found = time_shares([Span(*span) for span in spans], 0.0, until)
    return {name: seconds for name, seconds in found.items() if seconds}


def test_an_operation_computes_or_queues():
    assert shares_of(("operation", 2, 8), ("compute", 5, 8)) == {
        "client": 4.0,
        "queue": 3.0,
        "compute": 3.0,
    }


def test_the_trainer_computes_while_samples_are_drawn():
    assert shares_of(("sample", 0, 10), ("operation", 4, 6), ("compute", 5, 6)) == {
        "samples": 8.0,
        "queue": 1.0,
        "compute": 1.0,
    }


def test_an_operation_waits_for_its_trainers_place_and_devices():
    states = [("trainer:place", 0, 3), ("trainer:devices", 3, 5), ("trainer:awake", 5, 10)]
    assert shares_of(("operation", 1, 9), ("compute", 7, 9), *states) == {
        "client": 2.0,
        "place": 2.0,
        "devices": 2.0,
        "queue": 2.0,
        "compute": 2.0,
    }


def test_samples_wait_for_an_engine_only_if_none_is_awake():
    first = [("engine:devices", 0, 4), ("engine:awake", 4, 10)]
    second = [("engine:place", 0, 2), ("engine:awake", 2, 3), ("engine:place", 3, 10)]
    assert shares_of(("sample", 0, 8), *first, *second) == {
        "place": 3.0,
        "samples": 5.0,
        "client": 2.0,
    }


def test_a_worker_that_nobody_waits_for_costs_no_time():
    assert shares_of(("trainer:place", 0, 10), ("engine:devices", 0, 10)) == {"client": 10.0}


def test_publishing_comes_before_loading_and_both_before_the_queue():
    spans = [("operation", 0, 9), ("publish", 1, 4), ("load", 3, 6)]
    assert shares_of(*spans) == {"queue": 4.0, "publish": 3.0, "weights": 2.0, "client": 1.0}


@pytest.mark.parametrize("seed", range(20))
def test_shares_agree_with_a_count_of_moments_and_add_up(seed):
    rng = random.Random(seed)
    names = ["operation", "compute", "publish", "load", "sample", "trainer:place", "engine:devices"]
    spans = []
    for _ in range(40):
        begin = rng.randrange(-20, 100)
        spans.append(Span(rng.choice(names), begin, begin + rng.randrange(1, 30)))
    found = time_shares(spans, 0, 80)
    assert sum(found.values()) == pytest.approx(80)
    counted = dict.fromkeys(SHARES, 0)
    for moment in range(80):
        there = [each for each in spans if each.begin <= moment < each.end]
        counted[next(iter(k for k, v in time_shares(there, moment, moment + 1).items() if v))] += 1
    assert found == pytest.approx(counted)


def test_a_step_begins_where_the_last_one_ended_and_open_spans_go_on():
    clock = Clock()
    timelines = Timelines(clock)
    run = timelines.open("s:train:0", session_id="s")
    run.note_published("v0", step=0)
    ended = timelines.begin_sample(run_id="s:train:0", session_id="s", engines=["e"])
    other = timelines.begin_sample(run_id="", session_id="s", engines=["e"])
    clock.now += 4
    ended("v0")
    clock.now += 1
    run.add("compute", seconds=1)

    def end_step(step: int) -> dict[str, float]:
        numbers = run.end_step(
            timelines.workers, step=step, trainer="t", accepted_at=clock.now, policy=step == 2
        )
        return {name: value for name, value in numbers.items() if value}

    assert end_step(1) == {"seconds/samples": 4, "seconds/compute": 1, "seconds/step": 5}
    clock.now += 2
    other("")
    clock.now += 3
    assert end_step(2) == {
        "seconds/samples": 2,
        "seconds/client": 3,
        "seconds/step": 5,
        "staleness": 1,
    }
    clock.now += 1
    assert end_step(3) == {"seconds/client": 1, "seconds/step": 1}


def test_staleness_is_the_mean_distance_of_the_samples_to_the_trainer():
    timelines = Timelines(Clock())
    run = timelines.open("r", session_id="s")
    run.note_published("v2", step=2)
    run.note_published("v4", step=4)
    for version in ("v2", "v4", "v4", "another run's", ""):
        timelines.begin_sample(run_id="r", session_id="s", engines=[])(version)
    numbers = run.end_step(timelines.workers, step=5, trainer="t", accepted_at=100.0, policy=True)
    assert numbers["staleness"] == pytest.approx(2 / 3)
    numbers = run.end_step(timelines.workers, step=6, trainer="t", accepted_at=100.0, policy=True)
    assert numbers["staleness"] == 1  # the last sample's weights
    numbers = run.end_step(timelines.workers, step=7, trainer="t", accepted_at=100.0, policy=False)
    assert "staleness" not in numbers


def test_a_step_over_a_restart_of_the_gateway_counts_the_unknown_time_as_queue():
    clock = Clock()
    timelines = Timelines(clock)
    run = timelines.open("r", session_id="s", ago=7.0)
    clock.now += 3
    run.add("compute", seconds=2)
    numbers = run.end_step(
        timelines.workers, step=5, trainer="t", accepted_at=clock.now - 2, policy=False
    )
    assert {name: value for name, value in numbers.items() if value} == {
        "seconds/queue": 7,
        "seconds/client": 1,
        "seconds/compute": 2,
        "seconds/step": 10,
    }


def test_a_waiting_worker_shows_in_the_step_and_a_gone_one_is_forgotten():
    clock = Clock()
    timelines = Timelines(clock)
    run = timelines.open("r", session_id="s")
    for state, seconds in (("waiting", 1), ("placed", 2), ("starting", 4), ("awake", 8)):
        timelines.workers.note("r", state)
        clock.now += seconds
    numbers = run.end_step(timelines.workers, step=1, trainer="r", accepted_at=100.0, policy=False)
    assert (numbers["seconds/place"], numbers["seconds/devices"]) == (5, 2)
    assert numbers["seconds/queue"] == 8
    timelines.workers.note("r", "gone")
    assert not [*timelines.workers.spans("trainer", ["r"], until=clock.now)]


def test_a_run_that_only_samples_keeps_a_bounded_number_of_spans():
    clock = Clock()
    timelines = Timelines(clock)
    run = timelines.open("r", session_id="s")
    for _ in range(5000):
        ended = timelines.begin_sample(run_id="r", session_id="s", engines=[])
        clock.now += 1
        ended("")
    assert sum(len(spans) for spans in run._spans.values()) < 1000
    numbers = run.end_step(
        timelines.workers, step=1, trainer="t", accepted_at=clock.now, policy=False
    )
    assert numbers["seconds/samples"] == numbers["seconds/step"] == 5000
