"""Who waits for a place or for an engine's slot, and who is next."""

from __future__ import annotations

import asyncio
from heapq import nlargest
from itertools import count

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.placement.asks import Asks
from gateway.placement.groups import DeviceGroup
from gateway.placement.room import PlaceRequest
from tandem.errors import InvalidRequest
from tandem.protocol.devices import parse_device
from tests.support.gateway.placement import SAMPLE, TRAIN, WHOLE, Engine, Run, World, group, quiet

GIB = 2**30


# --- The queue ------------------------------------------------------------------------------------


async def test_the_next_is_the_highest_priority_then_the_owner_with_the_fewest_then_the_first():
    only = group("g", workers=2)
    world = await World(only).open()
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
    world = await World(group("g", workers=2)).open()
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
    assert "others have waited for so long that they are next" in later.why
    small.pop(0).end()
    await large.granted()
    large.end()
    await later.granted()


async def test_who_gives_up_leaves_nothing_behind_and_lets_the_others_go_on():
    world = await World(group("g", workers=2)).open()
    first = await (await world.run().ask()).granted()
    second, third = await world.run().ask(), await world.run().ask()
    assert third.why.startswith("2nd")
    await second.give_up()
    assert third.why.startswith("1st") and second.why == ""
    first.end()
    await third.granted()


async def test_who_gives_up_in_the_moment_of_its_turn_gives_its_places_back():
    world = await World(group("g", workers=2)).open()
    first = await (await world.run().ask()).granted()
    second, third = await world.run().ask(), await world.run().ask()
    first.end()  # it is the turn of the second
    await second.give_up()
    await third.granted()
    assert len(world.rows.rows) == 2


# --- Engines --------------------------------------------------------------------------------------


async def test_engines_start_a_few_at_a_time_and_those_that_wait_know_their_turn():
    world = await World(WHOLE, starting=1).open()
    first, second, third = [await world.engine().ask() for _ in range(3)]
    assert first.has and first.why == ""
    assert third.why == (
        "2nd in the queue for a place on group cpu: 1 engines are starting, 1 at most"
    )
    world.places.note_started(first.slot)
    await second.granted()
    assert not third.has
    world.places.give_back(second.slot)  # it could not start
    await third.granted()


async def test_on_a_group_that_is_not_leased_only_so_many_engines_run():
    world = await World(WHOLE, engines=2).open()
    first, _second = await world.engine().serve(), await world.engine().serve()
    late = await world.engine().ask()
    world.now = 1000.0
    assert not late.has
    assert "2 engines run on this machine (TANDEM_MAX_ENGINES)" in late.why
    await (await world.run().ask()).granted()  # its engine has not started yet
    world.places.give_back(first.slot)
    await late.granted()


async def test_on_a_leased_group_engines_sleep_and_are_not_counted():
    world = await World(group("g", workers=9), engines=1).open()
    for _ in range(3):
        await world.engine().serve()


async def test_the_idle_engine_that_was_used_least_recently_makes_room_after_its_quantum():
    world = await World(WHOLE, engines=3).open()
    busy, recent, old = (
        world.engine(),
        world.engine(idle=True, used_at=9),
        world.engine(idle=True, used_at=3),
    )
    for engine in (busy, recent, old):
        await engine.serve()
    world.now = 59.0
    late = await world.engine().ask()
    assert not (recent.retired or old.retired)
    world.now = 60.0
    await late.granted()
    assert [engine.retired for engine in (busy, recent, old)] == [False, False, True]


async def test_the_owner_with_the_fewest_engines_is_next():
    world = await World(WHOLE, engines=2).open()
    held = [await world.engine("ann").serve() for _ in range(2)]
    ann, bea = await world.engine("ann").ask(), await world.engine("bea").ask()
    world.places.give_back(held[0].slot)
    await bea.granted()
    assert not ann.has
    world.places.give_back(held[1].slot)
    await ann.granted()


async def test_an_engine_that_is_given_up_in_the_moment_of_its_turn_frees_its_slot():
    world = await World(WHOLE, engines=1).open()
    first = await world.engine().serve()
    given_up, other = await world.engine().ask(), await world.engine().ask()
    world.places.give_back(first.slot)
    await given_up.give_up()
    await other.granted()


async def test_an_idle_engine_that_no_run_keeps_gives_its_place_to_a_run():
    world = await World(group("g", workers=2)).open()
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
    world = await World(group("g", workers=2)).open()
    run = await (await world.run().ask()).granted()
    kept = world.engine(idle=True)
    kept.key = run.sampler
    await kept.serve()
    world.now = 1000.0
    late = await world.engine().ask()
    world.places.queue.assign()
    assert not late.has and not kept.retired
    run.end()  # its session goes on, and so does the engine, until another needs its place
    assert world.keys(world.groups[0]) == sorted([kept.key, late.key])


