"""The queue for places."""

from __future__ import annotations

from itertools import count

from tests.support.gateway.supervised_places import SAMPLE, TRAIN, PlacesWorld, group, quiet

GIB = 2**30


# --- The queue ------------------------------------------------------------------------------------


async def test_the_next_is_the_highest_priority_then_the_owner_with_the_fewest_then_the_first():
    only = group("g", workers=2)
    world = await PlacesWorld(only).open()
    held = [await (await world.run("ann", sampler="none").ask()).granted() for _ in range(2)]
    queue = [
        await world.run(owner, sampler="none", priority=priority).ask()
        for owner, priority in (("ann", 0), ("bea", 0), ("bea", 0), ("cai", -1), ("dan", 3))
    ]
    assert [run.why.split()[0] for run in queue] == ["4th", "2nd", "3rd", "5th", "1st"]
    ended = []
    for run in (held[0], queue[4], queue[1], held[1]):
        run.end()
        await quiet()
        ended.append([n for n, each in enumerate(queue) if each.has])
    assert ended == [[4], [1, 4], [1, 2, 4], [0, 1, 2, 4]]


async def test_a_large_ask_is_overtaken_only_so_often():
    world = await PlacesWorld(group("g", workers=2)).open()
    small = [await (await world.run(sampler="none").ask()).granted() for _ in range(2)]
    large = await world.run().ask()  # needs both places
    for _served in count():
        later = await world.run("other", sampler="none").ask()
        small.pop(0).end()
        await quiet()
        if not later.has:
            break
        small.append(later)
    assert _served == 8
    assert "others have waited longer and are next" in later.why
    small.pop(0).end()
    await large.granted()
    large.end()
    await later.granted()


async def test_who_gives_up_leaves_nothing_behind_and_lets_the_others_go_on():
    world = await PlacesWorld(group("g", workers=2)).open()
    first = await (await world.run().ask()).granted()
    second, third = await world.run().ask(), await world.run().ask()
    assert third.why.startswith("2nd")
    await second.give_up()
    assert third.why.startswith("1st") and second.why == ""
    first.end()
    await third.granted()


async def test_who_gives_up_in_the_moment_of_its_turn_gives_its_places_back():
    world = await PlacesWorld(group("g", workers=2)).open()
    first = await (await world.run().ask()).granted()
    second, third = await world.run().ask(), await world.run().ask()
    first.end()  # it is the turn of the second
    await second.give_up()
    await third.granted()
    assert len(world.placed) == 2


# --- Engines --------------------------------------------------------------------------------------


async def test_an_idle_engine_that_no_run_keeps_gives_its_place_to_a_run():
    world = await PlacesWorld(group("g", workers=2)).open()
    idle, busy = world.engine(idle=True), world.engine()
    await idle.serve()
    await busy.serve()
    world.now = 60.0
    run = await (await world.run(sampler="none").ask()).granted()
    assert idle.retired and not busy.retired
    late = await world.engine().ask()
    assert not late.has
    run.end()
    await late.granted()


async def test_an_engine_that_a_run_keeps_is_not_stopped_for_others():
    world = await PlacesWorld(group("g", workers=2)).open()
    run = await (await world.run().ask()).granted()
    kept = world.engine(idle=True)
    kept.key = run.sampler
    await kept.serve()
    world.now = 1000.0
    late = await world.engine().ask()
    world.supervisor.poke()
    await quiet()
    assert not late.has and not kept.retired
    run.end()  # the session and its engine go on, until another needs the place
    await quiet()
    assert world.keys(world.groups[0]) == sorted([kept.key, late.key])


async def test_no_engine_is_stopped_where_that_would_not_help():
    world = await PlacesWorld(TRAIN, SAMPLE, host=16 * GIB).open()
    idle = world.engine(idle=True)
    await idle.serve()
    for _ in range(2):
        await (await world.run(sampler="none").ask()).granted()
    world.now = 1000.0
    late = await world.run(sampler="none").ask()
    world.supervisor.poke()
    await quiet()
    assert not late.has and not idle.retired
