"""Several model engines serve one sampler, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from gateway.checkpoints.versions import WeightVersion
from gateway.workers.groups import WorkerGroup
from tandem.errors import InvalidRequest, NoRoom, OperationTimedOut, SessionFinished, WorkerDied
from tandem.v1 import common_pb2, sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.sampler_world import LOAD_TIMEOUT, TURNS, WHOLE_MACHINE, World
from tests.support.virtual_time import now
from tests.support.waiting import until

DEVICES = tuple(
    WorkerGroup(
        name=f"d{number}",
        kinds=frozenset({"trainer", "engine"}),
        devices=(f"cpu:{number}",),
        on_host=True,
        awake=0,
        workers=1,
    )
    for number in range(3)
)


@pytest.fixture
def new_world(tmp_path):
    def new(replicas: int = 2, groups=WHOLE_MACHINE, **settings) -> World:
        return World(tmp_path, settings, replicas=replicas, groups=groups)

    return new


def engines(world: World) -> list[ModelSampler]:
    return [world.host.workers[name] for name in world.running()]


async def serving(world: World, replicas: int = 2) -> list[ModelSampler]:
    """Start engines. Each of their samples takes a second."""
    await world.open()
    world.sampler().start()
    await until(lambda: sum(each.serves for each in world.sampler().engines) >= replicas)
    for engine in engines(world):
        engine.seconds = 1.0
    return engines(world)


def saved(world: World, name: str) -> WeightVersion:
    version = world.version(name)
    return WeightVersion(
        name=version.name, path=version.path, run_id="s-1:train:0", step=1, base_model="tiny"
    )


async def many(world: World, *, version: str = "v1", number: int = 40) -> list[str]:
    asked = (world.sample(version, prompt=bytes([n]) * 128) for n in range(number))
    return list(await asyncio.gather(*asked))


def test_two_engines_share_the_samples_and_answer_as_one_would(new_world):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        first, second = await serving(world)
        answers.extend(await many(world))
        assert min(len(first.answered), len(second.answered)) >= 15

    async def by_one():
        await serving(alone, 1)
        assert await many(alone) == answers

    world.run(scenario())
    alone.run(by_one())


def test_a_load_reaches_all_engines_before_it_ends(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        await many(world)
        await world.sampler().load(saved(world, "v2"))
        assert first.version.name == second.version.name == "s-1:train:0/v2"
        await many(world, version="v2")
        assert {"s-1:train:0/v2"} < {*first.answered} == {*second.answered}

    world.run(scenario())


def test_samples_of_the_version_before_end_with_it_on_their_engine(new_world):
    world = new_world()

    async def scenario():
        await serving(world)
        before = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        await world.sampler().load(saved(world, "v2"))
        after = await many(world, version="v2")
        assert before.done()
        assert not {*before.result()} & {*after}

    world.run(scenario())


@pytest.mark.parametrize("wait", [0.2, 0.5, 1.0])
def test_an_engine_that_is_killed_loses_no_sample_and_its_samples_go_to_the_other_one(
    new_world, wait
):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        await serving(world)
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(wait)
        world.host.kill(world.running()[0])
        answers.extend(await asked)

    async def undisturbed():
        await serving(alone, 1)
        assert await many(alone) == answers

    world.run(scenario())
    alone.run(undisturbed())


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_sampler_says_was_lost_with_its_engine_is_asked_of_another_one(new_world, replicas):
    world, alone = new_world(replicas), new_world(1)
    answers = []

    async def scenario():
        first = (await serving(world, replicas))[0]
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        first.failed = True
        answers.extend(await asked)
        now = engines(world)[0]
        assert now is not first
        now.failed = True
        await world.sampler().load(saved(world, "v2"))
        await until(lambda: now not in engines(world))
        assert "s-1:train:0/v2" in [each.version.name for each in engines(world)]

    async def undisturbed():
        await serving(alone, 1)
        assert await many(alone) == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_a_request_at_which_engines_fail_ends_with_the_second_one(new_world, monkeypatch):
    world = new_world(1)

    async def scenario():
        (first,) = await serving(world, 1)
        monkeypatch.setattr(ModelSampler, "failed", True)
        assert await world.sample() == "worker_died"
        (second,) = engines(world)
        assert second is not first
        with pytest.raises(WorkerDied, match="died twice during a load: the engine failed"):
            await world.sampler().load(saved(world, "v2"))

    world.run(scenario())


@pytest.mark.parametrize(
    ("in_flight", "updates", "led", "drawn_from"),
    [
        (True, "DEFAULT", True, "v2"),
        (False, "DEFAULT", True, "v1"),
        (True, "DEFAULT", False, "v1"),
        (True, "KEEP", False, "v2"),
        (True, "ABORT", False, "v2"),
    ],
)
def test_what_is_in_flight_when_its_engine_is_killed_is_drawn_from_the_newest_version(
    new_world, in_flight, updates, led, drawn_from
):
    world = new_world(1)

    async def scenario():
        (engine,) = await serving(world, 1)
        updates_as = sampler_pb2.Updates.Value(f"UPDATES_{updates}")
        asked = asyncio.create_task(world.sample("v1", in_flight=in_flight, updates=updates_as))
        await asyncio.sleep(0.5)

        async def load_at_once(request):
            return sampler_pb2.LoadReply(version=request.version)

        engine.Load = load_at_once
        await world.sampler().load(saved(world, "v2"), in_flight=led)
        assert not asked.done(), "the load did not wait for it"
        world.host.kill(engine.spec.worker_id)
        assert await asked == await world.sample(drawn_from)

    world.run(scenario())


def test_an_engine_that_was_killed_is_started_again_while_there_is_work(new_world):
    world = new_world()

    async def scenario():
        before = {engine.spec.worker_id for engine in await serving(world)}
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        killed = world.host.workers[min(before)]
        world.host.kill(killed.spec.worker_id)
        await asked
        await many(world)
        now = {engine.spec.worker_id: engine.spec.replica for engine in engines(world)}
        assert len(now) == 2 and killed.spec.worker_id not in now
        assert sorted(now.values()) == [0, 1]

    world.run(scenario())


def test_samples_go_on_when_a_replica_cannot_load_and_are_of_the_version_they_name(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        world.host.kill(second.spec.worker_id)
        load = asyncio.create_task(world.sampler().load(saved(world, "v2")))
        answers = await many(world, version="v2")
        await load
        assert len({*answers}) == len(answers)
        assert first.version.name == "s-1:train:0/v2"
        assert {*first.answered} == {"s-1:train:0/v2"}

    world.run(scenario())


def test_each_engine_is_adopted_as_the_one_that_it_was(new_world):
    world = new_world()

    async def scenario():
        world.left("sampler-s-1-0", replica=1).version = world.version("v2")
        world.left("sampler-s-1-1", replica=0)
        world.left("sampler-s-1-2", replica=2)
        del world.table.rows["s-1/tiny/0#2"]
        await world.open()
        first, second = world.sampler().engines
        assert (first.process, second.process) == ("sampler-s-1-1", "sampler-s-1-0")
        assert (first.weights, second.weights) == ("base/tiny", "s-1:train:0/v2")
        assert world.running() == ["sampler-s-1-0", "sampler-s-1-1"], "the third has no place"

    world.run(scenario())


# --- Lost -----------------------------------------------------------------------------------------


async def losing(world: World, replicas: int) -> ModelSampler:
    """Have that many engines that serve, and lose the first."""
    await serving(world, replicas)
    first = world.sampler().engine
    process = world.host.workers[first.process]
    process.frozen, world.launcher.reports = True, False
    world.supervisor.roster.note(first.row.moved("lost", at=now()))
    return process


def test_a_sample_of_a_lost_engine_fails_in_time_and_shows_why_it_waits(new_world):
    world = new_world(1)

    async def scenario():
        process = await losing(world, 1)
        asked = asyncio.create_task(world.sample())
        await asyncio.sleep(LOAD_TIMEOUT - 50)
        assert "neither it nor its launcher answers" in world.sampler().explain()
        assert not asked.done()
        async with asyncio.timeout(100):
            assert await asked == OperationTimedOut.type
        with pytest.raises(OperationTimedOut, match="neither it nor its launcher answers"):
            await world.sampler().load(saved(world, "v2"))
        process.frozen = False
        await world.sample()
        assert process.answered
        world.launcher.reports = True

    world.run(scenario())


def test_a_sample_of_a_lost_engine_goes_to_another_one_in_the_end(new_world):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        lost = await losing(world, 2)
        answers.append(await world.sample())
        assert LOAD_TIMEOUT <= now() < LOAD_TIMEOUT + 50
        assert not lost.answered
        world.launcher.reports = True

    async def undisturbed():
        await serving(alone, 1)
        assert [await alone.sample()] == answers

    world.run(scenario())
    alone.run(undisturbed())


# --- Scaled while it lives ------------------------------------------------------------------------


async def scale(world: World, replicas: int, *, wait: float = 0.0) -> None:
    await world.router.scale(world.sampler(), replicas, wait=wait)


def states(world: World) -> dict[str, int]:
    return Counter(engine.state for engine in world.sampler().engines)


async def by_one(world: World, *, number: int) -> list[str]:
    await serving(world, 1)
    return await many(world, number=number)


def test_an_engine_that_is_added_has_the_version_before_its_first_request(new_world):
    world = new_world(1)

    async def scenario():
        (first,) = await serving(world, 1)
        await many(world, version="v2")
        busy = asyncio.create_task(many(world, version="v2"))
        await scale(world, 2)
        await until(lambda: states(world) == {"ready": 2})
        second = next(engine for engine in engines(world) if engine is not first)
        second.seconds = 1.0
        await until(lambda: second.version.name == first.version.name)
        assert not second.answered
        await busy
        await many(world, version="v2")
        assert len(second.answered) >= 15

    world.run(scenario())


def test_what_one_engine_was_sent_too_much_goes_to_the_one_that_is_added(new_world):
    world, alone = new_world(1, sampler={"max_num_seqs": 8}), new_world(1)
    answers = []

    async def scenario():
        (first,) = await serving(world, 1)
        first.seconds = 100.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 2)
        answers.extend(await asked)
        second = next(engine for engine in engines(world) if engine is not first)
        assert len(second.answered) == 32, "the first can have begun 8"

    async def undisturbed():
        assert await by_one(alone, number=40) == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_an_engine_that_leaves_ends_what_it_has_and_gets_nothing_new(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        first.seconds = second.seconds = 50.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        assert len(world.sampler().replicas.leaving) == 1 and len(world.running()) == 2
        await many(world)
        await asked
        await until(lambda: len(world.running()) == 1)
        assert 15 <= len(second.answered) <= 25
        assert not world.sampler().replicas.leaving
        assert len(world.supervisor.roster.rows) == 1

    world.run(scenario())


def test_an_engine_that_does_not_end_what_it_has_loses_it_to_the_others(new_world):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        _, second = await serving(world)
        second.seconds = 5000.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        async with asyncio.timeout(400):
            answers.extend(await asked)
            await until(lambda: len(world.running()) == 1)

    async def undisturbed():
        assert await by_one(alone, number=40) == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_an_engine_that_dies_while_it_leaves_is_not_started_again(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.seconds = 50.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        (leaving,) = world.sampler().replicas.leaving
        with patch.object(leaving, "start") as start:
            world.host.kill(leaving.process)
            await asked
            await until(lambda: len(world.supervisor.roster.rows) == 1)
        start.assert_not_called()

    world.run(scenario())


def test_an_engine_that_is_wanted_again_while_it_leaves_stays(new_world):
    world = new_world()

    async def scenario():
        for engine in await serving(world):
            engine.seconds = 50.0
        before = world.running()
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        await scale(world, 2)
        await asked
        await many(world)
        assert world.running() == before and states(world) == {"ready": 2}

    world.run(scenario())


def test_a_load_does_not_wait_for_the_devices_of_an_engine_that_leaves(new_world):
    small, large = (replace(TURNS[0], name=f"d{n}", workers=n) for n in (1, 2))
    world = new_world(groups=(small, large))

    async def scenario():
        await serving(world)
        first, second = world.sampler().engines
        other = world.sampler("s-2")
        await world.router.scale(other, 1, wait=0)
        await world.sample(session_id="s-2")
        world.host.workers[other.engine.process].seconds = 5000.0
        busy = asyncio.create_task(world.sample(session_id="s-2"))
        await until(lambda: second.row.state == "asleep")
        load = asyncio.create_task(world.sampler().load(saved(world, "v2")))
        await until(lambda: second.waits_for_devices)
        await scale(world, 1)
        async with asyncio.timeout(10):
            await load
        assert first.weights == "s-1:train:0/v2" and not busy.done()

    world.run(scenario())


def test_a_sample_that_was_answered_leaves_the_engine_idle_at_once(new_world):
    world = new_world(1)

    async def scenario():
        await serving(world, 1)
        (engine,) = world.sampler().engines
        calls = world.supervisor.roster.calls_of(engine.key)
        version = world.version("v1")
        seen: list[int] = []

        async def send(_client: object) -> None:
            seen.append(calls.uses)

        await engine.call(send, version=version)
        assert (seen, calls.uses) == ([1], 0)

    world.run(scenario())


def test_a_load_that_waits_for_devices_ends_with_its_sampler(new_world):
    world = new_world(1, groups=TURNS)

    async def scenario():
        await serving(world, 1)
        (engine,) = world.sampler().engines
        await world.sample(session_id="s-2")
        (second,) = (each for each in engines(world) if each.spec.session_id == "s-2")
        second.seconds = 5000.0
        busy = asyncio.create_task(world.sample(session_id="s-2"))
        await until(lambda: engine.row.state == "asleep" and not busy.done())
        load = asyncio.create_task(world.sampler().load(saved(world, "v2")))
        await until(lambda: engine.waits_for_devices)
        await world.router.end_session("s-1", SessionFinished("over"))
        async with asyncio.timeout(10):
            with pytest.raises(SessionFinished, match="over"):
                await load

    world.run(scenario())


def test_an_engine_wakes_with_the_version_that_the_oldest_waiting_request_wants(new_world):
    world, woken = new_world(1, groups=TURNS), []

    async def scenario():
        (engine,) = await serving(world, 1)
        wake = engine.Wake

        async def load_as_it_wakes(request):
            await wake(request)
            await engine.Load(sampler_pb2.LoadRequest(version=request.version))
            woken.append(world.sampler().engine.weights)
            return common_pb2.SwitchReply(version=request.version)

        engine.Wake = load_as_it_wakes
        await world.sample("v1")
        await world.sample(session_id="s-2")
        samples = [asyncio.create_task(world.sample(version)) for version in ("v2", "v3")]
        await until(lambda: world.sampler().engine.weights == "s-1:train:0/v2")
        assert woken == ["s-1:train:0/v1"] and engine.answered == ["s-1:train:0/v1"]
        await asyncio.gather(*samples)

    world.run(scenario())


def test_engines_are_added_all_or_none_and_the_refusal_says_how_many_there_is_room_for(new_world):
    world = new_world(1, groups=DEVICES)

    async def scenario():
        await serving(world, 1)
        await world.sample(session_id="s-2")
        with pytest.raises(NoRoom, match="and there is room for 1: "):
            await scale(world, 3)
        assert len(world.running()) == 2 and states(world) == {"ready": 1}
        with pytest.raises(InvalidRequest, match="there can be no place for it"):
            await scale(world, 4)
        await scale(world, 2)
        await until(lambda: states(world) == {"ready": 2})
        await scale(world, 2)
        assert len(world.running()) == 3
        assert sum(bool(row.group) for row in world.supervisor.roster.rows.values()) == 3

    world.run(scenario())


def test_engines_that_have_nothing_to_do_end_for_those_that_are_added(new_world):
    world = new_world(1, groups=DEVICES, engine_quantum=0)

    async def scenario():
        await serving(world, 1)
        await world.sample(session_id="s-2")
        await scale(world, 3)
        await until(lambda: states(world) == {"ready": 3})
        assert len(world.running()) == 3

    world.run(scenario())


def test_the_next_gateway_goes_on_with_what_was_asked_for(new_world):
    world = new_world(1)

    async def scenario():
        world.left("sampler-s-1-8", replica=0)
        world.left("sampler-s-1-9", replica=2)
        await world.open()
        await until(lambda: states(world) == {"ready": 2})
        replicas = sorted(engine.spec.replica for engine in engines(world))
        assert replicas == [0, 1], "one ends that is too many, and one starts that is not there"

    world.run(scenario())


def test_without_a_run_engines_start_when_all_have_a_place(new_world):
    world = new_world(2, groups=DEVICES[:2], engine_quantum=0)

    async def scenario():
        await world.open()
        other = world.sampler("s-2")
        await world.router.scale(other, 1, wait=0)
        await world.sample(session_id="s-2")
        (busy,) = engines(world)
        busy.seconds = 10.0
        at_work = asyncio.create_task(world.sample(session_id="s-2"))
        await asyncio.sleep(0.1)
        asked = asyncio.create_task(world.sample())
        await asyncio.sleep(5)
        assert states(world) == {"queued": 2} and len(world.running()) == 1
        assert "a place on group d0 or d1" in world.sampler().explain()
        await at_work
        assert await asked != "worker_start_failed"
        await until(lambda: states(world) == {"ready": 2})

    world.run(scenario())


def test_samples_that_wait_for_the_devices_of_an_engine_go_to_one_that_has_nothing_to_do(new_world):
    world, alone = new_world(), new_world(1)
    answers, turn = [], asyncio.Event()

    @asynccontextmanager
    async def waits_for_its_turn(_key: str):
        await turn.wait()
        yield

    async def scenario():
        first, second = await serving(world)
        sleeper = next(e for e in world.sampler().engines if e.process == second.spec.worker_id)
        calls = SimpleNamespace(waiting=[asyncio.Future()])
        roster = SimpleNamespace(rows=world.supervisor.roster.rows, calls_of=lambda _key: calls)
        sleeper.supervisor = SimpleNamespace(
            roster=roster, use=waits_for_its_turn, release=world.supervisor.release
        )
        answers.extend(await many(world))
        assert len(first.answered) == 40 and not second.answered
        sleeper.supervisor = world.supervisor

    async def undisturbed():
        assert await by_one(alone, number=40) == answers

    world.run(scenario())
    alone.run(undisturbed())


@pytest.mark.parametrize("seed", range(12))
def test_however_it_is_scaled_while_engines_die_no_sample_is_lost_or_another_one(new_world, seed):
    world, alone = new_world(1, sampler={"max_num_seqs": 8}), new_world(1)
    answers, rng = [], random.Random(seed)

    async def scenario():
        await serving(world, 1)
        asked = asyncio.create_task(many(world, number=80))
        killed = 0
        while not asked.done():
            await asyncio.sleep(rng.random() * 3)
            for engine in engines(world):
                engine.seconds = rng.random() * 20
            if killed < 1 and rng.random() < 0.2:
                killed += 1
                world.host.kill(rng.choice(world.running()))
            else:
                await scale(world, rng.randint(1, 4))
        answers.extend(await asked)

    async def undisturbed():
        assert await by_one(alone, number=80) == answers

    world.run(scenario())
    alone.run(undisturbed())


@pytest.mark.parametrize("replicas", [1, 2])
def test_samples_that_come_while_rows_are_written_hear_why_they_were_not(new_world, replicas):
    world = new_world(replicas)

    async def scenario():
        await world.open()
        world.table.commit_seconds, world.table.failing = 5.0, 1
        samples = [asyncio.create_task(world.sample("base"))]
        await asyncio.sleep(1)
        samples.append(asyncio.create_task(world.sample("base")))
        assert await asyncio.gather(*samples) == ["storage_failed", "storage_failed"]
        world.table.commit_seconds = 0.0
        assert await world.sample("base") not in ("storage_failed", "worker_died")

    world.run(scenario())


def test_an_engine_that_answers_again_while_it_is_prepared_is_prepared_twice(new_world):
    world, faults = new_world(), []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, about: faults.append(about))
        await serving(world)
        replicas = world.sampler().replicas
        goes_on = asyncio.Event()

        async def prepare(_engine) -> None:
            await goes_on.wait()

        replicas.prepare = prepare
        for _ in range(2):
            replicas.engines[1].on_change(None)
            await asyncio.sleep(0)
        assert replicas.serving() == replicas.engines[:1]
        goes_on.set()
        await asyncio.sleep(0.1)
        gc.collect()
        assert replicas.serving() == replicas.engines and not faults

    world.run(scenario())
