"""Who has a place where."""

from __future__ import annotations

import pytest

from gateway.placement.groups import DeviceGroup, Role
from gateway.placement.room import Place, PlaceRequest, engine_key
from tandem.errors import InvalidRequest, NoRoom, StorageFull
from tandem.protocol.devices import parse_device
from tests.support.gateway.placement import SAMPLE, TRAIN, WHOLE, Engine, Run, World, group, quiet
from tests.support.work import calls_in

GIB = 2**30


# --- Trainer and sampler together -----------------------------------------------------------------


async def test_a_run_has_the_places_of_its_trainer_and_its_sampler_before_it_starts():
    world = await World(TRAIN, SAMPLE).open()
    run = await (await world.run(run_id="r").ask()).granted()
    assert (run.place.key, run.place.group, run.place.devices) == (
        "r",
        TRAIN,
        tuple(str(d) for d in TRAIN.devices),
    )
    assert (world.keys(TRAIN), world.keys(SAMPLE)) == (["r"], ["sampler-of-r"])
    assert sorted(world.rows.rows) == ["r", "sampler-of-r"]
    run.end()
    assert (world.keys(TRAIN), world.keys(SAMPLE), world.rows.rows) == ([], [], {})


async def test_a_run_holds_nothing_while_half_of_what_it_needs_is_taken():
    world = await World(group("train", "trainer", workers=9), SAMPLE).open()
    first, second, third = [await world.run().ask() for _ in range(3)]
    assert first.has and second.has and not third.has
    assert third.why == (
        "1st in the queue for a place on group train and a place on group sample: "
        "2 workers are there (TANDEM_GROUPS workers)"
    )
    assert len(world.rows.rows) == 4
    first.end()
    await third.granted()


async def test_a_run_that_only_trains_needs_no_place_for_a_sampler():
    world = await World(TRAIN, SAMPLE).open()
    await (await world.run(sampler="none").ask()).granted()
    assert world.keys(SAMPLE) == []


async def test_the_runs_of_a_session_share_the_place_of_its_sampler_until_the_last_ends():
    world = await World(TRAIN, SAMPLE).open()
    first, second = world.run(), world.run()
    second.sampler = first.sampler
    for run in (first, second):
        await (await run.ask()).granted()
    assert world.keys(SAMPLE) == [first.sampler]
    first.end()
    assert world.keys(SAMPLE) == [first.sampler]
    second.end()
    assert world.keys(SAMPLE) == []


async def test_a_run_has_the_places_of_all_its_engines_or_of_none():
    devices = [group(f"s{n}", "sampler", workers=1) for n in range(3)]
    world = await World(group("train", "trainer", workers=9), *devices).open()
    first = await (await world.run(run_id="r", replicas=2).ask()).granted()
    assert [len(world.keys(each)) for each in devices] == [1, 1, 0]
    assert world.places.replicas_of(first.sampler) == 2
    second = await world.run(replicas=2).ask()
    assert not second.has and len(world.keys(devices[2])) == 0
    assert "1 workers are there" in second.why
    first.end()
    await second.granted()
    assert len(world.rows.rows) == 3


async def test_engines_of_one_sampler_never_take_turns_on_one_group():
    one, two = (group(name, "sampler", workers=9) for name in ("one", "two"))
    world = await World(TRAIN, one, two).open()
    await (await world.run(run_id="r", replicas=2).ask()).granted()
    assert (world.keys(one), world.keys(two)) == (["sampler-of-r"], ["sampler-of-r#1"])
    with pytest.raises(InvalidRequest, match="another engine of the same sampler is on group"):
        world.places.check(world.run(replicas=3).as_ask())
    free = await World(WHOLE).open()
    free.places.check(free.run(replicas=3).as_ask())


def scaled(run: Run, replicas: int):
    engines = {engine_key(run.sampler, number): run.asks for number in range(replicas)}
    ask = PlaceRequest.of_engines("scaled", owner=run.owner, session_id="s", engines=engines)
    return run.places.scale(run.sampler, replicas, ask, wait=0)


async def test_engines_that_are_added_have_their_places_at_once_also_after_a_restart_or_none_has():
    world = await World(TRAIN, *(group(f"s{n}", "sampler", workers=1) for n in range(3))).open()
    run = await (await world.run(run_id="r").ask()).granted()
    with pytest.raises(NoRoom, match=r"3 more engines need a place, and there is room for 2: .*"):
        await scaled(run, 4)
    world.rows.full = True
    with pytest.raises(StorageFull):
        await scaled(run, 3)
    assert (len(world.rows.rows), world.places.replicas_of(run.sampler)) == (2, 1)
    world.rows.full = False
    await scaled(run, 3)
    again = await world.open()
    again.places.release_left(["r"])
    assert (len(world.rows.rows), again.places.replicas_of(run.sampler, asked=1)) == (4, 3)


