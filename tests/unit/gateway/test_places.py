"""The places of runs and engines."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidRequest
from tests.support.gateway.supervised_places import (
    SAMPLE,
    TRAIN,
    WHOLE,
    PlacesWorld,
    group,
    quiet,
)
from tests.support.work import calls_in

GIB = 2**30


# --- Trainer and sampler together -----------------------------------------------------------------


async def test_a_run_has_the_places_of_its_trainer_and_its_sampler_before_it_starts():
    world = await PlacesWorld(TRAIN, SAMPLE).open()
    run = await (await world.run(run_id="r").ask()).granted()
    assert (run.place.key, run.place.group, run.place.devices) == (
        "r",
        TRAIN,
        TRAIN.devices,
    )
    assert (world.keys(TRAIN), world.keys(SAMPLE)) == (["r"], ["sampler-of-r"])
    assert world.placed == {"r", "sampler-of-r"}
    run.end()
    await quiet()
    assert (world.keys(TRAIN), world.keys(SAMPLE), world.placed) == ([], [], set())


async def test_a_run_holds_nothing_while_half_of_what_it_needs_is_taken():
    world = await PlacesWorld(group("train", "trainer", workers=9), SAMPLE).open()
    first, second, third = [await world.run().ask() for _ in range(3)]
    assert first.has and second.has and not third.has
    assert third.why == (
        "1st in the queue for a place on group train and a place on group sample: "
        "2 workers are there (TANDEM_GROUPS workers)"
    )
    assert len(world.placed) == 4
    first.end()
    await quiet()
    await third.granted()


async def test_a_run_that_only_trains_needs_no_place_for_a_sampler():
    world = await PlacesWorld(TRAIN, SAMPLE).open()
    await (await world.run(sampler="none").ask()).granted()
    assert world.keys(SAMPLE) == []


async def test_the_runs_of_a_session_share_the_place_of_its_sampler_until_the_last_ends():
    world = await PlacesWorld(TRAIN, SAMPLE).open()
    first, second = world.run(), world.run()
    second.sampler = first.sampler
    for run in (first, second):
        await (await run.ask()).granted()
    assert world.keys(SAMPLE) == [first.sampler]
    first.end()
    await quiet()
    assert world.keys(SAMPLE) == [first.sampler]
    second.end()
    await quiet()
    assert world.keys(SAMPLE) == []


async def test_a_run_has_the_places_of_all_its_engines_or_of_none():
    devices = [group(f"s{n}", "sampler", workers=1) for n in range(3)]
    world = await PlacesWorld(group("train", "trainer", workers=9), *devices).open()
    first = await (await world.run(run_id="r", replicas=2).ask()).granted()
    assert [world.keys(each) for each in devices] == [["sampler-of-r"], ["sampler-of-r#1"], []]
    second = await world.run(replicas=2).ask()
    assert not second.has and len(world.keys(devices[2])) == 0
    assert "1 workers are there" in second.why
    first.end()
    await quiet()
    await second.granted()
    assert len(world.placed) == 3


async def test_engines_of_one_sampler_never_take_turns_on_one_group():
    one, two = (group(name, "sampler", workers=9) for name in ("one", "two"))
    world = await PlacesWorld(TRAIN, one, two).open()
    await (await world.run(run_id="r", replicas=2).ask()).granted()
    assert (world.keys(one), world.keys(two)) == (["sampler-of-r"], ["sampler-of-r#1"])
    with pytest.raises(InvalidRequest, match="another engine of the same sampler is on group"):
        world.supervisor.check(world.run(replicas=3).as_ask())
    free = await PlacesWorld(WHOLE).open()
    free.supervisor.check(free.run(replicas=3).as_ask())


async def test_an_engine_with_several_ranks_has_as_many_devices_of_one_group():
    devices = ("cpu:0", "cpu:1")
    large = group("large", "sampler", devices=devices)
    world = await PlacesWorld(TRAIN, SAMPLE, large).open()
    run = await (await world.run(sampler_ranks=2).ask()).granted()
    place = world.place_of(run.sampler)
    assert (place.group, place.devices) == (large, ("cpu:0", "cpu:1"))


async def test_more_engines_than_there_is_room_for_are_refused_without_trying_every_order():
    devices = [group(f"s{n}", "sampler", workers=1) for n in range(24)]
    world = await PlacesWorld(TRAIN, *devices).open()
    fits, too_many = world.run(replicas=24), world.run(replicas=25)
    world.supervisor.check(fits.as_ask())
    few = calls_in(lambda: world.supervisor.check(fits.as_ask()))

    def check() -> None:
        with pytest.raises(InvalidRequest, match="no place for it"):
            world.supervisor.check(too_many.as_ask())

    assert calls_in(check) < 50 * few


async def test_a_named_group_is_waited_for_though_another_has_room():
    other = group("other", "trainer")
    world = await PlacesWorld(group("train", "trainer", workers=1), other, SAMPLE).open()
    await (await world.run(group="train").ask()).granted()
    picky, any_group = await world.run(group="train").ask(), await world.run().ask()
    assert not picky.has and any_group.has
    assert any_group.place.group is other


async def test_workers_are_spread_over_the_groups_with_the_fewest():
    groups = [group(f"g{n}", workers=4) for n in range(3)]
    world = await PlacesWorld(*groups).open()
    for _ in range(3):
        await (await world.run(sampler="none").ask()).granted()
    assert [len(world.keys(each)) for each in groups] == [1, 1, 1]


async def test_ranks_need_a_group_with_as_many_devices_and_use_the_first():
    devices = ("cpu:0", "cpu:1", "cpu:2")
    large = group("large", "trainer", devices=devices)
    world = await PlacesWorld(group("train", "trainer"), large, SAMPLE).open()
    run = await (await world.run(ranks=2).ask()).granted()
    assert (run.place.group, run.place.devices) == (large, ("cpu:0", "cpu:1"))


# --- Memory ---------------------------------------------------------------------------------------


async def test_three_workers_of_16_gib_do_not_fit_into_the_nine_tenths_of_48_gib_of_a_host():
    world = await PlacesWorld(group("g", workers=99), host=48 * GIB * 9 // 10).open()
    asks = {"host_memory": 16 * GIB, "sampler": "none"}
    first, second, third = [await world.run(**asks).ask() for _ in range(3)]
    assert first.has and second.has and not third.has
    assert "it needs 16 GiB of the host's memory, and workers have 32 GiB of 43.2 GiB" in third.why
    second.end()
    await quiet()
    await third.granted()


async def test_what_could_never_fit_is_refused_at_once():
    world = await PlacesWorld(group("g", workers=1, device_bytes=8 * GIB), host=9 * GIB).open()
    for asks, why in (
        ({}, "1 workers are there"),
        ({"sampler": "none", "memory": 9 * GIB}, "9 GiB of a device's 8 GiB on group g"),
        ({"sampler": "none", "host_memory": 10 * GIB}, "needs 10 GiB of the host's memory"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            world.supervisor.check(world.run(**asks).as_ask())
    world.supervisor.check(world.run(sampler="none", memory=8 * GIB).as_ask())


# --- Drained groups -------------------------------------------------------------------------------


async def test_a_drained_group_takes_nobody_until_that_is_undone():
    world = await PlacesWorld(TRAIN, SAMPLE, group("other", "trainer")).open()
    there = await (await world.run(group="train").ask()).granted()
    await world.supervisor.drain("train", drained=True)
    named = await world.run(group="train").ask()
    anywhere = await world.run().ask()
    assert anywhere.has and anywhere.place.group.name == "other"
    assert named.why == (
        "1st in the queue for a place on group train and a place on group sample: "
        "group train is drained, and takes no more workers"
    )
    there.end()
    await quiet()
    assert not named.has
    await world.supervisor.drain("train", drained=False)
    await named.granted()


async def test_a_drained_group_is_drained_for_the_next_gateway():
    world = await PlacesWorld(TRAIN, SAMPLE).open()
    await world.supervisor.drain("train", drained=True)
    await world.open()
    world.supervisor.check(world.run().as_ask())  # it is not refused
    waiting = await world.run().ask()
    assert not waiting.has
    await world.supervisor.drain("train", drained=False)
    await waiting.granted()


async def test_engines_of_a_drained_group_end_when_they_are_idle_and_no_run_keeps_them():
    world = await PlacesWorld(group("sample", "sampler", workers=9), TRAIN).open()
    idle, busy = [await world.engine(idle=idle).serve() for idle in (True, False)]
    await world.supervisor.drain("sample", drained=True)
    await quiet()
    assert (idle.retired, busy.retired) == (True, False)
    await busy.rest()
    await quiet()
    assert busy.retired and world.keys(world.groups[0]) == []


# --- Restarts -------------------------------------------------------------------------------------


async def test_the_next_gateway_knows_who_has_a_place():
    world = await PlacesWorld(TRAIN, SAMPLE).open()
    run = await (await world.run(run_id="r").ask()).granted()
    await (await world.run(run_id="ended").ask()).granted()
    place = run.place
    await world.open()
    again = await world.run(run_id="r").ask()
    late = await world.run(run_id="late").ask()
    assert again.has and again.place.group == place.group and not late.has
    await world.supervisor.settle({"r", "sampler-of-r", "late", "sampler-of-late"})
    await late.granted()
    assert "ended" not in world.placed
    assert world.keys(SAMPLE) == ["sampler-of-late", "sampler-of-r"]
