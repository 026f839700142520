"""Who has a place where, who waits for one, and who is next."""

from __future__ import annotations

import asyncio
from heapq import nlargest
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert

from gateway.placement.asks import Asks
from gateway.placement.groups import DeviceGroup
from gateway.placement.places import Places
from gateway.placement.room import Ask, engine_key
from gateway.storage.tables import drained_groups, scaled_samplers
from tandem.devices import parse_device
from tandem.errors import InvalidRequest, NoRoom, StorageFull
from tests.support.waiting import PATIENCE
from tests.support.work import calls_in

GIB = 2**30


class Rows:
    """A database of places, as a dictionary, of the names of drained groups, and of how many
    engines samplers were scaled to. It takes what is written together unless it is `full`."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, object]] = {}
        self.drained: set[str] = set()
        self.scaled: dict[str, int] = {}
        self.full = False

    async def read(self, query):
        if query.get_final_froms() == [drained_groups]:
            return [{"name": name} for name in self.drained]
        if query.get_final_froms() == [scaled_samplers]:
            return [{"sampler": key, "replicas": n} for key, n in self.scaled.items()]
        return list(self.rows.values())

    def insert_once(self, table):
        return insert(table)

    async def write(self, statement, *rows) -> None:
        self.drained.update(row["name"] for row in rows)
        if statement.is_delete:
            self.drained.discard(statement.compile().params["name_1"])

    async def write_together(self, *statements) -> None:
        if self.full:
            raise StorageFull("the disk is full")
        for statement in statements:
            params = statement.compile().params
            if statement.table is not scaled_samplers:
                self.write_soon(statement, params)
            elif statement.is_insert:
                self.scaled[params["sampler"]] = params["replicas"]

    def write_soon(self, statement, *rows) -> None:
        if statement.table is scaled_samplers:
            self.scaled.pop(statement.compile().params["sampler_1"])
            return
        for row in rows:
            self.rows[row["key"]] = row
        if statement.is_delete:
            self.rows.pop(statement.compile().params["key_1"], None)

    async def flush(self) -> bool:
        return True


def group(name: str, *roles: str, **changes) -> DeviceGroup:
    number = sum(map(ord, name)) % 1000
    values = {"devices": (parse_device(f"cpu:{number}"),), "workers": 2} | changes
    return DeviceGroup(name=name, roles=frozenset(roles or ("trainer", "sampler")), **values)


WHOLE = group("cpu", devices=(), workers=0, awake=0, most_ranks=8)
TRAIN, SAMPLE = group("train", "trainer"), group("sample", "sampler")


class World:
    """Places on some groups. The clock stands still."""

    def __init__(self, *groups: DeviceGroup, host: int = 0, engines: int = 99, starting: int = 99):
        self.now = 0.0
        self.rows = Rows()
        self.groups, self.host = groups, host
        self.limits = {"most_engines": engines, "most_starting": starting, "quantum": 60.0}
        self.numbers = count()

    async def open(self, active=lambda _session: True) -> World:
        self.places = Places(database=self.rows, clock=lambda: self.now, **self.limits)
        await self.places.open(
            self.groups,
            host_memory_bytes=self.host,
            is_wanted=lambda place: active(place.session_id),
        )
        return self

    def run(self, owner: str = "ann", run_id: str = "", **asks) -> Run:
        return Run(self, owner, run_id or f"run-{next(self.numbers)}", Asks(**asks))

    def engine(self, owner: str = "ann", **values) -> Engine:
        return Engine(self, owner, f"sampler-{next(self.numbers)}", **values)

    def keys(self, group: DeviceGroup) -> list[str]:
        return sorted(place.key for place in self.places.on(group))


async def quiet() -> None:
    """Return when every task has gone as far as it can."""
    for _ in range(8):
        await asyncio.sleep(0)


class Asking:
    """Somebody who asks for places, in a task of its own."""

    task: asyncio.Task | None = None

    async def ask(self):
        self.task = asyncio.create_task(self.take())
        await quiet()
        return self

    @property
    def has(self) -> bool:
        return self.task is not None and self.task.done() and not self.task.cancelled()

    async def granted(self):
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)
        return self

    async def give_up(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Run(Asking):
    def __init__(self, world: World, owner: str, run_id: str, asks: Asks) -> None:
        self.places, self.owner, self.key, self.asks = world.places, owner, run_id, asks
        self.sampler = f"sampler-of-{run_id}"

    def as_ask(self) -> Ask:
        return Ask.of_run(
            self.key, owner=self.owner, session_id="s", asks=self.asks, sampler=self.sampler
        )

    async def take(self):
        self.place = await self.places.take(self.as_ask())

    def end(self) -> None:
        self.places.release_trainer(self.key)

    @property
    def why(self) -> str:
        return self.places.queue.explain(self.key)


class Engine(Asking):
    session_id = "s"

    def __init__(self, world, owner, key, *, idle=False, used_at=0.0, asks=Asks()) -> None:  # noqa: B008
        self.places, self.owner, self.key, self.asks = world.places, owner, key, asks
        self.idle, self.used_at, self.slot, self.retired = idle, used_at, None, False

    async def take(self):
        self.slot = await self.places.take_for_engine(self, self.asks)

    async def serve(self) -> Engine:
        await (await self.ask()).granted()
        self.places.note_started(self.slot)
        return self

    async def retire(self) -> None:
        self.retired = True
        self.places.give_back(self.slot)

    @property
    def why(self) -> str:
        return self.places.queue.explain(self.key)


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
    ask = Ask.of_engines("scaled", owner=run.owner, session_id="s", engines=engines)
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
        "2nd in the queue for a place on group cpu: "
        "1 engines are starting (TANDEM_MAX_STARTING_ENGINES)"
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
                    ask = Ask.of_engine(one, one.asks)
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