async def test_places_of_engines_that_are_too_many_are_given_back_after_a_restart():
    world = await World(TRAIN, *(group(f"s{n}", "sampler") for n in range(3))).open()
    run = await (await world.run(run_id="r", replicas=3).ask()).granted()
    await run.places.scale(run.sampler, 1, None, wait=0)
    assert len(world.rows.rows) == 4, "its engines may run"
    again = await world.open()
    again.places.drop_beyond(run.sampler)
    assert sorted(world.rows.rows) == ["r", "sampler-of-r"]
    again.places.forget_scaled(run.sampler)
    assert not world.rows.scaled


async def test_an_engine_with_several_ranks_has_as_many_devices_of_one_group():
    devices = tuple(parse_device(f"cpu:{n}") for n in range(2))
    large = group("large", "sampler", devices=devices)
    world = await World(TRAIN, SAMPLE, large).open()
    run = await (await world.run(sampler_ranks=2).ask()).granted()
    place = world.places.get(run.sampler)
    assert (place.group, place.devices) == (large, ("cpu:0", "cpu:1"))


async def test_engines_that_a_run_keeps_have_their_places_also_after_a_restart():
    world = await World(TRAIN, *(group(f"s{n}", "sampler") for n in range(3))).open()
    await (await world.run(run_id="r", replicas=3).ask()).granted()
    again = await world.open(active=lambda _session: True)
    assert again.places.replicas_of("sampler-of-r") == 3
    again.places.release_left(["r"])
    assert again.places.replicas_of("sampler-of-r") == 3
    again.places.release_left([])
    assert world.rows.rows == {}


async def test_more_engines_than_there_is_room_for_are_refused_without_trying_every_order():
    devices = [group(f"s{n}", "sampler", workers=1) for n in range(24)]
    world = await World(TRAIN, *devices).open()
    fits, too_many = world.run(replicas=24), world.run(replicas=25)
    world.places.check(fits.as_ask())
    few = calls_in(lambda: world.places.check(fits.as_ask()))

    def check() -> None:
        with pytest.raises(InvalidRequest, match="no place for it"):
            world.places.check(too_many.as_ask())

    assert calls_in(check) < 50 * few


async def test_a_named_group_is_waited_for_though_another_has_room():
    other = group("other", "trainer")
    world = await World(group("train", "trainer", workers=1), other, SAMPLE).open()
    await (await world.run(group="train").ask()).granted()
    picky, any_group = await world.run(group="train").ask(), await world.run().ask()
    assert not picky.has and any_group.has
    assert any_group.place.group is other


async def test_workers_are_spread_over_the_groups_with_the_fewest():
    groups = [group(f"g{n}", workers=4) for n in range(3)]
    world = await World(*groups).open()
    for _ in range(3):
        await (await world.run(sampler="none").ask()).granted()
    assert [len(world.keys(each)) for each in groups] == [1, 1, 1]


async def test_ranks_need_a_group_with_as_many_devices_and_use_the_first():
    devices = tuple(parse_device(f"cpu:{n}") for n in range(3))
    large = group("large", "trainer", devices=devices)
    world = await World(group("train", "trainer"), large, SAMPLE).open()
    run = await (await world.run(ranks=2).ask()).granted()
    assert (run.place.group, run.place.devices) == (large, ("cpu:0", "cpu:1"))


# --- Memory ---------------------------------------------------------------------------------------


