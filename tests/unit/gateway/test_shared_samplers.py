"""Sampling sessions share a sampler: in virtual time, with model engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.owners.sessions.registry import Session
from gateway.sampling import router
from gateway.sampling.sampler import Sampler, SamplerKey
from tandem.errors import LimitExceeded, Overloaded, SessionFinished
from tandem.settings.sharing import Sharing
from tests.support.gateway.sampler_world import TURNS, World

BOTH = [("s-1", "tiny", 0), ("s-2", "tiny", 0)]


@pytest.fixture
def new_world(tmp_path):
    def new(**settings):
        return World(tmp_path, {"sharing": settings})

    return new


@pytest.fixture
def world(new_world) -> World:
    return new_world()


def all_weights(world: World, session_id: str, *, kept: str = "") -> Sampler:
    return world.router.ensure(
        session_id=session_id, model=world.model, rank=0, all_weights=True, kept=kept
    )


def key(sampler: Sampler) -> str:
    return str(sampler.key)


async def end(world: World, session_id: str) -> None:
    del world.sessions[session_id]
    await world.router.end_session(session_id, SessionFinished("over"))


@pytest.mark.parametrize("name", ["s-1/qwen/8b/16", "s-1/qwen/8b/0.1"])
def test_a_key_is_read_as_it_is_written(name):
    assert str(SamplerKey.parse(name)) == name
    assert SamplerKey.parse(name).model_name == "qwen/8b"


def test_64_sessions_of_a_base_model_have_one_engine(world):
    async def scenario():
        for number in range(3, 65):
            name = f"s-{number}"
            world.sessions[name] = Session(
                name, 0.0, None, "ann", sdk_version="0.38", user_metadata={"tandem.replicas": 1}
            )
        await world.open()
        names = [name for name in world.sessions if name != "implicit"]
        await asyncio.gather(*(world.sample("base", session_id=name) for name in names))
        assert len(names) == 64
        assert world.running() == ["sampler-s-1-0"]
        assert world.sampler().users == set(names)

    world.run(scenario())


def test_an_engine_outlives_the_session_it_was_made_for(world):
    async def scenario():
        await world.open()
        tokens = await world.sample("base")
        waiting = asyncio.create_task(world.sample("base", session_id="s-2"))
        await asyncio.sleep(0)
        await end(world, "s-1")
        assert await waiting == await world.sample("base", session_id="s-2") == tokens
        assert world.running() == ["sampler-s-1-0"]
        world.host.kill("sampler-s-1-0")
        assert await world.sample("base", session_id="s-2") == tokens
        assert len(world.running()) == 1
        await end(world, "s-2")
        assert world.running() == []

    world.run(scenario())


@pytest.mark.parametrize(("across_owners", "samplers"), [(False, 3), (True, 1)])
def test_owners_share_if_the_administrator_allows_it(new_world, across_owners, samplers):
    world = new_world(across_owners=across_owners)

    async def scenario():
        owners = {"s-1": "ann", "s-2": "ben", "implicit": "cat"}
        for name, owner in owners.items():
            world.sessions[name].owner = owner
        await world.open()
        assert len({key(world.sampler(name)) for name in owners}) == samplers

    world.run(scenario())


def test_a_full_queue_of_one_owner_does_not_refuse_another(new_world, monkeypatch):
    monkeypatch.setattr(router, "MAX_WAITING_SAMPLES", 1)
    world = new_world(across_owners=True)

    async def scenario():
        await world.open()
        first = asyncio.create_task(world.sample("base"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await world.sample("base", session_id="s-2")
        await world.sample("base", session_id="s-2", owner="ben")
        await first
        await world.sample("base", session_id="s-2")

    world.run(scenario())


def test_only_an_engine_that_suits_is_shared(world):
    async def scenario():
        await world.open()
        first = world.sampler(rank=8)
        assert world.sampler("s-2", rank=16) is not first, "its adapters are too large"
        await end(world, "s-2")
        world.sessions["s-2"] = Session("s-2", 0.0, None, "ann")
        moved = replace(world.model, path="elsewhere")
        assert world.router.ensure(session_id="s-2", model=moved, rank=0) is not first
        await end(world, "s-2")
        for options in ({"tandem.sampler_memory": "1GiB"}, {"tandem.share": "never"}):
            world.sessions["s-2"] = Session("s-2", 0.0, None, "ann", user_metadata=options)
            assert world.sampler("s-2") is not first, options
            await end(world, "s-2")
        world.sessions["s-2"] = Session("s-2", 0.0, None, "ann")
        assert world.sampler("s-2", rank=5) is world.sampler("s-2") is first

    world.run(scenario())


def test_sessions_that_never_share_have_an_engine_each(new_world):
    world = new_world(lora_runs="never")

    async def scenario():
        await world.open()
        assert world.sampler() is not world.sampler("s-2")

    world.run(scenario())


def test_the_engine_of_a_run_is_not_shared_from_its_creation_to_its_end(world):
    async def scenario():
        await world.open()
        first = world.sampler(rank=8)
        world.router.keep(key(first))  # the trainer has no row yet
        assert key(world.sampler("s-2")) == "s-2/tiny/0"
        await end(world, "s-2")
        world.sessions["s-2"] = Session("s-2", 0.0, None, "ann", sdk_version="0.38")
        world.sessions["s-2"].user_metadata = {"tandem.replicas": 1}
        await world.router.release_unused(key(first))
        assert world.sampler("s-2") is first

    world.run(scenario())


def test_a_run_loads_its_weights_into_the_engine_that_its_trainer_keeps(world):
    async def scenario():
        await world.open()
        shared = world.sampler()
        assert world.sampler("s-2") is shared
        kept = world.router.key_for(session_id="s-1", model_name="tiny", rank=0)
        world.router.keep(kept)
        await end(world, "s-2")  # the session has the other engine alone again
        assert key(all_weights(world, "s-1", kept=kept)) == kept == "s-1/tiny/0.1"
        assert world.sampler() is shared

    world.run(scenario())


def test_an_exclusive_run_has_an_engine_that_no_other_run_of_its_session_uses(world):
    async def scenario():
        await world.open()
        router, alone = world.router, Sharing.EXCLUSIVE
        about = {"session_id": "s-1", "model_name": "tiny", "rank": 8}
        keys = [router.key_for(**about)]
        router.keep(keys[0])
        for _ in range(2):
            keys.append(router.key_for(**about, apart=True))
            router.keep(keys[-1], sharing=alone, apart=True)
        assert keys == ["s-1/tiny/8", "s-1/tiny/8.1", "s-1/tiny/8.2"]
        run = {"session_id": "s-1", "model": world.model, "rank": 8}
        found = [router.ensure(**run, kept=each) for each in keys]
        assert list(map(key, found)) == keys
        assert router.key_for(**about) == keys[0]
        assert key(router.ensure(**run, kept="")) == keys[0]
        asked = [each.requests(1)[0].sharing for each in found]
        assert asked == [None, alone, alone]
        await router.release_unused(keys[1])
        assert found[1].requests(1)[0].sharing is None

    world.run(scenario())


def test_others_share_the_group_of_an_exclusive_run_s_engine_after_the_run(tmp_path):
    world = World(tmp_path, {}, groups=TURNS)

    async def scenario():
        await world.open()
        router, rows = world.router, world.supervisor.roster.rows
        kept = router.key_for(session_id="s-1", model_name="tiny", rank=0, apart=True)
        router.keep(kept, sharing=Sharing.EXCLUSIVE, apart=True)
        router.ensure(session_id="s-1", model=world.model, rank=0, kept=kept)
        await world.sample("base")
        assert rows[kept].request.sharing is Sharing.EXCLUSIVE
        other = asyncio.create_task(world.sample("base", session_id="s-2"))
        await asyncio.sleep(1)
        assert "to itself" in world.supervisor.explain("s-2/tiny/0").reason
        await router.release_unused(kept)
        await other
        assert {row.request.sharing for row in rows.values()} == {None}
        assert [row.group for row in rows.values()] == ["one", "one"]

    world.run(scenario())


def test_a_run_does_not_use_the_engine_that_its_session_has_joined(world):
    async def scenario():
        await world.open()
        world.sampler("s-2", rank=8)
        assert world.sampler() is world.sampler("s-2")
        kept = world.router.key_for(session_id="s-1", model_name="tiny", rank=8)
        assert kept == "s-1/tiny/8"
        run = world.router.ensure(session_id="s-1", model=world.model, rank=8, kept=kept)
        assert key(run) == kept and run.users == {"s-1"}

    world.run(scenario())


def test_a_run_of_a_shared_trainer_uses_the_engine_that_the_trainer_keeps(world):
    async def scenario():
        await world.open()
        first = world.sampler(rank=8)
        assert world.sampler("s-2", rank=16) is not first
        world.router.keep(key(first))  # by the next gateway, while the trainer waits for a group
        run = {"session_id": "s-2", "model": world.model, "rank": 8, "kept": key(first)}
        assert world.router.ensure(**run) is first and first.users == {"s-1", "s-2"}

    world.run(scenario())


def test_all_weights_are_loaded_into_an_engine_that_nobody_shares(world):
    async def scenario():
        await world.open()
        shared = world.sampler()
        assert world.sampler("s-2") is shared
        kept = world.router.key_for(session_id="s-1", model_name="tiny", rank=0)
        assert kept == "s-1/tiny/0.1"
        own = all_weights(world, "s-1", kept=kept)
        assert key(own) == kept and own.users == {"s-1"}
        assert all_weights(world, "s-1") is own
        assert key(all_weights(world, "s-2")) == "s-2/tiny/0"
        assert world.sampler("implicit") is shared

    world.run(scenario())


def test_an_engine_with_other_weights_is_not_shared(world):
    async def scenario():
        await world.open()
        await world.sample("v1")
        assert key(world.sampler("s-2")) == "s-2/tiny/0"

    world.run(scenario())


# --- The next gateway ---------------------------------------------------------------------


def test_the_next_gateway_shares_an_engine_as_the_one_before(world):
    world.sampled = BOTH

    async def scenario():
        world.left()
        await world.open()
        await end(world, "s-1")
        await world.sample("base", session_id="s-2")
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


@pytest.mark.parametrize("who", ["the owner", "another owner", "other options"])
def test_an_engine_whose_session_has_ended_goes_on_for_those_that_share_it(world, who):
    world.sampled = BOTH
    if who == "another owner":
        for session in world.sessions.values():
            session.owner = "ben"
    elif who == "other options":
        for session in world.sessions.values():
            session.user_metadata = {"tandem.sampler_memory": "1GiB"}

    async def scenario():
        world.left("sampler-s-0-0", session_id="s-0")
        await world.open()
        assert world.running() == (["sampler-s-0-0"] if who == "the owner" else [])
        if who == "the owner":
            (sampler,) = world.router.all()
            assert sampler.users == {"s-1", "s-2"}
            await end(world, "s-1")
            await world.sample("base", session_id="s-2")
            assert world.running() == ["sampler-s-0-0"]

    world.run(scenario())


def test_an_ended_session_leaves_no_engine_to_a_session_that_has_one(world):
    world.sampled = BOTH[:1]

    async def scenario():
        world.left("sampler-s-0-0", session_id="s-0")
        world.left()
        await world.open()
        assert world.running() == ["sampler-s-1-0"]

    world.run(scenario())


def test_an_engine_counts_for_an_owner_who_uses_it(tmp_path):
    world = World(tmp_path, {"sharing": {"across_owners": True}, "limit": {"samplers": 1}})

    async def scenario():
        world.sessions["s-2"].owner = "ben"
        await world.open()
        assert world.sampler() is world.sampler("s-2")
        await end(world, "s-1")
        for owner in ("ann", "ben"):
            options = {"tandem.share": "never"}
            world.sessions[owner] = Session(owner, 0.0, None, owner, user_metadata=options)
        with pytest.raises(LimitExceeded):
            world.sampler("ben")
        assert key(world.sampler("ann")) == "ann/tiny/0"

    world.run(scenario())
