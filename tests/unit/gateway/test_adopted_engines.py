"""The next gateway continues with the engines of the previous one, in virtual time, with model
engines."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from unittest.mock import patch

import grpc.aio
import pytest

from gateway.workers import model_sizes
from tandem.errors import OperationTimedOut, SessionFinished
from tandem.v1 import sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.sampler_world import LOAD_TIMEOUT, ONE_PLACE, TURNS, WHOLE_MACHINE, World
from tests.support.model_files import write_weights
from tests.support.virtual_time import now, run_in_virtual_time

DESCRIBE_TIMEOUT = 30.0
"""Virtual seconds."""


@pytest.fixture
def new_world(tmp_path):
    def new(groups=WHOLE_MACHINE, starts=0, **settings):
        return World(tmp_path, settings, groups=groups, starts=starts)

    return new


@pytest.fixture
def world(new_world) -> World:
    return new_world()


def test_an_engine_is_adopted_with_what_it_has_and_answers_as_before(world):
    async def scenario():
        engine = world.left()
        engine.version, engine.adapters = world.version("v1"), ["s-1:train:1/v2"]
        await world.open()
        sampler = world.sampler()
        assert (sampler.engine.state, sampler.engine.weights) == ("ready", "s-1:train:0/v1")
        assert sampler.engine.loaded == {"s-1:train:0/v1", "s-1:train:1/v2"}
        assert "weights/s-1_train_0/v1" in world.pins.folders()
        assert await world.sample("v1") == await engine_alone(world, "v1")
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


async def engine_alone(world: World, version: str) -> str:
    """The answer of an undisturbed engine."""
    request = sampler_pb2.SampleRequest(version=world.version(version))
    request.params.seed = 7
    engine = world.left("alone")
    del world.host.workers["alone"]
    return (await engine.Sample(request)).response.decode()


def test_an_engine_that_has_another_version_changes_to_the_one_that_is_asked_for(world):
    async def scenario():
        world.left().version = world.version("v1")
        await world.open()
        assert await world.sample("v2") == await engine_alone(world, "v2")
        assert world.sampler().engine.weights == "s-1:train:0/v2"
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


def test_a_load_that_was_under_way_is_awaited_and_samples_wait_for_it(world):
    async def scenario():
        engine = world.left()
        engine.version = world.version("v1")
        engine.state = sampler_pb2.SAMPLER_STATE_LOADING
        await world.open()
        assert now() < 5, "the gateway opens meanwhile"
        assert world.sampler().engine.state == "starting"
        assert "weights/s-1_train_0/v1" in world.pins.folders(), "it goes back to it if it fails"
        sample = asyncio.create_task(world.sample("v3"))
        await asyncio.sleep(LOAD_TIMEOUT / 2)
        assert not sample.done()
        engine.version, engine.state = world.version("v2"), sampler_pb2.SAMPLER_STATE_AWAKE
        assert await sample == await engine_alone(world, "v3")
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


def test_an_engine_that_sleeps_is_adopted_asleep_and_woken_by_its_next_use(new_world):
    world = new_world(groups=TURNS)

    async def scenario():
        engine = world.left(state="asleep")
        engine.version, engine.state = world.version("v1"), sampler_pb2.SAMPLER_STATE_ASLEEP
        await world.open()
        sampled = world.sampler().engine
        assert (sampled.state, sampled.weights) == ("ready", "s-1:train:0/v1")
        assert sampled.row.state == "asleep"
        await asyncio.sleep(100)
        assert engine.state == sampler_pb2.SAMPLER_STATE_ASLEEP, "nobody needs it"
        assert await world.sample("v1") == await engine_alone(world, "v1")
        assert world.sampler().engine.row.state == "awake"
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


def test_an_engine_that_sleeps_where_nobody_is_put_to_sleep_any_more_is_replaced(world):
    async def scenario():
        engine = world.left()
        engine.state = sampler_pb2.SAMPLER_STATE_ASLEEP
        await world.open()
        assert await world.sample() == await engine_alone(world, "v1")
        assert engine.died.done()

    world.run(scenario())


def test_a_wake_that_was_under_way_is_awaited_and_the_engine_adopted(new_world):
    world = new_world(groups=TURNS)

    async def scenario():
        engine = world.left(state="waking")
        engine.state = sampler_pb2.SAMPLER_STATE_WAKING
        await world.open()
        sample = asyncio.create_task(world.sample("v1"))
        await asyncio.sleep(100)
        assert (world.sampler().engine.row.state, sample.done()) == ("waking", False)
        engine.state = sampler_pb2.SAMPLER_STATE_AWAKE
        assert await sample == await engine_alone(world, "v1")
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


def test_a_run_uses_the_engine_that_is_kept_for_it_where_its_session_has_others(world):
    async def scenario():
        await world.open()
        router, any_rank = world.router, {"session_id": "s-1", "model": world.model}
        own = router.ensure(**any_rank, rank=8)
        router.lend("s-2/tiny/64", "s-1", world.model)
        assert router.ensure(**any_rank, rank=8) is own
        assert str(router.ensure(**any_rank, rank=8, kept="s-2/tiny/64").key) == "s-2/tiny/64"
        made = router.ensure(**any_rank, rank=8, kept="s-1/tiny/128")
        assert str(made.key) == "s-1/tiny/128", "its trainer keeps a place for it"

    world.run(scenario())


def test_an_engine_that_still_starts_is_awaited(world):
    async def scenario():
        engine = world.left(state="starting")
        engine.serving.clear()
        await world.open()
        assert now() < 5, "the gateway opens meanwhile"
        sample = asyncio.create_task(world.sample())
        await asyncio.sleep(100)
        engine.serving.set()
        await sample
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


def freeze(world: World, engine: ModelSampler) -> None:
    engine.frozen = True


def fail(world: World, engine: ModelSampler) -> None:
    engine.state = sampler_pb2.SAMPLER_STATE_FAILED


def load_for_ever(world: World, engine: ModelSampler) -> None:
    engine.state = sampler_pb2.SAMPLER_STATE_LOADING


def die(world: World, engine: ModelSampler) -> None:
    world.host.kill(engine.spec.worker_id)


@pytest.mark.parametrize(
    ("misfortune", "seconds"),
    [(freeze, DESCRIBE_TIMEOUT), (fail, 0), (load_for_ever, LOAD_TIMEOUT), (die, 0)],
)
def test_an_engine_that_is_of_no_use_is_replaced_and_gives_the_same_tokens(
    world, misfortune, seconds
):
    async def scenario():
        engine = world.left()
        await world.open_host()
        misfortune(world, engine)
        await world.router.take_up_engines([])
        assert await world.sample() == await engine_alone(world, "v1")
        assert now() < seconds + 20
        assert engine.died.done()
        assert len(world.running()) == 1

    world.run(scenario())


def test_an_engine_of_no_use_that_nobody_needs_is_killed_and_no_other_is_started(world):
    async def scenario():
        freeze(world, world.left())
        await world.open()
        await asyncio.sleep(2 * DESCRIBE_TIMEOUT)
        assert world.sampler().engine.state == "idle"
        assert world.running() == []

    world.run(scenario())


def test_samples_of_an_engine_that_nobody_can_find_fail_until_it_answers(world):
    async def scenario():
        engine = world.left()
        engine.frozen, world.launcher.reports = True, False
        await world.open()
        assert await world.sample() == OperationTimedOut.type
        assert LOAD_TIMEOUT <= now() < LOAD_TIMEOUT + 2 * DESCRIBE_TIMEOUT
        engine.frozen = False
        assert await world.sample() == await engine_alone(world, "v1")
        assert world.running() == ["sampler-s-1-0"]
        world.launcher.reports = True

    world.run(scenario())


def test_an_engine_that_dies_after_its_adoption_is_replaced(world):
    async def scenario():
        world.left()
        await world.open()
        tokens = await world.sample()
        world.host.kill("sampler-s-1-0")
        assert await world.sample() == tokens
        assert len(world.running()) == 1

    world.run(scenario())


@pytest.mark.parametrize(
    "why", ["its session has ended", "its session has no client", "its model lies elsewhere"]
)
def test_an_engine_that_nobody_can_ask_for_is_stopped(world, why):
    async def scenario():
        if why == "its session has ended":
            world.left(session_id="s-0")
        elif why == "its session has no client":
            world.left(session_id="implicit")
        else:
            world.left(path=str(world.folder / "another"))
        await world.open()
        assert world.running() == []
        assert world.router.all() == []

    world.run(scenario())


STATES = ["it serves", "it is frozen", "it loads", "it starts"]


def leave(world: World, state: str) -> None:
    """Leave an engine in one of these states."""
    engine = world.left()
    engine.frozen = state == "it is frozen"
    if state == "it loads":
        load_for_ever(world, engine)
    if state == "it starts":
        engine.serving.clear()


@pytest.mark.parametrize("state", STATES)
def test_the_end_of_a_session_ends_its_engine_also_in_the_middle_of_its_adoption(world, state):
    async def scenario():
        leave(world, state)
        await world.open()
        sample = asyncio.create_task(world.sample())
        await asyncio.sleep(1)
        await world.router.end_session("s-1", SessionFinished("over"))
        assert world.running() == []
        assert not world.supervisor.roster.rows
        assert (await sample == SessionFinished.type) == (state != "it serves")

    world.run(scenario())


@pytest.mark.parametrize("state", STATES)
def test_a_hand_over_in_the_middle_of_an_adoption_leaves_the_engine(world, state):
    async def scenario():
        leave(world, state)
        await world.open()
        await asyncio.sleep(1)
        await world.router.close()
        await world.supervisor.close()
        await world.processes.close(leaving=True)
        assert world.running() == ["sampler-s-1-0"]

    with patch.object(grpc.aio, "insecure_channel", world.launcher.channel):
        run_in_virtual_time(scenario())


def test_each_sampler_of_a_session_gets_its_own_engine_again(world):
    async def scenario():
        for number, rank in enumerate((0, 8)):
            world.left(f"sampler-s-1-{number}", rank=rank)
        world.left("sampler-s-2-0", session_id="s-2")
        await world.open()
        engines = {
            (sampler.key.session_id, sampler.key.max_lora_rank): sampler.engine.worker.worker_id
            for sampler in world.router.all()
        }
        assert engines == {
            ("s-1", 0): "sampler-s-1-0",
            ("s-1", 8): "sampler-s-1-1",
            ("s-2", 0): "sampler-s-2-0",
        }
        assert world.sampler(rank=4).key.max_lora_rank == 8

    world.run(scenario())


def test_of_two_engines_for_one_sampler_one_is_stopped(world):
    async def scenario():
        world.left("sampler-s-1-0")
        world.left("sampler-s-1-1")
        await world.open()
        assert world.running() == [world.sampler().engine.worker.worker_id]

    world.run(scenario())


def test_adopted_engines_count_for_the_places_and_make_room_when_they_are_idle(new_world):
    world = new_world(groups=ONE_PLACE, engine_quantum=0)

    async def scenario():
        engine = world.left()
        load_for_ever(world, engine)
        await world.open()
        other = asyncio.create_task(world.sample(session_id="s-2"))
        await asyncio.sleep(100)
        assert world.running() == ["sampler-s-1-0"]
        assert "1 workers are there" in world.sampler("s-2").engine.explain()
        engine.state = sampler_pb2.SAMPLER_STATE_AWAKE
        await other
        assert world.running() == ["sampler-s-2-0"]
        assert world.sampler("s-1").engine.state == "idle"

    world.run(scenario())


@pytest.mark.parametrize("misfortune", [freeze, load_for_ever])
def test_an_engine_that_is_busy_or_frozen_keeps_no_other_from_its_start(new_world, misfortune):
    world = new_world(starts=1)

    async def scenario():
        misfortune(world, world.left())
        await world.open()
        await world.sample(session_id="s-2")
        assert now() < 20
        assert world.running() == ["sampler-s-1-0", "sampler-s-2-0"]

    world.run(scenario())


def test_an_engine_that_still_starts_counts_as_one_that_does(new_world):
    world = new_world(starts=1)

    async def scenario():
        engine = world.left(state="starting")
        engine.serving.clear()
        await world.open()
        other = asyncio.create_task(world.sample(session_id="s-2"))
        await asyncio.sleep(100)
        assert world.running() == ["sampler-s-1-0"]
        engine.serving.set()
        await other

    world.run(scenario())


def test_more_engines_may_be_adopted_than_may_run_and_none_starts_until_there_are_fewer(new_world):
    world = new_world(groups=ONE_PLACE, engine_quantum=0)

    async def scenario():
        for number in (1, 2):
            world.left(f"sampler-s-{number}-0", session_id=f"s-{number}")
        await world.open()
        assert len(world.running()) == 2
        await asyncio.gather(*(world.sample(session_id=name) for name in ("s-1", "s-2")))
        assert len(world.running()) == 2
        await world.sample(session_id="implicit")
        assert len(world.running()) == 1

    world.run(scenario())


def test_the_files_of_a_model_whose_engine_is_a_pod_are_read_beside_the_event_loop(
    new_world, monkeypatch
):
    world = new_world(launcher="kubernetes", claim_pools=[{"name": "cpu", "roles": ["sampler"]}])
    folder = Path(world.model.path)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_weights(folder, "weight", [64, 64])
    readers, read = [], model_sizes.text_config

    def noted(path: Path) -> object:
        readers.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(model_sizes, "text_config", noted)

    async def scenario():
        world.left()
        await world.open()
        assert world.sampler().engine.state == "ready"
        assert readers and threading.main_thread() not in readers

    world.run(scenario())
