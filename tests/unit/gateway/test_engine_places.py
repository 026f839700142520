"""How many engines run and start at once, who is next, and whose engine is stopped for it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.sampling.places import EnginePlaces
from tests.support.waiting import PATIENCE


class Engine:
    def __init__(self, owner: str = "ann", *, idle: bool = False, used_at: float = 0.0) -> None:
        self.owner = owner
        self.idle = idle
        self.used_at = used_at
        self.retired = False
        self.places: EnginePlaces | None = None
        self.place = None

    async def retire(self) -> None:
        self.retired = True
        self.places.give_back(self.place)

    async def start(self, places: EnginePlaces) -> Engine:
        self.places, self.place = places, await places.take(self)
        return self


@pytest.fixture
def now():
    return [0.0]


def places_for(now, *, most: int, most_starting: int = 10) -> EnginePlaces:
    return EnginePlaces(most=most, most_starting=most_starting, quantum=60, clock=lambda: now[0])


async def begun(places: EnginePlaces, *engines: Engine) -> list[asyncio.Task[Engine]]:
    """Let each of them begin to wait, in this order."""
    tasks = []
    for engine in engines:
        tasks.append(asyncio.create_task(engine.start(places)))
        await asyncio.sleep(0)
    return tasks


async def serving(places: EnginePlaces, *engines: Engine) -> None:
    for engine in engines:
        await engine.start(places)
        places.note_started(engine.place)


async def test_engines_start_a_few_at_a_time_and_those_that_wait_know_their_place(now):
    places = places_for(now, most=8, most_starting=1)
    engines = [Engine() for _ in range(3)]
    first, second, third = await begun(places, *engines)
    await first
    assert places.explain(engines[0]) == ""
    assert places.explain(engines[2]) == (
        "1 engines are starting (TANDEM_MAX_STARTING_ENGINES); 1 engine before this one"
    )
    places.note_started(engines[0].place)
    await second
    assert not third.done()
    assert "0 engines before" in places.explain(engines[2])
    places.give_back(engines[1].place)  # it could not start
    await third


async def test_no_more_engines_run_than_the_machine_may_have(now):
    places = places_for(now, most=2)
    await serving(places, Engine(), Engine())
    late = Engine()
    (task,) = await begun(places, late)
    now[0] = 1000.0
    await asyncio.sleep(0)
    assert not task.done()
    assert places.explain(late) == (
        "2 engines run on this machine (TANDEM_MAX_ENGINES); 0 engines before this one"
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert places.explain(late) == ""


async def test_the_idle_engine_that_was_used_least_recently_makes_room_after_its_quantum(now):
    places = places_for(now, most=3)
    busy, recent, old = Engine(), Engine(idle=True, used_at=9), Engine(idle=True, used_at=3)
    await serving(places, busy, recent, old)
    now[0] = 59.0
    late = Engine()
    (task,) = await begun(places, late)
    assert not (recent.retired or old.retired)
    now[0] = 60.0
    await task
    assert [engine.retired for engine in (busy, recent, old)] == [False, False, True]


async def test_the_owner_with_the_fewest_engines_is_next(now):
    places = places_for(now, most=2)
    held = [Engine("ann"), Engine("ann")]
    await serving(places, *held)
    ann, bea = Engine("ann"), Engine("bea")
    tasks = await begun(places, ann, bea)
    places.give_back(held[0].place)
    assert await tasks[1] is bea
    assert not tasks[0].done()
    places.give_back(held[1].place)
    await tasks[0]


async def test_an_engine_that_is_given_up_in_the_moment_of_its_turn_frees_its_place(now):
    places = places_for(now, most=1)
    first = Engine()
    await serving(places, first)
    given_up, other = await begun(places, Engine(), Engine())
    places.give_back(first.place)  # it is the turn of the first that waits
    given_up.cancel()
    started = await asyncio.wait_for(other, PATIENCE)
    assert places.explain(started) == ""