async def test_no_engine_is_stopped_where_that_would_not_help():
    world = await World(TRAIN, SAMPLE, host=16 * GIB).open()
    idle = world.engine(idle=True)
    await idle.serve()
    for _ in range(2):
        await (await world.run(sampler="none").ask()).granted()
    world.now = 1000.0
    late = await world.run(sampler="none").ask()
    world.places.queue.assign()
    assert not late.has and not idle.retired


# --- Whatever happens -----------------------------------------------------------------------------

asked = st.fixed_dictionaries(
    {
        "owner": st.sampled_from("abc"),
        "sampler": st.sampled_from([True, "none"]),
        "memory": st.integers(0, 8),
        "host_memory": st.integers(0, 8),
        "sampler_memory": st.integers(0, 8),
        "sampler_host_memory": st.integers(0, 8),
        "group": st.sampled_from(["", "", "x"]),
        "priority": st.integers(-2, 2),
        "ranks": st.integers(1, 2),
    }
)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("run"), asked),
        st.tuples(st.just("engine"), asked),
        st.tuples(st.sampled_from(["end", "give up", "idle", "later"]), st.integers(0, 30)),
    ),
    max_size=40,
)


def groups_for(data) -> list[DeviceGroup]:
    devices = tuple(parse_device(f"cpu:{n}") for n in range(2))
    return [
        group(name, devices=devices, workers=workers, memory_bytes=memory, awake=awake)
        for name, (workers, memory, awake) in zip("xy", data, strict=False)
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    acts=acts,
    shapes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=2
    ),
    host=st.integers(0, 20),
    engines=st.integers(1, 3),
)
def test_no_budget_is_exceeded_nothing_is_half_taken_and_everybody_gets_a_turn(
    acts, shapes, host, engines
):
    async def scenario():
        world = await World(*groups_for(shapes), host=host, engines=engines, starting=2).open()
        everybody = []

        def check() -> None:
            for each in world.groups:
                there = world.places.on(each)
                assert len(there) <= each.workers
                awake = sum(nlargest(each.awake or len(there), [p.memory for p in there]))
                assert not each.memory_bytes or awake <= each.memory_bytes
            every = [place for each in world.groups for place in world.places.on(each)]
            assert not host or sum(place.host_memory for place in every) <= host
            keys = {place.key for place in every}
            assert keys == set(world.rows.rows)
            for one in everybody:
                if isinstance(one, Run):
                    kept = one.asks.sampler and one.has
                    assert one.has == (one.key in keys)
                    assert (one.sampler in keys) == bool(kept)

        for act, value in acts:
            if act in ("run", "engine"):
                asks = {k: v for k, v in value.items() if k != "owner"}
                if act == "run":
                    one = world.run(value["owner"], **asks)
                    ask = one.as_ask()
                else:
                    one = world.engine(
                        value["owner"], asks=Asks(**(asks | {"sampler_group": asks["group"]}))
                    )
                    ask = PlaceRequest.of_engine(one, one.asks)
                try:
                    world.places.check(ask)
                except InvalidRequest:
                    continue
                everybody.append(await one.ask())
            elif everybody:
                one = everybody[value % len(everybody)]
                if act == "later":
                    world.now += 100
                    world.places.queue.assign()
                elif act == "idle" and isinstance(one, Engine):
                    one.idle = True
                elif act == "give up" and not one.task.done():
                    await one.give_up()
                    everybody.remove(one)
                elif act == "end" and one.has:
                    await end(one)
                    everybody.remove(one)
            await settle(everybody)
            everybody = [one for one in everybody if not getattr(one, "retired", False)]
            check()
        # Whoever waits is served when the others end, and nothing is left when all have ended.
        for _ in range(len(everybody) + 1):
            await settle(everybody)
            check()
            for one in [one for one in everybody if one.has]:
                if not getattr(one, "retired", False):  # for the sake of one that waited
                    await end(one)
                everybody.remove(one)
                await settle(everybody)
        assert everybody == [] and world.rows.rows == {} and world.places.queue.waiting == []

    asyncio.run(scenario())


async def end(one: Run | Engine) -> None:
    if isinstance(one, Run):
        one.end()
    else:
        one.places.give_back(one.slot)
    await asyncio.sleep(0)


async def settle(everybody) -> None:
    """Let what was granted be taken, and engines serve."""
    for _ in range(3):
        await quiet()
        for one in everybody:
            if isinstance(one, Engine) and one.has and one.slot.starting and not one.retired:
                one.places.note_started(one.slot)
