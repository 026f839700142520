"""An exclusive run has its group to itself, with its own trainer and engines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gateway.workers.placing import find_groups, why_no_place
from gateway.workers.requests import WorkerRequest
from tandem.errors import InvalidRequest
from tandem.settings.sharing import Sharing
from tests.support.gateway.overviews import overview, row, worker_group
from tests.support.gateway.supervised_places import PlacesWorld, group, quiet

ALONE = {"sharing": "exclusive"}
GROUP = group("g", workers=9)
DECLARED = replace(GROUP, sharing=Sharing.EXCLUSIVE)


async def test_an_exclusive_run_has_its_trainer_and_its_engine_on_one_group_without_others():
    world = await PlacesWorld(GROUP).open()
    alone = await (await world.run(run_id="r", **ALONE).ask()).granted()
    other = await world.run(run_id="o").ask()
    assert world.keys(GROUP) == ["r", "sampler-of-r"] and not other.has
    assert "a run has group g to itself (tandem.sharing exclusive)" in other.why
    alone.end()
    await quiet()
    await other.granted()


async def test_an_exclusive_run_waits_until_the_others_have_ended():
    world = await PlacesWorld(GROUP).open()
    others = [await (await world.run(sampler="none").ask()).granted() for _ in range(2)]
    alone = await world.run(**ALONE).ask()
    assert "it needs group g to itself" in alone.why and "2 workers of other runs" in alone.why
    others[0].end()
    await quiet()
    assert not alone.has
    others[1].end()
    await alone.granted()


async def test_others_overtake_a_waiting_exclusive_run_eight_times_at_most():
    world = await PlacesWorld(GROUP).open()
    await (await world.run(sampler="none").ask()).granted()
    alone = await world.run(**ALONE).ask()
    later = [await world.run("bea", sampler="none").ask() for _ in range(10)]
    assert [each.has for each in later] == [True] * 8 + [False] * 2
    assert not alone.has


async def test_an_idle_engine_of_others_ends_for_an_exclusive_run():
    world = await PlacesWorld(GROUP).open()
    idle = world.engine(idle=True)
    await idle.serve()
    world.now = 60.0
    await (await world.run(**ALONE).ask()).granted()
    assert idle.retired


async def test_each_run_is_alone_on_a_group_that_is_declared_exclusive():
    world = await PlacesWorld(DECLARED).open()
    first, second = await world.run(run_id="r").ask(), await world.run(run_id="o").ask()
    assert first.has and not second.has
    assert world.keys(DECLARED) == ["r", "sampler-of-r"]


@pytest.mark.parametrize("first", [Sharing.EXCLUSIVE, None])
def test_a_session_reads_that_its_own_worker_has_the_group_and_how_to_go_on(first):
    there = row("r", "awake", sampler="s", sharing=first, session="one")
    later = row("t", sharing=Sharing.EXCLUSIVE, session="one")
    joined = replace(there, request=replace(there.request, session="two"), holders=("one:train:3",))
    remedy = "give one of them another group (tandem.group, tandem.sampler_group), or end the other"
    for holder in (there, joined):
        found = overview(holder, later, groups=(worker_group(),))
        fault = why_no_place(found, later, found.groups["g"])
        assert "of this session" in fault and fault.endswith(remedy)
    found = overview(there, replace(later, request=replace(later.request, session="two")))
    fault = why_no_place(found, found.rows["t"], found.groups["g"])
    assert fault and "session" not in fault


async def test_a_job_does_not_run_beside_an_exclusive_run():
    there = row("t", "awake", sampler="s", sharing=Sharing.EXCLUSIVE)
    found = overview(there, row("j", kind="job", session="two"), groups=(worker_group(),))
    fault = why_no_place(found, found.rows["j"], found.groups["g"])
    assert "a run has group g to itself" in fault


@pytest.mark.parametrize("asked", ["time_slice", "mps"])
async def test_a_group_takes_only_runs_that_share_as_it_says(asked):
    world = await PlacesWorld(DECLARED).open()
    with pytest.raises(InvalidRequest, match="no group suits it"):
        world.supervisor.check(world.run(sharing=asked).as_ask())
    world.supervisor.check(world.run(**ALONE).as_ask())


def test_a_request_of_an_earlier_gateway_asks_for_no_sharing():
    request = WorkerRequest(key="t", kind="trainer", owner="ann", session="s")
    stored = request.to_json()
    assert WorkerRequest.from_json(stored) == request
    del stored["sharing"]
    assert WorkerRequest.from_json(stored).sharing is None
    exclusive = replace(request, sharing=Sharing.EXCLUSIVE)
    assert WorkerRequest.from_json(exclusive.to_json()).sharing is Sharing.EXCLUSIVE


async def test_a_queued_run_of_an_earlier_gateway_gets_a_group_that_is_declared_exclusive():
    trainer = row("t", together=("s#0", "s#1"))
    engines = [row(f"s#{n}", kind="engine", sampler="s") for n in range(2)]
    found = overview(trainer, *engines, groups=(worker_group(sharing=Sharing.EXCLUSIVE, awake=0),))
    assert isinstance(find_groups(found, [trainer, *engines]), tuple)


@pytest.mark.parametrize("now", [Sharing.EXCLUSIVE, Sharing.MPS])
async def test_a_run_stays_on_its_group_when_the_group_shares_otherwise_from_a_restart_on(now):
    world = await PlacesWorld(GROUP).open()
    there = await (await world.run(sharing="time_slice").ask()).granted()
    keys = world.keys(GROUP)
    world.groups = (replace(GROUP, sharing=now),)
    await world.open()
    await quiet()
    rows = world.supervisor.roster.rows
    assert world.keys(GROUP) == keys and len(keys) == 2
    assert {rows[key].ends_as for key in keys} == {"placed"}
    assert world.groups[0].sharing_of(there.row.request) == now
    later = await world.run().ask()
    assert later.has == (now == Sharing.MPS)
    there.end()
    await quiet()
    await later.granted()
    world.supervisor.raise_fault()


@pytest.mark.parametrize("seed", range(20))
async def test_no_device_has_an_exclusive_run_and_another_one_also_after_restarts(seed):
    """`CheckedSupervisor` checks each decision. Here, 40 random runs begin and end."""
    chance = random.Random(seed)
    groups = [group(name, workers=chance.choice([2, 4, 9])) for name in "gh"]
    groups.append(replace(group("x", workers=9), sharing=Sharing.EXCLUSIVE))
    world = await PlacesWorld(*groups).open()
    alive, alone, together = list[tuple[str, str]](), 0, 0
    for number in range(40):
        run = world.run(
            chance.choice(["ann", "bea"]),
            f"run-{number}",
            sharing=chance.choice([None, "exclusive", "time_slice"]),
            sampler=chance.choice([True, "none"]),
            priority=chance.randint(-1, 1),
        )
        trainer, *engines = run.as_ask()
        if engines:
            await world.supervisor.place(engines, holder=run.sampler)
        await world.supervisor.place([trainer], holder=run.key)
        alive.append((run.key, run.sampler))
        await quiet()
        rows = [each for each in world.table.rows.values() if each.group]
        for name in "ghx":
            there = {each.request.run_name for each in rows if each.group == name}
            alone += any(each.request.sharing == "exclusive" for each in rows if each.group == name)
            together += len(there) > 1
        while alive and (len(alive) > 6 or chance.random() < 0.4):
            key, sampler = alive.pop(chance.randrange(len(alive)))
            world.supervisor.let_go(key, holder=key)
            world.supervisor.let_go(sampler, holder=sampler)
            await quiet()
        if chance.random() < 0.2:
            world.supervisor.raise_fault()
            await world.open()
            await quiet()
    world.supervisor.raise_fault()
    assert world.supervisor.checks, "no decision was checked"
    assert alone and together, "the runs met nobody"
