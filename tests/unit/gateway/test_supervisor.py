"""The supervisor in random lives. Under all faults, the rules of workers hold, and everybody gets a
turn."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from gateway.workers.groups import CONTEXT_BYTES, WorkerGroup
from gateway.workers.requests import WorkerRequest
from tandem.settings.sharing import SharingSettings
from tests.support.gateway.worker_cluster import KINDS, Cluster, User
from tests.support.virtual_time import run_in_virtual_time


def some_groups(chance: random.Random) -> list[WorkerGroup]:
    """Return groups of a GPU machine: leased by bytes, leased by number, or not leased."""
    groups = []
    for number in range(chance.randint(1, 3)):
        memory = chance.choice([0, 10, 16])
        groups.append(
            WorkerGroup(
                name=f"g{number}",
                kinds=KINDS,
                devices=("cuda:0", "cuda:1"),
                awake=chance.choice([1, 1, 2, 3]) if number < 2 else 0,
                workers=chance.randint(3, 5),
                device_bytes=memory and memory + 5 * CONTEXT_BYTES,
                host="here",
            )
        )
    return groups


def some_user(cluster: Cluster, chance: random.Random, number: int) -> User:
    """Return a user with engines, and with or without a trainer."""
    owner, sampler = chance.choice(["ann", "bob", "cai"]), f"s{number}"
    share = {"owner": owner, "session": sampler, "priority": chance.choice([0, 0, 1])}
    replicas = chance.randint(1, len(cluster.groups) if number % 3 else 1)
    engines = [
        WorkerRequest(
            key=f"{sampler}#{n}",
            kind="engine",
            sampler=sampler,
            device_bytes=chance.choice([0, 2, 5]),
            **share,
        )
        for n in range(replicas)
    ]
    if chance.random() < 0.3:
        return User(cluster, number, None, engines, random.Random(number))
    trainer = WorkerRequest(
        key=f"t{number}",
        kind="trainer",
        device_bytes=chance.choice([0, 3, 8]),
        ranks=chance.choice([1, 1, 2]),
        together=tuple(engine.key for engine in engines),
        **share,
    )
    return User(cluster, number, trainer, engines, random.Random(number))


async def random_life(seed: int, *, events: int) -> None:
    chance = random.Random(seed)
    settings = SharingSettings(
        quantum=chance.choice([0, 0.5, 2]),
        max_wait=chance.choice([5, 50]),
        switch_timeout=3,
        policy=chance.choice(["deferred", "deferred", "eager", "idle_after"]),
        idle_after=1,
    )
    cluster = Cluster(some_groups(chance), settings)
    await cluster.new_gateway()
    users: list[User] = []
    lives: dict[User, asyncio.Task[None]] = {}

    def come() -> None:
        user = some_user(cluster, chance, len(users))
        users.append(user)
        lives[user] = asyncio.create_task(user.live())

    async def leave(user: User) -> None:
        lives[user].cancel()
        await asyncio.gather(lives.pop(user), return_exceptions=True)
        await user.end()

    for _ in range(chance.randint(1, 4)):
        come()
    for _ in range(events):
        await asyncio.sleep(chance.choice([0.001, 0.05, 0.5, 3, 20]))
        check(cluster, lives)
        event = chance.choice(
            ["die", "freeze", "fail", "slow", "storage", "restart", "restart", "calm", "full",
             "silent", "answer", "come", "leave", "drain"]
        )  # fmt: skip
        process = chance.choice([*cluster.processes.values(), None])
        match event:
            case "die" if process is not None:
                cluster.die(process)
            case "freeze" if process is not None:
                cluster.freeze(process)
            case "fail":
                cluster.failing = chance.randint(1, 3)
            case "slow":
                cluster.seconds = chance.choice([0.001, 0.05, 0.5, 2])
            case "storage":
                cluster.table.failing = chance.randint(1, 4)
            case "full":
                cluster.full = chance.choice([False, True])
            case "silent":
                cluster.silent = True
                if chance.random() < 0.5:  # otherwise the gateway does not know yet
                    cluster.supervisor.note_launcher("agent", answers=False)
            case "answer":
                cluster.answer()
            case "come" if len(lives) < 6:
                come()
            case "leave" if len(lives) > 1:
                await leave(chance.choice([*lives]))
            case "drain":
                group = chance.choice(cluster.groups)
                drained = chance.choice([False, True])
                await cluster.supervisor.drain(group.name, drained=drained)
            case "restart":
                for life in lives.values():
                    life.cancel()
                await asyncio.gather(*lives.values(), return_exceptions=True)
                cluster.table.forgets_cancelled = chance.choice([False, True])
                await cluster.restart(holders={user.holder for user in lives})
                lives = {user: asyncio.create_task(user.live()) for user in lives}
    await calm_down(cluster)
    for user in lives:
        user.done = 0
    await asyncio.sleep(400)
    check(cluster, lives)
    waiting = [user.holder for user in lives if not user.done]
    reasons = {
        r.key: cluster.supervisor.explain(r.key) for r in cluster.supervisor.roster.rows.values()
    }
    assert not waiting, f"{waiting} wait for ever: {reasons}"
    for user in [*lives]:
        await leave(user)
    await asyncio.sleep(200)
    check(cluster, lives)
    assert cluster.supervisor.roster.rows == cluster.table.rows == cluster.processes == {}


async def calm_down(cluster: Cluster) -> None:
    cluster.answer()
    cluster.failing = cluster.table.failing = 0
    cluster.seconds, cluster.full = 0.05, False
    for group in cluster.groups:
        await cluster.supervisor.drain(group.name, drained=False)


def check(cluster: Cluster, lives: dict[User, asyncio.Task[None]]) -> None:
    cluster.supervisor.raise_fault()
    for life in lives.values():
        if life.done():
            life.result()
    cluster.check_devices()


@pytest.mark.parametrize("block", range(10))
def test_whatever_fails_the_rules_hold_and_everybody_gets_a_turn(block):
    run_in_virtual_time(random_life(block, events=30))


@pytest.mark.nightly
def test_ten_thousand_events_of_random_lives():
    for seed in range(1000, 1000 + int(os.environ.get("TANDEM_TEST_LIVES", "200"))):
        run_in_virtual_time(random_life(seed, events=50))