async def test_three_workers_of_16_gib_do_not_fit_into_the_nine_tenths_of_48_gib_of_a_host():
    world = await World(group("g", workers=99), host=48 * GIB * 9 // 10).open()
    asks = {"host_memory": 16 * GIB, "sampler": "none"}
    first, second, third = [await world.run(**asks).ask() for _ in range(3)]
    assert first.has and second.has and not third.has
    assert "it needs 16 GiB of the host's memory, and workers have 32 GiB of 43.2 GiB" in third.why
    second.end()
    await third.granted()


async def test_a_device_must_hold_those_that_are_awake_at_once():
    one = group("one", memory_bytes=80 * GIB, awake=1, workers=9)
    two = group("two", memory_bytes=80 * GIB, awake=2, workers=9)
    every = group("every", memory_bytes=80 * GIB, awake=0, workers=9)
    for where, of_35, of_45 in ((one, 3, 2), (two, 3, 1), (every, 2, 0)):
        world = await World(where).open()
        small = [await world.run(memory=35 * GIB, sampler="none").ask() for _ in range(3)]
        large = [await world.run(memory=45 * GIB, sampler="none").ask() for _ in range(2)]
        assert (sum(run.has for run in small), sum(run.has for run in large)) == (of_35, of_45)


async def test_what_could_never_fit_is_refused_at_once():
    world = await World(group("g", workers=1, memory_bytes=8 * GIB), host=9 * GIB).open()
    for asks, why in (
        ({}, "1 workers are there"),
        ({"sampler": "none", "memory": 9 * GIB}, "9 GiB of a device's 8 GiB on group g"),
        ({"sampler": "none", "host_memory": 10 * GIB}, "needs 10 GiB of the host's memory"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            world.places.check(world.run(**asks).as_ask())
    world.places.check(world.run(sampler="none", memory=8 * GIB).as_ask())


# --- Drained groups -------------------------------------------------------------------------------


async def test_a_drained_group_takes_nobody_until_that_is_undone():
    world = await World(TRAIN, SAMPLE, group("other", "trainer")).open()
    there = await (await world.run(group="train").ask()).granted()
    await world.places.drain(TRAIN, drained=True)
    named = await world.run(group="train").ask()
    anywhere = await world.run().ask()
    assert anywhere.has and anywhere.place.group.name == "other"
    assert named.why == (
        "1st in the queue for a place on group train and a place on group sample: "
        "group train is drained, and takes no more workers"
    )
    assert (await world.run(run_id=there.key).ask()).place == there.place, "what runs goes on"
    there.end()
    await quiet()
    assert not named.has
    await world.places.drain(TRAIN, drained=False)
    await named.granted()


async def test_a_drained_group_is_drained_for_the_next_gateway():
    world = await World(TRAIN, SAMPLE).open()
    await world.places.drain(TRAIN, drained=True)
    await world.open()
    assert world.places.is_drained(TRAIN) and not world.places.is_drained(SAMPLE)
    world.places.check(world.run().as_ask())  # it is not refused
    waiting = await world.run().ask()
    assert not waiting.has
    await world.places.drain(TRAIN, drained=False)
    await waiting.granted()
    await world.open()
    assert not world.places.is_drained(TRAIN)


async def test_engines_of_a_drained_group_end_when_they_are_idle_and_no_run_keeps_them():
    world = await World(group("sample", "sampler", workers=9), TRAIN).open()
    sample = world.groups[0]
    idle, busy = [await world.engine(idle=idle).serve() for idle in (True, False)]
    run = await (await world.run().ask()).granted()
    kept = Engine(world, "ann", run.sampler, idle=True)
    await kept.serve()
    await world.places.drain(sample, drained=True)
    await quiet()
    assert (idle.retired, busy.retired, kept.retired) == (True, False, False)
    busy.idle = True
    run.end()
    await quiet()
    assert busy.retired and kept.retired
    assert world.keys(sample) == []


# --- Restarts -------------------------------------------------------------------------------------


async def test_the_next_gateway_knows_who_has_a_place():
    world = await World(TRAIN, SAMPLE).open()
    run = await (await world.run(run_id="r").ask()).granted()
    other = await (await world.run(run_id="ended").ask()).granted()
    await world.open()
    again = await world.run(run_id="r").ask()
    late = await world.run(run_id="late").ask()
    assert again.has and again.place == run.place and not late.has
    world.places.release_left(["r"])
    await late.granted()
    assert other.key not in world.rows.rows
    assert world.keys(SAMPLE) == ["sampler-of-late", "sampler-of-r"]


async def test_a_place_whose_session_or_group_is_gone_is_forgotten():
    world = await World(TRAIN, SAMPLE).open()
    await (await world.run(run_id="r").ask()).granted()
    world.groups = (group("train", "trainer", devices=(parse_device("cpu:900"),)), SAMPLE)
    await world.open()
    assert world.places.get("r") is None and "r" not in world.rows.rows
    await world.open(active=lambda _session: False)
    assert world.rows.rows == {}


async def test_an_adopted_engine_has_its_slot_and_one_without_a_place_is_not_adopted():
    world = await World(SAMPLE, TRAIN).open()
    engine = await world.engine().serve()
    await world.open()
    assert world.places.adopt(engine).place.group is SAMPLE
    assert world.places.adopt(world.engine()) is None
    world.places.release_left([])
    assert world.keys(SAMPLE) == [engine.key]


# --- On one device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "ranks", "on_one"),
    [
        ({"awake": 2}, 1, True),
        ({"devices": (), "awake": 0}, 1, True),
        ({"awake": 1}, 1, False),
        ({"awake": 2}, 2, False),
        ({"awake": 0, "pool": "gpus"}, 1, False),
    ],
)
def test_a_trainer_and_a_sampler_that_are_awake_at_once_may_have_one_device(
    changes: dict[str, object], ranks: int, on_one: bool
):
    """Not where they take turns, nor where either has several, nor as pods."""
    both = group("both", **changes)

    def place(role: Role, of: DeviceGroup = both) -> Place:
        return Place(key=role, role=role, group=of, owner="o", session_id="s", ranks=ranks)

    assert place("sampler").has_device_of(place("trainer")) is on_one
    assert not place("sampler").has_device_of(place("trainer", group("other", **changes)))
