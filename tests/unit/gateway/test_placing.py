"""Placing of waiting rows on groups, as pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.workers.overview import Budgets, Demand
from gateway.workers.placing import find_groups
from gateway.workers.schedule import explain_wait, schedule
from gateway.workers.steps import ForgetRow, PlaceRows, StopWorker, TakeGroup
from tandem.settings.sharing import Sharing
from tests.support.gateway.overviews import NOW, overview, row, waits, worker_group

GIB = 2**30


def decided(*rows, **about):
    return schedule(overview(*rows, **about))[0]


def placed(*rows, **about) -> dict[str, str]:
    """Return the groups of the next placements."""
    steps = [step for step in decided(*rows, **about) if isinstance(step, PlaceRows)]
    return {each.key: each.group for step in steps for each in step.rows if each.group}


def engine(key, state="waiting", **about):
    return row(key, state, kind="engine", sampler=key.partition("#")[0], **about)


def test_a_row_gets_the_group_with_the_fewest_workers():
    groups = worker_group("g"), worker_group("h")
    assert placed(row("a", "awake"), row("b"), groups=groups) == {"b": "h"}


def test_a_trainer_and_its_engines_get_their_groups_at_one_moment_or_not_at_all():
    trainer = row("t", together=("e#0", "e#1"))
    rows = trainer, engine("e#0"), engine("e#1")
    groups = tuple(worker_group(name, workers=2) for name in "gh")
    assert placed(*rows, groups=groups) == {"t": "g", "e#0": "h", "e#1": "g"}
    assert len(decided(*rows, groups=groups)) == 1, "in one transaction"
    assert placed(*rows, row("x", "awake"), row("y", "awake", group="h"), groups=groups) == {}


@pytest.mark.parametrize("state", ["waiting", "placed"])
def test_a_trainer_gets_no_group_while_its_engine_is_being_written(state):
    rows = row("t", together=("e",)), engine("e", state)
    found = overview(*rows, busy=frozenset("e"))
    assert schedule(found)[0] == []
    wait = explain_wait(found, rows[0])
    assert wait is not None and wait.reason == "the database is asked to note its places"
    assert "t" in placed(*rows)


def test_a_released_engine_gets_no_group_with_its_trainer():
    released = engine("e", ends_as="gone")
    assert placed(row("t", together=("e",)), released) == {"t": "g"}


def test_two_engines_of_one_sampler_never_share_a_leased_group():
    demand = {"e#1": waits()}
    assert placed(engine("e#0", "awake"), engine("e#1"), demand=demand) == {}
    groups = (worker_group(awake=0),)
    assert placed(engine("e#0", "awake"), engine("e#1"), demand=demand, groups=groups) != {}


def test_an_engine_asks_only_while_it_is_used_or_kept():
    assert placed(engine("e")) == {}
    assert placed(engine("e"), demand={"e": waits()}) == {"e": "g"}
    assert placed(engine("e"), row("t", "awake", together=("e",))) == {"e": "g"}


def test_nobody_is_overtaken_for_the_ninth_time():
    rows = (
        row("x", "awake", session="before"),
        row("large", together=("e",)),
        engine("e"),
        row("small", since=950),
    )
    about = {"groups": (worker_group(workers=2),)}
    step = decided(*rows, **about)[0]
    assert [(each.key, each.overtaken) for each in step.rows] == [("small", 0), ("large", 1)]
    tired = rows[0], row("large", together=("e",), overtaken=8), *rows[2:]
    assert decided(*tired, **about) == []
    found = overview(*tired, **about)
    assert "others have waited longer and are next" in (
        explain_wait(found, found.rows["small"]).reason
    )


def test_a_run_gets_the_engine_that_its_program_waits_for_before_a_run_that_waits_for_its_end():
    there, alone = row("r", "awake", session="one"), {"sharing": Sharing.EXCLUSIVE}
    first = row("x", overtaken=8, session="two", **alone)
    demand = {"t": waits(), "idle": Demand()}
    assert placed(there, first, engine("t", session="three"), demand=demand) == {}
    teacher, joined = engine("t", session="one"), replace(there, holders=("three:train:0",))
    for pair in ((there, teacher), (joined, engine("t", session="three"))):
        (step,) = decided(first, *pair, demand=demand)
        assert [(each.key, each.overtaken) for each in step.rows] == [("t", 0), ("x", 8)]
    idle, about = engine("idle", "asleep", session="three"), {"groups": (worker_group(workers=2),)}
    (step,) = decided(there, first, teacher, idle, demand=demand, **about)
    assert isinstance(step, StopWorker) and (step.key, step.ends_as) == ("idle", "waiting")


def test_an_idle_engine_ends_for_a_waiting_row_after_its_quantum():
    rows = engine("e", "asleep"), row("t")
    about = {"groups": (worker_group(workers=1),)}
    young = {"e": Demand(started_at=NOW - 59)}
    steps, again_at = schedule(overview(*rows, demand=young, **about))
    assert (steps, again_at) == ([], NOW + 1)
    old = {"e": Demand(started_at=NOW - 60)}
    (step,) = decided(*rows, demand=old, **about)
    assert isinstance(step, StopWorker) and (step.key, step.ends_as) == ("e", "waiting")
    used = {"e": Demand(started_at=0.0, uses=1)}
    assert decided(*rows, demand=used, **about) == []
    kept = (*rows, row("u", "awake", group="h", together=("e",)))
    two = (worker_group(workers=1), worker_group("h", workers=1))
    assert decided(*kept, demand=old, groups=two) == []


def test_no_engine_ends_where_that_would_not_help():
    rows = engine("e", "awake"), row("t", groups=("h",)), row("u", "awake", group="h")
    groups = worker_group("g"), worker_group("h", workers=1)
    assert decided(*rows, demand={"e": Demand(idle_since=NOW)}, groups=groups) == []


def test_an_unused_engine_without_a_process_loses_its_place_at_once():
    assert decided(engine("e", "placed")) == [TakeGroup("e")]


def test_a_drained_group_takes_nobody_and_its_idle_engines_end():
    group = worker_group(drained=True)
    found = overview(row("t"), groups=(group,))
    assert find_groups(found, [found.rows["t"]]) == (
        "group g is drained, and takes no more workers"
    )
    demand = {"e": Demand(started_at=NOW, idle_since=NOW)}
    assert isinstance(decided(engine("e", "awake"), demand=demand, groups=(group,))[0], StopWorker)


def test_where_nobody_takes_turns_all_workers_fit_at_once():
    group = worker_group(awake=0, device_bytes=8)
    there = row("a", "awake", device_bytes=5)
    assert placed(there, row("b", device_bytes=3), groups=(group,)) == {"b": "g"}
    for need in (4, 0):
        assert placed(there, row("b", device_bytes=need), groups=(group,)) == {}


def test_the_host_memory_of_all_rows_is_bounded():
    budgets = Budgets(host_bytes=43 * GIB)
    rows = [row(key, "awake", host_bytes=16 * GIB) for key in "ab"]
    assert placed(*rows, row("c", host_bytes=11 * GIB), budgets=budgets) == {"c": "g"}
    found = overview(*rows, row("c", host_bytes=16 * GIB), budgets=budgets)
    assert "it needs 16 GiB of the host's memory, and workers have 32 GiB of 43 GiB" in (
        explain_wait(found, found.rows["c"]).reason
    )


def test_a_released_row_is_forgotten_when_nothing_of_it_is_left():
    assert decided(row("a", "placed", ends_as="gone")) == [ForgetRow("a")]
    stop = StopWorker("a", "it was released", at_once=False, ends_as="gone")
    assert decided(row("a", "asleep", ends_as="gone")) == [stop]


def test_a_released_row_stops_in_the_middle_of_its_start():
    starting = row("a", "starting", ends_as="gone")
    (step,) = decided(starting, busy=frozenset("a"))
    assert isinstance(step, StopWorker) and step.at_once
    assert decided(row("a", "waking", ends_as="gone"), busy=frozenset("a")) == []
